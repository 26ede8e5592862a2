"""AdamW over named parameters, its snapshots, and its state as named tensors.

Knows nothing of losses, models or the meaning of the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from unstable_lite.config.training import LearnerConfig

Parameters = Mapping[str, nn.Parameter]


def make_optimizer(parameters: Parameters, learning_rate: float, config: LearnerConfig) -> Optimizer:
    arguments: dict[str, Any] = {"lr": learning_rate, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw":
        return AdamW(list(parameters.values()), **arguments)
    from bitsandbytes.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(list(parameters.values()), **arguments)
    return optimizer


def set_learning_rate(optimizer: Optimizer, learning_rate: float, config: LearnerConfig, progress: float) -> float:
    """Set and return the learning rate of the schedule.

    learning_rate: the rate of the first update.
    progress: share of the run's updates that are done.
    """
    if config.learning_rate_schedule == "linear":
        learning_rate *= max(0.0, 1 - progress)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return learning_rate


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy of parameters and optimiser state, to restore them."""

    optimizer: Optimizer
    values: list[tuple[nn.Parameter, Tensor]]
    state: dict[str, Any]

    @classmethod
    def take(cls, optimizer: Optimizer) -> Snapshot:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        values = [(parameter, parameter.detach().clone()) for parameter in parameters]
        return cls(optimizer, values, copy.deepcopy(optimizer.state_dict()))

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in self.values:
            parameter.copy_(value)
        self.optimizer.load_state_dict(self.state)


def state_tensors(optimizer: Optimizer, parameters: Parameters) -> dict[str, Tensor]:
    """Return the state by `exp_avg/<parameter's name>` and so on, on the CPU; an integer becomes a tensor of int64."""
    return {
        f"{key}/{name}": torch.as_tensor(value).detach().to("cpu", copy=True).contiguous()
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_state_tensors(optimizer: Optimizer, parameters: Parameters, tensors: Mapping[str, Tensor]) -> None:
    """Restore `state_tensors`; names of other parameters are ignored."""
    state: dict[int, dict[str, Any]] = {}
    indices = {name: index for index, name in enumerate(parameters)}
    for name, tensor in tensors.items():
        key, _, parameter_name = name.partition("/")
        if parameter_name in indices:
            value = int(tensor) if tensor.dtype == torch.int64 else tensor
            state.setdefault(indices[parameter_name], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
