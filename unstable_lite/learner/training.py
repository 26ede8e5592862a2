"""State of a training, and the steps that every algorithm's update has in common: check, count, clip, skip, save.

Knows no loss: that is the algorithm's page. `I` counts the items of a batch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import peft
import safetensors
import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.config.training import LearnerConfig, Schedule
from unstable_lite.errors import AdapterError, ConfigError, ModelError
from unstable_lite.learner import UpdateResult, distributed, losses
from unstable_lite.learner.base_model import random_states, set_random_states
from unstable_lite.learner.batching import check, fit, length
from unstable_lite.learner.critic import (
    Critic,
    estimate_advantages,
    is_judged,
    policy_weights,
    value_metrics,
    zero_share,
)
from unstable_lite.learner.distributed import Floats
from unstable_lite.learner.model import Policy
from unstable_lite.learner.training_stats import Trained
from unstable_lite.reward_transformations.averages import Spread
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Logprobs, TrainItem

STATE = "learner.safetensors"
"""File beside the adapter with optimiser moments, random states and counters. Reading safetensors can run no code."""
Parameters = Mapping[str, nn.Parameter]
_COUNTERS = ("step", "version", "samples_seen", "completion_len")


class Training:
    """Policy, critic if the algorithm has one, their optimiser and the counters."""

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
        self._longest = float(config.engine.max_generation_len)
        self.completion_len = self._longest
        """Constant divisor of each item's loss: the mean completion length of the first batch, in tokens."""
        self.entropy_coefficient = self.config.entropy_coefficient
        """Coefficient of the entropy bonus, by its schedule or `entropy_target`."""
        self.kl_coefficient = self.config.kl_coefficient
        """Coefficient of the KL penalty, by its schedule."""
        self.spread = Spread()
        """Memory of earlier batches' returns and advantages."""
        groups = [(self.policy.parameters, self.config.learning_rate)]
        if self.critic is not None:
            groups.append((self.critic.parameters, self.config.critic_learning_rate))
        self.optimizer = make_optimizer(groups, self.config)
        self._learning_steps = config.run.learning_steps

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of policy and critic, in the optimiser's order."""
        return self.policy.parameters | (self.critic.parameters if self.critic is not None else {})

    def schedule(self) -> dict[str, float]:
        """Set learning rates and coefficients of the next update and return them as metrics."""
        config = self.config
        progress = self.step, self._learning_steps
        factor = schedule_factor(config.learning_rate_schedule, *progress, config.learning_rate_warmup)
        metrics = {"lr": config.learning_rate * factor}
        if self.critic is not None:
            metrics["critic_lr"] = config.critic_learning_rate * factor
        for group, learning_rate in zip(self.optimizer.param_groups, metrics.values(), strict=True):
            group["lr"] = learning_rate
        factor = schedule_factor(config.coefficient_schedule, *progress)
        self.kl_coefficient = config.kl_coefficient * factor
        if config.entropy_target is None:
            self.entropy_coefficient = config.entropy_coefficient * factor
        in_use = {"kl_coefficient": self.kl_coefficient, "entropy_coefficient": self.entropy_coefficient}
        return metrics | {name: value for name, value in in_use.items() if getattr(config, name)}

    def follow(self, entropy: float | None) -> None:
        """Adapt the entropy's coefficient and the KL penalty's reference after an update.

        entropy: mean entropy of the update's tokens before it, if the algorithm reported it.
        """
        config = self.config
        if config.entropy_target is not None and entropy is not None:
            limits = config.entropy_coefficient, config.entropy_target
            self.entropy_coefficient = losses.adapted_coefficient(self.entropy_coefficient, entropy, *limits)
        if config.kl_stage is None:
            self.policy.follow(config.kl_average_decay)
        elif self.step % config.kl_stage == 0:
            self.policy.follow(decay=0.0)

    def add_critic_gradient(self, items: Sequence[TrainItem], target_I: Floats) -> float | None:
        """Add the gradient of the critic's loss on `items`, of this rank's share; return the loss, or None without."""
        return None if self.critic is None else self.critic.add_gradient(items, target_I)

    def begin_again(self, seed: int, adapter: Path | None) -> None:
        """Reset all state to its initial values, and the adapter to that in a PEFT directory or a fresh one.

        seed: that of fresh parameters, and of the random streams from now on. Raises AdapterError or ModelError, and
        resets nothing, for an adapter that does not fit.
        """
        if adapter is not None:
            self.policy.load_adapter(adapter)
        torch.manual_seed(seed)
        if adapter is None:
            self.policy.make_fresh()
        if self.critic is not None:
            self.critic.begin_again()
        distributed.copy_from_first(self.parameters)
        self.policy.follow(decay=0.0)
        self.optimizer.state.clear()
        self.step = self.samples_seen = 0
        self.completion_len = self._longest
        self.spread = Spread()
        self.entropy_coefficient = self.config.entropy_coefficient

    def save(self, directory: Path) -> None:
        """Write adapters, optimiser, counters and random states into a directory that exists."""
        peft_files.write_files(directory, *self.policy.adapter_state())
        if self.critic is not None:
            (directory / "critic").mkdir(exist_ok=True)
            self.critic.save(directory / "critic")
        if (moving := self.policy.moving_reference) is not None:
            (directory / moving).mkdir(exist_ok=True)
            peft_files.write_files(directory / moving, *self.policy.adapter_state(moving))
        tensors = state_tensors(self.optimizer, self.parameters) | random_states(self.policy.device)
        counters = {name: getattr(self, name) for name in _COUNTERS} | {"spread": self.spread.state_dict()}
        if self.config.entropy_target is not None:
            counters["entropy_coefficient"] = self.entropy_coefficient
        content = safetensors.torch.save(tensors, {"counters": json.dumps(counters)})
        peft_files.write_file(directory / STATE, content)

    def load(self, directory: Path) -> None:
        """Restore the state that `save` wrote, bit for bit.

        Raises AdapterError or ModelError if a file is not part of such a state of this algorithm.
        """
        self.policy.load_adapter(directory)
        if self.critic is not None:
            self.critic.load(directory / "critic")
        moving = self.policy.moving_reference
        if moving is not None and (directory / moving).is_dir():
            self.policy.load_adapter(directory / moving, moving)
        else:  # the config did not ask for this reference when the state was saved
            self.policy.follow(decay=0.0)
        moments, counters = read_state(directory / STATE, self.policy.device)
        try:
            load_state_tensors(self.optimizer, self.parameters, self.policy.of_text(moments))
            for name in _COUNTERS:
                setattr(self, name, counters[name])
            self.spread.load_state_dict(counters["spread"])
            if self.config.entropy_target is not None:
                self.entropy_coefficient = counters.get("entropy_coefficient", self.config.entropy_coefficient)
        except KeyError as error:
            raise ModelError(f"{directory / STATE} is of another algorithm or version ({error})") from error


