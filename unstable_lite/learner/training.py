"""State of a training, and the steps that every algorithm's update has in common: check, count, clip, skip, save.

Knows no loss: that is the algorithm's page. `I` counts the items of a batch.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.learner import UpdateResult, distributed
from unstable_lite.learner.advantages import Floats, zero_share
from unstable_lite.learner.batching import check, fit, length
from unstable_lite.learner.critic import Critic
from unstable_lite.learner.learner_state import read_state, write_state
from unstable_lite.learner.model import Policy
from unstable_lite.learner.optimizers import (
    Snapshot,
    load_state_tensors,
    make_optimizer,
    set_learning_rate,
    state_tensors,
)
from unstable_lite.learner.training_stats import Trained
from unstable_lite.reward_transformations.spread import Spread
from unstable_lite.types import Logprobs, TrainItem


class Training:
    """Policy, critic if the algorithm has one, their optimisers and the counters."""

    def __init__(self, config: Config, device: str, has_critic: bool = False) -> None:
        self.policy = Policy(config, device)
        self.critic = Critic(self.policy, config) if has_critic else None
        self.config = config.learner
        self.step = 0
        """Number of updates."""
        self.version = 0
        """Version of the adapter that the policy holds; 0 is the one that it started with."""
        self.samples_seen = 0
        """Number of trained items."""
        self.completion_len = float(config.engine.max_generation_len)
        """Constant divisor of each item's loss: the mean completion length of the first batch, in tokens."""
        self.spread = Spread()
        """Memory of earlier batches' returns and advantages."""
        self.optimizer = make_optimizer(self.policy.parameters, self.config.learning_rate, self.config)
        self.critic_optimizer: Optimizer | None = None
        if self.critic is not None:
            learning_rate = self.config.critic_learning_rate
            self.critic_optimizer = make_optimizer(self.critic.parameters, learning_rate, self.config)
        self._learning_steps = config.run.learning_steps

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer] if self.critic_optimizer is None else [self.optimizer, self.critic_optimizer]

    @property
    def is_warming_up(self) -> bool:
        """Whether only the critic learns yet."""
        return self.critic is not None and self.step < self.config.critic_warmup_updates

    def schedule(self) -> dict[str, float]:
        """Set the learning rates of the next update and return them as metrics."""
        progress = self.step / self._learning_steps
        config = self.config
        metrics = {"lr": set_learning_rate(self.optimizer, config.learning_rate, config, progress)}
        if self.critic_optimizer is not None:
            learning_rate = set_learning_rate(self.critic_optimizer, config.critic_learning_rate, config, progress)
            metrics["critic_lr"] = learning_rate
        return metrics

    def add_critic_gradient(self, items: Sequence[TrainItem], target_I: Floats) -> float:
        """Add the gradient of the critic's loss on `items`, of this rank's share; return the loss."""
        assert self.critic is not None
        return self.critic.add_gradient(items, target_I)

    def save(self, directory: Path) -> None:
        """Write adapters, optimisers, counters and random state into a directory that exists."""
        peft_files.write_files(directory, *self.policy.adapter_state())
        moments = state_tensors(self.optimizer, self.policy.parameters)
        counters: dict[str, Any] = {
            "step": self.step,
            "version": self.version,
            "samples_seen": self.samples_seen,
            "completion_len": self.completion_len,
        }
        if self.critic is not None and self.critic_optimizer is not None:
            (directory / "critic").mkdir(exist_ok=True)
            self.critic.save(directory / "critic")
            moments |= state_tensors(self.critic_optimizer, self.critic.parameters)
            counters["spread"] = self.spread.state_dict()
        write_state(directory, moments, counters, self.policy.device)

    def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote, bit for bit."""
        self.policy.load_adapter(directory)
        if self.critic is not None:
            self.critic.load(directory / "critic")
        moments, counters = read_state(directory, self.policy.device)
        load_state_tensors(self.optimizer, self.policy.parameters, moments)
        if self.critic is not None and self.critic_optimizer is not None:
            load_state_tensors(self.critic_optimizer, self.critic.parameters, moments)
        self.step, self.version = counters["step"], counters["version"]
        self.samples_seen = counters["samples_seen"]
        # A state without it is of a run that divided by max_generation_len, and continues to.
        self.completion_len = counters.get("completion_len", self.completion_len)
        if "spread" in counters:  # a checkpoint of an earlier version has none
            self.spread.load_state_dict(counters["spread"])


class Gathered(Protocol):
    """Loss and tokens of one backward pass."""

    @property
    def loss(self) -> float: ...

    def gather(self) -> None:
        """Gather loss and tokens from all ranks."""


class Update:
    """One update: the items that fit, its metrics, and the reason if it is skipped."""

    def __init__(self, training: Training, items: Sequence[TrainItem]) -> None:
        """Check and select the items. Raises RequestError for items that are damaged."""
        self._started = time.perf_counter()
        check(items, training.policy.vocab_size)
        self.fitted = fit(items, training.config.max_train_len)
        self.items = self.fitted.items
        self.advantages_of_critic: tuple[float, ...] = ()
        """Advantage of each of `items`, if a critic computed them; else their rewards are the advantages."""
        self.skipped: str | None = f"none of {len(items)} steps has a completion and fits into learner.max_train_len"
        self.metrics: dict[str, float] = {
            "num_items": float(len(self.items)),
            "dropped_too_long": float(self.fitted.num_dropped),
            "pct_truncated": self.fitted.num_dropped / max(len(items), 1),
            **training.schedule(),
        }
        self._training = training
        self._logprobs: Sequence[Logprobs] = ()
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._value_losses: list[float] = []
        self._critic_norms: list[float] = []
        if self.items and training.step == 0:
            training.completion_len = self.fitted.mean_completion_len

    @contextlib.contextmanager
    def steps(self, several: bool = False) -> Iterator[None]:
        """Take the update's steps in the body; on exit no gradient is left.

        `several`: if one of them is not finite, or the body raises, all are undone.
        """
        optimizers = self._training.optimizers
        before = [Snapshot.take(optimizer) for optimizer in optimizers] if several else []
        is_complete = False
        try:
            yield
            is_complete = self.skipped is None
        finally:
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            if not is_complete:
                for snapshot in before:
                    snapshot.restore()

    def step(self, gathered: Gathered, value_loss: float | None = None) -> bool:
        """Take one optimiser step with the gradients of all ranks.

        Returns False, and takes none, if a loss or a gradient is not finite. A policy whose gradient is zero is not
        stepped, because AdamW also moves by momentum and weight decay.
        """
        training, config = self._training, self._training.config
        parameters = list(training.policy.parameters.values())
        critic_parameters: list[nn.Parameter] = []
        if training.critic is not None:
            critic_parameters = list(training.critic.parameters.values())
        distributed.sum_gradients([*parameters, *critic_parameters])
        gathered.gather()
        if value_loss is not None:
            value_loss = distributed.sum_metric(value_loss)
            self._value_losses.append(value_loss)
        # clip_grad_norm_ returns the norm from before the clipping.
        norm = clip_grad_norm_(parameters, config.gradient_clipping).item()
        self._losses.append(gathered.loss)
        self._norms.append(norm)
        numbers, reason = [gathered.loss, norm], f"not finite: loss {gathered.loss:g}, gradient norm {norm:g}"
        if value_loss is not None:
            critic_norm = clip_grad_norm_(critic_parameters, config.gradient_clipping).item()
            self._critic_norms.append(critic_norm)
            numbers += [value_loss, critic_norm]
            reason += f"; critic: loss {value_loss:g}, gradient norm {critic_norm:g}"
        if not all(map(math.isfinite, numbers)):
            self.skipped = reason
            return False
        if norm > 0 and not training.is_warming_up:
            training.optimizer.step()
        if training.critic_optimizer is not None:
            training.critic_optimizer.step()
        for optimizer in training.optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.skipped = None
        return True

    @property
    def loss(self) -> float:
        """Mean loss of the steps."""
        return fmean(self._losses)

    def report(self, trained: Trained) -> None:
        """Add the metrics of the items' tokens before the update, and of its steps."""
        cap = self._training.config.importance_weight_cap
        self._logprobs = trained.logprobs(self.items)
        self.metrics |= trained.metrics(self._training.version, cap) | self._step_metrics()

    def _step_metrics(self) -> dict[str, float]:
        """Return the means over the steps, and the share of items without an advantage."""
        metrics: dict[str, float] = {
            "zero_advantage": zero_share(self.advantages_of_critic or [item.reward for item in self.items]),
            "policy_grad_norm": fmean(self._norms),
            "grad_clipped": fmean(norm > self._training.config.gradient_clipping for norm in self._norms),
        }
        if self._critic_norms:
            metrics |= {
                "value_loss": fmean(self._value_losses),
                "grad_norm": fmean(self._norms),
                "critic_grad_norm": fmean(self._critic_norms),
            }
        return metrics

    def end(self, version: int) -> UpdateResult:
        """Count the update, which made adapter `version`, unless it was skipped; return its result."""
        training = self._training
        if self.skipped is None:
            training.step += 1
            training.version = version
            training.samples_seen += len(self.items)
        seconds = time.perf_counter() - self._started
        self.metrics |= {
            "step": float(training.step),
            "samples_seen": float(training.samples_seen),
            "seconds": seconds,
            "tokens_per_s": sum(map(length, self.items)) / seconds,
        }
        return UpdateResult(
            metrics=self.metrics,
            skipped=self.skipped,
            logprobs=self.fitted.spread(self._logprobs) if self._logprobs else (),
            advantages=self.advantages_of_critic,
        )
