"""REINFORCE with truncated importance weights.

Owns the optimiser and the one update on this page. An item's advantage is all that it knows of games and rewards.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from unstable_lite.config import Config
from unstable_lite.learners import UpdateResult, adapter_files, losses
from unstable_lite.learners.batching import MicroBatch, check, fit, length, make_micro_batches
from unstable_lite.learners.model import Policy
from unstable_lite.types import TrainItem

_STATE = "learner.safetensors"


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
        skipped: str | None = f"none of {len(items)} steps has room for a completion token within max_train_len"
        if fitted.items:
            batches = make_micro_batches(
                fitted.items, self._config.max_tokens_per_micro_batch, self._config.mini_batch_size
            )
            try:
                trained = self._accumulate_gradient(batches, divisor=self._max_generation_len * len(fitted.items))
                skipped = self._take_step(trained)
            finally:
                self._optimizer.zero_grad(set_to_none=True)
            metrics |= self._figures(fitted.items, batches, trained, time.perf_counter() - started)
        if skipped is None:
            self.step += 1
            self.version = version
            self.samples_seen += len(fitted.items)
        metrics |= {
            "step": float(self.step),
            "samples_seen": float(self.samples_seen),
            "seconds": time.perf_counter() - started,
        }
        return UpdateResult(metrics=metrics, skipped=skipped)

    def _accumulate_gradient(self, batches: list[MicroBatch], divisor: float) -> dict[str, Tensor]:
        """Add up the gradient of the whole batch; returns per-token tensors and the loss."""
        columns: dict[str, list[Tensor]] = {}
        for batch in (cpu_batch.to(self.policy.device) for cpu_batch in batches):
            logp_N, entropy_N = self.policy.logprobs(batch)
            weight_N = losses.importance_weights(
                logp_N, batch.behaviour_logp_N, self._config.importance_weight_cap
            )
            loss = losses.policy_gradient_loss(logp_N, weight_N, batch.advantage_N, divisor)
            loss.backward()
            of_batch = {
                "loss": loss.detach()[None],
                "logp": logp_N.detach(),
                "behaviour_logp": batch.behaviour_logp_N,
                "entropy": entropy_N,
                "version": batch.version_N,
            }
            for name, column in of_batch.items():
                columns.setdefault(name, []).append(column)
        return {name: torch.cat(column) for name, column in columns.items()}

    def _take_step(self, trained: dict[str, Tensor]) -> str | None:
        """Clip and step, or say why not; the norm is measured before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.gradient_clipping)
        trained["grad_norm"] = norm
        loss = trained["loss"].sum().item()
        if not math.isfinite(loss) or not math.isfinite(norm.item()):
            return f"loss {loss:g}, gradient norm {norm.item():g}"
        self._optimizer.step()
        return None

    def _figures(
        self, items: list[TrainItem], batches: list[MicroBatch], trained: dict[str, Tensor], seconds: float
    ) -> dict[str, float]:
        logp_N, behaviour_logp_N = trained["logp"], trained["behaviour_logp"]
        staleness_N = (self.version - trained["version"]).float()
        num_input_tokens = sum(map(length, items))
        return {
            "loss": trained["loss"].sum().item(),
            "policy_grad_norm": trained["grad_norm"].item(),
            "logp_mean": logp_N.mean().item(),
            "entropy": trained["entropy"].mean().item(),
            "staleness_mean": staleness_N.mean().item(),
            "staleness_max": staleness_N.max().item(),
            "num_tokens": float(len(logp_N)),
            "avg_train_len": num_input_tokens / len(items),
            "tokens_per_s": num_input_tokens / seconds,
            "padding_share": sum(b.num_padding for b in batches) / sum(b.tokens_BT.numel() for b in batches),
            **losses.importance_figures(logp_N, behaviour_logp_N, self._config.importance_weight_cap),
            **losses.mismatch_figures(logp_N, behaviour_logp_N, trained["version"] == self.version),
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
        self._optimizer.load_state_dict(
            {"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]}
        )
        self.step, self.version = counters["step"], counters["version"]
        self.samples_seen = counters["samples_seen"]
