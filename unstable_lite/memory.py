"""How much memory a learner and an engine will need, computed from a model's shape before anything is loaded.

Computed, not measured: the coefficients of the learner's activations are those of transformers 5 and PEFT 0.18 for
the usual decoder layer (RMSNorm, grouped-query attention, gated MLP), found by counting every allocation on the CPU
(`tests/learners/test_memory.py` counts again). A CPU keeps attention in float32, so a GPU needs somewhat less.
Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unstable_lite.config import Config, EngineConfig, LearnerConfig, LoraConfig
from unstable_lite.errors import ConfigError
from unstable_lite.learners import LEARNERS
from unstable_lite.models import read_json, resolve_model

GIB = 1 << 30
RESERVED_BYTES = GIB
"""CUDA's context and what its allocator cannot use."""
ENGINE_PASS_BYTES = 3 * GIB // 2
"""An engine's own pass and its CUDA graphs."""
LOGIT_BYTES = 8
"""Per token of a logits chunk and vocabulary entry: logits and log-probabilities, each in float32. The gradient takes
the room of the logits; a bfloat16 base needs it once more, in its own type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a decoder's config decides its memory. Sizes in elements; `queries` and `keys` over all heads."""

    hidden: int
    inner: int
    queries: int
    keys: int
    layers: int
    vocab_size: int
    is_tied: bool
    """Whether the head is the embedding."""

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a decoder layer's linear layers."""
        return {
            "q_proj": (self.hidden, self.queries),
            "k_proj": (self.hidden, self.keys),
            "v_proj": (self.hidden, self.keys),
            "o_proj": (self.queries, self.hidden),
            "gate_proj": (self.hidden, self.inner),
            "up_proj": (self.hidden, self.inner),
            "down_proj": (self.inner, self.hidden),
        }

    @property
    def base_parameters(self) -> int:
        """Norms are left out: they are less than one in a thousand."""
        return self.layers * sum(rows * columns for rows, columns in self.linear_layers.values()) + self.end_parameters

    @property
    def end_parameters(self) -> int:
        """Embedding and head."""
        return self.vocab_size * self.hidden * (1 if self.is_tied else 2)

    def lora_parameters(self, lora: LoraConfig) -> int:
        """0 where none of the targets is a usual linear layer."""
        linear = self.linear_layers
        sizes = [sum(linear[name]) for name in lora.target_modules if name in linear]
        return lora.lora_rank * self.layers * sum(sizes)


def _shape(
    hidden: int, inner: int, heads: tuple[int, int, int], layers: int, vocab_size: int, tied: bool
) -> ModelShape:
    queries, keys, size = heads
    return ModelShape(
        hidden=hidden,
        inner=inner,
        queries=queries * size,
        keys=keys * size,
        layers=layers,
        vocab_size=vocab_size,
        is_tied=tied,
    )


KNOWN_SHAPES = {
    "Qwen/Qwen3-0.6B": _shape(1024, 3072, (16, 8, 128), 28, 151_936, True),
    "Qwen/Qwen3-1.7B": _shape(2048, 6144, (16, 8, 128), 28, 151_936, True),
    "Qwen/Qwen3-4B": _shape(2560, 9728, (32, 8, 128), 36, 151_936, True),
    "Qwen/Qwen3-8B": _shape(4096, 12_288, (32, 8, 128), 36, 151_936, False),
    "Qwen/Qwen3-14B": _shape(5120, 17_408, (40, 8, 128), 40, 151_936, False),
    "meta-llama/Llama-3.2-1B": _shape(2048, 8192, (32, 8, 64), 16, 128_256, True),
    "meta-llama/Llama-3.2-3B": _shape(3072, 8192, (24, 8, 128), 28, 128_256, True),
    "meta-llama/Llama-3.1-8B": _shape(4096, 14_336, (32, 8, 128), 32, 128_256, False),
    "google/gemma-3-1b-pt": _shape(1152, 6912, (4, 1, 256), 26, 262_144, True),
}
"""From the models' published config.json, for machines that have not downloaded them; `-Base`, `-Instruct` alike."""


