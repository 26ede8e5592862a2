r"""Read an answer: the thinking of a reasoning model, the last `\\boxed{}` outside of it, and its LaTeX.

Knows text only, no tokens and no prompts. Games and questions read answers by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache, partial

from unstable_lite import plugins
from unstable_lite.errors import ConfigError

Tags = tuple[str, str]
"""Texts that open and close a thought."""

THINK: Tags = ("<think>", "</think>")
"""Tags of Qwen and DeepSeek, and of every model whose tags are not known."""
KNOWN_TAGS: tuple[Tags, ...] = (
    THINK,
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel|>", "<|channel|>final<|message|>"),  # Harmony: every channel but the final one is thinking
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),  # Kimi
)
_HARMONY_END = "<|end|><|start|>assistant<|channel|>final<|message|>"
_MENTION = re.compile(r"thinking|thought|reasoning_|[._]reasoning|<[^<>]*think", re.IGNORECASE)
"""Names of fields and of tags; prose about tools also says "think" and "reasoning"."""


def find_tags(chat_template: str, tokens: Collection[str]) -> Tags | None:
    """Return the known tags of a model, None if it has none.

    Tags in the text of the chat template come before tags that are only tokens.
    """
    mentioned = [tags for tags in KNOWN_TAGS if tags[0] in chat_template or tags[1] in chat_template]
    have_tokens = [tags for tags in mentioned or KNOWN_TAGS if tags[0] in tokens]
    return next(iter(have_tokens or mentioned), None)


def tags_in(text: str) -> Tags:
    """Return the first known tags of which an answer has one; the usual ones if it has none."""
    return next((tags for tags in KNOWN_TAGS if any(tag in text for tag in tags)), THINK)


def has_unknown_tags(chat_template: str, tokens: Collection[str]) -> bool:
    """Return whether a chat template speaks of thinking, but no known tags mark it."""
    return _MENTION.search(chat_template) is not None and find_tags(chat_template, tokens) is None


def end_of_thinking(tags: Tags) -> str:
    """Return text that ends the thinking for a model whose budget is spent, as models themselves write it."""
    return _HARMONY_END if tags[0].startswith("<|channel|>") else f"\n{tags[1]}\n\n"


END_OF_THINKING = end_of_thinking(THINK)


def leaves_thinking_open(text: str, tags: Tags = THINK) -> bool:
    """Return whether `text` ends inside an open thought."""
    return without_thinking(text, tags) is None


def without_thinking(text: str, tags: Tags = THINK) -> str | None:
    """Return the text outside of thoughts, as `<think>…</think>`, or None if it ends inside an open one.

    Thinking ends at its first `</think>`; a `<think>` inside it is plain text. Text before a `</think>` that nothing
    opened is thinking, because prompts may open it. A newline replaces thinking, so no box is joined from two parts.
    """
    if tags[0] not in text and tags[1] not in text:  # most answers
        return text
    outside: list[str] = []
    is_thinking, start = False, 0
    for tag in _pattern(tags).finditer(text):
        if tag.group() == tags[1]:
            if not is_thinking:
                outside.clear()
            is_thinking, start = False, tag.end()
        elif not is_thinking:
            outside.append(text[start : tag.start()])
            is_thinking = True
    return None if is_thinking else "\n".join([*outside, text[start:]])


@cache
def _pattern(tags: Tags) -> re.Pattern[str]:
    """Return a pattern of both tags, the longer one first, because one may begin with the other."""
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))


def written_answer(prompt: str, action: str, tags: Tags = THINK) -> str:
    """Return an action in the templates' notation; a thought that the prompt has opened stays empty."""
    thought = end_of_thinking(tags) if prompt.rstrip().endswith(tags[0]) else ""
    if tags[1].startswith(tags[0]) and not prompt.endswith(tags):  # an answer has a header of its own
        thought = tags[1]
    return f"{thought}\\boxed{{{action}}}"


_EXACT_BOX = re.compile(r"\\boxed\{(\[[^\[\]{}]+\])\}")
_BRACE = re.compile(r"\\(?:boxed|fbox)[ \t]*\{|[{}]")


