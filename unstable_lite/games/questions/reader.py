"""Read a file of questions: JSONL, each line `{"question": TEXT, "answer": TEXT or NUMBER, "id": TEXT or NUMBER}`.

Runs no code of the file and prints nothing of its contents.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from unstable_lite.config.env_ids import questions_path
from unstable_lite.errors import ConfigError
from unstable_lite.plugins import suggestion

KEYS = ("question", "answer", "id")
MOST_BYTES = 64 << 20
SHOWN_PROBLEMS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    id: str
    """Value of `id` in the file, or else the line: `line 3`."""
    text: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
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
    try:
        lines = content.decode("utf-8-sig").split("\n")  # a text may contain other separators, such as U+2028
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    items: list[Question] = []
    problems: list[str] = []
    line_of: dict[tuple[str, str], int] = {}
    """Line of each id and of each text."""
    for number, text in enumerate(lines, start=1):
        if text.strip():
            try:
                item = _question(text, number)
                for what, value in (("id", item.id), ("question", item.text)):
                    if (first := line_of.setdefault((what, value), number)) != number:
                        raise ConfigError(f"line {first} has the same {what}; keep one")
                items.append(item)
            except ConfigError as error:
                problems.append(f"{path}:{number}: {error}")
    if len(problems) > SHOWN_PROBLEMS:
        problems[SHOWN_PROBLEMS:] = [f"{path}: {len(problems) - SHOWN_PROBLEMS} more lines are invalid"]
    if not items and not problems:
        problems = [f'{path}: there is no question; write one a line: {{"question": …, "answer": …}}']
    if problems:
        raise ConfigError(*problems)
    return Questions(items=tuple(items), sha256=hashlib.sha256(content).hexdigest())


def _content(path: Path) -> bytes:
    """Return the file. Raises ConfigError if it cannot be read, is not a file (a pipe never ends), or is too large."""
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{path} is not a file")
        if facts.st_size > MOST_BYTES:
            raise ConfigError(
                f"{path} has {facts.st_size >> 20} MiB, and questions are kept in memory: at most {MOST_BYTES >> 20} "
                "MiB. Split the file"
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} cannot be read: {reason}. A relative path starts at the directory of the command"
        ) from None


def _question(line: str, number: int) -> Question:
    """Return the question of a line. Raises ConfigError."""
    try:
        found = json.loads(line, parse_float=Decimal, parse_constant=_refuse)  # Decimal keeps 0.10 as it is written
    except (ValueError, RecursionError) as error:  # not JSON, nested too deep, or a number of thousands of digits
        raise ConfigError(f"not JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"this is {type(found).__name__}, not a JSON object")
    if problems := [*_problems(found)]:
        raise ConfigError("; ".join(problems))
    return Question(
        id=str(found.get("id", f"line {number}")), text=found["question"].strip(), answer=str(found["answer"]).strip()
    )


def _problems(found: dict[str, Any]) -> Iterator[str]:
    for key in found:
        if key not in KEYS:
            yield f"unknown key {key[:40]!r}; {suggestion(key, KEYS)}"
    for key, kinds in (("question", str), ("answer", str | int | Decimal)):
        value = found.get(key)
        if key not in found:
            yield f"{key!r} is missing"
        elif not isinstance(value, kinds) or isinstance(value, bool):
            yield f"{key!r} must be text{' or a number' if key == 'answer' else ''}, not {type(value).__name__}"
        elif not str(value).strip():
            yield f"{key!r} is empty"
    if not isinstance(found.get("id", ""), str | int):
        yield f"'id' must be text or a whole number, not {type(found['id']).__name__}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")