_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def shape_of(model_name: str) -> ModelShape | None:
    """From the model's config.json where it is local, else by its well-known name; None if neither is there.

    Raises ModelError for a path or a built-in name that is no model, and for a config.json that cannot be read.
    """
    path = Path(resolve_model(model_name)) / "config.json"
    if not path.is_file():
        names = [name for name in KNOWN_SHAPES if model_name == name or model_name.startswith(f"{name}-")]
        return KNOWN_SHAPES[names[0]] if names else None
    model = read_json(path)
    sizes = [size for key in _SIZES if isinstance(size := model.get(key), int) and size > 0]
    if len(sizes) < len(_SIZES):
        return None
    hidden, inner, heads, layers, vocab_size = sizes
    key_heads, size = model.get("num_key_value_heads") or heads, model.get("head_dim") or hidden // heads
    return _shape(hidden, inner, (heads, key_heads, size), layers, vocab_size, bool(model.get("tie_word_embeddings")))


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Bytes of a learner. A micro-batch costs `per_token` for each of its tokens, padding included."""

    base: int
    """Of a rank: all of it, or its part where it is sharded."""
    lent: int
    """What of the rest a rank is lent in the middle of a pass."""
    adapter: int
    """Weights, gradient and both of Adam's moments."""
    head: int
    """One chunk's logits."""
    kept_per_token: int
    """Activations that the backward pass waits for."""
    layer_per_token: int
    """What one layer's backward pass needs on top."""

    def total(self, tokens: int) -> int:
        """With a micro-batch of so many tokens: the head's backward pass comes before the layers'."""
        passing = max(self.head, self.layer_per_token * tokens)
        return self.base + self.lent + self.adapter + self.kept_per_token * tokens + passing

    def longest(self, memory_bytes: int) -> int:
        """Tokens of the largest micro-batch that fits; the longest sequence, if it is alone in it. 0: none."""
        room = memory_bytes - self.base - self.lent - self.adapter
        under_head = (room - self.head) // self.kept_per_token
        under_layer = room // (self.kept_per_token + self.layer_per_token)
        return max(0, min(under_head, under_layer))


