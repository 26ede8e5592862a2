"""Models and adapters that only benches need: real shapes, random weights.

With random weights a completion practically never ends early, so that every engine gets the same work.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.profiler._utils import traverse_dfs
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from unstable_lite.adapters import peft_files
from unstable_lite.config import Config
from unstable_lite.learner.model import Policy
from unstable_lite.models import BUILTIN

END = "<|im_end|>"


def make_tiny(directory: Path, seed: int) -> Path:
    """Make a model with the shape and tokenizer of `builtin:tiny`."""
    builtin = BUILTIN["builtin:tiny"]
    shutil.copytree(builtin, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    return _save_random(Qwen3Config.from_pretrained(builtin), directory, seed)


QWEN3_VOCABULARY = 151_936
BODIES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def make_for(device: str, directory: Path, seed: int) -> Path:
    """Make the model for a bench of engines: the tiny shape on the CPU, that of Qwen3-1.7B on a GPU."""
    if device == "cpu":
        return make_tiny(directory, seed)
    return make_wide_vocabulary(directory, QWEN3_VOCABULARY, seed, BODIES["1.7B"], device)


def make_wide_vocabulary(
    directory: Path, vocab_size: int, seed: int, body: Mapping[str, Any], device: str = "cpu"
) -> Path:
    """Make a body with a head as wide as Qwen3's. If the body is small, logits dominate the cost of a loss.

    `device`: where the weights are drawn; one core needs a minute for 1.7 billion of them.
    """
    shape = Qwen3Config(vocab_size=vocab_size, max_position_embeddings=8192, tie_word_embeddings=True, **body)
    _byte_tokenizer(vocab_size).save_pretrained(directory)
    return _save_random(shape, directory, seed, device)


def make_adapters(config: Config, directory: Path, versions: list[int], seed: int) -> dict[int, Path]:
    """Write PEFT directories as the learner does, with weights that change the model's output."""
    tensors, peft_config = Policy(config, "cpu").adapter_state()
    generator = torch.Generator().manual_seed(seed)
    paths = {}
    for version in versions:
        noise = {name: 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
        paths[version] = directory / f"v{version}"
        peft_files.write_adapter(paths[version], noise, peft_config)
    return paths


def _save_random(shape: Qwen3Config, directory: Path, seed: int, device: str = "cpu") -> Path:
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen3ForCausalLM(shape)
    (model.bfloat16() if shape.hidden_size >= 1024 else model).save_pretrained(directory)
    return directory


def _byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that encodes each byte alone, and decodes every other token to its number.

    A model with random weights samples from the whole vocabulary, and tokens without text cost an engine no time.
    """
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    symbols += [f"Ġ{number}" for number in range(len(symbols), vocab_size)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=END, pad_token=END
    )


def peak_bytes(function: Callable[[], object], device: str = "cpu") -> int:
    """Return the peak bytes of the tensors that `function` makes, by the allocator's count."""
    if device != "cpu":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    tree = profile.profiler.kineto_results.experimental_event_tree()
    live, now, peak = dict[int, int](), 0, 0
    for event in sorted(traverse_dfs(tree), key=lambda event: event.start_time_ns):
        if event.name == "[memory]":
            block = event.extra_fields
            size = max(0, block.alloc_size)  # negative if freed, and then of any size if the block is from before
            now += size - live.get(block.ptr, 0)
            live[block.ptr] = size
            peak = max(peak, now)
    return peak
