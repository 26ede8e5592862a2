"""The bytes of messages.

A frame is msgpack: `[PROTOCOL, [[name, field, …], …]]`. Queued messages share one frame. msgspec checks every field on
arrival. Token arrays are little-endian `bin`, not lists.
"""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Iterable
from typing import Any, TypeVar, get_args

import msgpack
import msgspec
import numpy as np

from unstable_lite.errors import ProtocolError
from unstable_lite.transport.messages import MESSAGES, Message

T = TypeVar("T")

PROTOCOL = 14
MAX_FRAME_BYTES = 1 << 30
MAX_ITEMS = 1 << 20
"""Longest accepted list or table, so that a frame cannot claim memory that it does not fill."""
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_ANY_MESSAGE: Any = functools.reduce(operator.or_, MESSAGES)


class _Messages(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Messages of a frame, as a class: msgspec examines a class once, but any other type at each call (40 µs)."""

    messages: list[_ANY_MESSAGE]


@functools.cache
def number_format(array_type: Any) -> np.dtype[Any]:
    """Return the little-endian number format of an array type such as `TokenIds`. Raises TypeError for another type.

    It reads the type itself, because two names of one type need not be equal: numpy 2.5 has `NDArray` as a `type` alias
    on Python 3.12, which msgspec resolves. Bytes that are read in a wrong format become other tokens.
    """
    arguments = get_args(array_type)
    if len(arguments) != 2 or not (scalar := get_args(arguments[1])):
        raise TypeError(f"{array_type} is not a type of arrays")
    number: np.dtype[Any] = np.dtype(scalar[0])
    return number.newbyteorder("<")


def encode(values: Iterable[Any]) -> bytes:
    """Pack messages, or values of one type, into one frame. Raises ProtocolError if they cannot be sent."""
    try:
        plain = msgspec.to_builtins([PROTOCOL, list(values)], builtin_types=(bytes,), enc_hook=_to_plain)
        frame: bytes = msgpack.packb(plain)
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError(f"cannot be sent: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"cannot be sent: a frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes) -> list[Message]:
    """Unpack the messages of one frame.

    Raises ProtocolError if the frame is malformed, oversized, of another protocol version, or has fields of a wrong
    type.
    """
    return _convert([_unpack(frame)], _Messages).messages


def decode_values(cls: type[T], frame: bytes) -> list[T]:
    """Unpack values of one type. Raises ProtocolError for any other content."""
    return _convert(_unpack(frame), list[cls])  # type: ignore[valid-type]


def _unpack(frame: bytes) -> list[Any]:
    """Return the values of `[PROTOCOL, values]`. Needs at most about 70 bytes of memory per byte of the frame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame of {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
    try:
        envelope = msgpack.unpackb(frame, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"frame of {len(frame)} bytes is not msgpack: {error}") from error
    if type(envelope) is not list or len(envelope) != 2 or type(envelope[1]) is not list:
        raise ProtocolError("frame is not [protocol, messages]")
    if type(envelope[0]) is not int or envelope[0] != PROTOCOL:
        raise ProtocolError(f"peer uses protocol {reprlib.repr(envelope[0])}, this process uses {PROTOCOL}")
    values: list[Any] = envelope[1]
    return values


def _convert(values: list[Any], cls: type[T]) -> T:
    try:
        return msgspec.convert(values, cls, dec_hook=_to_array)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(str(error)) from error


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
    return np.frombuffer(value, number_format(hint))
