"""The last message of a worker that an error ends."""

from __future__ import annotations

import msgspec
import pytest

from unstable_lite.errors import ConfigError
from unstable_lite.transport.worker_main import last_words


def own_code() -> None:
    msgspec.json.decode(b"{")


def test_error_names_the_line_of_our_own_code_and_not_of_a_package() -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        own_code()
    words = last_words(caught.value)
    line = own_code.__code__.co_firstlineno + 1
    assert words.error == f"DecodeError: Input data was truncated (test_last_words.py, line {line}, in own_code)"
    assert not words.is_final


def test_error_that_says_what_to_do_names_no_line() -> None:
    words = last_words(ConfigError("learner.x: set it to 1"))
    assert words.error == "ConfigError: learner.x: set it to 1" and words.is_final
