"""An optimizer's state as tensors."""

from __future__ import annotations

import importlib.util

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from unstable_lite.config.training import LearnerConfig
from unstable_lite.learner.training import load_state_tensors, make_optimizer, state_tensors

NAMES = [
    "adamw",
    pytest.param(
        "adamw8bit",
        marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes"),
    ),
]


def make_parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {"large": nn.Parameter(torch.randn(64, 128)), "small": nn.Parameter(torch.randn(4))}


def step(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", NAMES)
def test_optimizer_state_survives_a_file_bit_for_bit(name):
    config = LearnerConfig.model_validate({"optimizer": name})
    parameters = make_parameters()
    optimizer = make_optimizer([(parameters, 1e-2)], config)
    for seed in (1, 2):
        step(parameters, optimizer, seed)
    largest = {v.dtype for v in optimizer.state[parameters["large"]].values() if torch.is_tensor(v) and v.dim() == 2}
    assert largest == {torch.uint8 if name == "adamw8bit" else torch.float32}
    file = safetensors.torch.save(state_tensors(optimizer, parameters))
    resumed = {key: nn.Parameter(parameter.detach().clone()) for key, parameter in parameters.items()}
    resumed_optimizer = make_optimizer([(resumed, 1e-2)], config)
    load_state_tensors(resumed_optimizer, resumed, safetensors.torch.load(file))
    assert is_equal(step(resumed, resumed_optimizer, 3), step(parameters, optimizer, 3))
    load_state_tensors(optimizer, parameters, {})
    assert not optimizer.state, "a fresh optimizer has no moments"