def read_state(path: Path, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return moments and counters, and restore the random states. Raises ModelError if the file is not such a state."""
    try:
        peft_files.read_header(path)
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            counters: dict[str, Any] = json.loads(file.metadata()["counters"])
        set_random_states(tensors, device)
    except (OSError, AdapterError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"{path} is not a learner's state: {error}") from error
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("rng.")}, counters


def ready_info(policy: Policy, spec: WorkerSpec) -> dict[str, Any]:
    """Return the facts that a learner sends with `Ready`.

    The bytes are those of one adapter version and of the base. `position_limit`: of a sequence.
    """
    return {
        "adapter_bytes": policy.adapter_bytes,
        "lora_parameters": sum(parameter.numel() for parameter in policy.parameters.values()),
        "base_parameters": sum(weight.numel() for weight in policy.base_weights),
        "base_bytes": sum(weight.nbytes for weight in policy.base_weights),
        "dtype": str(policy.dtype).removeprefix("torch."),
        "device": spec.device,
        "threads": spec.threads,
        "vocab_size": policy.vocab_size,
        "position_limit": policy.position_limit,
        "sequences": policy.layout,
        **({"warning": policy.warning} if policy.warning is not None else {}),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
    }


class Update:
    """One update: the items that fit, its metrics, and the reason if it is skipped."""

    def __init__(self, training: Training, items: Sequence[TrainItem]) -> None:
        """Check and select the items. Raises RequestError for items that are damaged."""
        self._started = time.perf_counter()
        training.optimizer.zero_grad(set_to_none=True)  # an update that ran out of memory may have left some
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
        self._steps: list[dict[str, float]] = []
        """Losses and gradient norms of each step, by the names of their metrics."""
        if self.items and training.step == 0:
            training.completion_len = self.fitted.mean_completion_len

    def weigh(self, items: Sequence[TrainItem]) -> tuple[list[TrainItem], Floats]:
        """Return the update's items with the critic's advantages as rewards, and the critic's targets.

        Without a critic the items stay as they are. All of `items` take part: a step that is too long to train on still
        passes later rewards on to earlier ones.
        """
        training, config, kept = self._training, self._training.config, self.fitted.kept
        if training.critic is None:
            return self.items, np.zeros(len(self.items))
        value_I = training.critic.estimate(items)
        advantage_I, target_I = estimate_advantages(items, value_I, config.gamma, config.gae_lambda)
        weight_I = policy_weights(items, advantage_I, config.gamma, config.normalize_adv, training.spread)
        is_judged_I = is_judged(items)[kept]
        value_I, weight_I, target_I = value_I[kept], weight_I[kept], target_I[kept]
        self.metrics |= value_metrics(value_I[is_judged_I], target_I[is_judged_I])
        self.advantages_of_critic = tuple(weight_I.tolist())
        weighed = [replace(item, reward=float(weight)) for item, weight in zip(self.items, weight_I, strict=True)]
        return weighed, target_I

    def step(self, trained: Trained, value_loss: float | None = None) -> bool:
        """Take one optimiser step with the gradients of all ranks.

        Returns False, and takes none, if a loss or a gradient is not finite. A policy whose gradient is zero is not
        stepped, because AdamW also moves by momentum and weight decay.
        """
        training, limit = self._training, self._training.config.gradient_clipping
        if not isinstance(trained, Trained):
            raise ConfigError(f"algorithm: add_gradient must return a Trained; it returned {trained!r:.99}")
        distributed.sum_gradients(training.parameters.values())
        trained.gather()
        # clip_grad_norm_ returns the norm from before the clipping.
        norm = clip_grad_norm_(training.policy.parameters.values(), limit).item()
        numbers = {"loss": trained.loss, "policy_grad_norm": norm}
        if training.critic is not None and value_loss is not None:
            numbers["value_loss"] = float(distributed.sum_metrics(np.array([value_loss]))[0])
            numbers["critic_grad_norm"] = clip_grad_norm_(training.critic.parameters.values(), limit).item()
        self._steps.append(numbers)
        if not all(map(math.isfinite, numbers.values())):
            self.skipped = "not finite: " + ", ".join(f"{name} {number:g}" for name, number in numbers.items())
            training.optimizer.zero_grad(set_to_none=True)
            return False
        is_warming_up = training.critic is not None and training.step < training.config.critic_warmup_updates
        if norm == 0 or is_warming_up:  # the optimiser steps over parameters without a gradient
            for parameter in training.policy.parameters.values():
                parameter.grad = None
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
        self.skipped = None
        return True

    @property
    def loss(self) -> float:
        """Mean loss of the steps."""
        return fmean(step["loss"] for step in self._steps)

    def report(self, trained: Trained) -> None:
        """Add the metrics of the items' tokens before the update, and of its steps.

        Raises ConfigError if an item was left out, because the rows of the others would then count without it.
        """
        if missing := len({*range(len(self.items))} - {*trained.rows}):
            raise ConfigError(
                f"{missing} of {len(self.items)} items were not added to the reported `Trained`: give all of them to "
                "policy.micro_batches and each batch to trained.add; an item of weight 0 has no gradient"
            )
        training, config, steps = self._training, self._training.config, self._steps
        logp_N = trained.logp_N.float().cpu()
        self._logprobs = [logp.numpy() for logp in trained.per_item(logp_N, self.items)]
        self.metrics |= trained.metrics(training.version, config.importance_weight_cap, training.policy.kl_metric)
        self.metrics |= {name: fmean(step[name] for step in steps) for name in steps[0]}
        self.metrics |= {
            "zero_advantage": zero_share(self.advantages_of_critic or [item.reward for item in self.items]),
            "grad_clipped": fmean(step["policy_grad_norm"] > config.gradient_clipping for step in steps),
        }
        if training.critic is not None:
            self.metrics["grad_norm"] = self.metrics["policy_grad_norm"]

    def end(self, version: int) -> UpdateResult:
        """Count the update, which made adapter `version`, unless it was skipped; return its result."""
        training = self._training
        if self.skipped is None:
            training.step += 1
            training.version = version
            training.samples_seen += len(self.items)
            training.follow(self.metrics.get("entropy"))
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


def make_optimizer(groups: Sequence[tuple[Parameters, float]], config: LearnerConfig) -> Optimizer:
    """Return an optimizer of `groups`: parameters, and their learning rate."""
    settings = [{"params": list(parameters.values()), "lr": learning_rate} for parameters, learning_rate in groups]
    if config.optimizer == "adamw":
        return AdamW(settings, weight_decay=config.weight_decay)
    from bitsandbytes.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(settings, weight_decay=config.weight_decay)
    return optimizer


def state_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, Tensor]:
    """Return the state by `exp_avg/<parameter's name>` and so on, on the CPU; an integer becomes a tensor of int64.

    parameters: all of the optimizer's, in the order of its groups.
    """
    return {
        f"{key}/{name}": torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(optimizer: Optimizer, parameters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Restore the state that `state_tensors` returned."""
    state: dict[int, dict[str, Any]] = {}
    indices = {name: index for index, name in enumerate(parameters)}
    for name, tensor in tensors.items():
        key, _, parameter_name = name.partition("/")
        value = int(tensor) if tensor.dtype == torch.int64 else tensor
        state.setdefault(indices[parameter_name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def schedule_factor(schedule: Schedule, step: int, num_steps: int, warmup: int = 0) -> float:
    """Return the factor of a learning rate or coefficient after `step` of `num_steps` updates.

    It rises by equal amounts in the first `warmup` updates, is 1 in the next one, and then follows the schedule, which
    would reach 0 after `num_steps`, or has no end (`inverse_sqrt`).
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "inverse_sqrt":
        return 1 / math.sqrt(step - warmup + 1)
    progress = min(1.0, (step - warmup) / max(num_steps - warmup, 1))
    if schedule == "linear":
        return 1 - progress
    return (1 + math.cos(math.pi * progress)) / 2 if schedule == "cosine" else 1.0
