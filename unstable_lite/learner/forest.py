"""Attention over a forest of prefix trees, in which a prefix that sequences share is computed once.

A forest is one flat row of tokens in depth-first order. Token j is an ancestor of token i, or i itself, exactly if
`j <= i < end[j]`, with `end[j]` the index after the last descendant of j: that is the whole mask. The model's own mask
function, which knows the windows of its layers, is asked about the tokens' depths instead of their indices. On a CPU
queries attend block by block to the tokens that one of them sees, so that the cost grows with the depth, and not with
the square of the forest; on a GPU FlexAttention leaves out the blocks that no token sees.

Both are registered with transformers under `NAME`; without a forest, in rows, they are torch's own attention.
Shapes: `T` tokens of the forest, `Q` queries of a block, `K` tokens that one of them sees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from unstable_lite.learner import BLOCK_QUERIES, MOST_COPIES

NAME = "unstable_lite_forest"
FLEX_BLOCK = 128
"""Tokens of a block of FlexAttention."""
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A model's mask function: whether a query sees a key, by batch, head and the positions of both."""


@dataclass(frozen=True, slots=True)
class Forest:
    depth_T: Tensor
    """Position of each token in its sequences."""
    end_T: Tensor
    """Index after each token's last descendant."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Forest:
        return Forest(*(one.to(device, non_blocking=non_blocking) for one in (self.depth_T, self.end_T)))

    def sees(self, query: Tensor, key: Tensor, rule: Rule) -> Tensor:
        """Return whether each query token sees each key token."""
        zero = query.new_zeros(())
        is_ancestor = (key <= query) & (query < self.end_T[key])
        return is_ancestor & rule(zero, zero, self.depth_T[query], self.depth_T[key])

    def blocks(self, rule: Rule) -> list[Block]:
        """Return the forest's queries in order, with the tokens that they see."""
        index_T, num_tokens = torch.arange(len(self.depth_T), device=self.depth_T.device), len(self.depth_T)
        blocks = []
        size = _block_queries.get()
        for first in range(0, num_tokens, size):
            query_Q = index_T[first : first + size]
            # Of the tokens before a block its queries see those that are ancestors of its first one.
            key_K = torch.cat([index_T[:first][self.end_T[:first] > first], query_Q])
            is_seen_QK = self.sees(query_Q[:, None], key_K, rule)
            blocks.append(Block(key_K, _summand_of(is_seen_QK, torch.float32)))
        return blocks

    def block_mask(self, rule: Rule) -> BlockMask:
        """Return the mask for FlexAttention.

        Its blocks follow from the ancestors alone, because torch's own function first asks about every pair of tokens.
        """

        def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(query, key, rule)

        num_tokens = len(self.depth_T)
        block_T = torch.arange(num_tokens, device=self.end_T.device) // FLEX_BLOCK
        num_blocks = -(-num_tokens // FLEX_BLOCK)
        # For a block of keys and one of queries: how many keys begin to be seen there, less those that end before it.
        edges_KQ = torch.zeros(num_blocks, num_blocks + 1, dtype=torch.int32, device=block_T.device)
        one = edges_KQ.new_ones(())
        edges_KQ.index_put_((block_T, block_T), one, accumulate=True)
        edges_KQ.index_put_((block_T, (self.end_T - 1) // FLEX_BLOCK + 1), -one, accumulate=True)
        is_seen_11QK = (edges_KQ.cumsum(1)[:, :-1] > 0).T[None, None]
        num_seen = is_seen_11QK.sum(-1, dtype=torch.int32)
        first_seen = is_seen_11QK.int().argsort(dim=-1, descending=True, stable=True).int()
        lengths = num_tokens, num_tokens
        return BlockMask.from_kv_blocks(num_seen, first_seen, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=lengths)

    def summand(self, rule: Rule, dtype: torch.dtype) -> Tensor:
        """Return a summand of the attention's logits, 1 × 1 × T × T, for models that compute attention themselves."""
        index_T = torch.arange(len(self.depth_T), device=self.depth_T.device)
        return _summand_of(self.sees(index_T[:, None], index_T, rule), dtype)[None, None]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries that attend together: the next ones of the forest."""

    key_K: Tensor
    """Tokens that one of them may see."""
    mask_QK: Tensor
    """Summand of the attention's logits. In bool, torch would make and keep one for each layer."""


def _summand_of(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 for a token that is seen, and the least number for one that is not."""
    return torch.zeros_like(is_seen, dtype=dtype).masked_fill_(~is_seen, torch.finfo(dtype).min)


_forest: ContextVar[Forest | None] = ContextVar("forest", default=None)
_block_queries = ContextVar("block_queries", default=BLOCK_QUERIES)


@contextlib.contextmanager
def of_blocks(num_queries: int) -> Iterator[None]:
    """Attend in blocks of another size in the body."""
    token = _block_queries.set(num_queries)
    try:
        yield
    finally:
        _block_queries.reset(token)


@contextlib.contextmanager
def reading(forest: Forest | None) -> Iterator[dict[str, Tensor]]:
    """Compute the body's forward pass over a forest, or over rows if there is none; yield the pass's arguments."""
    token = _forest.set(forest)
    try:
        if forest is None:
            yield {}
        else:  # without a mask of padding, transformers takes positions that jump for those of packed sequences
            depth_1T = forest.depth_T[None]
            yield {"position_ids": depth_1T, "attention_mask": torch.ones_like(depth_1T)}
    finally:
        _forest.reset(token)


def attend(base: transformers.PreTrainedModel) -> None:
    """Let a model attend over forests and rows, unless it computes attention itself; then its masks do."""
    if base.get_decoder().config._attn_implementation == "sdpa":  # type: ignore[no-untyped-call]
        base.set_attn_implementation(NAME)


def _mask(mask_function: Rule, **kwargs: Any) -> Any:
    if (forest := _forest.get()) is None:
        return sdpa_mask(mask_function=mask_function, **kwargs)
    return forest.block_mask(mask_function) if forest.depth_T.is_cuda else forest.blocks(mask_function)


def _summand(mask_function: Rule, dtype: torch.dtype, **kwargs: Any) -> Any:
    if (forest := _forest.get()) is None:
        return eager_mask(mask_function=mask_function, dtype=dtype, **kwargs)
    return forest.summand(mask_function, dtype)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend in float32 on CPUs, where the backward pass in bfloat16 takes five times as long."""
    device, dtype = query.device.type, query.dtype
    if device != "cpu" or dtype != torch.bfloat16:
        return _attend_as_given(module, query, key, value, attention_mask, *args, **kwargs)
    with torch.autocast(device, enabled=False):
        if isinstance(attention_mask, Tensor) and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        floats = query.float(), key.float(), value.float()
        output, weights = _attend_as_given(module, *floats, attention_mask, *args, **kwargs)
    return output.to(dtype), weights


def _attend_as_given(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attention_mask is None or isinstance(attention_mask, Tensor):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    is_grouped = query.shape[1] != key.shape[1]
    if isinstance(attention_mask, BlockMask):
        flex, options = _flex(query.is_cuda), {"scale": scaling, "enable_gqa": is_grouped}
        result = flex(query, key, value, block_mask=attention_mask, **options)
    else:
        result = _attend_in_blocks(query, key, value, attention_mask, scaling, is_grouped)
    return result.transpose(1, 2).contiguous(), None


@cache
def _flex(is_compiled: bool) -> Callable[..., Tensor]:
    """Return FlexAttention, which a GPU computes fast only if it is compiled; a CPU has no backward pass of it."""
    return torch.compile(flex_attention, dynamic=True) if is_compiled else flex_attention  # type: ignore[return-value]


def _attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scaling: float | None, is_grouped: bool
) -> Tensor:
    def attend(part: Tensor, key: Tensor, value: Tensor, block: Block) -> Tensor:
        seen = key.index_select(2, block.key_K), value.index_select(2, block.key_K)
        return scaled_dot_product_attention(
            part, *seen, attn_mask=block.mask_QK.to(part.dtype), scale=scaling, enable_gqa=is_grouped
        )

    parts = zip(torch.split(query, [len(block.mask_QK) for block in blocks], 2), blocks, strict=True)
    if sum(len(block.key_K) for block in blocks) > MOST_COPIES * query.shape[2]:
        attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([attend(part, key, value, block) for part, block in parts], 2)


transformers.AttentionInterface.register(NAME, _attend)
transformers.AttentionMaskInterface.register(NAME, _mask)
transformers.AttentionMaskInterface.register("eager", _summand)
