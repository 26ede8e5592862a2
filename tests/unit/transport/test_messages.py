import tracemalloc
from dataclasses import fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.game_records import make_generation
from unstable_lite.errors import ProtocolError
from unstable_lite.transport import codec
from unstable_lite.transport.codec import PROTOCOL, decode, decode_values, encode, number_format
from unstable_lite.transport.messages import MESSAGES, REPLIES, Failed, Generate, Generated, Reply, Update, Updated
from unstable_lite.types import (
    Generation,
    LearnerLogprobs,
    Logprobs,
    TokenIds,
    TrainItem,
)

_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


_plain: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    str: st.text(),
    bytes: st.binary(),
    NoneType: st.none(),
    Any: _anything,
    TokenIds: st.lists(st.integers(-(2**31), 2**31 - 1)).map(lambda ids: np.array(ids, np.int32)),
    Logprobs: st.lists(st.floats(width=32)).map(lambda values: np.array(values, np.float32)),
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value that a field of this type may hold."""
    kind, inner = get_origin(hint), get_args(hint)
    if hint in _plain:
        return _plain[hint]
    if is_dataclass(hint) or _is_struct(hint):
        return _instances(hint)
    if kind is tuple and Ellipsis in inner:
        return st.lists(_values(inner[0]), max_size=3).map(tuple)
    if kind is tuple:
        return st.tuples(*map(_values, inner))
    if kind is dict:
        return st.dictionaries(*map(_values, inner))
    if kind is Literal:
        return st.sampled_from(inner)
    assert kind in (Union, UnionType), hint
    return st.one_of(*map(_values, inner))


def _is_struct(cls: Any) -> bool:
    return isinstance(cls, type) and issubclass(cls, msgspec.Struct)


def _instances(cls: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls)
    names = cls.__struct_fields__ if _is_struct(cls) else [field.name for field in fields(cls)]
    built = st.builds(cls, **{name: _values(hints[name]) for name in names})
    return built.map(_of_equal_lengths) if cls in (Generation, TrainItem, LearnerLogprobs) else built


def _of_equal_lengths(instance: Any) -> Any:
    if isinstance(instance, Generation | TrainItem):
        return replace(instance, logprobs=np.resize(instance.logprobs, len(instance.completion_ids)))
    return replace(instance, adapter=np.resize(instance.adapter, len(instance.base)))


def _same(a: Any, b: Any) -> bool:
    """Return whether type and value are the same to the last bit, NaN included."""
    return repr(a) == repr(b) and encode([a]) == encode([b])


@given(st.lists(st.one_of([_instances(cls) for cls in MESSAGES]), max_size=4))
def test_every_message_survives_a_round_trip(sent):
    received = decode(encode(sent))
    assert len(received) == len(sent)
    assert all(map(_same, sent, received))


def test_every_request_names_the_type_of_its_reply():
    assert {Generate: Generated, Update: Updated}.items() <= REPLIES.items()
    assert all(issubclass(reply, Reply) and reply in MESSAGES for reply in REPLIES.values())


class Arrays(msgspec.Struct, array_like=True):
    """Arrays of types that equal no name of ours, as numpy 2.5's `NDArray` on Python 3.12."""

    ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    logprobs: np.ndarray[tuple[int], np.dtype[np.float32]]


def test_number_format_of_an_array_is_read_from_its_type_and_never_guessed():
    sent = Arrays(ids=np.array([0, 5, 2**31 - 1], np.int32), logprobs=np.array([-0.5, -1e-9], np.float32))
    (read,) = decode_values(Arrays, encode([sent]))
    for name in ("ids", "logprobs"):
        np.testing.assert_array_equal(getattr(read, name), getattr(sent, name), strict=True)
    for hint in (np.ndarray, list[int], int):
        with pytest.raises(TypeError, match="not a type of arrays"):
            number_format(hint)


def test_arrays_take_four_bytes_per_token_in_any_byte_order():
    ids = np.arange(1000, dtype=">i4")
    generation = replace(
        make_generation([]), prompt_ids=ids, completion_ids=ids[:2], logprobs=np.array([-1.5, -0.25], ">f4")
    )
    frame = encode([Generated(request_id=1, generation=generation)])
    assert len(frame) < 4200
    (received,) = decode(frame)
    assert isinstance(received, Generated)
    assert received.generation.prompt_ids.tolist() == list(range(1000))
    assert received.generation.logprobs.tolist() == [-1.5, -0.25]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_protocol_error_or_messages(frame):
    try:
        decode(frame)
    except ProtocolError:
        pass


_json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.data(), st.sampled_from(MESSAGES))
def test_wrong_field_gives_a_protocol_error_or_a_message_that_can_be_sent_again(data, cls):
    (_, ((tag, *values),)) = msgpack.unpackb(encode([data.draw(_instances(cls))]))
    if values:
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(_json_like)
    try:
        (message,) = decode(msgpack.packb([PROTOCOL, [[tag, *values]]]))
    except ProtocolError:
        return
    assert all(map(_same, decode(encode([message])), [message])), "msgspec writes no value of a wrong type"


def _generated(**changes: Any) -> list[Any]:
    plain = {"prompt_ids": b"", "completion_ids": b"", "logprobs": b"", "text": "", "finish_reason": "stop"}
    return ["Generated", 1, plain | {"adapter_version": 0} | changes]


