"""Log-probabilities and gradients of a tiny policy, saved to a file: `python -m fakes.kernels KERNELS MODEL OUTPUT`.

A process of its own, because liger-kernel changes modules of transformers, and because Triton's interpreter
(TRITON_INTERPRET=1) has to be chosen before Triton is imported. The file's metadata names the functions that computed
norm, MLP and rotary embedding.
"""

import sys
from typing import Any

import numpy as np
import safetensors.torch
import torch
from transformers.models.qwen3 import modeling_qwen3

from unstable_lite.config import Config
from unstable_lite.learner.algorithms.reinforce import REINFORCELearner
from unstable_lite.types import TrainItem


def main(kernels: str, model: str, output: str) -> None:
    torch.set_num_threads(1)
    if kernels == "liger":
        adapt_interpreter()
    learner = REINFORCELearner(config_of(kernels, model), "cpu")
    policy, generator = learner.policy, torch.Generator().manual_seed(1)
    for name, parameter in policy.parameters.items():
        if "lora_B" in name:
            parameter.data.normal_(0.0, 0.1, generator=generator)
    rng = np.random.default_rng(0)
    items = [item(rng, num_prompt) for num_prompt in (3, 6)]
    logps = {f"logp {index}": logp for index, logp in enumerate(policy.item_logprobs(items))}
    learner.add_gradient(items)
    gradients = {name: parameter.grad for name, parameter in policy.parameters.items() if parameter.grad is not None}
    layer: Any = policy.base.model.layers[0]
    computed_by = {
        "norm": layer.input_layernorm.forward.__qualname__,
        "mlp": layer.mlp.forward.__qualname__,
        "rope": modeling_qwen3.apply_rotary_pos_emb.__qualname__,
    }
    safetensors.torch.save_file(logps | gradients, output, computed_by)


def adapt_interpreter() -> None:
    """Let Triton's interpreter do what its compiler does: pass numbers as float32, and compute a square root.

    It would pass them as Python's floats, and has none of the functions of CUDA's libdevice.
    """
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats_too(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = convert_floats_too
    rms_norm.rsqrt = lambda number: tl.math.rsqrt(number)  # the interpreter replaces the functions in tl.math


def config_of(kernels: str, model: str) -> Config:
    return Config.model_validate(
        {
            "model_name": model,
            "learner": {"dtype": "float32", "kernels": kernels},
            "lora": {"lora_rank": 4},
            "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}],
        }
    )


def item(rng: np.random.Generator, num_prompt: int, num_completion: int = 3) -> TrainItem:
    return TrainItem(
        prompt_ids=rng.integers(0, 300, num_prompt).astype(np.int32),
        completion_ids=rng.integers(0, 300, num_completion).astype(np.int32),
        logprobs=rng.uniform(-7, -5, num_completion).astype(np.float32),
        reward=float(rng.normal()),
        adapter_version=0,
        trajectory=num_prompt,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
