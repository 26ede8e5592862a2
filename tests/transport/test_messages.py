from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.errors import ProtocolError
from unstable_lite.transport import messages
from unstable_lite.transport.messages import (
    PROTOCOL,
    REPLIES,
    SAME_LENGTH,
    Failed,
    Generate,
    Generated,
    Message,
    Update,
    Updated,
    decode,
    encode,
    pack_all,
    unpack_all,
)
from unstable_lite.types import Generation, Logprobs, StepContext, TokenIds, TrainItem

_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    if hint == TokenIds:
        return st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda ids: np.array(ids, np.int32))
    if hint == Logprobs:
        return st.lists(st.floats(width=32)).map(lambda values: np.array(values, np.float32))
    if is_dataclass(hint) or _is_struct(hint):
        return _instances(hint)
    if hint == StepContext | None:
        return st.none() | _instances(StepContext)
    if hint == tuple[str, ...]:
        return st.lists(st.text()).map(tuple)
    if hint == tuple[float, ...]:
        return st.lists(st.floats(allow_nan=False)).map(tuple)
    if get_origin(hint) is tuple:
        return st.lists(_values(get_args(hint)[0]), max_size=3).map(tuple)
    if hint == dict[str, float]:
        return st.dictionaries(st.text(), st.floats())
    if hint == dict[str, Any]:
        return st.dictionaries(st.text(), _anything)
    if hint == dict[str, int]:
        return st.dictionaries(st.text(), st.integers(0, 2**63 - 1))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(),
        str: st.text(),
        bytes: st.binary(),
        str | None: st.none() | st.text(),
        int | None: st.none() | st.integers(0, 2**63 - 1),
    }
    if hint in plain:
        return plain[hint]
    return st.sampled_from(get_args(hint))  # a Literal


def _is_struct(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, msgspec.Struct)


