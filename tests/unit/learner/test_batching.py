"""The tokens that are trained, the amount of padding, and answers after a shared prompt."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from fakes.game_records import make_item
from unstable_lite.errors import RequestError
from unstable_lite.learner import batching
from unstable_lite.learner.answers import answer_hidden, make_answer_batches
from unstable_lite.learner.batching import check, fit, length, make_micro_batches, make_prompt_batches, pad
from unstable_lite.types import Forced, TrainItem


def item(num_prompt: int, num_completion: int, first_id: int = 1) -> TrainItem:
    ids, of = range(first_id, first_id + num_prompt + num_completion), float(first_id)
    own = {"reward": of, "adapter_version": first_id, "trajectory": first_id}
    return make_item(ids[:num_prompt], ids[num_prompt:], [-float(id) for id in ids[num_prompt:]], **own)


def forced(at: int, *ids: int) -> Forced:
    return Forced(at=at, ids=np.array(ids or [1], np.int32))


def test_only_completion_tokens_are_trained_from_the_position_before():
    batch = pad([item(3, 2, first_id=10), item(1, 1, first_id=50)])
    assert batch.tokens_BT.tolist() == [[10, 11, 12, 13, 14], [50, 51, 0, 0, 0]]
    assert batch.target_U.tolist() == [13, 14, 51]
    assert batch.tokens_BT.flatten()[batch.source_U].tolist() == [12, 13, 50]
    assert batch.behaviour_logp_N.tolist() == [-13, -14, -51]
    assert batch.advantage_N.tolist() == [10, 10, 50]
    assert batch.version_N.tolist() == [10, 10, 50]
    assert batch.num_padding == 3


def test_forced_ids_are_read_in_their_place_and_never_trained():
    rows = [replace(item(2, 2, first_id=10), forced=forced(at, 90, 91)) for at in (1, 0, 2)]
    batch = pad([*rows, item(2, 2, first_id=50)])
    assert [length(row) for row in rows] == [6, 6, 6]
    assert batch.tokens_BT.tolist() == [
        [10, 11, 12, 90, 91, 13],
        [10, 11, 90, 91, 12, 13],
        [10, 11, 12, 13, 90, 91],
        [50, 51, 52, 53, 0, 0],
    ]
    assert batch.target_U.tolist() == [12, 13, 12, 13, 12, 13, 52, 53]
    assert batch.tokens_BT.flatten()[batch.source_U].tolist() == [11, 91, 91, 12, 11, 12, 51, 52]
    assert batch.num_padding == 2
    assert fit(rows, max_train_len=5).num_dropped == 3


def test_overlong_steps_are_dropped_whole_and_counted():
    items = [item(3, 2), item(4, 2), item(5, 1), item(9, 1), item(2, 0), item(2, 1)]
    fitted = fit(items, max_train_len=5)
    assert fitted.items == [items[0], items[5]]
    assert (fitted.kept, fitted.num_dropped) == ([0, 5], 4)
    assert fit(items, None).items == [*items[:4], items[5]]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40),
    max_tokens=st.integers(1, 200),
    max_rows=st.none() | st.integers(1, 5),
)
def test_micro_batches_hold_every_item_once_within_their_limits(lengths, max_tokens, max_rows):
    items = [item(p, c, first_id=100 * i) for i, (p, c) in enumerate(lengths)]
    batches = make_micro_batches(items, max_tokens, max_rows)
    for batch in batches:
        rows, width = batch.tokens_BT.shape
        assert rows == 1 or rows * width <= max_tokens
        assert max_rows is None or rows <= max_rows
    trained = sorted(token for batch in batches for token in batch.target_U.tolist())
    assert trained == sorted(token for i in items for token in i.completion_ids.tolist())
    assert sum(b.tokens_BT.numel() - b.num_padding for b in batches) == sum(map(length, items))


def test_items_of_equal_length_share_rows_unpadded_unless_dropout_differs():
    items = [item(5, 3), item(2, 2), item(5, 3, first_id=2), item(2, 2, first_id=2)]
    assert sum(batch.num_padding for batch in make_micro_batches(items, max_tokens=16, max_rows=None)) == 0
    (batch,) = make_micro_batches([item(3, 2), item(3, 2)], max_tokens=100, max_rows=None, share_rows=False)
    assert len(batch.tokens_BT) == 2


def test_items_of_the_same_tokens_share_a_row():
    early, later = (replace(item(3, 2), forced=forced(at, 90)) for at in (1, 2))
    items = [item(3, 2), early, replace(item(3, 2), reward=7.0, logprobs=np.array([-8, -9], np.float32)), later]
    (batch,) = make_micro_batches([*items, item(2, 3)], max_tokens=100, max_rows=None)
    assert sorted(batch.tokens_BT.tolist()) == sorted(
        [*[[1, 2, 3, 4, 5, 0]] * 2, [1, 2, 3, 4, 90, 5], [1, 2, 3, 4, 5, 90]]
    )
    assert sorted(batch.rows) == [0, 1, 2, 3, 4]
    found = [torch.empty(0)] * 5
    batch.scatter(batch.tokens_BT.flatten()[batch.source_U][batch.index_N], found)
    assert [part.tolist() for part in found] == [[3, 4], [3, 90], [3, 4], [3, 4], [2, 3, 4]]
    batch.scatter(batch.target_U[batch.index_N], found)
    assert [part.tolist() for part in found] == [[4, 5], [4, 5], [4, 5], [4, 5], [3, 4, 5]]
    batch.scatter(batch.behaviour_logp_N, found)
    assert found[2].tolist() == [-8, -9]
    batch.scatter(batch.advantage_N, found)
    assert found[2].tolist() == [7, 7]
    batch.scatter(batch.sequence_mean(batch.behaviour_logp_N), found)
    assert [part[0].item() for part in found] == [-4.5, -4.5, -8.5, -4.5, -4]
    assert (batch.num_tokens, batch.num_padding) == (27, 2)


@pytest.mark.parametrize(
    ("num_items", "median_completion"), [(32, 200), (384, 8), (384, 200), (384, 1000)], ids=lambda n: f"{n}"
)
def test_less_than_5_percent_of_a_typical_batch_is_padding(num_items, median_completion):
    """Prompts grow by the turn; answers vary as sampled ones do, most of them short and a few very long."""
    rng = np.random.default_rng(0)
    prompts = 150 + 40 * rng.integers(0, 12, num_items)
    completions = rng.lognormal(np.log(median_completion), 0.8, num_items).clip(1, 4096).astype(int)
    items = [item(int(p), int(c)) for p, c in zip(prompts, completions, strict=True)]
    batches = make_micro_batches(items, max_tokens=16_384, max_rows=None)
    padding = sum(batch.num_padding for batch in batches)
    assert padding / sum(batch.tokens_BT.numel() for batch in batches) < 0.05
    sizes = [batch.tokens_BT.numel() for batch in batches]
    assert sizes == sorted(sizes, reverse=True)


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=7),
    max_tokens=st.integers(1, 900),
    max_rows=st.none() | st.integers(1, 4),
    device=st.sampled_from(["cpu", "cuda"]),
)
def test_micro_batch_cut_has_minimal_cost(lengths, max_tokens, max_rows, device):
    """Compare with every way to cut the sorted rows."""

    def cost(groups: list[list[int]]) -> int:
        return sum(len(group) * max(group) + batching.BATCH_COST[device] for group in groups)

    def is_allowed(group: list[int]) -> bool:
        return len(group) == 1 or (len(group) <= (max_rows or 9) and len(group) * max(group) <= max_tokens)

    ordered = sorted(lengths, reverse=True)
    every = []
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        ends = [i + 1 for i, is_cut in enumerate(cuts) if is_cut] + [len(ordered)]
        groups = [ordered[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if all(map(is_allowed, groups)):
            every.append(cost(groups))
    batches = make_prompt_batches([item(n, 1) for n in lengths], max_tokens, max_rows, device=device)
    assert cost([[lengths[row] for row in batch.rows] for batch in batches]) == min(every)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(item(3, 2), logprobs=np.zeros(1, np.float32)), "item 1: 1 logprobs"),
        (item(3, 2, first_id=98), "item 1: token id 100"),
        (item(3, 2, first_id=-1), "token id -1"),
        (item(0, 2), "empty prompt"),
        *(
            (replace(item(2, 2), forced=forced(at)), f"item 1: forced ids at {at} of 2 completion tokens")
            for at in (-1, 3)
        ),
        (replace(item(2, 2), forced=forced(1, 100)), "token id 100 is outside"),
    ],
)
def test_items_that_no_engine_can_have_sampled_are_refused(broken, message):
    with pytest.raises(RequestError, match=message):
        check([item(3, 2), broken], vocab_size=100)


SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, Any] = {
    "Qwen3": lambda: transformers.Qwen3Config(**SMALL, **HEADS),
    "Gemma3 with a window": lambda: transformers.Gemma3TextConfig(
        **SMALL, **HEADS, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "LFM2 with convolutions": lambda: transformers.Lfm2Config(
        **SMALL, **HEADS, layer_types=["conv", "full_attention"] * 2
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_tokens", [8, 40, 10_000])
def test_answers_after_a_shared_prompt_are_computed_as_whole_sequences(name, max_tokens):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).eval()
    decoder, rng = model.get_decoder(), np.random.default_rng(0)
    prompts = [rng.integers(2, 60, length).astype(np.int32) for length in (5, 9, 5, 7)]
    sizes: tuple[tuple[int, ...], ...] = ((1, 3), (2,), (4, 1, 2), ())
    answers = [[rng.integers(2, 60, length).astype(np.int32) for length in lengths] for lengths in sizes]
    seen = set()
    with torch.no_grad():
        for batch in make_answer_batches(prompts, answers, max_tokens):
            assert len(batch.answers) == 1 or len(batch.answers) * batch.prompt_BP.shape[1] <= max_tokens
            hidden_KAD = answer_hidden(decoder, batch)
            for k, (row, option) in enumerate(batch.answers):
                seen.add((row, option))
                whole = torch.from_numpy(np.concatenate([prompts[row], answers[row][option]]).astype(np.int64))
                expected = decoder(input_ids=whole[None]).last_hidden_state[0, len(prompts[row]) - 1 : -1]
                assert torch.allclose(hidden_KAD[k, : len(expected)], expected, atol=2e-5)
                assert batch.is_token_KA[k].sum() == len(answers[row][option])
    assert seen == {(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)}
