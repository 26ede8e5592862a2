"""Make control characters visible in text that reaches a terminal or a log, and markup in text that reaches Markdown.

Text from opponents, servers and other people's files may hold escape sequences, which would set the terminal's title,
clear its screen or write to its clipboard. Knows nothing of the text's origin.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

_VISIBLE = {
    code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in ("\n", "\t")
}


def visible(text: str) -> str:
    r"""Return `text` with C0 (except newline and tab), DEL and C1 control characters written as `\xNN`."""
    return text.translate(_VISIBLE)


_MARKUP = re.compile(r"[\\`*\[\]<>|&~$!#]|(?<!\w)_|_(?!\w)")


def as_markdown(text: str) -> str:
    """Return one line that Markdown, also in a table, shows as `text`."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(visible(text).split()))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, whose first row is the head."""
    lines = rows[0], ["---"] * len(rows[0]), *rows[1:]
    return "".join(f"| {' | '.join(map(as_markdown, line))} |\n" for line in lines)


class VisibleFormatter(logging.Formatter):
    """Format log records, tracebacks included, with control characters made visible."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
