"""The bytes of messages.

A frame is msgpack: `[PROTOCOL, [[name, field, …], …]]`. Queued messages share one frame. msgspec checks every field on
arrival. Token arrays are little-endian `bin`, not lists.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from unstable_lite.errors import ProtocolError
from unstable_lite.transport.messages import MESSAGES, Message
from unstable_lite.types import TokenIds

T = TypeVar("T")

PROTOCOL = 9
MAX_FRAME_BYTES = 1 << 30
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class _Frame(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    protocol: int
    values: msgspec.Raw
    """Read to its end, but not yet unpacked, so that no list in it claims memory that it does not fill."""


def encode(messages: Sequence[Message]) -> bytes:
    """Pack messages into one frame. Raises ProtocolError if they cannot be sent."""
    return _pack(messages)


def decode(frame: bytes) -> list[Message]:
    """Unpack the messages of one frame.

    Raises ProtocolError if the frame is malformed, oversized, of another protocol version, or has fields of a wrong
    type.
    """
    return _unpack(frame, _MESSAGES)


def pack_all(values: Iterable[Any]) -> bytes:
    """Pack values of one type without names into the content of a file."""
    return _pack(list(values))


def unpack_all(cls: type[T], content: bytes) -> list[T]:
    """Unpack values that `pack_all` packed. Raises ProtocolError for any other content."""
    return _unpack(content, msgspec.msgpack.Decoder(list[cls], dec_hook=_to_array))  # type: ignore[valid-type]


def _pack(values: Any) -> bytes:
    try:
        frame = _ENCODER.encode([PROTOCOL, values])
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"cannot be sent: a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    return frame


def _unpack(content: bytes, values: msgspec.msgpack.Decoder[list[T]]) -> list[T]:
    if len(content) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(content)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        frame = _FRAME.decode(content)
        if frame.protocol != PROTOCOL:
            raise ProtocolError(f"peer uses protocol {frame.protocol}, this process uses {PROTOCOL}")
        return values.decode(frame.values)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"frame of {len(content)} bytes is malformed: {error}") from error


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.astype(_INT32 if value.dtype.kind == "i" else _FLOAT32, copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):  # a subclass, such as torch's version
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _to_array(hint: Any, value: Any) -> Any:
    if type(value) is not bytes:
        raise ValueError(f"expected the bytes of an array, got {type(value).__name__}")
    return np.frombuffer(value, _INT32 if hint == TokenIds else _FLOAT32)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_plain)
_FRAME = msgspec.msgpack.Decoder(_Frame)
_ANY_MESSAGE: Any = functools.reduce(operator.or_, MESSAGES)
_MESSAGES: msgspec.msgpack.Decoder[list[Message]] = msgspec.msgpack.Decoder(list[_ANY_MESSAGE], dec_hook=_to_array)
