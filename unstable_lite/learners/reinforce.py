"""REINFORCE with truncated importance weights.

Owns the one update on this page. An item's reward is its advantage: all that it knows of games.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from torch.nn.utils import clip_grad_norm_

from unstable_lite.config import Config
from unstable_lite.learners import UpdateResult, adapter_files, losses, ranks
from unstable_lite.learners.advantages import zero_share
from unstable_lite.learners.batching import check, fit, length
from unstable_lite.learners.figures import Trained
from unstable_lite.learners.learner_state import read_state, write_state
from unstable_lite.learners.model import Policy
from unstable_lite.learners.optimizers import (
    load_state_tensors,
    make_optimizer,
    set_learning_rate,
    state_tensors,
)
from unstable_lite.types import Logprobs, TrainItem


class REINFORCELearner:
    def __init__(self, config: Config, device: str) -> None:
        self.policy = Policy(config, device)
        self.step = 0
        """Updates whose step was taken."""
        self.version = 0
        """Of the adapter that the policy now holds; 0 is the one that it started with."""
        self.samples_seen = 0
        self._completion_len = float(config.engine.max_generation_len)
        """Constant that the loss of a step is divided by: the mean completion length of the first batch, in tokens."""
        self._config = config.learner
        self._learning_steps = config.run.learning_steps
        self._parameters = list(self.policy.parameters.values())
        self._optimizer = make_optimizer(self.policy.parameters, config.learner.learning_rate, config.learner)

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """One optimiser step on all of `items`, which makes adapter `version`.

        The step is not taken, and nothing changes, where the loss or the gradient is not finite. If the gradient
        is zero no parameter and no moment changes, but the update counts and makes its version.
        """
        started = time.perf_counter()
        check(items, self.policy.vocab_size)
        fitted = fit(items, self._config.max_train_len)
        progress = self.step / self._learning_steps
        metrics = {
            "num_items": float(len(fitted.items)),
            "dropped_too_long": float(fitted.num_dropped),
            "pct_truncated": fitted.num_dropped / max(len(items), 1),
            "lr": set_learning_rate(self._optimizer, self._config.learning_rate, self._config, progress),
        }
        skipped: str | None = f"none of {len(items)} steps has a completion and fits into learner.max_train_len"
        logprobs: tuple[Logprobs, ...] = ()
        if fitted.items:
            if self.step == 0:
                self._completion_len = fitted.mean_completion_len
            try:
                trained = self.add_gradient(fitted.items)
                ranks.sum_gradients(self._parameters)
                trained.gather()
                # Returns the norm from before the clipping.
                norm = clip_grad_norm_(self._parameters, self._config.gradient_clipping).item()
                if math.isfinite(trained.loss) and math.isfinite(norm):
                    # AdamW also moves without a gradient, by momentum and weight decay.
                    if norm > 0:
                        self._optimizer.step()
                    skipped = None
                else:
                    skipped = f"not finite: loss {trained.loss:g}, gradient norm {norm:g}"
            finally:
                self._optimizer.zero_grad(set_to_none=True)
            logprobs = fitted.spread(trained.logprobs(fitted.items))
            metrics |= {
                "zero_advantage": zero_share([item.reward for item in fitted.items]),
                "policy_grad_norm": norm,
                "grad_clipped": float(norm > self._config.gradient_clipping),
                **trained.figures(self.version, self._config.importance_weight_cap),
            }
        if skipped is None:
            self.step += 1
            self.version = version
            self.samples_seen += len(fitted.items)
        seconds = time.perf_counter() - started
        return UpdateResult(
            metrics=metrics
            | {
                "step": float(self.step),
                "samples_seen": float(self.samples_seen),
                "seconds": seconds,
                "tokens_per_s": sum(map(length, fitted.items)) / seconds,
            },
            skipped=skipped,
            logprobs=logprobs,
        )

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        """Add the gradient of the loss on `items`, of this rank's share, to the parameters."""
        config = self._config
        divisor = self._completion_len * len(items)
        trained = Trained(kl_metric=self.policy.kl_metric)
        for batch in self.policy.micro_batches(items):
            logp_N, entropy_N = self.policy.logprobs(batch)
            weight_N = losses.importance_weights(logp_N, batch.behaviour_logp_N, config.importance_weight_cap)
            loss = losses.policy_gradient_loss(logp_N, weight_N, batch.advantage_N, divisor)
            if config.entropy_coefficient:
                loss = loss - config.entropy_coefficient * entropy_N.sum() / divisor
            reference_logp_N = None
            if config.kl_coefficient:
                reference_logp_N = self.policy.reference_logprobs(batch)
                loss = loss + config.kl_coefficient * losses.kl_penalty(logp_N, reference_logp_N, weight_N, divisor)
            loss.backward()  # type: ignore[no-untyped-call]
            trained.add(batch, logp_N, entropy_N, reference_logp_N, loss)
        return trained

    def save(self, directory: Path) -> None:
        """Adapter, optimiser, counters and random state, into a directory that exists."""
        adapter_files.write(directory, *self.policy.adapter_state())
        moments = state_tensors(self._optimizer, self.policy.parameters)
        counters: dict[str, float] = {"step": self.step, "version": self.version, "samples_seen": self.samples_seen}
        counters["completion_len"] = self._completion_len
        write_state(directory, moments, counters, self.policy.device)

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote, bit for bit."""
        self.policy.load_adapter(directory)
        moments, counters = read_state(directory, self.policy.device)
        load_state_tensors(self._optimizer, self.policy.parameters, moments)
        self.step, self.version = counters["step"], counters["version"]
        self.samples_seen = counters["samples_seen"]
        # A state without it is of a run that divided by max_generation_len, and continues to.
        self._completion_len = counters.get("completion_len", self._completion_len)
