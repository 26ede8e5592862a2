"""Memory that a learner and an engine will need, computed from the model's shape before anything is loaded.

The values are computed, not measured. The coefficients of the learner's activations are those of transformers 5 and
PEFT 0.18 for the usual decoder layer (RMSNorm, grouped-query attention, gated MLP); they were found by counting every
allocation on the CPU (`tests/integration/planning/test_memory.py` repeats the count). A CPU keeps attention in float32,
so a GPU needs somewhat less. Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.config.training import EngineConfig, LoraConfig, reference_adapter
from unstable_lite.errors import ConfigError
from unstable_lite.learner import BLOCK_QUERIES, LOGITS_CHUNK_TOKENS, MOST_COPIES
from unstable_lite.models import read_json, resolve_model
from unstable_lite.planning.defaults import algorithm_of

GIB = 1 << 30
RESERVED_BYTES = GIB
"""CUDA's context and the memory that its allocator cannot use."""
ENGINE_PASS_BYTES = 3 * GIB // 2
"""Memory of an engine's forward pass and its CUDA graphs."""
LOGIT_BYTES = 8
"""Bytes per token of a logits chunk and vocabulary entry: logits and log-probabilities, each in float32. The gradient
reuses the memory of the logits; a bfloat16 base needs the gradient once more, in bfloat16."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder that determine its memory, in elements."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_size: int
    layers: int
    vocab_size: int
    is_tied: bool
    """Whether head and embedding share their weights."""

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.key_heads * self.head_size

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Sizes (in, out) of a decoder layer's linear layers."""
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
        """Parameters of the base model without its norms, which are less than one in a thousand."""
        return self.layers * sum(rows * columns for rows, columns in self.linear_layers.values()) + self.end_parameters

    @property
    def end_parameters(self) -> int:
        """Parameters of the embedding and the head."""
        return self.vocab_size * self.hidden * (1 if self.is_tied else 2)

    def lora_parameters(self, lora: LoraConfig) -> int:
        """Return the number of LoRA parameters; 0 if none of the targets is a usual linear layer."""
        linear = self.linear_layers
        sizes = [sum(linear[name]) for name in lora.target_modules if name in linear]
        return lora.lora_rank * self.layers * sum(sizes)


KNOWN_SHAPES = {
    "Qwen/Qwen3-0.6B": ModelShape(1024, 3072, 16, 8, 128, 28, 151_936, True),
    "Qwen/Qwen3-1.7B": ModelShape(2048, 6144, 16, 8, 128, 28, 151_936, True),
    "Qwen/Qwen3-4B": ModelShape(2560, 9728, 32, 8, 128, 36, 151_936, True),
    "Qwen/Qwen3-8B": ModelShape(4096, 12_288, 32, 8, 128, 36, 151_936, False),
    "Qwen/Qwen3-14B": ModelShape(5120, 17_408, 40, 8, 128, 40, 151_936, False),
    "meta-llama/Llama-3.2-1B": ModelShape(2048, 8192, 32, 8, 64, 16, 128_256, True),
    "meta-llama/Llama-3.2-3B": ModelShape(3072, 8192, 24, 8, 128, 28, 128_256, True),
    "meta-llama/Llama-3.1-8B": ModelShape(4096, 14_336, 32, 8, 128, 32, 128_256, False),
    "google/gemma-3-1b-pt": ModelShape(1152, 6912, 4, 1, 256, 26, 262_144, True),
}
"""Shapes from the models' published config.json, for machines without the model; also for `-Base` and `-Instruct`."""

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


