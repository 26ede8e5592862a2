r"""An env of questions with known answers, from a file of lines `{"question": TEXT, "answer": TEXT or NUMBER}`.

An answer is compared with the expected one as exact numbers if both are numbers, else as text: `1/2`, `0.5`, `.50` and
`\frac{1}{2}` are one number; `1,000` is 1000. No algebra: `x + 1` is not `1 + x`. A line may have an `id`.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from unstable_lite.config.env_ids import QUESTIONS
from unstable_lite.errors import ConfigError
from unstable_lite.games.answers import plain
from unstable_lite.games.local_game import LocalGame
from unstable_lite.rng import question_number

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
    path = Path(env_id.removeprefix(QUESTIONS))
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


MOST_DIGITS = 400
"""Length of the longest text that is read as a number."""
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_WITH_UNIT = re.compile(
    rf"([+-]?)([$€£¥#]?)([+-]?)(?:(\d+) (?=\d+/\d+\D*$))?({_NUMBER})(?:/([+-]?{_NUMBER}))?([%°$€£¥]?)", re.ASCII
)
"""A number, with the whole part of `3 1/2` apart."""
_LIST = re.compile(r"\d\s*,\s+\d|\d\s+,")
_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)|(?<=\d)\s+(?=[^\W\d])")
"""Spaces except those between two words, or two numbers: `4 2` is not 42."""
_PRODUCT = re.compile(r"(?<![\w)}])\(([\w.]+)\)(?=/)")
"""Parentheses around a numerator that means the same without them: `(2π)/3`."""
_CHOICE = re.compile(r"\(([a-z])\)")
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x2212: "-"}
"""Full-width forms of ASCII, and the sign of minus."""


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer means the same as the expected one.

    A pair of square brackets around the answer, in which games take their moves, is left out if it is not expected; so
    are braces, which LaTeX does not show.
    """
    candidates = [_normalised(answer)]
    is_braced = answer.lstrip().startswith("{") and candidates[0][:1] + candidates[0][-1:] == "{}"
    if is_braced or candidates[0][:1] + candidates[0][-1:] == "[]":
        candidates.append(candidates[0][1:-1].strip())
    return any(_is_same(candidate, _normalised(expected)) for candidate in candidates)


def _is_same(answer: str, expected: str) -> bool:
    number, other = _number(answer), _number(expected)
    if number is None or other is None:
        return _text(answer) == _text(expected)
    return number[0] == other[0] and (number[1] == other[1] or not (number[1] and other[1]))


def _normalised(text: str) -> str:
    """Return the text without LaTeX, a final full stop, and repeated spaces."""
    return " ".join(plain(text.translate(_WIDE)).split()).removesuffix(".").casefold()


def _text(text: str) -> str:
    """Return the text to compare: without extra spaces, outer `$`, and parentheses around one letter."""
    text = _PRODUCT.sub(r"\1", _SPACE.sub("", text))
    text = text.strip("$") or text
    return choice[1] if (choice := _CHOICE.fullmatch(text)) else text


def _number(text: str) -> tuple[Fraction, str] | None:
    """Return the number that a normalised text is, with its unit ("" if it has none), or None."""
    if len(text) > MOST_DIGITS or _LIST.search(text):
        return None
    found = _WITH_UNIT.fullmatch(_SPACE.sub("", text))
    if found is None:
        return None
    sign, currency, inner_sign, whole, above, below, unit = found.groups()
    dividend, divisor = Fraction(above.replace(",", "")), Fraction((below or "1").replace(",", ""))
    if not divisor or (sign and inner_sign) or (whole and dividend >= divisor):
        return None
    value = int(whole or 0) + dividend / divisor
    return value * (-1 if "-" in sign + inner_sign else 1), currency or unit


class QuestionGame(LocalGame):
    """The reward is 1 for the right answer and 0 for any other. No answer counts as an invalid move."""

    teams = None
    eliminated = ()
    num_players = 1

    def __init__(self, env_id: str, num_players: int, seed: int, error_allowance: int = 0) -> None:
        """Choose the question by the seed. `error_allowance`: number of times that no answer may be repeated.

        Raises ConfigError for a file that cannot be used, or another number of players.
        """
        if num_players != 1:
            advice = "set num_players = 1, and in training num_actors = 1, too"
            raise ConfigError(f"questions have one player, not num_players = {num_players}: {advice}")
        questions = read_questions(env_id).items
        self.env_id = env_id
        self._asked = questions[question_number(seed) % len(questions)]
        self.was_invalid = False
        """Whether the last action was no answer."""
        self._error_allowance = error_allowance
        self._num_errors = 0
        self._is_right = False

    def reseed(self, seed: int) -> None:
        """Do nothing: after its choice of a question, a game has no chance."""

    def observe(self) -> tuple[int, str]:
        """Return player 0 and the question."""
        remark = "\n\nThere was no answer inside \\boxed{}. Answer again." * bool(self._num_errors)
        return 0, self._asked.question + remark

    def step(self, action: str) -> bool:
        """Judge the content of the answer's box, empty without one; return whether the game is over."""
        self.was_invalid = not action.strip()
        self._is_right = not self.was_invalid and is_right(action, self._asked.expected)
        self._num_errors += self.was_invalid
        return not self.was_invalid or self._num_errors > self._error_allowance

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        """Return the reward, and remarks that hold the question's id."""
        reason = "There was no answer inside \\boxed{}; " * self.was_invalid + f"expected: {self._asked.expected}"
        return self.rewards_so_far(), {0: {"id": self._asked.id, "invalid_move": self.was_invalid, "reason": reason}}

    def rewards_so_far(self) -> dict[int, float]:
        return {0: float(self._is_right)}
