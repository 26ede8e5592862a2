"""The reward transforms, and the compositions that a buffer applies. A kind differs from the others in its `__call__`:

final    `(reward, pid, env_id) -> float`, once per trajectory
step     `(player_traj, step_index, reward) -> float`, once per step
sampling `(steps) -> steps`, once per batch; it may also set a step's `weight`, or the `token_weights` of its completion

A final or step transform with a parameter named `context` also gets the `StepContext` of the player's last turn or of
the step; the steps of a batch have theirs. A sampling transform returns new Step objects in the same order and leaves
the given ones unchanged, because a transcript or a second sample may still need the rewards that the game gave.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Generic, Literal, Protocol, Self, TypeVar, runtime_checkable

import numpy as np

from unstable_lite.errors import ConfigError
from unstable_lite.plugins import lasting
from unstable_lite.reward_transformations.averages import RunningMeans, Spread, cell_of
from unstable_lite.types import PlayerTrajectory, Step, StepContext, Weights

Transform = TypeVar("Transform", bound=Callable[..., Any])


@runtime_checkable
class Stateful(Protocol):
    """Transform whose memory must survive a restart; its state must fit in JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Compose(Generic[Transform]):
    def __init__(self, transforms: Iterable[Transform] = ()) -> None:
        self.transforms: list[Transform] = []
        self._calls: list[tuple[Transform, bool]] = []
        """Each transform, and whether it takes the context."""
        for transform in transforms:
            self.register(transform)

    @classmethod
    def of(cls, transform: Transform | Self | None) -> Self:
        """Return `transform` if it is a composition, else a composition of it; an empty one for None."""
        if isinstance(transform, cls):
            return transform
        return cls(() if transform is None else (transform,))  # type: ignore[arg-type]

    def register(self, transform: Transform) -> None:
        """Append a transform, which is applied last."""
        self.transforms.append(transform)
        self._calls.append((transform, takes_context(transform)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transforms!r})"

    def state_dict(self) -> dict[str, Any]:
        states: list[dict[str, Any]] = []
        for transform in self.transforms:
            states.append(lasting(_name(transform), transform.state_dict()) if isinstance(transform, Stateful) else {})
        return {"names": [_name(t) for t in self.transforms], "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = [_name(t) for t in self.transforms]
        if state["names"] != names:
            raise ConfigError(f"the saved reward transforms are {state['names']}, but the config has {names}")
        for transform, saved in zip(self.transforms, state["states"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)


def takes_context(transform: Callable[..., Any]) -> bool:
    """Return whether `transform` has a parameter named `context`, for the turn's `StepContext`."""
    try:
        return "context" in inspect.signature(transform).parameters
    except ValueError:  # some callables written in C have no signature
        return False


def _name(transform: object) -> str:
    return getattr(transform, "__name__", type(transform).__name__)


FinalRewardTransform = Callable[..., float]
"""`(reward, pid, env_id) -> float`, or `(reward, pid, env_id, context) -> float`."""


class ComposeFinalRewardTransforms(Compose[FinalRewardTransform]):
    """Applies its transforms in order."""

    ARGUMENTS = ("reward", "pid", "env_id")

    def __call__(self, reward: float, pid: int, env_id: str, context: StepContext | None = None) -> float:
        return self.stages(reward, pid, env_id, context)[1]

    def stages(self, reward: float, pid: int, env_id: str, context: StepContext | None) -> tuple[float, float]:
        """Return the reward before the first transform with `is_baseline`, and after all of them."""
        before: float | None = None
        for transform, with_context in self._calls:
            if before is None and getattr(transform, "is_baseline", False):
                before = reward
            keywords = {"context": context} if with_context else {}
            reward = transform(reward, pid, env_id, **keywords)
        return (reward if before is None else before), reward


class RoleAdvantageFormatter:
    """Subtracts the average reward of the player's seat against opponents of the same kinds, over all envs.

    The average is exponential with rate `tau`, and its initial bias is corrected. A reward is compared with the average
    of the earlier ones; the first reward is compared with `role_adv`.
    Source: Liu et al. 2025, "SPIRAL", arXiv:2506.24119 (role-conditioned advantage estimation, decay 0.95).
    """

    is_baseline = True

    def __init__(self, role_adv: float = 0.0, tau: float = 0.05) -> None:
        if not 0 <= tau <= 1:
            raise ConfigError(f"tau = {tau}: must be between 0 and 1")
        self._averages = RunningMeans(tau, role_adv)

    def __call__(self, reward: float, pid: int, env_id: str, context: StepContext | None = None) -> float:
        cell = cell_of(self._scope(env_id), pid, context)
        average = self._averages.mean(cell)
        self._averages.add(cell, reward)
        return reward - average

    def __repr__(self) -> str:
        return f"RoleAdvantageFormatter(role_adv={self._averages.initial}, tau={self._averages.rate})"

    def state_dict(self) -> dict[str, Any]:
        return self._averages.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages.load_state_dict(state)

    def _scope(self, env_id: str) -> str:  # noqa: ARG002
        """Return the key of the envs that share averages."""
        return ""


class RoleAdvantageByEnvFormatter(RoleAdvantageFormatter):
    """Subtracts the average reward of the player's seat in this env; see RoleAdvantageFormatter."""

    def __init__(self, default_role_adv: float = 0.0, tau: float = 0.05) -> None:
        super().__init__(default_role_adv, tau)

    def __repr__(self) -> str:
        return f"RoleAdvantageByEnvFormatter(default_role_adv={self._averages.initial}, tau={self._averages.rate})"

    def _scope(self, env_id: str) -> str:
        return env_id


@dataclass
class WinDrawLossFormatter:
    """Replaces a score by one of three values: above `draw_score` is a win, below it a loss."""

    win_reward: float = 1.0
    draw_reward: float = 0.0
    loss_reward: float = -1.0
    draw_score: float = 0.0

    def __call__(self, reward: float, pid: int, env_id: str) -> float:  # noqa: ARG002
        if reward == self.draw_score:
            return self.draw_reward
        return self.win_reward if reward > self.draw_score else self.loss_reward


FINAL: dict[str, Callable[..., FinalRewardTransform]] = {
    "RoleAdvantageFormatter": RoleAdvantageFormatter,
    "RoleAdvantageByEnvFormatter": RoleAdvantageByEnvFormatter,
    "WinDrawLossFormatter": WinDrawLossFormatter,
}
"""Transforms by their names in `final_reward_transformation`."""


StepRewardTransform = Callable[..., float]
"""`(player_traj, step_index, reward) -> float`, or `(player_traj, step_index, reward, context) -> float`."""


class ComposeStepRewardTransforms(Compose[StepRewardTransform]):
    """Applies its transforms in order."""

    ARGUMENTS = ("player_traj", "step_index", "reward")

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        for transform, with_context in self._calls:
            keywords = {"context": player_traj.steps[step_index].context} if with_context else {}
            reward = transform(player_traj, step_index, reward, **keywords)
        return reward


@dataclass
class RewardForFormat:
    """Adds `reward` if the answer has the form that the template asks for, else `penalty` (usually negative)."""

    reward: float = 0
    penalty: float = 0

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        is_right = player_traj.steps[step_index].format_feedback["correct_answer_format"]
        return reward + (self.reward if is_right else self.penalty)


@dataclass
class PenaltyForInvalidMove:
    """Adds `penalty` (usually negative) to an invalid move, `reward` to any other."""

    reward: float = 0
    penalty: float = 0

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        is_invalid = player_traj.steps[step_index].format_feedback["invalid_move"]
        return reward + (self.penalty if is_invalid else self.reward)


@dataclass
class PenaltyForCutOff:
    """Adds `penalty` (usually negative) to an answer that a limit on tokens ended."""

    penalty: float = 0

    def __call__(self, player_traj: PlayerTrajectory, step_index: int, reward: float) -> float:
        context = player_traj.steps[step_index].context
        return reward + (self.penalty if context is not None and context.is_cut_off else 0)


STEP: dict[str, Callable[..., StepRewardTransform]] = {
    "RewardForFormat": RewardForFormat,
    "PenaltyForCutOff": PenaltyForCutOff,
    "PenaltyForInvalidMove": PenaltyForInvalidMove,
}
"""Transforms by their names in `step_reward_transformation`."""


SamplingRewardTransform = Callable[[Sequence[Step]], list[Step]]


class ComposeSamplingRewardTransforms(Compose[SamplingRewardTransform]):
    """Applies its transforms in order."""

    ARGUMENTS = ("steps",)

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        """Apply the transforms. Raises ConfigError if one does not return steps with finite rewards and weights."""
        for transform in self.transforms:
            given, who = transform(steps), f"{transform!r} of the sampling reward transformations"
            is_empty = bool(steps) and isinstance(given, Sequence) and not given
            if not isinstance(given, Sequence) or is_empty or not all(isinstance(step, Step) for step in given):
                raise ConfigError(f"{who} returned no steps: {given!r:.99}")
            for step in given:
                if not isinstance(step.reward, Real) or not math.isfinite(step.reward):
                    raise ConfigError(f"{who} returned the reward {step.reward!r}; it must be a finite number")
                if reason := weight_problem(step.weight, step.token_weights, step.generation.completion_ids):
                    raise ConfigError(f"{who} returned {reason}")
            steps = given
        # A message to the learner cannot hold every type of number, such as NumPy's.
        return [step if type(step.reward) is float else replace(step, reward=float(step.reward)) for step in steps]


class NormalizeRewards:
    """Subtracts the batch's mean; with `z_score`, also divides by its standard deviation.

    A step is compared with those of its env, seat and kinds of opponents: if their rewards before the baseline are all
    alike, its advantage is 0 and it enters neither mean nor standard deviation. The standard deviation is at least a
    tenth of its running average over batches.
    """

    def __init__(self, z_score: bool = False) -> None:
        self.z_score = z_score
        self._spread = Spread()

    def __call__(self, steps: Sequence[Step]) -> list[Step]:
        rewards = np.array([step.reward for step in steps], np.float64)
        results = rewards + [step.step_info.get("baseline", 0.0) for step in steps]
        cells = [cell_of(step.env_id, step.pid, step.context) for step in steps]
        is_different = self._spread.tells_apart(results, cells)
        rows_of_group: dict[str, list[int]] = defaultdict(list)
        for row in np.flatnonzero(is_different).tolist():
            rows_of_group[self._group(steps[row])].append(row)
        advantages = np.zeros(len(steps))
        for group, rows in rows_of_group.items():
            given = rewards[rows]
            advantages[rows] = self._spread.standardized(group, given) if self.z_score else given - given.mean()
        return [replace(step, reward=reward) for step, reward in zip(steps, advantages.tolist(), strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(z_score={self.z_score})"

    def state_dict(self) -> dict[str, Any]:
        return self._spread.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spread.load_state_dict(state)

    def _group(self, step: Step) -> str:  # noqa: ARG002
        """Return the key of the steps that share mean and standard deviation."""
        return ""


class NormalizeRewardsByEnv(NormalizeRewards):
    """Normalizes rewards within each env of the batch; see NormalizeRewards."""

    def _group(self, step: Step) -> str:
        return step.env_id


SAMPLING: dict[str, Callable[..., SamplingRewardTransform]] = {
    "NormalizeRewards": NormalizeRewards,
    "NormalizeRewardsByEnv": NormalizeRewardsByEnv,
}
"""Transforms by their names in `sampling_reward_transformation`."""


def set_rewards(
    trajectory: PlayerTrajectory,
    final_transform: ComposeFinalRewardTransforms,
    step_transform: ComposeStepRewardTransforms,
    batches: Literal["steps", "episodes"],
) -> None:
    """Set the rewards of all steps; each gets the final reward, or in an episode the last one only."""
    before, reward = final_transform.stages(
        trajectory.final_reward, trajectory.pid, trajectory.env_id, trajectory.steps[-1].context
    )
    if not isinstance(reward, Real):
        raise ConfigError(f"{trajectory.env_id}: {final_transform!r} returned {reward!r}; a reward must be a number")
    # A message to the learner cannot hold every type of number, such as NumPy's.
    final, subtracted = float(reward), float(before - reward)
    for index, step in enumerate(trajectory.steps):
        is_paid = step is trajectory.steps[-1] or batches == "steps"
        env_reward, baseline = (final, subtracted) if is_paid else (0.0, 0.0)
        reward = step_transform(trajectory, index, env_reward)
        step = trajectory.steps[index]  # a transform may replace it
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise ConfigError(
                f"{trajectory.env_id}: player {trajectory.pid}: reward {trajectory.final_reward} became {reward} "
                f"in the final ({final_transform!r}) and step ({step_transform!r}) reward transformations"
            )
        if reason := weight_problem(step.weight, step.token_weights, step.generation.completion_ids):
            raise ConfigError(
                f"{trajectory.env_id}: {step_transform!r} of the step reward transformations set {reason}"
            )
        step.weight, step.token_weights = plain_weights(step)
        step.reward = float(reward)
        step.step_info.update(
            raw_reward=trajectory.final_reward, env_reward=env_reward, baseline=baseline, step_reward=step.reward
        )


def weight_problem(weight: object, token_weights: object, completion: Sized) -> str | None:
    """Return the reason why these cannot be the weights of a step with this completion; None if they can."""
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        return f"the weight {weight!r:.99}; it must be a finite number of at least 0"
    if token_weights is None:
        return None
    try:
        given = np.asarray(token_weights, np.float32)
    except (TypeError, ValueError) as error:
        return f"token_weights that are not numbers: {error}"
    if given.shape != (len(completion),):
        return f"token_weights of shape {given.shape} for a completion of {len(completion)} tokens"
    if not (np.isfinite(given) & (given >= 0)).all():
        return "token_weights that are not all finite numbers of at least 0"
    return None


def plain_weights(step: Step) -> tuple[float, Weights | None]:
    """Return the weights of a step and of its tokens in the types that a message and a checkpoint hold."""
    of_tokens = step.token_weights
    return float(step.weight), None if of_tokens is None else np.asarray(of_tokens, np.float32)
