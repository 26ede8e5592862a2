"""The policy: a frozen base, a LoRA adapter in float32, and log-probabilities of completion tokens.

Owns loading, precision, checkpointing and the language model head. Knows nothing of rewards, losses, optimisers
or text. Works with any stock causal LM of transformers; one whose head it does not reproduce is refused at load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from unstable_lite.config import Config, LoraConfig, no_adapter_at
from unstable_lite.errors import ConfigError, ModelError, RequestError
from unstable_lite.learners import adapter_files, batching, ranks
from unstable_lite.models import resolve_model
from unstable_lite.models.positions import longrope_limit, position_limit
from unstable_lite.rng import derive_seed
from unstable_lite.types import LearnerLogprobs, TrainItem

_ADAPTER = "default"
_REFERENCE = "reference"


class Policy:
    """π: the learner's model. The base never changes; the adapter is never merged into it."""

    def __init__(self, config: Config, device: str) -> None:
        torch.manual_seed(config.run.seed)
        self.device = torch.device(device)
        self.dtype = _choose_dtype(config.learner.dtype, self.device)
        self._temperature = config.engine.temperature
        self._chunk_tokens = config.learner.logits_chunk_tokens
        self._has_entropy_bonus = config.learner.entropy_coefficient > 0
        self._use_cache = config.learner.use_trainer_cache
        self._seed, self._has_dropout = config.run.seed, config.lora.lora_dropout > 0
        self.max_tokens_per_micro_batch = config.learner.max_tokens_per_micro_batch
        """Less than configured once memory has run out."""
        self._max_rows = config.learner.mini_batch_size
        path = resolve_model(config.model_name)
        self.is_sharded = config.learner.shard_base and ranks.num_ranks() > 1
        """Whether every rank holds a part of the base, and all of them must pass through it together."""
        place = torch.device("cpu") if self.is_sharded else self.device
        self._base = _load_base(path, self.dtype, place, config.trust_remote_code)
        self.num_base_parameters = sum(parameter.numel() for parameter in self._base.parameters())
        self.model = _add_lora(self._base, config.lora, path)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        if config.lora.initial_lora_path is not None:
            self.load_adapter(config.lora.initial_lora_path)
        if config.learner.is_checkpointed:
            self._base.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
        if self.device.type == "cuda":
            # It makes a plan for every new shape, which takes longer than a pass, and every micro-batch is one.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._through = _shard(self._base, self.device) if self.is_sharded else _straight
        self.model.eval()
        self._check_head()
        self._train()
        ranks.copy_from_first(self.parameters)
        learner, initial = config.learner, config.lora.initial_lora_path
        self._has_reference = bool(learner.kl_coefficient) and learner.kl_reference == "initial" and initial is not None
        if self._has_reference and initial is not None:
            # A frozen copy: nothing trains it, and a resumed run reads it from the same directory.
            for parameter in self.add_adapter(_REFERENCE, config.lora).values():
                parameter.requires_grad_(False)
            self.load_adapter(initial, _REFERENCE)

    @property
    def vocab_size(self) -> int:
        return int(self._base.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self._base.config.get_text_config().hidden_size)

    @property
    def base_bytes(self) -> int:
        """Of the base's weights, as far as this rank holds them."""
        frozen = [weight for name, weight in self._base.named_parameters() if "lora_" not in name]
        return sum((weight.to_local() if hasattr(weight, "to_local") else weight).nbytes for weight in frozen)

    @property
    def position_limit(self) -> int:
        """Tokens of the longest sequence that it computes as engines do."""
        return position_limit(self._base.config)

    def micro_batches(
        self, items: Sequence[TrainItem], max_tokens: int | None = None, share: batching.Share | None = None
    ) -> Iterator[batching.MicroBatch]:
        """This rank's share of `items`, or the one that is given, in parts that fit the memory, on the device.

        Raises RequestError for a sequence that would be rotated otherwise than where it was sampled.
        """
        longest, limit = max(map(batching.length, items), default=0), longrope_limit(self._base.config)
        if longest > limit:
            raise RequestError(
                f"a sequence of {longest} tokens: past {limit} the model's LongRoPE rotates by other factors, whatever "
                f"stands beside it too; set engine.max_model_len or learner.max_train_len = {limit}"
            )
        max_tokens = max_tokens or self.max_tokens_per_micro_batch
        for batch in batching.make_micro_batches(items, max_tokens, self._max_rows, share or self.share):
            yield batch.to(self.device)

    @property
    def share(self) -> batching.Share:
        """What this rank computes of a batch."""
        return batching.Share(rank=ranks.rank(), num_ranks=ranks.num_ranks(), in_step=self.is_sharded)

    def draw_apart(self, version: int) -> None:
        """Ranks that drop out draw each from a stream of its own; rank 0 goes on with what its state holds."""
        if self._has_dropout and ranks.rank():
            torch.manual_seed(derive_seed(self._seed, "dropout", version, ranks.rank()))

    def logprobs(self, batch: batching.MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each trained token and the entropy of its distribution, in nats.

        The entropy has a gradient only if `learner.entropy_coefficient` is set.
        """
        logp_N, entropy_N = self._through(self._logprobs, batch)
        return logp_N, entropy_N

    def _logprobs(self, batch: batching.MicroBatch) -> tuple[Tensor, Tensor]:
        with self._autocast():
            hidden_ND = self._hidden(batch.tokens_BT).flatten(0, 1)[batch.source_N]
            logps, entropies = [], []
            chunks = torch.split(hidden_ND, self._chunk_tokens), torch.split(batch.target_N, self._chunk_tokens)
            for hidden_KD, target_K in zip(*chunks, strict=True):
                logp_K, entropy_K = self._token_logprobs(hidden_KD, target_K)
                logps.append(logp_K)
                entropies.append(entropy_K)
        return torch.cat(logps), torch.cat(entropies)

    @torch.no_grad()
    def is_most_likely(self, batch: batching.MicroBatch) -> Tensor:
        """Whether each trained token is the one that greedy decoding would choose in its place."""
        with self._autocast():
            hidden_ND = self._hidden(batch.tokens_BT).flatten(0, 1)[batch.source_N]
            chunks = [self._logits(hidden_KD).argmax(-1) for hidden_KD in torch.split(hidden_ND, self._chunk_tokens)]
        return torch.cat(chunks) == batch.target_N

    @torch.no_grad()
    def score(self, items: Sequence[TrainItem], max_tokens: int | None = None) -> list[LearnerLogprobs]:
        """Log-probabilities of each item's completion tokens under the adapter, and under the base alone.

        max_tokens: of a micro-batch, if not those of training. Every rank is asked where the base is sharded, and
        takes its share; else this one alone. Raises RequestError for an item that no engine can have sampled.
        """
        batching.check(items, self.vocab_size)
        adapter_logp = self._score(items, max_tokens)
        with self.model.disable_adapter():
            base_logp = self._score(items, max_tokens)
        return [
            LearnerLogprobs(adapter=adapter.numpy(), base=base.numpy())
            for adapter, base in zip(adapter_logp, base_logp, strict=True)
        ]

    @torch.no_grad()
    def logprobs_with(
        self, parameters: Mapping[str, Tensor], items: Sequence[TrainItem], max_tokens: int | None = None
    ) -> list[Tensor]:
        """Return the log-probabilities of each item's completion tokens under an adapter with these `parameters`.

        They replace the policy's own, of the same names, until this returns. If the base is sharded, all ranks must
        call it.
        """
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.copy_(parameters[name])
            return self._score(items, max_tokens)
        finally:
            for name, parameter in self.parameters.items():
                parameter.copy_(own[name])

    def _score(self, items: Sequence[TrainItem], max_tokens: int | None) -> list[Tensor]:
        """Return the log-probabilities of each item's completion tokens, in float32 on the CPU."""
        share = self.share if self.is_sharded else batching.WHOLE
        logp = [torch.empty(0)] * len(items)
        rows: list[int] = []
        for batch in self.micro_batches(items, max_tokens, share):
            rows += batch.rows
            with self.evaluating():
                logp_N, _ = self.logprobs(batch)
            batch.scatter(logp_N.float().cpu(), logp)
        if self.is_sharded:
            ranks.fill(rows, logp, like=torch.empty(0))
        return logp

    @property
    def kl_metric(self) -> str:
        """Name of the KL metric, by what `reference_logprobs` are of."""
        return "kl_to_initial" if self._has_reference else "kl_to_base"

    @torch.no_grad()
    def reference_logprobs(self, batch: batching.MicroBatch) -> Tensor:
        """Return each trained token's log-probability under the policy that `kl_coefficient` holds the adapter near.

        That is the adapter that training started from, or the base if there was none or `kl_reference` says so.
        """
        if not self._has_reference:
            return self.base_logprobs(batch)
        with self.evaluating(), self.using(_REFERENCE):
            logp_N, _ = self.logprobs(batch)
        return logp_N

    @torch.no_grad()
    def base_logprobs(self, batch: batching.MicroBatch) -> Tensor:
        """Log-probability of each trained token under the base alone."""
        with self.evaluating(), self.model.disable_adapter():
            logp_N, _ = self.logprobs(batch)
        return logp_N

    def last_hidden(self, batch: batching.PromptBatch) -> Tensor:
        """`BD`: the decoder's output at each prompt's last token."""
        with self._autocast():
            hidden_BTD: Tensor = self._through(self._hidden, batch.tokens_BT)
        return hidden_BTD[torch.arange(len(batch.last_B), device=self.device), batch.last_B]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without checkpointing, which costs a forward that trains nothing, and without the adapter's dropout."""
        self.model.eval()
        try:
            yield
        finally:
            self._train()

    def _train(self) -> None:
        """Training mode for what asks for it, checkpointed layers and the adapter's dropout, and for nothing else.

        A base may draw where it trains, as the routers of PhiMoE and Mixtral do: that is another policy than was
        sampled from. Where no layer is of transformers' own kind (remote code) nobody can tell what checkpoints, and
        the whole base is in training mode.
        """
        if not any(isinstance(module, GradientCheckpointingLayer) for module in self._base.modules()):
            self.model.train()
        for name, module in self.model.named_modules():
            if isinstance(module, GradientCheckpointingLayer) or ".lora_dropout." in name:
                module.training = True

    def add_adapter(self, name: str, lora: LoraConfig) -> dict[str, nn.Parameter]:
        """A second fresh adapter on the same base, at rest until `using` it; its parameters."""
        self.model.add_adapter(name, _peft_config(lora, self.model.peft_config[_ADAPTER].base_model_name_or_path))
        _cast_by_autocast_alone(self.model)
        return {key: parameter for key, parameter in self.model.named_parameters() if f".{name}." in key}

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The base with adapter `name` instead of the policy's; the backward pass too must end inside.

        Checkpointing runs layers again in the backward pass, with the adapter that is in place then. PEFT lets only
        the adapter in place ask for gradients.
        """
        self.model.set_adapter(name)
        try:
            yield
        finally:
            self.model.set_adapter(_ADAPTER)

    def adapter_state(self, name: str = _ADAPTER) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and config as PEFT saves them: names without the adapter's, float32, plain lists."""
        # save_embedding_layers="auto" would ask the hub whether the vocabulary was resized.
        state = peft.get_peft_model_state_dict(self.model, adapter_name=name, save_embedding_layers=False)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
        config = self.model.peft_config[name].to_dict() | {"inference_mode": True}
        return tensors, config | {k: sorted(v) for k, v in config.items() if isinstance(v, set)}

    def load_adapter(self, directory: Path, name: str = _ADAPTER) -> None:
        """Go on from a PEFT directory. Raises ModelError unless it has this run's rank, targets and scale."""
        tensors, stored = adapter_files.read(directory)
        own_tensors, own = self.adapter_state(name)
        for key in ("r", "lora_alpha", "target_modules", "bias", "use_rslora", "use_dora", "rank_pattern"):
            theirs, ours = _comparable(stored.get(key)), _comparable(own.get(key))
            if theirs != ours:
                raise ModelError(f"{directory}: {key} is {theirs}, this run's is {ours}; set [lora] alike")
        theirs, ours = _shapes(tensors), _shapes(own_tensors)
        if theirs != ours:
            key, _ = min(theirs.items() ^ ours.items())
            raise ModelError(
                f"{directory} is not of this base: {key} has shape {theirs.get(key)} there, {ours.get(key)} here"
            )
        peft.set_peft_model_state_dict(self.model, tensors, adapter_name=name)

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        decoder = self._base.get_decoder()  # type: ignore[no-untyped-call]
        hidden_BTD: Tensor = decoder(input_ids=tokens_BT, use_cache=self._use_cache).last_hidden_state
        return hidden_BTD

    def _logits(self, hidden_KD: Tensor) -> Tensor:
        """The model's own head: projection, scale, soft cap; at least float32."""
        logits_KV: Tensor = self._base.get_output_embeddings()(hidden_KD)  # type: ignore[no-untyped-call]
        logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
        config = self._base.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits_KV = logits_KV * scale
        if scale := getattr(config, "logits_scaling", None):  # Granite
            logits_KV = logits_KV / scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits_KV = torch.tanh(logits_KV / cap) * cap
        return logits_KV

    def _token_logprobs(self, hidden_KD: Tensor, target_K: Tensor) -> tuple[Tensor, Tensor]:
        """One chunk's logits exist only in here, and once: the gradient towards the hidden state is taken with them.

        A token's log-probability depends on its own row alone, so that this gradient, scaled, is all that a loss needs.
        Autograd goes through the head alone: what it would do with a softmax takes as long again, and twice the memory.
        """
        leaf_KD = hidden_KD.detach().requires_grad_(hidden_KD.requires_grad)
        logits_KV = self._logits(leaf_KD)
        with torch.no_grad():
            shifted_KV = logits_KV.detach().div_(self._temperature)
            shifted_KV -= shifted_KV.amax(-1, keepdim=True)
            weight_KV = shifted_KV.exp()
            total_K = weight_KV.sum(-1)
            logp_K = shifted_KV.gather(-1, target_K[:, None]).squeeze(-1) - total_K.log()
            product_KV = shifted_KV.mul_(weight_KV)
            entropy_K = total_K.log() - product_KV.sum(-1) / total_K
        if logits_KV.requires_grad:
            # Adds 0, and the gradient's way to the hidden state.
            distance_KD = (hidden_KD - leaf_KD.detach()).to(logp_K.dtype)
            if self._has_entropy_bonus:
                # −d entropy / d logits = p (log p + entropy) / temperature, with p = weight / total.
                product_KV.addcmul_(weight_KV, (entropy_K - total_K.log())[:, None])
                (slope_KD,) = torch.autograd.grad(logits_KV, leaf_KD, product_KV, retain_graph=True)
                entropy_K = entropy_K - (distance_KD * slope_KD).sum(-1) / (total_K * self._temperature)
            # −d log p(target) / d logits = (weight / total − one-hot) / temperature; figures of a whole row come last.
            weight_KV.scatter_add_(-1, target_K[:, None], -total_K[:, None])
            (slope_KD,) = torch.autograd.grad(logits_KV, leaf_KD, weight_KV)
            logp_K = logp_K - (distance_KD * slope_KD).sum(-1) / (total_K * self._temperature)
        return logp_K, entropy_K

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bfloat16 base: the float32 adapter is multiplied in bfloat16, as engines do; its gradient is float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse an architecture with another head than `_logits`: it would train on wrong probabilities."""
        tokens_BT = torch.arange(8, device=self.device)[None] % self.vocab_size

        def both() -> tuple[Tensor, Tensor]:
            return self._base(input_ids=tokens_BT).logits.float(), self._logits(self._hidden(tokens_BT)).float()

        with self._autocast():
            theirs, ours = self._through(both)
        # bfloat16 models round once more than we do.
        tolerance = (0.02 if self.dtype == torch.bfloat16 else 1e-4) * theirs.abs().max().item()
        if not torch.allclose(ours, theirs, rtol=0, atol=tolerance):
            raise ModelError(
                f"{type(self._base).__name__}: the learner does not reproduce this architecture's logits "
                f"(off by {(ours - theirs).abs().max().item():.3g}); it would train on wrong probabilities"
            )


def _choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        # Measured on a Zen 4 core: training in bfloat16 is 1.6 times as fast as in float32; emulated, it is slower.
        has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return torch.bfloat16 if device.type == "cuda" or has_bfloat16 else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


def _load_base(
    path: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> transformers.PreTrainedModel:
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        # Layers that checkpoint are in training mode: with dropout the base would be another distribution than was
        # sampled from.
        for part in (config, config.get_text_config()):
            for name, value in part.to_dict().items():
                if "drop" in name and isinstance(value, float):
                    setattr(part, name, 0.0)
        # torch's own attention knows no cap on attention's logits (Gemma 2), and leaves it out without a word.
        is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        base = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager" if is_capped else None,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model {path}: transformers cannot load it as a causal LM: {error}") from error
    if device.type == "cpu" and dtype == torch.bfloat16 and base.config._attn_implementation == "sdpa":
        base.set_attn_implementation(_FLOAT32_ATTENTION)
    return base.to(device)  # type: ignore[arg-type, no-any-return]


class _Whole(nn.Module):
    """The base, and whatever is computed with it: in here its embedding, last norm and head are whole."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        return compute(*arguments)


def _shard(base: transformers.PreTrainedModel, device: torch.device) -> _Whole:
    """Each rank keeps a part of every frozen weight; a layer is whole only while it computes. Adapters stay whole.

    Takes the base layer by layer to the device, which need not have room for all of it.
    """
    # A second of imports that other learners do without.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    adapter = {parameter for parameter in base.parameters() if parameter.requires_grad}
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (ranks.num_ranks(),)),
        "reshard_after_forward": True,
        "ignored_params": adapter,
    }
    for layer in base.get_decoder().layers:  # type: ignore[no-untyped-call]
        fully_shard(layer, **settings)
    whole = _Whole(base)
    fully_shard(whole, **settings)
    for parameter in adapter:
        parameter.data = parameter.data.to(device)
    return whole


