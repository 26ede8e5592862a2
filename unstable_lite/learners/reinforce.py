"""REINFORCE with truncated importance weights.

Owns the optimiser and the one update on this page. An item's advantage is all that it knows of games and
rewards.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from unstable_lite.config import Config
from unstable_lite.learners import UpdateResult, adapter_files, losses
from unstable_lite.learners.batching import check, fit, length, make_micro_batches
from unstable_lite.learners.model import Policy
from unstable_lite.types import TrainItem

_STATE = "learner.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What the gradient was made of; `N` counts the batch's trained tokens."""

    loss: float
    logp_N: Tensor
    behaviour_logp_N: Tensor
    entropy_N: Tensor
    version_N: Tensor
    mean_length: float
    padding_share: float


class REINFORCELearner:
    def __init__(self, config: Config, device: str) -> None:
        self.policy = Policy(config, device)
        self.step = 0
        """Updates whose step was taken."""
        self.version = 0
        """Of the adapter that the policy now holds; 0 is the one that it started with."""
        self.samples_seen = 0
        self._max_generation_len = config.engine.max_generation_len
        self._config = config.learner
        self._parameters = list(self.policy.parameters.values())
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=config.learner.learning_rate, weight_decay=config.learner.weight_decay
        )

    def update(self, items: Sequence[TrainItem], version: int) -> UpdateResult:
        """One optimiser step on all of `items`, which makes adapter `version`.

        The step is not taken, and nothing changes, where the loss or the gradient is not finite.
        """
        started = time.perf_counter()
        check(items, self.policy.vocab_size)
        fitted = fit(items, self._config.max_train_len)
        metrics = {
            "num_items": float(len(fitted.items)),
            "dropped_too_long": float(fitted.num_dropped),
            "pct_truncated": fitted.num_cut / max(len(items), 1),
            "lr": self._config.learning_rate,
        }
        skipped: str | None = f"max_train_len leaves none of {len(items)} steps room for a completion token"
        if fitted.items:
            try:
                trained = self.add_gradient(fitted.items)
                # Returns the norm from before the clipping.
                norm = clip_grad_norm_(self._parameters, self._config.gradient_clipping).item()
                if math.isfinite(trained.loss) and math.isfinite(norm):
                    self._optimizer.step()
                    skipped = None
                else:
                    skipped = f"not finite: loss {trained.loss:g}, gradient norm {norm:g}"
            finally:
                self._optimizer.zero_grad(set_to_none=True)
            metrics |= {"policy_grad_norm": norm, **self._figures(trained)}
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
        )

    def add_gradient(self, items: Sequence[TrainItem]) -> Trained:
        """Add the gradient of the loss on all of `items` to the parameters, micro-batch by micro-batch."""
        config = self._config
        divisor = self._max_generation_len * len(items)
        loss, parts, num_padding, num_positions = torch.zeros((), device=self.policy.device), [], 0, 0
        for cpu_batch in make_micro_batches(items, config.max_tokens_per_micro_batch, config.mini_batch_size):
            batch = cpu_batch.to(self.policy.device)
            logp_N, entropy_N = self.policy.logprobs(batch)
            weight_N = losses.importance_weights(logp_N, batch.behaviour_logp_N, config.importance_weight_cap)
            part_loss = losses.policy_gradient_loss(logp_N, weight_N, batch.advantage_N, divisor)
            part_loss.backward()  # type: ignore[no-untyped-call]
            loss += part_loss.detach()
            parts.append((logp_N.detach(), batch.behaviour_logp_N, entropy_N, batch.version_N))
            num_padding += batch.num_padding
            num_positions += batch.tokens_BT.numel()
        logp_N, behaviour_logp_N, entropy_N, version_N = map(torch.cat, zip(*parts, strict=True))
        return Trained(
            loss=loss.item(),
            logp_N=logp_N,
            behaviour_logp_N=behaviour_logp_N,
            entropy_N=entropy_N,
            version_N=version_N,
            mean_length=sum(map(length, items)) / len(items),
            padding_share=num_padding / num_positions,
        )

    def _figures(self, trained: Trained) -> dict[str, float]:
        staleness_N = (self.version - trained.version_N).float()
        return {
            "loss": trained.loss,
            "logp_mean": trained.logp_N.mean().item(),
            "entropy": trained.entropy_N.mean().item(),
            "staleness_mean": staleness_N.mean().item(),
            "staleness_max": staleness_N.max().item(),
            "num_tokens": float(len(trained.logp_N)),
            "avg_train_len": trained.mean_length,
            "padding_share": trained.padding_share,
            **losses.importance_figures(trained.logp_N, trained.behaviour_logp_N, self._config.importance_weight_cap),
            **losses.mismatch_figures(trained.logp_N, trained.behaviour_logp_N, staleness_N == 0),
        }

    def save(self, directory: Path) -> None:
        """Adapter, optimiser, counters and random state, into a directory that exists."""
        tensors = {"rng.cpu": torch.get_rng_state()}
        if self.policy.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.policy.device)
        for name, parameter in self.policy.parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
        counters = {"step": self.step, "version": self.version, "samples_seen": self.samples_seen}
        adapter_files.write(directory, *self.policy.adapter_state())
        adapter_files.write_file(
            directory / _STATE, safetensors.torch.save(tensors, {"counters": json.dumps(counters)})
        )

    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote, bit for bit."""
        self.policy.load_adapter(directory)
        with safetensors.safe_open(directory / _STATE, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            counters = json.loads(file.metadata()["counters"])
        torch.set_rng_state(tensors.pop("rng.cpu"))
        if "rng.cuda" in tensors and self.policy.device.type == "cuda":
            torch.cuda.set_rng_state(tensors.pop("rng.cuda"), self.policy.device)
        state: dict[int, dict[str, Tensor]] = {}
        indices = {name: index for index, name in enumerate(self.policy.parameters)}
        for name, tensor in tensors.items():
            key, _, parameter_name = name.partition("/")
            if parameter_name in indices:
                state.setdefault(indices[parameter_name], {})[key] = tensor
        self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})
        self.step, self.version = counters["step"], counters["version"]
        self.samples_seen = counters["samples_seen"]
