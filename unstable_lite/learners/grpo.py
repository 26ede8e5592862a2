"""GRPO: PPO's clipped steps without a critic.

Owns the one update on this page. An item's reward is its advantage within the group that it was played in (the same
start, the same seat), made before it came here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from torch.nn.utils import clip_grad_norm_

from unstable_lite.config import Config
from unstable_lite.learners import UpdateResult, adapter_files, losses, ranks
from unstable_lite.learners.advantages import zero_share
from unstable_lite.learners.batching import check, fit, length
from unstable_lite.learners.figures import Clipped
from unstable_lite.learners.learner_state import read_state, write_state
from unstable_lite.learners.model import Policy
from unstable_lite.learners.optimizers import (
    Snapshot,
    load_state_tensors,
    make_optimizer,
    set_learning_rate,
    state_tensors,
)
from unstable_lite.learners.proximal import Proximal, proximal_policy, shuffled_minibatches
from unstable_lite.types import Logprobs, TrainItem


class GRPOLearner:
    def __init__(self, config: Config, device: str) -> None:
        self.policy = Policy(config, device)
        self.step = 0
        """Updates that were taken, whatever the number of their steps."""
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
        """`ppo_epochs` passes over `items` in `ppo_minibatches` steps each, which make one adapter `version`.

        Where the loss or the gradient of any of them is not finite all are taken back, and nothing changes. A step
        whose gradient is zero changes no parameter and no moment.
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
            before = Snapshot.take(self._optimizer)
            try:
                proximal = proximal_policy(self.policy, fitted.items, self._config)
                loss_of_steps, norm_of_steps, last_epoch = [], [], Clipped()
                for is_last_epoch, rows in shuffled_minibatches(len(fitted.items), self._config):
                    minibatch = [fitted.items[row] for row in rows]
                    clipped = self.add_gradient(minibatch, proximal.of(rows))
                    ranks.sum_gradients(self._parameters)
                    clipped.gather()
                    # Returns the norm from before the clipping.
                    norm = clip_grad_norm_(self._parameters, self._config.gradient_clipping).item()
                    loss_of_steps.append(clipped.loss)
                    norm_of_steps.append(norm)
                    if not all(map(math.isfinite, (clipped.loss, norm))):
                        skipped = f"not finite: loss {clipped.loss:g}, gradient norm {norm:g}"
                        break
                    # AdamW also moves without a gradient, by momentum and weight decay.
                    if norm > 0:
                        self._optimizer.step()
                    self._optimizer.zero_grad(set_to_none=True)
                    if is_last_epoch:
                        last_epoch.extend(clipped)
                else:
                    skipped = None
            finally:
                self._optimizer.zero_grad(set_to_none=True)
                if skipped is not None:
                    before.restore()
            logprobs = fitted.spread(proximal.trained.logprobs(fitted.items))
            metrics |= {
                "zero_advantage": zero_share([item.reward for item in fitted.items]),
                **proximal.trained.figures(self.version, self._config.importance_weight_cap),
                "loss": fmean(loss_of_steps),
                "policy_loss": fmean(loss_of_steps),
                "policy_grad_norm": fmean(norm_of_steps),
                "grad_clipped": fmean(norm > self._config.gradient_clipping for norm in norm_of_steps),
                "logp_std": proximal.trained.logp_std,
                **last_epoch.figures(self._config.clip_range),
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

    def add_gradient(self, items: Sequence[TrainItem], proximal: Proximal) -> Clipped:
        """Add the gradient of the clipped loss on `items`, of this rank's share, to the parameters."""
        config = self._config
        divisor = self._completion_len * len(items)
        clipped = Clipped()
        for batch in self.policy.micro_batches(items):
            logp_N, entropy_N = self.policy.logprobs(batch)
            old_logp_N = batch.gather(proximal.logp)
            weight_N = losses.importance_weights(old_logp_N, batch.behaviour_logp_N, config.importance_weight_cap)
            loss = losses.clipped_loss(logp_N, old_logp_N, weight_N, batch.advantage_N, config.clip_range, divisor)
            if config.entropy_coefficient:
                loss = loss - config.entropy_coefficient * entropy_N.sum() / divisor
            if proximal.reference_logp is not None:
                reference_logp_N = batch.gather(proximal.reference_logp)
                # This term is of the policy as it is now.
                weight_N = losses.importance_weights(logp_N, batch.behaviour_logp_N, config.importance_weight_cap)
                loss = loss + config.kl_coefficient * losses.kl_penalty(logp_N, reference_logp_N, weight_N, divisor)
            loss.backward()  # type: ignore[no-untyped-call]
            clipped.add(logp_N, old_logp_N, loss)
        return clipped

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