def _instances(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    names = cls.__struct_fields__ if _is_struct(cls) else [field.name for field in fields(cls)]
    built = st.builds(cls, **{name: _values(hints[name]) for name in names})
    return built.map(_with_equal_lengths) if cls in SAME_LENGTH else built


def _with_equal_lengths(instance: Any) -> Any:
    one, other = SAME_LENGTH[type(instance)]
    return replace(instance, **{one: np.resize(getattr(instance, one), len(getattr(instance, other)))})


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if type(a) is not type(b):
        return False
    if _is_struct(type(a)):
        return all(_same(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if is_dataclass(a):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))


@given(st.lists(st.one_of([_instances(cls) for cls in get_args(Message)]), max_size=4))
def test_every_message_comes_back_as_it_went(sent: list[Message]) -> None:
    received = decode(encode(sent))
    assert len(received) == len(sent)
    assert all(map(_same, sent, received))


def test_what_answers_a_request_is_what_its_docstring_names() -> None:
    requests = {cls: doc.partition("Reply: `")[2] for cls in get_args(Message) if "Reply: `" in (doc := cls.__doc__)}
    named = {cls: reply.partition("`")[0] for cls, reply in requests.items() if "request_id" in cls.__slots__}
    assert {cls: reply.__name__ for cls, reply in REPLIES.items()} == named


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
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def _assert_well_typed(value: Any, hint: Any) -> None:
    if hint in (TokenIds, Logprobs):
        assert value.dtype == ("<i4" if hint == TokenIds else "<f4")
    elif hint == StepContext | None:
        if value is not None:
            _assert_well_typed(value, StepContext)
    elif is_dataclass(hint) or _is_struct(hint):
        for name, inner in get_type_hints(hint).items():
            _assert_well_typed(getattr(value, name), inner)
        if hint in SAME_LENGTH:
            one, other = SAME_LENGTH[hint]
            assert len(getattr(value, one)) == len(getattr(value, other))
    elif get_origin(hint) in (tuple, dict):
        assert type(value) is get_origin(hint)
        for item in value.values() if isinstance(value, dict) else value:
            _assert_well_typed(item, get_args(hint)[-1 if isinstance(value, dict) else 0])
    elif get_origin(hint) is Literal:
        assert value in get_args(hint)
    elif hint is not Any:
        assert type(value) in (get_args(hint) or (hint,))
        assert type(value) is not int or -(2**63) <= value < 2**63


@given(st.data(), st.sampled_from(get_args(Message)))
def test_one_field_of_another_kind_gives_a_protocol_error_or_a_well_typed_message(data: Any, cls: Any) -> None:
    (_, ((tag, *values),)) = msgpack.unpackb(encode([data.draw(_instances(cls))]))
    if values:
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(_json_like)
    try:
        (message,) = decode(msgpack.packb([PROTOCOL, [[tag, *values]]]))
    except ProtocolError:
        return
    _assert_well_typed(message, cls)
    encode([message])  # what was let in is whole: it can be sent on


@pytest.mark.parametrize(
    ("envelope", "says"),
    [
        ([PROTOCOL + 1, []], "protocol"),
        ([PROTOCOL, [["NoSuchMessage", 1]]], "unknown message"),
        ([PROTOCOL, [[["unhashable"], 1]]], "unknown message"),
        ([PROTOCOL, [["UnloadAdapter", 1]]], "expected 2 fields"),
        ([PROTOCOL, [["UnloadAdapter", 1, "two"]]], "UnloadAdapter.version"),
        ([PROTOCOL, [["UnloadAdapter", 1, True]]], "UnloadAdapter.version: bool"),
        ([PROTOCOL, [["UnloadAdapter", 1, 2**63]]], "UnloadAdapter.version: 9223372036854775808 is more than 64 bits"),
        ([PROTOCOL, [["Updated", 1, {"loss": "low"}, None, [], [], ""]]], "Updated.metrics: an item is str"),
        ([PROTOCOL, [["Updated", 1, {"loss": [1.0]}, None, [], [], ""]]], "Updated.metrics: an item is list"),
        ([PROTOCOL, [["FineTuned", 1, {}, {"too long": 0.5}]]], "FineTuned.left_out: an item is float"),
        ([PROTOCOL, [["Ready", {"bytes": b"x"}]]], "Ready.facts: bytes"),
        ([PROTOCOL, [["Ready", {"when": msgpack.Timestamp(1)}]]], "not msgpack|Ready.facts"),
        ([PROTOCOL, [["Ready", {b"kind": 1}]]], "not text"),
        ([PROTOCOL, [["Generated", 1, [b"", bytes(8), bytes(4), "", "stop", 0]]]], "1 logprobs, 2 completion_ids"),
        ([PROTOCOL, [["Generated", 1, [b"", b"", b"", "", "tired", 0]]]], "'tired' is none of"),
        ([PROTOCOL, [["Generated", 1, [b"123", b"", b"", "", "stop", 0]]]], "3 bytes are not a whole number"),
        ([PROTOCOL, [["Generated", 1, [b"", b"", b"", "", "stop", 0, 0]]]], "expected 6 fields, got 7"),
        ([PROTOCOL, [["Generated", 1, [b"", b"", b"", "", "stop", 0], 0]]], "expected 2 fields, got 3"),
        ([PROTOCOL, [["Generated", 2**63, [b"", b"", b"", "", "stop", 0]]]], "more than 64 bits"),
        ([PROTOCOL, [["Scored", 1, [[bytes(8), bytes(4)]]]]], "Scored.logprobs: 2 adapter, 1 base"),
        ([float(PROTOCOL), []], f"peer speaks protocol {PROTOCOL}.0, this side speaks {PROTOCOL}"),
        ({"a": 1}, "not \\[protocol, messages\\]"),
    ],
)
def test_what_is_not_ours_is_refused_by_name(envelope: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        decode(msgpack.packb(envelope))


def _nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


def _in_envelope(content: bytes) -> bytes:
    """[PROTOCOL, [content]]"""
    return b"\x92" + bytes([PROTOCOL]) + b"\x91" + content


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_nested(5000), id="lists nested deeper than msgpack goes"),
        pytest.param(_in_envelope(_nested(1000)), id="a message nested deeper than Python goes"),
        pytest.param(b"\x92" + _nested(1000) + b"\x90", id="a version nested deeper than Python goes"),
        pytest.param(_in_envelope(b"\x92\xa5Ready\x81\xa1x" + _nested(900)), id="facts nested without end"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list of four billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a table of four billion"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="four billion bytes"),
        pytest.param((b"\xdd" + (60_000).to_bytes(4, "big")) * 1000 + b"\xc0" * 60_000, id="lists of lists of lists"),
        pytest.param(b"\x90" * 65_536, id="what follows the end"),
        pytest.param(_in_envelope(b"\x92\xa5Ready\x82\xa1x\x01\xa1x\x02"), id="a key twice"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_frame_that_claims_or_hides_too_much_is_refused_in_little_memory(frame: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 29
    finally:
        tracemalloc.stop()


def test_a_list_longer_than_any_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_ITEMS", 10)
    with pytest.raises(ProtocolError, match="not msgpack"):
        decode(encode([Failed(request_id=1, error="x")] * 11))


def test_memory_of_a_frame_is_bounded_by_its_size() -> None:
    """The worst there is: tables of nothing, a byte each."""
    frame = _in_envelope(b"\xdd" + (100_000).to_bytes(4, "big") + b"\x80" * 100_000)
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(frame)


def test_a_frame_that_claims_more_memory_than_there_is_is_refused() -> None:
    code = """
import resource
from unstable_lite.errors import ProtocolError
from unstable_lite.transport.messages import decode
resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))
try:
    decode((b"\\xdd" + (1_000_000).to_bytes(4, "big")) * 1000 + bytes(1_000_000))
except ProtocolError:
    print("refused")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "refused\n", ended.stderr


@pytest.mark.parametrize(("error", "says"), [("\ud800", "surrogates not allowed"), ("x" * 2000, "the limit is 1000")])
def test_what_no_frame_can_hold_is_refused_by_the_sender(
    error: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ProtocolError, match=f"cannot be sent.*{says}"):
        encode([Failed(request_id=1, error=error)])


def test_steps_on_disk_are_held_to_the_same() -> None:
    assert unpack_all(Failed, pack_all(Failed, [Failed(request_id=1, error="x")])) == [Failed(request_id=1, error="x")]
    for content in ([PROTOCOL, [7]], [PROTOCOL, [[1, 2]]], [PROTOCOL, [[True, "x"]]], [PROTOCOL + 1, []], 7):
        with pytest.raises(ProtocolError):
            unpack_all(Failed, msgpack.packb(content))


def test_an_oversized_frame_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    updated = encode([Updated(request_id=1, metrics={"loss": 1.0}, skipped=None)])
    generated = msgpack.packb([PROTOCOL, [["Generated", 1, [b"", b"", b"", "", "stop", 0]]]])
    assert decode(updated) and decode(generated)
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 10)
    for frame in (updated, generated):
        with pytest.raises(ProtocolError, match="the limit is 10"):
            decode(frame)


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
