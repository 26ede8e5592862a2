"""REINFORCE that also measures the variance of its policy gradient, with its own baseline and with others.

`algorithm = "bench.gradient_variance:MeasuredREINFORCE"` in a study run from this repository. The update is that of
`reinforce`, bit for bit. The gradient is that of the policy's term alone, before clipping.

A batch has independent parts, its units: games, or groups of games from one start. Its gradient is the sum of theirs,
so mean and variance follow from the gradients of the units. The other baselines are applied to the raw rewards of the
same steps, so that they are compared at one policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.learner import UpdateResult, losses
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.learner.batching import WHOLE
from unstable_lite.learner.objective import importance_weights
from unstable_lite.learner.training_stats import Trained
from unstable_lite.reward_transformations import RoleAdvantageByEnvFormatter
from unstable_lite.types import StepContext, TrainItem

BASELINES = ("none", "batch", "role", "opponents")
"""Baselines that any batch is compared with: the batch's mean, and the averages of a seat over all opponents and
against those of the same kinds. Groups add "group", the run's own advantages."""
TAU = 0.01
"""Rate of the averages of a seat, as in examples/studies/base/kuhn.toml."""


class Moments:
    """Sums over the units of a batch, for its gradient with `K` baselines; `P` counts parameters."""

    def __init__(self) -> None:
        self.num_units = self.num_games = 0
        self._total_KP: Tensor | float = 0.0
        self._of_units_K: Tensor | float = 0.0
        """Squared norms of the units' gradients, summed."""
        self._of_games_K: Tensor | float = 0.0

    def add(self, games_GKP: Sequence[Tensor]) -> None:
        """Add a unit by the gradients of its games, K × P each."""
        unit_KP = torch.stack(list(games_GKP)).sum(0)
        self.num_units += 1
        self.num_games += len(games_GKP)
        self._total_KP = self._total_KP + unit_KP
        self._of_units_K = self._of_units_K + _squares(unit_KP)
        self._of_games_K = self._of_games_K + sum(map(_squares, games_GKP))

    @property
    def square_K(self) -> Tensor:
        """Squared norm of the batch's gradient."""
        return _squares(torch.as_tensor(self._total_KP))

    @property
    def signal_K(self) -> Tensor:
        """Squared norm of the mean gradient of such batches: without bias, and so below 0 at times."""
        return (self.square_K - self._of_units_K) * self.num_units / (self.num_units - 1)

    @property
    def variance_K(self) -> Tensor:
        """Trace of the covariance of the batch's gradient, for batches of as many units: without bias."""
        return self._of_units_K - self.signal_K / self.num_units

    @property
    def variance_of_games_K(self) -> Tensor:
        """The same if each game had a start of its own; equal to `variance_K` without groups."""
        return self._of_games_K - self.signal_K / self.num_games