def extract_boxed(text: str, tags: Tags = THINK) -> tuple[str, bool]:
    r"""Return the last `\boxed{…}` as `[content]`, and True; if there is none or it is empty, the whole text and False.

    Thinking (`without_thinking`) is left out first; an answer that never closed it is empty and False.
    The last is the closed box that opens last; braces inside are balanced. LaTeX becomes plain
    text; content with a `[` gets no brackets.
    """
    outside = without_thinking(text, tags) or ""
    content = plain(_last_boxed(outside))
    if not content:
        return outside, False
    return (content if "[" in content else f"[{content}]"), True


def boxed_content(text: str, tags: Tags = THINK) -> tuple[str, bool]:
    r"""Return the content of the last `\boxed{…}` outside thinking, and whether there is one; see `extract_boxed`."""
    content = _last_boxed(without_thinking(text, tags) or "")
    return (content, True) if plain(content) else ("", False)


def exact_box(text: str, tags: Tags = THINK) -> tuple[str, bool]:
    r"""Return the action and True if the answer outside thinking is only `\boxed{[action]}`, otherwise "" and False.

    So an action has one spelling, and its probability is that of one answer.
    """
    answer = without_thinking(text, tags) or ""
    match = _EXACT_BOX.fullmatch(answer if answer == text else answer.lstrip())
    return (match[1], True) if match else ("", False)


Extraction = Callable[..., tuple[str, bool]]
"""Function from a whole answer to the env's action, and whether the action stood where the template asks for it."""

EXTRACTIONS: dict[str, Extraction] = {"default": extract_boxed, "boxed": boxed_content, "exact": exact_box}


def find_extraction(name: str, tags: Tags = THINK) -> Extraction:
    """Return a built-in extraction by name, for thoughts between `tags`, or a user's by `module:function`.

    Raises ConfigError.
    """
    if name in EXTRACTIONS and tags != THINK:
        return partial(EXTRACTIONS[name], tags=tags)
    found = plugins.find("action_extraction_fn", name, EXTRACTIONS)
    if not callable(found):
        raise ConfigError(f"action_extraction_fn {name!r} is {found!r}, not a function")
    return found


def extraction_problems(name: str) -> list[str]:
    """Try the function on a short answer and return its problems."""
    try:
        extraction = find_extraction(name)
        answer = plugins.call("action_extraction_fn", name, lambda: extraction("It is \\boxed{0}."), {})
    except ConfigError as error:
        return list(error.problems)
    match answer:
        case (str(), bool()):
            return []
    return [
        f"action_extraction_fn {name!r} must return (action, whether the answer has the right form), a string and a "
        f"bool; for the text 'It is \\boxed{{0}}.' it returned {answer!r}"
    ]


def _last_boxed(text: str) -> str:
    """Return the content of the last box in one pass over the braces, so that the cost is linear in the input."""
    _, found, rest = text.rpartition("\\boxed{")
    if found and "{" not in rest and "}" in rest:  # the usual case
        return rest.partition("}")[0].strip()
    starts: list[int | None] = []
    """Open braces: the start of a box's content, or None for other braces."""
    last_start, last_end = -1, -1
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            starts.append(None)
        elif brace.group() != "}":
            starts.append(brace.end())
        elif starts:
            start = starts.pop()
            if start is not None and start > last_start:
                last_start, last_end = start, brace.start()
    return text[last_start:last_end].strip() if last_end >= 0 else ""


