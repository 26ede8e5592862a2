"""Decode any bytes as a frame and as the waiting steps of a checkpoint: valid messages or a ProtocolError.

    python tests/fuzz codec -runs=1000000        # coverage-guided, by atheris: pip install -e '.[fuzz]'

`seeds` has a frame of each kind of message; `DICTIONARY` has the words that a mutation may insert.
"""

from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from unstable_lite.errors import ProtocolError
from unstable_lite.transport.codec import decode, decode_values, encode
from unstable_lite.transport.messages import MESSAGES
from unstable_lite.types import Logprobs, Step, TokenIds

DICTIONARY = [
    *(bytes([0xA0 + len(kind.__name__)]) + kind.__name__.encode() for kind in MESSAGES if len(kind.__name__) < 32),
    *(bytes([lead]) for lead in range(0x80, 0x100)),
    *(bytes([lead]) + length for lead in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF) for length in (b"\xff" * 4, b"\0\0\0\x01")),
    *(bytes([lead]) + b"\xff" * 8 for lead in (0xCB, 0xCF, 0xD3)),
    b"\xcb\x7f\xf8" + bytes(6),
    b"\x92\x09\x91",
    b"\x92\x09\x90",
]


def one_input(data: bytes) -> None:
    try:
        messages = decode(data)
    except ProtocolError:
        pass
    else:
        frame = encode(messages)
        assert encode(decode(frame)) == frame
    try:
        chunks = decode_values(list[Step], data)
    except ProtocolError:
        pass
    else:
        content = encode(chunks)
        assert encode(decode_values(list[Step], content)) == content


def seeds() -> list[bytes]:
    messages = [_example(kind) for kind in MESSAGES]
    chunk = [_example(Step)]
    return [encode([message]) for message in messages] + [encode(messages), encode([chunk, chunk])]


def _example(hint: Any) -> Any:
    plain: dict[Any, Any] = {int: 7, float: 0.5, str: "text", bytes: b"bytes", bool: True}
    if hint == TokenIds:
        return np.array([1, 2], np.int32)
    if hint == Logprobs:
        return np.array([-0.5, -1.0], np.float32)
    if is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, msgspec.Struct)):
        hints = get_type_hints(hint)
        names = [field.name for field in fields(hint)] if is_dataclass(hint) else hint.__struct_fields__
        return hint(**{name: _example(hints[name]) for name in names})  # type: ignore[operator]
    if get_origin(hint) is UnionType:
        return _example(get_args(hint)[0])
    if get_origin(hint) is tuple:
        items = [item for item in get_args(hint) if item is not Ellipsis]
        return tuple(_example(item) for item in items)
    if get_origin(hint) is dict:
        inner = get_args(hint)[1]
        return {"key": [1, {"inner": None}] if inner is Any else _example(inner)}
    return get_args(hint)[0] if get_origin(hint) is Literal else plain[hint]