def learner_memory(
    shape: ModelShape,
    learner: LearnerConfig,
    lora: LoraConfig,
    is_bfloat16: bool = True,
    has_critic: bool = False,
    num_ranks: int = 1,
) -> LearnerMemory:
    """Of each of `num_ranks`, which divide the base where `learner.shard_base` says so.

    `is_bfloat16`: of the frozen base; adapter and optimiser are float32. A critic is a second adapter.
    """
    h, i, q, k, r = shape.hidden, shape.inner, shape.queries, shape.keys, lora.lora_rank
    if is_bfloat16:
        width, layer, recomputed, ends = 2, 12.4 * h + 8 * i + 14 * q + 12 * k + 18 * r, 2.4 * h + 4 * i, 19 * h
    else:
        width, layer, recomputed, ends = (
            4,
            13.1 * h + 17.5 * i + 12.3 * q + 12.1 * k + 28 * r,
            3.8 * h + 6.5 * i,
            31 * h,
        )
    if learner.is_checkpointed:
        kept, passing = float(shape.layers * width * h), layer + recomputed
    else:
        kept, passing = shape.layers * layer + ends, 0.0
    base, lent = width * shape.base_parameters, 0
    if learner.shard_base and num_ranks > 1:
        ends = width * shape.end_parameters
        one_layer = (base - ends) // shape.layers
        # What arrives is there twice until it is in its place: embedding and head before the first layer, and then,
        # beside a layer that computes, the next one.
        base, lent = -(-base // num_ranks), max(2 * (ends + one_layer), ends + 3 * one_layer)
    return LearnerMemory(
        base=base,
        lent=lent,
        adapter=(2 if has_critic else 1) * 16 * shape.lora_parameters(lora),
        head=(LOGIT_BYTES + (2 if is_bfloat16 else 0)) * learner.logits_chunk_tokens * shape.vocab_size,
        kept_per_token=round(kept),
        layer_per_token=round(passing),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of an engine."""

    base: int
    adapters: int
    """All slots."""
    kv_per_token: int

    def kv_tokens(self, memory_bytes: int) -> int:
        """Tokens whose keys and values fit beside the rest, all sequences together. 0: none."""
        return max(0, memory_bytes - self.base - self.adapters - ENGINE_PASS_BYTES) // self.kv_per_token


def engine_memory(shape: ModelShape, engine: EngineConfig, lora: LoraConfig) -> EngineMemory:
    """In 16-bit numbers, adapters too, as engines hold them on a GPU."""
    return EngineMemory(
        base=2 * shape.base_parameters,
        adapters=2 * engine.max_loras * shape.lora_parameters(lora),
        kv_per_token=4 * shape.layers * shape.keys,
    )


def describe(
    model_name: str, vram_gib: float, sections: Config | None = None, num_ranks: int = 1
) -> list[tuple[str, str]]:
    """(what, how much) for a GPU of `vram_gib`, with the memory-related keys of a config or the defaults, and
    `num_ranks` of the learner.

    Raises ConfigError for a model whose shape is not known.
    """
    shape = shape_of(model_name)
    if shape is None:
        raise ConfigError(
            f"--memory {model_name}: its shape is not known here; give the directory of a downloaded model (with its "
            f"config.json), or one of {', '.join(KNOWN_SHAPES)}"
        )
    learner, engine = (sections.learner, sections.engine) if sections else (LearnerConfig(), EngineConfig())
    lora = sections.lora if sections else LoraConfig()
    algorithm = LEARNERS.get(sections.algorithm) if sections else None
    has_critic = algorithm is not None and algorithm.has_critic
    usable = int(vram_gib * GIB) - RESERVED_BYTES
    rows = [("model", f"{shape.base_parameters / 1e9:.2f} billion parameters, {shape.layers} layers")]
    for is_checkpointed in (True, False):
        memory = _learner(shape, learner, lora, is_checkpointed, has_critic, num_ranks)
        how = "with checkpointing" if is_checkpointed else "without"
        if is_checkpointed:
            rows += [
                ("learner: frozen base", _gib(memory.base) + f", a rank's part of {num_ranks}" * bool(memory.lent)),
                *([("learner: lent in a pass", f"{_gib(memory.lent)} of the other ranks' parts")] * bool(memory.lent)),
                (
                    f"learner: adapter{'s of policy and critic,' * has_critic} of rank {lora.lora_rank}",
                    f"{_gib(memory.adapter)} with gradient and optimiser",
                ),
                (f"learner: logits of {learner.logits_chunk_tokens} tokens", _gib(memory.head)),
            ]
        per_token = (memory.kept_per_token + memory.layer_per_token) / 1e6
        tokens = memory.longest(usable)
        fits = f"{tokens:,} tokens" if tokens else "does not fit"
        rows.append((f"learner {how}: largest micro-batch", f"{fits}, at {per_token:.2f} MB a token"))
    serving = engine_memory(shape, engine, lora)
    tokens = serving.kv_tokens(int(usable * engine.gpu_share))
    at_once = tokens // engine.max_model_len
    rows += [
        ("engine: base", _gib(serving.base)),
        (f"engine: {engine.max_loras} adapter slots", _gib(serving.adapters)),
        (
            "engine: keys and values",
            f"{tokens:,} tokens at {serving.kv_per_token / 1e3:.0f} kB: {at_once} sequences of engine.max_model_len = "
            f"{engine.max_model_len} at once"
            if tokens
            else "do not fit",
        ),
    ]
    return rows


def table(models: Sequence[str], vram_gib: Sequence[float]) -> list[list[str]]:
    """Rows for models, columns for GPUs, all defaults: longest sequence trained / sequences served at once."""
    rows = [["model", *(f"{size:g} GB" for size in vram_gib)]]
    for name in models:
        shape = shape_of(name)
        assert shape is not None
        cells = []
        for size in vram_gib:
            usable = int(size * GIB) - RESERVED_BYTES
            trained = _learner(shape, LearnerConfig(), LoraConfig(), True).longest(usable)
            engine = EngineConfig()
            served = engine_memory(shape, engine, LoraConfig()).kv_tokens(int(usable * engine.gpu_share))
            at_once = served // engine.max_model_len
            cells.append(f"{_tokens(trained)} / {at_once or '–'}")
        rows.append([name, *cells])
    return rows


def _learner(
    shape: ModelShape,
    learner: LearnerConfig,
    lora: LoraConfig,
    is_checkpointed: bool,
    has_critic: bool = False,
    num_ranks: int = 1,
) -> LearnerMemory:
    switches = dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), is_checkpointed)
    learner = learner.model_copy(update=switches)
    return learner_memory(shape, learner, lora, learner.dtype != "float32", has_critic, num_ranks)


def _tokens(count: int) -> str:
    """In thousands, rounded down: a computed figure has no more digits than that."""
    return f"{count // 1000}k" if count >= 1000 else "–"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