MOST_CHARS = 10_000
"""Length of the longest text that is changed."""
MOST_NESTED = 8
"""Number of nested commands that are read."""
_SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "theta": "θ", "lambda": "λ", "mu": "μ", "pi": "π",
    "sigma": "σ", "phi": "φ", "omega": "ω", "infty": "∞", "degree": "°", "times": "×", "cdot": "·", "pm": "±",
    "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "to": "->", "rightarrow": "->",
    "ldots": "...", "dots": "...", "textunderscore": "_", "textdollar": "$", "lbrack": "[", "rbrack": "]",
    "lbrace": "\ue000", "rbrace": "\ue001",
}  # fmt: skip
_FONT = r"(?:bf|it|rm|tt|sf|em)(?:series|family)?"
_WRAPPED = re.compile(
    rf"\{{\\{_FONT}\s([^{{}}]*)\}}|\\(?:text(?:tt|bf|it|rm|sf|sc|sl|up|normal)?|math(?:tt|bf|it|rm|sf|bb|cal|normal)"
    rf"|[mhf]box|boxed|framebox|operatorname|emph|underline|boldsymbol|bm|{_FONT})\*?\s*\{{([^{{}}]*)\}}"
)
_ARGUMENT = r"\s*(?:\{((?:[^{}]|\{[^{}]*\})*)\}|([^\s{}\\]))"
_FRACTION = re.compile(rf"\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}")
_SIMPLE = re.compile(r"[+-]?(?:[\d.,]+|\w|\\sqrt\{\w+\})")
_GAP = r"(?:\\(?:[,;:> ]|q?quad(?![A-Za-z]))|(?<=[\w.,;:)}])~(?=[\w(\\+-]))"


def _rules(*rules: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), new) for pattern, new in rules]


_FIRST = _rules(
    (r"\\{2,}", r"\\"),
    (r"\\\{", "\ue000"),  # braces that are shown, set apart from those of LaTeX
    (r"\\\}", "\ue001"),
    (r"(?:(?<![\\\w])|(?<=\w)(?=\$\$?[\\^_]))(\$\$?)(?!\s)((?:[^$\\]|\\.)+)(?<!\s)\1(?!\w)", r"\2"),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])(?:\.(?!\d))?|\\(?:display|text)style(?![A-Za-z])\s*", ""),
    (r"\\(?:text)?color\{\w*\}|\\[()!]", ""),
    (r"\{,\}", ","),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"\^\s*(?:\{\s*)?\\(?:circ|degree)(?![A-Za-z])(?:\s*\})?", "°"),
)
_LAST = _rules(
    (r"([_^])\{([+-]?\w+)\}", r"\1\2"),
    (rf" ?{_GAP}+ ?", "\ue002"),
    (r"(?<=[\[(])\ue002|\ue002(?=[\])])", ""),
    (r"\ue002", " "),
    (r"\\\[([^\[\]\\]*)\\\]", r"[\1]"),
    (r"\\([%$#&_])", r"\1"),
    (r"\A\s*\{+(\[[^{}]*\])\}+\s*\Z", r"\1"),
    (r"\\[dtc]frac", r"\\frac"),
)
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,;:> ]|~)\d{3})+(?!\d)")
"""A number with LaTeX spaces between groups of three digits."""
_LATEX = re.compile(r"[\\${~]")
_SYMBOL = re.compile(rf"\\({'|'.join(_SYMBOLS)})(?![A-Za-z])")


def plain(text: str) -> str:
    """Return the text without LaTeX, also of moves such as `{[0]}`; braces around anything else stay."""
    if len(text) > MOST_CHARS or not _LATEX.search(text):
        return text.strip()
    for pattern, new in _FIRST:
        text = pattern.sub(new, text)
    text = _GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    text = _SYMBOL.sub(lambda found: _SYMBOLS[found[1]], text)
    for _ in range(MOST_NESTED):
        before, text = text, _FRACTION.sub(_fraction, _WRAPPED.sub(lambda found: found[1] or found[2] or "", text))
        if text == before:
            break
    for pattern, new in _LAST:
        text = pattern.sub(new, text)
    return text.strip().replace("\ue000", "{").replace("\ue001", "}")


def _fraction(found: re.Match[str]) -> str:
    r"""Return `above/below`, with a space to a letter or digit beside it: `3\frac{1}{2}` is `3 1/2`."""
    parts = [part.strip() for part in found.groups() if part is not None]
    above, below = (part if _SIMPLE.fullmatch(part) else f"({part})" for part in parts)
    left, right = found.string[max(found.start() - 1, 0) : found.start()], found.string[found.end() : found.end() + 1]
    return " " * (left.isalnum() or left == "}") + f"{above}/{below}" + " " * (right.isalnum() or right == "\\")