def shape_of(model_name: str) -> ModelShape | None:
    """Return the shape from the model's local config.json or from `KNOWN_SHAPES`; None if neither has it.

    Raises ModelError if a path or a built-in name is not a model, or if config.json cannot be read.
    """
    path = Path(resolve_model(model_name)) / "config.json"
    if not path.is_file():
        names = [name for name in KNOWN_SHAPES if model_name == name or model_name.startswith(f"{name}-")]
        return KNOWN_SHAPES[names[0]] if names else None
    model = read_json(path)
    # Experts are other layers than those of `ModelShape`; a soft cap needs eager attention, quadratic in the length.
    if any("experts" in key for key in model) or model.get("attn_logit_softcapping"):
        return None
    sizes = [size for key in _SIZES if isinstance(size := model.get(key), int) and size > 0]
    if len(sizes) < len(_SIZES):
        return None
    hidden, inner, heads, layers, vocab_size = sizes
    key_heads, size = model.get("num_key_value_heads") or heads, model.get("head_dim") or hidden // heads
    is_tied = bool(model.get("tie_word_embeddings"))
    if not isinstance(key_heads, int) or not isinstance(size, int):  # each layer has its own
        return None
    return ModelShape(hidden, inner, heads, key_heads, size, layers, vocab_size, is_tied)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Bytes of one rank of a learner. Padding counts as tokens of a micro-batch."""

    base: int
    """The frozen base."""
    adapter: int
    """Weights, gradient and both of Adam's moments; the weights of a reference adapter."""
    head: int
    """Logits of one chunk."""
    kept_per_token: int
    """Activations that are kept for the backward pass."""
    layer_per_token: int
    """Additional memory of one layer's backward pass."""

    def total(self, tokens: int) -> int:
        """Return the bytes needed with a micro-batch of `tokens` tokens."""
        # The head's backward pass comes before the layers', so their memory does not add up.
        passing = max(self.head, self.layer_per_token * tokens)
        return self.base + self.adapter + self.kept_per_token * tokens + passing

    def longest(self, memory_bytes: int) -> int:
        """Return the tokens of the largest micro-batch that fits, and so of the longest sequence; 0 if none fits."""
        room = memory_bytes - self.base - self.adapter
        under_head = (room - self.head) // self.kept_per_token
        under_layer = room // (self.kept_per_token + self.layer_per_token)
        return max(0, min(under_head, under_layer))


