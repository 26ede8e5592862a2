"""The tokens that are trained, and the tokens that are computed for them."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.game_records import make_item
from unstable_lite.errors import RequestError
from unstable_lite.learner import batching
from unstable_lite.learner.batching import MicroBatch, check, fit, make_micro_batches, whole_ids
from unstable_lite.types import Forced, TrainItem


def item(num_prompt: int, num_completion: int, first_id: int = 1) -> TrainItem:
    ids = range(first_id, first_id + num_prompt + num_completion)
    return make_item(ids[:num_prompt], ids[num_prompt:])


def forced(at: int, *ids: int) -> Forced:
    return Forced(at=at, ids=np.array(ids or [1], np.int32))


def read_until(batch: MicroBatch, position: int) -> list[int]:
    """Return the tokens that the model reads until a position of the flattened batch, in order."""
    if batch.forest is None:
        row, column = divmod(position, batch.tokens_BT.shape[1])
        return batch.tokens_BT[row, : column + 1].tolist()
    every = torch.arange(batch.tokens_BT.numel())
    is_seen_T = batch.forest.sees(torch.tensor(position), every, lambda _, __, query, key: key <= query)
    assert batch.forest.depth_T[is_seen_T].tolist() == list(range(int(is_seen_T.sum())))
    return batch.tokens_BT[0, is_seen_T].tolist()


@pytest.fixture(autouse=True, scope="module")
def forests_cost_nothing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "FOREST_COST", 0.0)
        yield


def test_rows_are_read_where_little_is_shared(monkeypatch):
    monkeypatch.setattr(batching, "FOREST_COST", 1.25)
    for num_shared, is_forest in ((1, False), (2, False), (3, True), (5, True)):  # 2, 4, 6, 10 of 24 are repeated
        items = [make_item([*range(num_shared), *[90 + n] * (n - num_shared - 1)], [1]) for n in (6, 10, 8)]
        (batch,) = make_micro_batches(items, 10_000, None)
        assert (batch.forest is not None) == is_forest
        assert batch.tokens_BT.shape == ((1, 24 - 2 * num_shared) if is_forest else (3, 10))


SEQUENCES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=8),
        st.lists(st.integers(0, 1), min_size=1, max_size=4),
        st.none() | st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), min_size=1, max_size=2)),
    ),
    min_size=1,
    max_size=12,
)
"""Prompts, completions and forced ids over two tokens, so that nearly everything is shared."""


def make_items(given: Sequence[Any]) -> list[TrainItem]:
    """Return items with numbers of their own, so that a mixed-up one would show."""
    items = []
    for number, (prompt, completion, place) in enumerate(given):
        own = {"reward": 1.0 + number, "adapter_version": number}
        if place is not None:
            own["forced"] = forced(min(place[0], len(completion)), *place[1])
        items.append(make_item(prompt, completion, -number - np.arange(len(completion)) / 8, **own))
    return items


@given(given=SEQUENCES, max_tokens=st.integers(1, 60), max_rows=st.none() | st.integers(1, 3), ranks=st.integers(1, 3))
@pytest.mark.parametrize("layout", ["forest", "rows", "separate"])
@pytest.mark.parametrize("of_prompts", [False, True])
def test_each_token_is_predicted_from_its_own_past_alone(layout, of_prompts, given, max_tokens, max_rows, ranks):
    items, limits = make_items(given), (max_tokens, max_rows)
    seen, logprobs = list[int](), [torch.empty(0)] * len(items)
    for rank in range(ranks):
        for batch in make_micro_batches(items, *limits, (rank, ranks), layout=layout, of_prompts=of_prompts):
            seen += batch.rows
            own = [items[row] for row in batch.rows]
            every = [(one.prompt_ids if of_prompts else whole_ids(one)).tolist() for one in own]
            read = every if layout == "separate" else [*map(list, {*map(tuple, every)})]
            assert len(read) == 1 or batch.tokens_BT.numel() <= max_tokens
            assert max_rows is None or len(read) <= max_rows
            assert batch.num_tokens == sum(map(len, every))
            if layout == "forest":  # no two tokens have the same past
                pasts = {tuple(ids[: n + 1]) for ids in read for n in range(len(ids))}
                assert len(pasts) == batch.tokens_BT.numel() and batch.num_padding == 0
            else:
                assert batch.tokens_BT.numel() - batch.num_padding == sum(map(len, read))
                assert batch.tokens_BT.shape == (len(read), max(map(len, read)))
            sources = batch.source_U[batch.index_N].tolist()
            if of_prompts:
                for one, source in zip(own, sources, strict=True):
                    assert read_until(batch, source) == one.prompt_ids.tolist()
                continue
            targets = batch.target_U[batch.index_N].tolist()
            assert targets == [token for one in own for token in one.completion_ids.tolist()]
            assert [read_until(batch, source) for source in sources] == [past for one in own for past in pasts_of(one)]
            numbers = [row for row, one in zip(batch.rows, own, strict=True) for _ in one.completion_ids]
            assert batch.version_N.tolist() == numbers
            assert batch.advantage_N.tolist() == [1 + number for number in numbers]
            means = [one.logprobs.mean() for one in own for _ in one.completion_ids]
            assert batch.sequence_mean(batch.behaviour_logp_N).tolist() == pytest.approx(means)
            batch.scatter(batch.behaviour_logp_N, logprobs)
    assert sorted(seen) == list(range(len(items)))
    assert of_prompts or [each.tolist() for each in logprobs] == [one.logprobs.tolist() for one in items]


def pasts_of(one: TrainItem) -> list[list[int]]:
    """Return what an engine had read before it sampled each token."""
    at, ids = (len(one.completion_ids), []) if one.forced is None else (one.forced.at, one.forced.ids.tolist())
    read, pasts = one.prompt_ids.tolist(), []
    for n, token in enumerate(one.completion_ids.tolist()):
        read = [*read, *(ids if n == at else [])]
        pasts.append(read)
        read = [*read, token]
    return pasts


def test_overlong_steps_are_dropped_whole_and_counted():
    items = [item(3, 2), item(4, 2), item(5, 1), item(9, 1), item(2, 0), item(2, 1)]
    fitted = fit(items, max_train_len=5)
    assert fitted.items == [items[0], items[5]]
    assert (fitted.kept, fitted.num_dropped) == ([0, 5], 4)
    assert fit([replace(items[0], forced=forced(1, 90))], max_train_len=5).num_dropped == 1
    assert fit(items, None).items == [*items[:4], items[5]]


@given(
    given=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=7, unique_by=tuple),
    max_tokens=st.integers(1, 40),
    max_rows=st.none() | st.integers(1, 4),
    cost=st.integers(0, 12),
    layout=st.sampled_from(["forest", "rows"]),
)
def test_micro_batch_cut_has_minimal_cost(given, max_tokens, max_rows, cost, layout):
    """Compare with every way to cut the sorted sequences."""

    def size(group: list[list[int]]) -> int:
        if layout == "rows":
            return len(group) * max(map(len, group))
        return len({tuple(ids[: n + 1]) for ids in group for n in range(len(ids))})

    def is_allowed(group: list[list[int]]) -> bool:
        return len(group) == 1 or (len(group) <= (max_rows or 9) and size(group) <= max_tokens)

    ordered = sorted(given) if layout == "forest" else sorted(given, key=len, reverse=True)
    every = []
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        ends = [i + 1 for i, is_cut in enumerate(cuts) if is_cut] + [len(ordered)]
        groups = [ordered[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if all(map(is_allowed, groups)):
            every.append(sum(map(size, groups)) + cost * len(groups))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(batching.BATCH_COST, "cpu", cost)
        items = [make_item(ids, [1]) for ids in given]
        batches = make_micro_batches(items, max_tokens, max_rows, layout=layout, of_prompts=True)
    sizes = [batch.tokens_BT.numel() for batch in batches]
    assert sum(sizes) + cost * len(sizes) == min(every)
    assert sizes == sorted(sizes, reverse=True)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 8))
def test_parts_of_a_batch_are_disjoint_complete_and_balanced(costs, num_parts):
    parts = [batching._part(np.array(costs, np.int64), (rank, num_parts)) for rank in range(num_parts)]
    assert [row for part in parts for row in range(len(costs))[part]] == list(range(len(costs)))
    totals = [sum(costs[part]) for part in parts]
    assert max(totals) - min(totals) <= 2 * max(costs, default=0)


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
