"""Incremental detokenization gives the text of any tokens."""

from __future__ import annotations

import pytest

from fakes.byte_tokens import BYTE_TOKENS, ids_of
from unstable_lite.models.detokenizer import IncrementalDetokenizer


def streamed(ids: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(BYTE_TOKENS, skip_special_tokens=True)
    return [stream.step(token_id) for token_id in ids]


def test_character_comes_out_with_its_last_byte() -> None:
    assert streamed(ids_of("a", "\u2581a", "é".encode(), "b")) == ["a", " a", "", "é", "b"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (ids_of(b"\xc3\xa9\x80", "b"), "é\ufffdb"),
        (ids_of("a", "🎲".encode(), b"\xc3", "\u2581a", "b"), "a🎲\ufffd ab"),
        (ids_of(b"AB\xc3", "b", b"\x80", "b"), "AB\ufffdb\ufffdb"),
    ],
)
def test_invalid_bytes_do_not_change_text_already_returned(ids: list[int], expected: str) -> None:
    assert "".join(streamed(ids)) == expected
