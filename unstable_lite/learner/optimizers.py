"""AdamW over groups of named parameters, its snapshots, and its state as named tensors.

Knows nothing of losses, models or the meaning of the parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from unstable_lite.config.training import LearnerConfig

Parameters = Mapping[str, nn.Parameter]


def make_optimizer(groups: Sequence[tuple[Parameters, float]], config: LearnerConfig) -> Optimizer:
    """Return an optimizer of `groups`: parameters, and their learning rate."""
    settings = [{"params": list(parameters.values()), "lr": learning_rate} for parameters, learning_rate in groups]
    if config.optimizer == "adamw":
        return AdamW(settings, betas=config.adam_betas, weight_decay=config.weight_decay)
    from bitsandbytes.optim import AdamW8bit

    optimizer: Optimizer = AdamW8bit(settings, betas=config.adam_betas, weight_decay=config.weight_decay)
    return optimizer


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