def learner_memory(shape: ModelShape, config: Config, is_on_gpu: bool = True, longest: int = 0) -> LearnerMemory:
    """Return the memory of a rank that holds the adapters of all policies of a config beside one base.

    longest: tokens of the longest sequence, to count the mask of shared prefixes, which a GPU needs no memory for.

    With `learner.dtype` "auto" the base counts as bfloat16 on a GPU, as float32 on the CPU; adapter and optimiser are
    float32. A critic counts as a second adapter, and the reference of a KL penalty as the weights of another.
    """
    learner = config.learner
    is_bfloat16 = learner.dtype == "bfloat16" or (learner.dtype == "auto" and is_on_gpu)
    h, i, q, k, r = shape.hidden, shape.inner, shape.queries, shape.keys, config.lora.lora_rank
    if is_bfloat16:
        width, layer, recomputed, ends = 2, 12.4 * h + 8 * i + 14 * q + 12 * k + 18 * r, 2.4 * h + 4 * i, 19 * h
    else:
        width, recomputed, ends = 4, 3.8 * h + 6.5 * i, 31 * h
        layer = 13.1 * h + 17.5 * i + 12.3 * q + 12.1 * k + 28 * r
    if learner.activation_checkpointing:
        kept, passing = float(shape.layers * width * h), layer + recomputed
    else:
        kept, passing = shape.layers * layer + ends, 0.0
    if longest and not is_on_gpu:
        kept += 4 * (longest / 2 + BLOCK_QUERIES)  # on average a token sees half of its sequence
        kept += 0 if learner.activation_checkpointing else 4 * 2 * k * (MOST_COPIES - 1) * shape.layers
    per_parameter = 0
    for own in map(config.of_policy, config.shares):
        has_reference = reference_adapter(own.learner, own.lora) is not None
        per_parameter += (2 if algorithm_of(own).has_critic else 1) * 16 + 4 * has_reference
    return LearnerMemory(
        base=width * shape.base_parameters,
        adapter=per_parameter * shape.lora_parameters(config.lora),
        head=(LOGIT_BYTES + (2 if is_bfloat16 else 0)) * LOGITS_CHUNK_TOKENS[is_on_gpu] * shape.vocab_size,
        kept_per_token=round(kept),
        layer_per_token=round(passing),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes of an engine."""

    base: int
    adapters: int
    """All adapter slots together."""
    kv_per_token: int


def engine_memory(shape: ModelShape, engine: EngineConfig, lora: LoraConfig) -> EngineMemory:
    """Return the memory of an engine on each of its GPUs, where adapters and KV cache have 16-bit numbers.

    The GPUs of one engine divide base and KV cache; each counts as holding every adapter whole.
    """
    width, num_gpus = 1 if engine.quantization else 2, engine.tensor_parallel
    return EngineMemory(
        base=(width * (shape.base_parameters - shape.end_parameters) + 2 * shape.end_parameters) // num_gpus,
        adapters=2 * engine.max_loras * shape.lora_parameters(lora),
        kv_per_token=4 * shape.layers * shape.keys // num_gpus,
    )


def describe(model_name: str, vram_gib: float, config: Config | None = None) -> list[tuple[str, str]]:
    """Return readable rows (name, amount) for a GPU of `vram_gib`.

    The memory-related keys are those of `config` or the defaults. Raises ConfigError if the model's shape is not known.
    """
    shape = shape_of(model_name)
    if shape is None:
        raise ConfigError(
            f"--memory {model_name}: the shape of this model is not known; give the directory of a downloaded model "
            f"(with its config.json), or one of {', '.join(KNOWN_SHAPES)}"
        )
    config = config or Config.model_construct(train_envs=())
    engine, usable = config.engine, int(vram_gib * GIB) - RESERVED_BYTES
    serving = engine_memory(shape, engine, config.lora)
    left = int(usable * engine.gpu_share) - serving.base - serving.adapters - ENGINE_PASS_BYTES
    tokens = max(0, left) // serving.kv_per_token
    fits = (
        f"{tokens:,} tokens at {serving.kv_per_token / 1e3:.0f} kB: {tokens // engine.max_model_len} sequences of "
        f"engine.max_model_len = {engine.max_model_len} at once"
    )
    return [
        ("model", f"{shape.base_parameters / 1e9:.2f} billion parameters, {shape.layers} layers"),
        *_describe_learner(shape, config, usable),
        ("engine: base", _gib(serving.base)),
        (f"engine: {engine.max_loras} adapter slots", _gib(serving.adapters)),
        ("engine: keys and values", fits if tokens else "do not fit"),
    ]


def _describe_learner(shape: ModelShape, config: Config, usable: int) -> Iterator[tuple[str, str]]:
    """Yield rows of one rank. `usable`: bytes of its GPU."""
    memory = learner_memory(shape, config)
    yield "learner: frozen base", _gib(memory.base)
    adapters = f"adapter{'s of policy and critic,' * algorithm_of(config).has_critic}"
    if config.policies:
        adapters = f"adapters of {' and '.join(config.policies)},"
    yield f"learner: {adapters} of rank {config.lora.lora_rank}", f"{_gib(memory.adapter)} with gradient and optimiser"
    yield f"learner: logits of {LOGITS_CHUNK_TOKENS[True]} tokens", _gib(memory.head)
    for is_checkpointed, how in ((True, "with checkpointing"), (False, "without")):
        memory = learner_memory(shape, config.changed(learner={"activation_checkpointing": is_checkpointed}))
        per_token = (memory.kept_per_token + memory.layer_per_token) / 1e6
        tokens = memory.longest(usable)
        fits = f"{tokens:,} tokens" if tokens else "does not fit"
        yield f"learner {how}: largest micro-batch", f"{fits}, at {per_token:.2f} MB per token"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