class MeasuredREINFORCE(REINFORCELearner):
    """REINFORCE with metrics of every `every`-th update; `baseline` names the run's own among the others.

    Metrics: `gradient_variance` and `gradient_signal`, the variance and the squared mean with the run's advantages, and
    `gradient_noise`, the variance divided by the squared norm of this batch's gradient, which estimates the share of
    noise in it (a ratio, so with a small bias); `relative_variance_NAME` for each baseline, its variance divided by
    that without a baseline if each game has a start of its own; `relative_variance_shared`, that without a baseline if
    the games of a group share theirs; and `relative_variance`, that of `baseline`. For a relative variance all
    advantages are in units of the reward, so "batch" stands for its z-score, too.

    The averages of the seats see every update. A resumed run begins them again.
    """

    def __init__(self, config: Config, device: str, every: int = 16, baseline: str = "none") -> None:
        super().__init__(config, device)
        if every < 1:
            raise ConfigError(f"learner.options.every = {every}: must be at least 1")
        self._has_group = config.group_baseline not in (None, "grpo")  # which divides by a group's standard deviation
        known = (*BASELINES, "group") if self._has_group else BASELINES
        if baseline not in known:
            raise ConfigError(f"learner.options.baseline = {baseline!r}: must be one of {', '.join(known)}")
        self._every, self._baseline = every, baseline
        self._role, self._opponents = RoleAdvantageByEnvFormatter(tau=TAU), RoleAdvantageByEnvFormatter(tau=TAU)
        self._metrics: dict[str, float] = {}

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        self._metrics = {}
        result = super().update(items, version)
        return replace(result, metrics=result.metrics | self._metrics)

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        advantages = self.advantages(items)
        if (self.training.step + 1) % self._every == 0:
            self._metrics = self.measure(items, advantages)
        return super().add_gradient(items)

    def advantages(self, items: Sequence[TrainItem]) -> dict[str, list[float]]:
        """Return the advantages of each baseline; "own" are those of the run."""
        contexts = [_context(item) for item in items]
        of_role, of_opponents = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
        by_env: dict[str, list[float]] = defaultdict(list)
        for one in contexts:
            by_env[one.env_id].append(one.final_reward)
            if (player := (one.game_idx, one.pid)) not in of_role:
                of_role[player] = self._role(one.final_reward, one.pid, one.env_id)
                of_opponents[player] = self._opponents(one.final_reward, one.pid, one.env_id, one)
        players = [(one.game_idx, one.pid) for one in contexts]
        return {
            "own": [item.reward for item in items],
            "none": [one.final_reward for one in contexts],
            "batch": [one.final_reward - fmean(by_env[one.env_id]) for one in contexts],
            "role": [of_role[player] for player in players],
            "opponents": [of_opponents[player] for player in players],
        }

    def measure(self, items: Sequence[TrainItem], advantages: dict[str, list[float]]) -> dict[str, float]:
        """Return the metrics of a batch; none if it has a single unit. Changes nothing."""
        advantage_IK = torch.tensor(list(advantages.values())).T
        units: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for row, item in enumerate(items):
            context = _context(item)
            unit = context.game_idx if context.group_idx is None else context.group_idx
            units[unit][context.game_idx].append(row)
        moments = Moments()
        for games in units.values():
            moments.add([self._of_game(items, rows, advantage_IK) for rows in games.values()])
        if moments.num_units < 2:
            return {}
        names = list(advantages)
        variance = dict(zip(names, moments.variance_K.tolist(), strict=True))
        apart = dict(zip(names, moments.variance_of_games_K.tolist(), strict=True))
        square, signal = moments.square_K[0].item(), moments.signal_K[0].item()
        metrics = {"gradient_variance": variance["own"], "gradient_signal": signal}
        metrics |= {"gradient_noise": variance["own"] / square} if square else {}
        if apart["none"] > 0:
            compared = {name: apart[name] for name in BASELINES} | {"shared": variance["none"]}
            compared |= {"group": variance["own"]} if self._has_group else {}
            relative = {name: value / apart["none"] for name, value in compared.items()}
            metrics |= {f"relative_variance_{name}": value for name, value in relative.items()}
            metrics["relative_variance"] = relative[self._baseline]
        return metrics

    def _of_game(self, items: Sequence[TrainItem], rows: Sequence[int], advantage_IK: Tensor) -> Tensor:
        """Return the gradients, K × P, of the loss on the steps of one game."""
        return torch.stack([advantage_IK[row].outer(self._score(items[row], len(items))) for row in rows]).sum(0)

    def _score(self, item: TrainItem, num_items: int) -> Tensor:
        """Return the gradient of an item's loss in a batch of `num_items`, with advantage 1."""
        with self.policy.evaluating():  # without dropout, which would draw from the update's random numbers
            (batch,) = self.policy.micro_batches([replace(item, reward=1.0)], WHOLE)
            logp_N, _ = self.policy.logprobs(batch)
            weight_N = importance_weights(batch, logp_N, self.training.config)
            divisor = self.training.completion_len * num_items
            loss = losses.policy_gradient_loss(logp_N, weight_N, batch.advantage_N, divisor)
            gradients = torch.autograd.grad(loss, list(self.policy.parameters.values()))
        return torch.cat([gradient.flatten() for gradient in gradients]).cpu()


def _squares(gradient_KP: Tensor) -> Tensor:
    norm_K: Tensor = torch.linalg.vector_norm(gradient_KP, dim=1, dtype=torch.float64)
    return norm_K.square()


def _context(item: TrainItem) -> StepContext:
    assert item.context is not None, "every step of a game has its context"
    return item.context
