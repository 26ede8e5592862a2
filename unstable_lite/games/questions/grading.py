r"""Compare an answer with the expected one: as exact numbers if both are numbers, else as text.

`1/2`, `0.5`, `.50` and `\frac{1}{2}` are one number; `1,000` is 1000. No algebra: `x + 1` is not `1 + x`.
"""

from __future__ import annotations

import re
from fractions import Fraction

MOST_DIGITS = 400
"""Length of the longest text that is read as a number."""
_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_PLAIN = re.compile(rf"([+-]?)({_NUMBER})(?:/([+-]?{_NUMBER}))?", re.ASCII)
_FRACTION = re.compile(rf"([+-]?)\\frac\{{([+-]?{_NUMBER})\}}\{{([+-]?{_NUMBER})\}}", re.ASCII)
_WRAPPED = re.compile(r"\\(?:text|texttt|textbf|mathrm|mathbf)\{([^{}]*)\}")
_LATEX = re.compile(r"\\[,;:! ()]|\\left(?![a-z])|\\right(?![a-z])")
"""Spaces of LaTeX, marks of its mathematics, and sizes of brackets."""
_SPACE = re.compile(r"(?<!\w)\s+|\s+(?!\w)")
"""Spaces except those between two words, or two numbers: `4 2` is not 42."""


def is_right(answer: str, expected: str) -> bool:
    """Return whether an answer means the same as the expected one.

    A pair of square brackets around the answer, in which games take their moves, is left out if it is not expected.
    """
    candidates = [answer.strip()]
    if candidates[0].startswith("[") and candidates[0].endswith("]"):
        candidates.append(candidates[0][1:-1])
    return any(_is_same(_normalised(candidate), _normalised(expected)) for candidate in candidates)


def _is_same(answer: str, expected: str) -> bool:
    numbers = _number(answer), _number(expected)
    return answer == expected if None in numbers else numbers[0] == numbers[1]


def _normalised(text: str) -> str:
    """Return the text without extra spaces, outer `$`, a final full stop, and LaTeX that changes no meaning."""
    text = _WRAPPED.sub(r"\1", text).replace("\u2212", "-").replace("{,}", ",")
    text = re.sub(r"\\[dt]frac", r"\\frac", _LATEX.sub("", " ".join(text.split())))
    text = _SPACE.sub("", text)
    return text.strip("$").removesuffix(".").strip("$").casefold()


def _number(text: str) -> Fraction | None:
    """Return the number that a normalised text is, or None."""
    if len(text) > MOST_DIGITS:
        return None
    found = _PLAIN.fullmatch(text) or _FRACTION.fullmatch(text)
    if found is None:
        return None
    sign, above, below = found.groups()
    divisor = _decimal(below or "1")
    if not divisor:
        return None
    return _decimal(above) / divisor * (-1 if sign == "-" else 1)


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))
