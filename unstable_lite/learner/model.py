"""Policy: a frozen base, a LoRA adapter in float32, and log-probabilities of completion tokens.

Owns loading, precision, checkpointing and the language model head. Knows nothing of rewards, losses, optimisers
or text. Works with any stock causal LM of transformers; it refuses a model whose head it does not reproduce.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import peft
import torch
import transformers
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from unstable_lite.adapters.peft_files import read_adapter
from unstable_lite.config import Config
from unstable_lite.config.training import LoraConfig, reference_adapter
from unstable_lite.errors import ModelError, RequestError
from unstable_lite.learner import LOGITS_CHUNK_TOKENS, base_model, batching, distributed, layout
from unstable_lite.learner.answers import Remembered
from unstable_lite.learner.base_model import ADAPTER, Head
from unstable_lite.learner.forest import Forest, reading
from unstable_lite.models.layers import longrope_limit, position_limit
from unstable_lite.rng import derive_seed
from unstable_lite.types import LearnerLogprobs, TrainItem

EAGER_TOKENS = 1024
"""Tokens of a forest for a model that computes attention itself, unless a sequence has more than half as many."""
MOVING = ("average", "stage")
"""References of the KL penalty that follow the adapter; also their directories in a saved state."""
_BASE = "base_model.model."
"""Beginning of PEFT's names of the base's modules."""


class Policy:
    """The learner's model, π. The base never changes; the adapter is never merged into it.

    Policies on one base take turns: the active one has the base's adapter and the random states of the process.
    """

    shared: ClassVar[Policy | None] = None
    """Policy whose base a new policy uses, too; None: a new one loads its own."""
    _random_states: dict[str, Tensor]

    def __init__(self, config: Config, device: str) -> None:
        self.device = torch.device(device)
        self.dtype = base_model.choose_dtype(config.learner.dtype, self.device)
        self._seed, self.has_dropout = config.run.seed, config.lora.lora_dropout > 0
        self.max_tokens_per_micro_batch = config.learner.max_tokens_per_micro_batch
        """Limit of a micro-batch; lower than configured once memory has run out."""
        self._max_rows = config.learner.mini_batch_size
        first, self._ending, self._turn = Policy.shared, "", [self]
        """First policy on the base, the end of PEFT's names of the adapters, and the active policy on the base."""
        if first is None:
            self.model = base_model.load(config, self.dtype, self.device)
        else:
            self.model, self._turn = first.model, first._turn
            self._ending = f"-{len(self.model.peft_config)}"
            self._begin_turn()
            torch.manual_seed(config.run.seed)
            base_model.add_adapter(self.model, ADAPTER + self._ending, config.lora)
            self.model.set_adapter(ADAPTER + self._ending)
        self.base: transformers.PreTrainedModel = self.model.get_base_model()
        self.base_weights = [weight for name, weight in self.base.named_parameters() if "lora_" not in name]
        self.parameters: dict[str, nn.Parameter] = self._parameters_of(ADAPTER)
        chunk_tokens = LOGITS_CHUNK_TOKENS[self.device.type == "cuda"]
        has_bonus = config.learner.entropy_coefficient > 0
        self._head = Head(self.base, config.engine.temperature, chunk_tokens, has_bonus)
        if config.lora.initial_lora_path is not None:
            self.load_adapter(config.lora.initial_lora_path)
        if self.device.type == "cuda":
            # cuDNN plans every new shape, which takes longer than a pass, and every micro-batch has a new one.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.model.eval()
        if first is None:
            self._check_head()
        self._train()
        self.layout: batching.Layout = first.layout if first else "rows"
        self.warning: str | None = first.warning if first else layout.choose(self, config)
        """Reason of a layout of rows, if a forest was expected."""
        distributed.copy_from_first(self.parameters)
        self._reference = reference_adapter(config.learner, config.lora)
        """Name of the frozen adapter that is the KL penalty's reference; None: the base, or no penalty."""
        # A run that repeats bit for bit computes the same batches after a resume, when nothing would be remembered.
        is_fixed = self.moving_reference is None and config.run.schedule != "sync"
        self._remembered = Remembered() if is_fixed else None
        self._reference_parameters: dict[str, nn.Parameter] = {}
        if self._reference is not None:
            self._reference_parameters = self.add_adapter(self._reference, config.lora)
            for parameter in self._reference_parameters.values():
                parameter.requires_grad_(False)
        if self._reference == "initial" and (initial := config.lora.initial_lora_path) is not None:
            # A resumed run reads it from the same directory.
            self.load_adapter(initial, self._reference)
        self.follow(decay=0.0)

    def activate(self) -> None:
        """Take the turn of the other policies on its base, with its adapter and its random states."""
        if self._turn != [self]:
            self._begin_turn()
            base_model.set_random_states(self._random_states, self.device)
            self.model.set_adapter(ADAPTER + self._ending)

    def _begin_turn(self) -> None:
        self._turn[0]._random_states = base_model.random_states(self.device)
        self._turn[0] = self

    @property
    def moving_reference(self) -> str | None:
        """Name of the KL penalty's reference if it follows the adapter."""
        return self._reference if self._reference in MOVING else None

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """Move the moving reference, if there is one, to the adapter, matrix by matrix.

        decay: weight of the old reference; 0 copies the adapter.
        """
        if self.moving_reference is not None:
            pairs = zip(self._reference_parameters.values(), self.parameters.values(), strict=True)
            for reference, parameter in pairs:
                reference.lerp_(parameter, 1 - decay)

    @property
    def vocab_size(self) -> int:
        return int(self.base.config.get_text_config().vocab_size)

    @property
    def adapter_bytes(self) -> int:
        """Size in bytes of the adapter's tensors."""
        return sum(parameter.nbytes for parameter in self.parameters.values())

    @property
    def position_limit(self) -> int:
        """Number of tokens of the longest sequence that it computes as engines do."""
        return position_limit(self.base.config)

    def micro_batches(
        self, items: Sequence[TrainItem], share: batching.Share | None = None
    ) -> Iterator[batching.MicroBatch]:
        """Yield this rank's share of `items`, or the given one, in parts that fit the memory, on the device.

        Raises RequestError for a sequence that the engine rotated differently.
        """
        longest, limit = max(map(batching.length, items), default=0), longrope_limit(self.base.config)
        if longest > limit:
            raise RequestError(
                f"a sequence of {longest} tokens: beyond {limit} the model's LongRoPE rotates all rows of a batch by "
                f"other factors; set engine.max_model_len or learner.max_train_len = {limit}"
            )
        yield from self._micro_batches(items, self._max_rows, share)

    def prompt_batches(self, items: Sequence[TrainItem], max_rows: int | None) -> Iterator[batching.MicroBatch]:
        """Yield batches of the prompts of this rank's share of `items`, of any length."""
        yield from self._micro_batches(items, max_rows, None, of_prompts=True)

    def _micro_batches(
        self, items: Sequence[TrainItem], max_rows: int | None, share: batching.Share | None, of_prompts: bool = False
    ) -> Iterator[batching.MicroBatch]:
        layout, limit = self.layout, self.max_tokens_per_micro_batch
        share = share or (distributed.rank(), distributed.num_ranks())
        if self.has_dropout and torch.is_grad_enabled():
            layout = "separate"
        elif layout == "forest" and self.base.config._attn_implementation == "eager":
            # It keeps a number for each pair of tokens of a forest.
            limit = min(limit, max(EAGER_TOKENS, 2 * max(map(batching.length, items), default=0)))
        for batch in batching.make_micro_batches(items, limit, max_rows, share, self.device.type, layout, of_prompts):
            yield batch.to(self.device)

    def draw_apart(self, version: int) -> None:
        """Give each other rank its own random stream for dropout; rank 0 keeps that of its state."""
        if self.has_dropout and distributed.rank():
            torch.manual_seed(derive_seed(self._seed, "dropout", version, distributed.rank()))

    def logprobs(self, batch: batching.MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each trained token and the entropy of its distribution, in nats.

        The entropy has a gradient only if `learner.entropy_coefficient` is set.
        """
        with self._autocast():
            hidden_UD = self._hidden(batch)
            logp_U, entropy_U = self._head.logprobs(hidden_UD, batch.target_U)
            return logp_U[batch.index_N], entropy_U[batch.index_N]

    @torch.no_grad()
    def is_most_likely(self, batch: batching.MicroBatch) -> Tensor:
        """Return whether each trained token is the one that greedy decoding would choose."""
        with self._autocast():
            return (self._head.most_likely(self._hidden(batch)) == batch.target_U)[batch.index_N]

    @torch.no_grad()
    def score(
        self, items: Sequence[TrainItem], parameters: Mapping[str, Tensor] | None = None
    ) -> list[LearnerLogprobs]:
        """Return the log-probabilities of each item's completion tokens under the adapter, and under the base alone.

        parameters: those of another adapter to use instead, by the names of the policy's. Raises RequestError for an
        item that no engine can have sampled.
        """
        batching.check(items, self.vocab_size)
        adapter_logp = self.item_logprobs(items) if parameters is None else self.logprobs_with(parameters, items)
        with self.model.disable_adapter():
            base_logp = self.item_logprobs(items)
        pairs = zip(adapter_logp, base_logp, strict=True)
        return [LearnerLogprobs(adapter=adapter.numpy(), base=base.numpy()) for adapter, base in pairs]

    @torch.no_grad()
    def logprobs_with(self, parameters: Mapping[str, Tensor], items: Sequence[TrainItem]) -> list[Tensor]:
        """Return the log-probabilities of each item's completion tokens under an adapter with these `parameters`.

        They replace the policy's parameters of the same names until it returns.
        """
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            for name, parameter in self.parameters.items():
                parameter.copy_(parameters[name])
            return self.item_logprobs(items)
        finally:
            for name, parameter in self.parameters.items():
                parameter.copy_(own[name])

    @torch.no_grad()
    def item_logprobs(self, items: Sequence[TrainItem]) -> list[Tensor]:
        """Return the log-probabilities of each item's completion tokens, in float32 on the CPU."""
        logp = [torch.empty(0)] * len(items)
        for batch in self.micro_batches(items, batching.WHOLE):
            with self.evaluating():
                logp_N, _ = self.logprobs(batch)
            batch.scatter(logp_N.float().cpu(), logp)
        return logp

    @property
    def kl_metric(self) -> str:
        """Name of the KL metric, which names the reference of `reference_logprobs`."""
        return f"kl_to_{self._reference or 'base'}"

    @torch.no_grad()
    def reference_logprobs(self, batch: batching.MicroBatch) -> Tensor:
        """Return each trained token's log-probability under the reference policy of `kl_coefficient`.

        That is the adapter from which training started, or the base if there was none or `kl_reference` is "base", or
        the moving reference.
        """
        with self.model.disable_adapter() if self._reference is None else self.using(self._reference):
            if self._remembered is not None:
                return torch.cat(self._remembered.of(batch.items, self.item_logprobs)).to(self.device)
            with self.evaluating():
                return self.logprobs(batch)[0]

    def last_hidden(self, batch: batching.MicroBatch) -> Tensor:
        """Return the decoder's output at the last token of each item's prompt, of a batch of prompts, N × D."""
        with self._autocast():
            return self._hidden(batch).index_select(0, batch.index_N)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Compute in the body without checkpointing, which costs a forward pass, and without the adapter's dropout."""
        self.model.eval()
        try:
            yield
        finally:
            self._train()

    def _train(self) -> None:
        """Set training mode for checkpointed layers and the adapter's dropout only.

        In training mode a base may sample, as the routers of PhiMoE and Mixtral do, and is then not the policy that
        sampled the tokens. If no layer is transformers' own (remote code), the checkpointed layers are unknown, and the
        whole base is in training mode.
        """
        if not any(isinstance(module, GradientCheckpointingLayer) for module in self.base.modules()):
            self.model.train()
        for name, module in self.model.named_modules():
            if isinstance(module, GradientCheckpointingLayer) or ".lora_dropout." in name:
                module.training = True

    def add_adapter(self, name: str, lora: LoraConfig) -> dict[str, nn.Parameter]:
        """Add a fresh adapter to the same base, inactive outside of `using`; return its parameters."""
        base_model.add_adapter(self.model, name + self._ending, lora)
        return self._parameters_of(name)

    def make_fresh(self, name: str = ADAPTER) -> None:
        """Reset adapter `name` to its initial values, with which it has no effect."""
        for module in self.model.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters(name + self._ending, True)

    def _parameters_of(self, name: str) -> dict[str, nn.Parameter]:
        """Return the parameters of adapter `name`, by the names that they have in the first policy."""
        own, plain = f".{name}{self._ending}.", f".{name}."
        return {key.replace(own, plain): value for key, value in self.model.named_parameters() if own in key}

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Replace the policy's adapter by adapter `name` in the body, which must contain the backward pass too.

        Checkpointing repeats layers in the backward pass, with the adapter that is active then. PEFT computes gradients
        of the active adapter only.
        """
        self.model.set_adapter(name + self._ending)
        try:
            yield
        finally:
            self.model.set_adapter(ADAPTER + self._ending)

    def adapter_state(self, name: str = ADAPTER) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and config as PEFT saves them: names without the adapter's, float32, plain lists."""
        # save_embedding_layers="auto" would query the hub for the size of the vocabulary.
        own = name + self._ending
        state = peft.get_peft_model_state_dict(self.model, adapter_name=own, save_embedding_layers=False)
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
        config = self.model.peft_config[own].to_dict() | {"inference_mode": True}
        return tensors, config | {k: sorted(v) for k, v in config.items() if isinstance(v, set)}

    def load_adapter(self, directory: Path, name: str = ADAPTER) -> None:
        """Load a PEFT directory. Raises AdapterError or ModelError unless it has this run's rank, targets and scale."""
        tensors, stored, _ = read_adapter(directory)
        tensors = self.of_text(tensors)
        own_tensors, own = self.adapter_state(name)
        for key in ("r", "lora_alpha", "target_modules", "bias", "use_rslora", "use_dora", "rank_pattern"):
            theirs, ours = _comparable(stored.get(key)), _comparable(own.get(key))
            if theirs != ours:
                raise ModelError(f"{directory}: {key} is {theirs}, this run's is {ours}; set [lora] alike")
        theirs, ours = shapes(tensors), shapes(own_tensors)
        if theirs != ours:
            key, _ = min(theirs.items() ^ ours.items())
            raise ModelError(
                f"{directory} is for another base: {key} has shape {theirs.get(key)} there, {ours.get(key)} here"
            )
        peft.set_peft_model_state_dict(self.model, tensors, adapter_name=name + self._ending)

    def of_text(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that belong to the text decoder, by name.

        Earlier versions adapted the vision tower of a multimodal model too, which no text changes.
        """
        outside = re.compile(self.model.peft_config[ADAPTER].exclude_modules or "(?!)")
        return {key: tensor for key, tensor in tensors.items() if not outside.fullmatch(key.partition(_BASE)[2])}

    def _hidden(self, batch: batching.MicroBatch) -> Tensor:
        """Return the decoder's output at the positions that predict, U × D."""
        return self._decoded(batch.tokens_BT, batch.forest).flatten(0, 1).index_select(0, batch.source_U)

    def _decoded(self, tokens_BT: Tensor, forest: Forest | None = None) -> Tensor:
        decoder = self.base.get_decoder()  # type: ignore[no-untyped-call]
        with reading(forest) as positions:
            hidden_BTD: Tensor = decoder(input_ids=tokens_BT, use_cache=False, **positions).last_hidden_state
        return hidden_BTD

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Multiply the float32 adapter in bfloat16 on a bfloat16 base, as engines do; its gradient is float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse an architecture whose head is not `Head`, because it would train on wrong probabilities."""
        tokens_BT = torch.arange(8, device=self.device)[None] % self.vocab_size
        with self._autocast():
            theirs = self.base(input_ids=tokens_BT).logits.float()
            ours = self._head.logits(self._decoded(tokens_BT)).float()
        # bfloat16 models round once more than this code.
        tolerance = (0.02 if self.dtype == torch.bfloat16 else 1e-4) * theirs.abs().max().item()
        if not torch.allclose(ours, theirs, rtol=0, atol=tolerance):
            raise ModelError(
                f"{type(self.base).__name__}: the learner does not reproduce this architecture's logits "
                f"(off by {(ours - theirs).abs().max().item():.3g}); it would train on wrong probabilities"
            )


def _comparable(value: Any) -> Any:
    """Return a canonical form, because PEFT writes sets and lists in any order, and nothing as None, false or {}."""
    return sorted(value) if isinstance(value, (set, list, tuple)) else value or None


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
