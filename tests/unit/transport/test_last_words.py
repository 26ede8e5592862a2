"""The last message of a worker that an error ends."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from unstable_lite.errors import ConfigError
from unstable_lite.reward_transformations.transforms import ComposeFinalRewardTransforms
from unstable_lite.rng import derive_seed
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


def raises(error: Exception) -> Callable[[], object]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (lambda: derive_seed(0, object()).nope, "AttributeError"),  # type: ignore[attr-defined]
        (lambda: ComposeFinalRewardTransforms([raises])(1.0, 0, "env"), "TypeError"),
        (lambda: torch.zeros(2) @ torch.zeros(3), "RuntimeError"),
        (lambda: Path("/no/such/file").read_text(), "FileNotFoundError"),
        (lambda: Path(b"/").read_text(), "TypeError"),  # type: ignore[arg-type]
    ],
    ids=["its own", "called by the package", "in torch", "no file", "in Python's library"],
)
def test_error_has_the_users_line_as_its_place(code: Callable[[], object], name: str) -> None:
    with pytest.raises(Exception) as caught:
        code()
    words = last_words(caught.value)
    line = code.__code__.co_firstlineno
    assert words.place == f"{name} {__file__}:{line}"
    assert f"(test_last_words.py, line {line}, in <lambda>)" in words.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory"),
        ConnectionResetError(),
        TimeoutError(),
        OSError(errno.ENOSPC, "no space"),
    ],
    ids=repr,
)
def test_error_from_outside_of_the_code_has_no_place(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        raises(error)()
    assert last_words(caught.value).place == ""


def test_mistake_below_the_package_alone_has_the_packages_line() -> None:
    with pytest.raises(TypeError) as caught:
        ComposeFinalRewardTransforms(5)  # type: ignore[arg-type]
    caught.value.__traceback__ = caught.tb.tb_next  # as in a worker, whose own frames are the package's
    assert re.fullmatch(r"TypeError .*/reward_transformations/transforms.py:\d+", last_words(caught.value).place)
