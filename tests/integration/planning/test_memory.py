"""The computed memory, compared with the allocated memory and with the table in docs/gpus.md."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.models import peak_bytes
from fakes import runs
from unstable_lite.config import Config
from unstable_lite.config.training import EngineConfig, LoraConfig
from unstable_lite.learner import LOGITS_CHUNK_TOKENS, batching
from unstable_lite.learner.model import Policy
from unstable_lite.planning import memory
from unstable_lite.types import TrainItem

DOCS = Path(__file__).parents[3] / "docs"
GPUS = DOCS / "gpus.md"
WIDE = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
DEEP = {"hidden_size": 96, "intermediate_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3}


def make_policy(directory: Path, shape: dict[str, int], layers: int, vocab_size: int, **learner: Any) -> Policy:
    config = Qwen3Config(
        **shape,
        num_hidden_layers=layers,
        head_dim=32,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return Policy(config_of(directory, **learner), "cpu")


def config_of(directory: Path, **learner: Any) -> Config:
    env = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}
    return Config.model_validate(
        {"model_name": str(directory), "train_envs": [env], "learner": learner, "lora": {"lora_rank": 16}}
    )


def defaults(**sections: Any) -> Config:
    return Config.model_construct(train_envs=()).changed(**sections)


@pytest.mark.parametrize("is_checkpointed", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("dtype", "shape", "layers", "vocab_size"),
    [
        pytest.param("float32", WIDE, 3, 400, id="wide"),
        pytest.param("float32", DEEP, 8, 400, id="deep"),
        pytest.param("float32", DEEP, 2, 30_000, id="head"),
        pytest.param("bfloat16", WIDE, 3, 400, id="wide in 16 bits", marks=pytest.mark.nightly),
        pytest.param("bfloat16", DEEP, 2, 30_000, id="head in 16 bits", marks=pytest.mark.nightly),
    ],
)
def test_computed_memory_of_an_update_matches_the_allocated(
    tmp_path: Path,
    dtype: str,
    is_checkpointed: bool,
    shape: dict[str, int],
    layers: int,
    vocab_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(LOGITS_CHUNK_TOKENS, False, 256)
    learner = {"dtype": dtype, "activation_checkpointing": is_checkpointed}
    policy = make_policy(tmp_path, shape, layers, vocab_size, **learner)
    ids = np.arange(600, dtype=np.int32) % 400
    item = TrainItem(
        prompt_ids=ids[:200],
        completion_ids=ids[200:],
        logprobs=np.zeros(400, np.float32),
        reward=1.0,
        adapter_version=0,
        trajectory=0,
    )
    (batch,) = batching.make_micro_batches([item, item], 10_000, None, layout="separate")

    def update() -> None:
        logp_N, _ = policy.logprobs(batch)
        (-logp_N.sum() / 1000).backward()

    update()  # allocates the gradients
    config = config_of(tmp_path, **learner)
    found = memory.shape_of(str(tmp_path))
    assert found is not None
    computed = memory.learner_memory(found, config, is_on_gpu=False)
    activations = computed.total(batch.tokens_BT.numel()) - computed.base - computed.adapter
    assert activations == pytest.approx(peak_bytes(update), rel=0.2)
    assert found.lora_parameters(config.lora) == sum(parameter.numel() for parameter in policy.parameters.values())
    num_parameters = sum(weight.numel() for weight in policy.base_weights)
    assert found.base_parameters == pytest.approx(num_parameters, rel=0.005)


def test_peak_leaves_out_blocks_from_before() -> None:
    held: list[torch.Tensor] = []
    peak_bytes(lambda: held.append(torch.empty(10**7)))
    held.clear()
    held.append(torch.empty(10**7))  # at the address of the one before, whose size the profiler remembers
    assert peak_bytes(lambda: (held.clear(), torch.empty(10**5))) == 4 * 10**5


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, 4 * 16),
        ({"num_key_value_heads": None}, 4 * 16),  # one for each query head
        ({"num_key_value_heads": 2}, 2 * 16),
        ({"head_dim": None}, 4 * 8),
        ({"num_attention_heads": None}, None),
        ({"num_hidden_layers": "3"}, None),
        ({"num_local_experts": 8}, None),
        ({"attn_logit_softcapping": 50.0}, None),
    ],
)
def test_shape_is_computed_if_the_required_sizes_are_known_and_the_layers_usual(
    tmp_path: Path, changes: dict[str, Any], keys: int | None
) -> None:
    config = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
    whole = {**config, "vocab_size": 300, "head_dim": 16, **changes}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    shape = memory.shape_of(str(tmp_path))
    assert (None if shape is None else shape.keys) == keys


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-0.6B", 0.60),
        ("Qwen/Qwen3-1.7B-Base", 1.72),
        ("Qwen/Qwen3-4B", 4.02),
        ("Qwen/Qwen3-8B", 8.19),
        ("Qwen/Qwen3-14B", 14.77),
        ("meta-llama/Llama-3.2-1B-Instruct", 1.24),
        ("meta-llama/Llama-3.2-3B", 3.21),
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("google/gemma-3-1b-pt", 1.00),
    ],
)
def test_known_shapes_have_their_published_number_of_parameters(name: str, billions: float) -> None:
    shape = memory.shape_of(name)
    assert shape.base_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_largest_micro_batch_fits_and_one_more_token_does_not() -> None:
    for name, shape in memory.KNOWN_SHAPES.items():
        for is_checkpointed in (True, False):
            needed = memory.learner_memory(shape, defaults(learner={"activation_checkpointing": is_checkpointed}))
            limit = 80 * memory.GIB
            tokens = needed.longest(limit)
            assert needed.total(tokens) <= limit < needed.total(tokens + 1), name
    small = memory.learner_memory(memory.KNOWN_SHAPES["Qwen/Qwen3-14B"], defaults())
    assert small.longest(8 * memory.GIB) == 0


def test_larger_logits_chunks_a_critic_and_keys_and_values_are_counted() -> None:
    shape = memory.KNOWN_SHAPES["Qwen/Qwen3-1.7B"]
    on_gpu, on_cpu = (
        memory.learner_memory(shape, defaults(learner={"dtype": "bfloat16"}), is_on_gpu=is_on_gpu)
        for is_on_gpu in (True, False)
    )
    assert (on_gpu.head, on_cpu.head) == (10 * 1024 * shape.vocab_size, 10 * 128 * shape.vocab_size)
    alone, both = (memory.learner_memory(shape, defaults(algorithm=name)) for name in ("reinforce", "a2c"))
    assert both.total(0) - alone.total(0) == alone.adapter == 16 * shape.lora_parameters(LoraConfig())
    engine = memory.engine_memory(memory.KNOWN_SHAPES["Qwen/Qwen3-1.7B"], EngineConfig(), LoraConfig())
    assert engine.kv_per_token == 2 * 2 * 28 * 8 * 128  # keys and values, 16 bits, 28 layers, 8 heads of 128


@pytest.mark.parametrize(
    ("reference", "coefficient", "initial", "is_kept"),
    [
        ("average", 0.1, None, True),
        ("average", 0.0, None, False),
        ("stage:50", 0.1, None, True),
        ("stage:50", 0.0, None, False),
        ("initial", 0.1, Path("adapter"), True),
        ("initial", 0.1, None, False),
        ("base", 0.1, Path("adapter"), False),
    ],
)
def test_reference_adapter_counts_its_weights(
    reference: Any, coefficient: float, initial: Path | None, is_kept: bool
) -> None:
    shape, config = memory.KNOWN_SHAPES["Qwen/Qwen3-1.7B"], defaults(lora={"initial_lora_path": initial})
    with_penalty = config.changed(learner={"kl_reference": reference, "kl_coefficient": coefficient})
    alone, whole = (memory.learner_memory(shape, each).adapter for each in (config, with_penalty))
    assert whole - alone == is_kept * 4 * shape.lora_parameters(config.lora)


def test_check_memory_works_with_and_without_a_config(tmp_path: Path) -> None:
    code, out, err = runs.invoke("check", "--memory", "Qwen/Qwen3-1.7B-Base", "24")
    assert (code, err) == (0, "")
    assert "24 GiB" in out
    small = runs.output_of(runs.invoke("check", runs.write_small(tmp_path), "--memory", "Qwen/Qwen3-1.7B-Base", "24"))
    assert small != out
    code, _, err = runs.invoke("check", "--memory", "unknown/model", "24")
    assert code == 1
    assert "unknown/model" in err


@pytest.mark.parametrize(("dtype", "base"), [("auto", "7.49"), ("bfloat16", "7.49"), ("float32", "14.98")])
def test_check_memory_counts_the_base_in_the_learner_dtype(tmp_path: Path, dtype: str, base: str) -> None:
    rows = dict(memory.describe("Qwen/Qwen3-4B", 80, config_of(tmp_path, dtype=dtype)))
    assert rows["learner: frozen base"] == f"{base} GiB"


def test_table_in_the_docs_matches_the_computation() -> None:
    text = GPUS.read_text()
    for name in (*(f"Qwen/Qwen3-{size}B" for size in ("0.6", "1.7", "4", "8")), "meta-llama/Llama-3.2-3B"):
        cells = [trained_and_served(dict(memory.describe(name, gib))) for gib in (16, 24, 48, 80, 141)]
        assert f"| {' | '.join([name, *cells])} |" in text


def trained_and_served(rows: dict[str, str]) -> str:
    """Return a cell of the table: the longest sequence trained, in thousands of tokens, / sequences served at once."""
    tokens = re.match(r"([\d,]+) tokens", rows["learner with checkpointing: largest micro-batch"])
    thousands = int(tokens[1].replace(",", "")) // 1000 if tokens else 0
    served = re.search(r"(\d+) sequences", rows["engine: keys and values"])
    return f"{f'{thousands}k' if thousands else '–'} / {(int(served[1]) if served else 0) or '–'}"


def test_memory_by_length_in_the_docs_matches_the_computation() -> None:
    rows = re.findall(r"^\| (\S+/\S+) \| (yes|no) \| (.*) \|$", GPUS.read_text(), re.M)
    assert len(rows) == 8
    for name, checkpointing, cells in rows:
        config = defaults(learner={"activation_checkpointing": checkpointing == "yes"})
        needed = memory.learner_memory(memory.KNOWN_SHAPES[name], config)
        for length, cell in zip((1024, 2048, 4096, 8192, 16_384), cells.split(" | "), strict=True):
            computed = (needed.total(length) + memory.RESERVED_BYTES) / memory.GIB
            assert cell == f"{computed:.1f} c" or cell.endswith(" m"), (name, checkpointing, length)


def test_costs_of_ranks_in_the_docs_are_the_computed_ones() -> None:
    rows = re.findall(r"^\| (Qwen/\S+) \| (\d+|all weights) \| (.*) \|$", (DOCS / "lora.md").read_text(), re.M)
    assert {(name, rank) for name, rank, _ in rows} == {
        (f"Qwen/Qwen3-{size}", rank) for size in ("1.7B", "8B") for rank in ("1", "8", "32", "128", "all weights")
    }
    for name, rank, cells in rows:
        shape = memory.KNOWN_SHAPES[name]
        if rank == "all weights":
            trained, handoff_bytes = shape.base_parameters, 2
            learner, slots = 16 * trained, 8 * 2 * trained
        else:
            lora = LoraConfig(lora_rank=int(rank))
            trained, handoff_bytes = shape.lora_parameters(lora), 4
            learner = memory.learner_memory(shape, defaults(lora=lora)).adapter
            slots = memory.engine_memory(shape, EngineConfig(max_loras=8), lora).adapters
        share = trained / shape.base_parameters
        gib = [f"{size / memory.GIB:.2f} GiB" for size in (learner, slots)]
        handoff = f"{handoff_bytes * trained / 1e6:,.0f} MB"
        assert cells == f"{trained / 1e6:,.1f} M ({share:.2%}) | {gib[0]} | {handoff} | {gib[1]}", (name, rank)