@pytest.mark.parametrize(
    ("envelope", "says"),
    [
        ([PROTOCOL + 1, []], "protocol"),
        ([PROTOCOL, [["NoSuchMessage", 1]]], "NoSuchMessage"),
        ([PROTOCOL, [[["unhashable"], 1]]], "Expected `str`, got `list`"),
        ([PROTOCOL, [["UnloadAdapter", 1]]], "at least length 3, got 2"),
        ([PROTOCOL, [["UnloadAdapter", 1, 2, 3]]], "at most length 2, got 3"),
        ([PROTOCOL, [["UnloadAdapter", 1, "two"]]], r"Expected `int`, got `str` - at `\$\[0\]\[0\]\[2\]`"),
        ([PROTOCOL, [["UnloadAdapter", 1, True]]], "Expected `int`, got `bool`"),
        ([PROTOCOL, [["Updated", 1, {"loss": "low"}, None, [], [], ""]]], "Expected `float`, got `str`"),
        ([PROTOCOL, [["Updated", 1, {"loss": [1.0]}, None, [], [], ""]]], "Expected `float`, got `array`"),
        ([PROTOCOL, [["EngineStats", 0.5, 1, 2.0, 0.5]]], "Expected `int`, got `float`"),
        ([PROTOCOL, [["Ready", {"bytes": b"x"}]]], "bytes"),
        ([PROTOCOL, [["Ready", {"when": msgpack.Timestamp(1)}]]], "not msgpack|Timestamp"),
        ([PROTOCOL, [["Ready", {b"kind": 1}]]], "Expected `str`, got `bytes`"),
        ([PROTOCOL, [_generated(completion_ids=bytes(8), logprobs=bytes(4))]], "1 logprobs, 2 completion_ids"),
        ([PROTOCOL, [_generated(finish_reason="tired")]], "Invalid enum value 'tired'"),
        ([PROTOCOL, [_generated(prompt_ids=b"123")]], "multiple of element size"),
        ([PROTOCOL, [_generated(prompt_ids="123")]], "str"),
        ([PROTOCOL, [["Generated", 1, []]]], "Expected `object`, got `array`"),
        ([PROTOCOL, [["Scored", 1, [{"adapter": bytes(8), "base": bytes(4)}]]]], "2 adapter, 1 base"),
        ([float(PROTOCOL), []], rf"{PROTOCOL}\.0.* {PROTOCOL}\b"),
        ({"a": 1}, r"\[protocol, messages\]"),
    ],
)
def test_invalid_envelope_is_refused_by_name(envelope, says):
    with pytest.raises(ProtocolError, match=says):
        decode(msgpack.packb(envelope))


def _nested(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


def _in_envelope(content: bytes) -> bytes:
    """Return the encoding of [PROTOCOL, [content]]."""
    return b"\x92" + bytes([PROTOCOL]) + b"\x91" + content


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(_nested(5000), id="lists nested deeper than msgpack goes"),
        pytest.param(_in_envelope(_nested(1000)), id="a message nested deeper than Python goes"),
        pytest.param(b"\x92" + _nested(1000) + b"\x90", id="a version nested deeper than Python goes"),
        pytest.param(_in_envelope(b"\x92\xa5Ready\x81\xa1x" + _nested(900)), id="facts nested without end"),
        pytest.param(
            _in_envelope(b"\x99\xa7MakeEnv\x01\x01\xa1E\x02\x03\xa3env\xc0\x81\xa1x" + _nested(900)),
            id="arguments nested without end",
        ),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="a list of four billion"),
        pytest.param(_in_envelope(b"\x92\xa5Ready\x81\xa1x\xdd\xff\xff\xff\xff"), id="facts of four billion"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="a table of four billion"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="four billion bytes"),
        pytest.param(
            (b"\xdd" + (1_000_000).to_bytes(4, "big")) * 1000 + b"\xc0" * 60_000, id="lists of lists of lists"
        ),
        pytest.param(b"\x90" * 65_536, id="data after the end"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_oversized_or_hidden_content_is_refused_in_little_memory(frame):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 29
    finally:
        tracemalloc.stop()


def test_list_or_frame_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(codec, "MAX_ITEMS", 10)
    with pytest.raises(ProtocolError, match="not msgpack"):
        decode(encode([Failed(request_id=1, error="x")] * 11))
    updated = encode([Updated(request_id=1, metrics={"loss": 1.0}, skipped=None)])
    generated = msgpack.packb([PROTOCOL, [_generated()]])
    assert decode(updated) and decode(generated)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 10)
    for frame in (updated, generated):
        with pytest.raises(ProtocolError, match=r"\b10\b"):
            decode(frame)


def test_memory_of_a_frame_is_bounded_by_its_size():
    """The worst case is a list of empty tables, a byte each."""
    frame = _in_envelope(b"\xdd" + (100_000).to_bytes(4, "big") + b"\x80" * 100_000)
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode(frame)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(frame)


@pytest.mark.parametrize(("error", "says"), [("\ud800", "surrogates not allowed"), ("x" * 2000, "1000")])
def test_sender_refuses_a_message_that_no_frame_can_hold(error, says, monkeypatch):
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ProtocolError, match=says):
        encode([Failed(request_id=1, error=error)])


def test_steps_on_disk_are_checked_in_the_same_way():
    failed = Failed(request_id=1, error="x")
    assert decode_values(Failed, encode([failed])) == [failed]
    for content in ([PROTOCOL, [7]], [PROTOCOL, [["Failed", 1, 2, False]]], [PROTOCOL + 1, []], 7):
        with pytest.raises(ProtocolError):
            decode_values(Failed, msgpack.packb(content))
