"""The fused kernels of liger-kernel compute what torch computes: on the CPU, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import transformers

from fakes.kernels import config_of
from unstable_lite.errors import ModelError
from unstable_lite.learner.model import Policy

pytestmark = pytest.mark.vllm
"""The environment with Triton, where .ci/run installs liger-kernel."""


def test_fused_kernels_give_the_same_log_probabilities_and_gradients(model_path, tmp_path):
    tensors, computed_by = {}, {}
    for kernels in ("torch", "liger"):
        output = tmp_path / kernels
        command = [sys.executable, "-m", "fakes.kernels", kernels, str(model_path), str(output)]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=os.environ | {"TRITON_INTERPRET": "1"})
        tensors[kernels] = safetensors.torch.load_file(output)
        with safetensors.safe_open(output, framework="pt") as file:
            computed_by[kernels] = file.metadata()
    assert all("liger" in name.lower() for name in computed_by["liger"].values()), computed_by
    assert not any("liger" in name.lower() for name in computed_by["torch"].values()), computed_by
    assert tensors["torch"].keys() == tensors["liger"].keys()
    for name, expected in tensors["torch"].items():
        assert expected.abs().max() > 0, name
        assert tensors["liger"][name].sub(expected).norm() <= 1e-5 * expected.norm(), name


def test_model_without_fused_kernels_is_refused(tmp_path):
    shape = transformers.GPTNeoXConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.GPTNeoXForCausalLM(shape).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"learner\.kernels = 'liger'.*'gpt_neox'.*'torch'"):
        Policy(config_of("liger", str(tmp_path)), "cpu")