def _straight(compute: Callable[..., Any], *arguments: Any) -> Any:
    return compute(*arguments)


def _sdpa_in_float32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """On CPUs the backward pass of bfloat16 attention takes 5 times that of float32."""
    with torch.autocast(query.device.type, enabled=False):
        output, weights = sdpa_attention_forward(module, query.float(), key.float(), value.float(), *args, **kwargs)
    return output.to(query.dtype), weights


_FLOAT32_ATTENTION = "unstable_lite_sdpa_float32"
transformers.AttentionInterface.register(_FLOAT32_ATTENTION, _sdpa_in_float32)
transformers.AttentionMaskInterface.register(_FLOAT32_ATTENTION, sdpa_mask)


def _comparable(value: Any) -> Any:
    """PEFT writes one thing in many ways: sets and lists in any order, nothing as None, false or {}."""
    return sorted(value) if isinstance(value, (set, list, tuple)) else value or None


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _add_lora(base: transformers.PreTrainedModel, lora: LoraConfig, path: str) -> peft.PeftModel:
    """`base` with a fresh adapter, which changes nothing yet."""
    names = [name for name, module in base.named_modules() if getattr(module, "weight", None) is not None]
    ends: list[nn.Module] = [base.get_input_embeddings(), base.get_output_embeddings()]  # type: ignore[no-untyped-call]
    for target in lora.target_modules:
        if any(f".{name}".endswith(f".{target}") for name, module in base.named_modules() if module in ends):
            raise ConfigError(no_adapter_at(target))
        if not any(f".{name}".endswith(f".{target}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ModelError(
                f"lora.target_modules: no module of {type(base).__name__} is called {target!r}; it has {known}"
            )
    try:
        model = peft.get_peft_model(base, _peft_config(lora, path), adapter_name=_ADAPTER, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ModelError(f"lora: {error}") from error
    if moved := model.peft_config[_ADAPTER].target_parameters:
        raise ConfigError(
            f"lora.target_modules: in {type(base).__name__} some of them are fused experts; PEFT would adapt "
            f"{', '.join(sorted(moved))} and leave the dense layers out, and engines cannot serve that. Name the "
            "projections of attention alone: ['q_proj', 'k_proj', 'v_proj', 'o_proj']"
        )
    _cast_by_autocast_alone(model)
    return model


def _peft_config(lora: LoraConfig, path: str) -> peft.LoraConfig:
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
        r=lora.lora_rank,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
    )


def _cast_by_autocast_alone(model: peft.PeftModel) -> None:
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False  # PEFT's own cast to float32 would come on top
