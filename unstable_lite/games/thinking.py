"""Tell an answer from the thinking of a reasoning model, by its tags. Knows text only, no tokens."""

from __future__ import annotations

import re

OPEN, CLOSE = "<think>", "</think>"
END_OF_THINKING = f"\n{CLOSE}\n\n"
"""Text that ends the thinking for a model whose budget is spent, as models themselves write it."""
_TAG = re.compile(r"</?think>")


def leaves_thinking_open(text: str) -> bool:
    """Return whether `text` ends inside an open `<think>`."""
    return text.rfind(OPEN) > text.rfind(CLOSE)


def without_thinking(text: str) -> str | None:
    """Return the text outside `<think>…</think>`, or None if it ends inside an open `<think>`.

    Thinking ends at its first `</think>`; a `<think>` inside it is plain text. Text before a `</think>` that nothing
    opened is thinking, because prompts may open it. A newline replaces thinking, so no box is joined from two parts.
    """
    outside: list[str] = []
    is_thinking, start = False, 0
    for tag in _TAG.finditer(text):
        if tag.group() == CLOSE:
            if not is_thinking:
                outside.clear()
            is_thinking, start = False, tag.end()
        elif not is_thinking:
            outside.append(text[start : tag.start()])
            is_thinking = True
    return None if is_thinking else "\n".join([*outside, text[start:]])
