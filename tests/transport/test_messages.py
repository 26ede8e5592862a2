from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.errors import ProtocolError
from unstable_lite.transport import messages
from unstable_lite.transport.messages import PROTOCOL, Generate, Generated, Message, Update, Updated, decode, encode
from unstable_lite.types import Generation, Logprobs, TokenIds, TrainItem


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    if hint == TokenIds:
        return st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda ids: np.array(ids, np.int32))
    if hint == Logprobs:
        return st.lists(st.floats(width=32, allow_nan=False)).map(lambda values: np.array(values, np.float32))
    if is_dataclass(hint):
        return _instances(hint)
    if hint == tuple[str, ...]:
        return st.lists(st.text()).map(tuple)
    if hint == tuple[TrainItem, ...]:
        return st.lists(_instances(TrainItem), max_size=3).map(tuple)
    if hint == dict[str, float] or hint == dict[str, Any]:
        return st.dictionaries(st.text(), st.floats(allow_nan=False))
    if hint == dict[str, int]:
        return st.dictionaries(st.text(), st.integers(0, 2**63 - 1))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(),
        str | None: st.none() | st.text(),
        int | None: st.none() | st.integers(0, 2**63 - 1),
    }
    if hint in plain:
        return plain[hint]
    return st.sampled_from(get_args(hint))  # a Literal


def _instances(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    return st.builds(cls, **{field.name: _values(hints[field.name]) for field in fields(cls)})


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if is_dataclass(a) and type(a) is type(b):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@given(st.lists(st.one_of([_instances(cls) for cls in get_args(Message)]), max_size=4))
def test_every_message_comes_back_as_it_went(sent: list[Message]) -> None:
    received = decode(encode(sent))
    assert len(received) == len(sent)
    assert all(map(_same, sent, received))


def test_arrays_travel_as_four_bytes_a_token_whatever_their_byte_order() -> None:
    ids = np.arange(1000, dtype=">i4")
    generation = Generation(
        prompt_ids=ids,
        completion_ids=ids[:2],
        logprobs=np.array([-1.5, -0.25], ">f4"),
        text="",
        finish_reason="stop",
        adapter_version=3,
    )
    frame = encode([Generated(request_id=1, generation=generation)])
    assert len(frame) < 4100
    (received,) = decode(frame)
    assert isinstance(received, Generated)
    assert received.generation.prompt_ids.tolist() == list(range(1000))
    assert received.generation.logprobs.tolist() == [-1.5, -0.25]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_protocol_error_or_messages(frame: bytes) -> None:
    try:
        decode(frame)
    except ProtocolError:
        pass


_json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=5) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.sampled_from([cls.__name__ for cls in get_args(Message)]), st.lists(_json_like, max_size=9))
def test_fields_of_wrong_number_or_type_give_a_protocol_error_or_a_well_typed_message(
    tag: str, values: list[Any]
) -> None:
    try:
        (message,) = decode(msgpack.packb([PROTOCOL, [[tag, *values]]]))
    except ProtocolError:
        return
    encode([message])  # what was let in is whole: it can be sent on


@pytest.mark.parametrize(
    ("envelope", "says"),
    [
        ([PROTOCOL + 1, []], "protocol"),
        ([PROTOCOL, [["NoSuchMessage", 1]]], "unknown message"),
        ([PROTOCOL, [[["unhashable"], 1]]], "unknown message"),
        ([PROTOCOL, [["UnloadAdapter", 1]]], "expected 2 fields"),
        ([PROTOCOL, [["UnloadAdapter", 1, "two"]]], "UnloadAdapter.version"),
        ({"a": 1}, "not \\[protocol, messages\\]"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(envelope: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(msgpack.packb(envelope))


def test_an_oversized_frame_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ProtocolError, match="the limit is 10"):
        decode(encode([Updated(request_id=1, metrics={"loss": 1.0}, skipped=None)]))


def test_several_messages_share_one_frame() -> None:
    items = tuple(
        TrainItem(
            prompt_ids=np.array([1, 2], np.int32),
            completion_ids=np.array([3], np.int32),
            logprobs=np.array([-0.5], np.float32),
            reward=0.5,
            adapter_version=version,
            trajectory=version,
        )
        for version in range(3)
    )
    generate = Generate(
        request_id=7, prompt="p", adapter_version=0, max_tokens=1, temperature=1, top_p=1, stop=("x",), seed=None
    )
    update = Update(request_id=8, items=items, version=4, path="/dev/shm/x", state_path="/dev/shm/y")
    first, second = decode(encode([generate, update]))
    assert isinstance(first, Generate)
    assert first.stop == ("x",)
    assert isinstance(second, Update)
    assert [item.adapter_version for item in second.items] == [0, 1, 2]
