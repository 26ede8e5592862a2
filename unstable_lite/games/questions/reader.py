"""Read a file of questions: JSONL, each line `{"question": TEXT, "answer": TEXT or NUMBER, "id": TEXT or NUMBER}`."""

from __future__ import annotations

import codecs
import hashlib
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

import msgspec

from unstable_lite.config.env_ids import questions_path
from unstable_lite.errors import ConfigError

MOST_BYTES = 64 << 20
SHOWN_PROBLEMS = 3


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the file."""

    question: str
    answer: str | int | float
    id: str | int | None = None

    @property
    def expected(self) -> str:
        """Answer as text, without an exponent."""
        return f"{Decimal(repr(self.answer)):f}" if isinstance(self.answer, float) else str(self.answer)


@dataclass(frozen=True, slots=True)
class Questions:
    items: tuple[Question, ...]
    sha256: str
    """Digest of the file."""


@cache
def read_questions(env_id: str) -> Questions:
    """Return the questions of `questions:PATH.jsonl`, read once per process.

    Raises ConfigError with the file, and the line of each of the first problems.
    """
    path = questions_path(env_id)
    content = _content(path)
    items: list[Question] = []
    problems: list[str] = []
    line_of: dict[str, int] = {}
    """Line of each question and of each id."""
    decoder = msgspec.json.Decoder(Question)
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            try:
                items.append(decoder.decode(line))
                _check(items[-1], number, line_of)
            except ValueError as error:  # not UTF-8, not JSON, or another form
                problems.append(f"{path}:{number}: {error}")
    if problems:
        more = f"; {len(problems) - SHOWN_PROBLEMS} more lines are invalid" * (len(problems) > SHOWN_PROBLEMS)
        form = 'write a question a line, as UTF-8: {"question": "2 + 3?", "answer": 5}; "id" is optional'
        raise ConfigError(f"{'; '.join(problems[:SHOWN_PROBLEMS])}{more}; {form}")
    if not items:
        raise ConfigError(f"{path} has no question")
    return Questions(tuple(items), hashlib.sha256(content).hexdigest())


def _check(item: Question, number: int, line_of: dict[str, int]) -> None:
    """Raise ValueError if a text is empty, or if an earlier line has the same question or id."""
    if not item.question.strip() or not item.expected.strip():
        raise ValueError("the question or the answer is empty")
    for what, value in (("question", item.question.strip()), ("id", item.id)):
        if value is not None and (first := line_of.setdefault(f"{what} {value}", number)) != number:
            raise ValueError(f"line {first} has the same {what}; keep one")


def _content(path: Path) -> bytes:
    """Return the file. Raises ConfigError if it cannot be read, is not a file (a pipe never ends), or is too large."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ConfigError(f"{path} has {size >> 20} MiB; at most {MOST_BYTES >> 20} fit in memory: split the file")
        return path.read_bytes()
    except OSError as error:
        where = "; a relative path starts at the working directory" * isinstance(error, FileNotFoundError)
        raise ConfigError(f"{path} cannot be read: {error.strerror}{where}") from None
