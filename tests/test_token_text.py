"""Text comes out as its tokens come in, whatever the tokens."""

from __future__ import annotations

import pytest
from byte_tokens import BYTE_TOKENS, ids_of

from unstable_lite.token_text import TextStream


def streamed(ids: list[int]) -> list[str]:
    stream = TextStream(BYTE_TOKENS, skip_special_tokens=True)
    return [stream.step(token_id) for token_id in ids]


def test_a_character_comes_out_with_its_last_byte() -> None:
    assert streamed(ids_of("a", "\u2581a", "é".encode(), "b")) == ["a", " a", "", "é", "b"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (ids_of(b"\xc3\xa9\x80", "b"), "é\ufffdb"),
        (ids_of("a", "🎲".encode(), b"\xc3", "\u2581a", "b"), "a🎲\ufffd ab"),
        (ids_of(b"AB\xc3", "b", b"\x80", "b"), "AB\ufffdb\ufffdb"),
    ],
)
def test_bytes_that_make_no_character_leave_what_was_given_out_as_it_is(ids: list[int], expected: str) -> None:
    assert "".join(streamed(ids)) == expected
