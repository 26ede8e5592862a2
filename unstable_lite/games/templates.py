r"""How an observation becomes a prompt, and how an answer becomes an action.

Owns the wording, the chat markup and the reading of `\boxed{}`. Knows nothing of tokens: the engine
tokenises, and adds the begin-of-sequence token where the model has one, so no template contains it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from unstable_lite.by_name import suggestion
from unstable_lite.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Template:
    """One way to ask a model for its next move."""

    name: str
    format: str
    """`str.format` with `{observation}`, `{game}` (a sentence that names the kind of game), `{system}`."""
    stop: tuple[str, ...] = ()
    """End the turn, besides the end-of-sequence tokens; a base model does not count these among them."""
    system: str = ""
    is_zero_sum: bool = False
    """Whether games of several players are said to be zero-sum."""

    def prompt(self, observation: str, num_players: int) -> str:
        return self.format.format(
            observation=_without_markup(observation),
            game=_game(num_players, self.is_zero_sum),
            system=self.system,
        )


_ASK = (
    "Think it through step by step first. Then write the move you choose inside \\boxed{{}}, "
    "in the notation that the game asks for."
)
_CHATML = "<|im_start|>user\n{game}\n\n{observation}\n\n" + _ASK + "<|im_end|>\n<|im_start|>assistant\n"
_GEMMA = "<start_of_turn>user\n{game}\n\n{observation}\n\n" + _ASK + "<end_of_turn>\n<start_of_turn>model\n"
_LLAMA = (
    "<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{game}\n\n{observation}\n\n" + _ASK + "<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_PLAIN = "{game}\n\nObservation:\n{observation}\n\n" + _ASK + "\n\nAnswer:\n"

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template("default", _PLAIN, stop=("\nObservation:",)),
        Template("tiny", "<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n", stop=("<|im_end|>",)),
        Template("qwen3-zs", _CHATML, stop=("<|im_end|>",), is_zero_sum=True),
        Template("qwen3-sp", _CHATML, stop=("<|im_end|>",)),
        Template("qwen3-reasoning", _CHATML + "<think>", stop=("<|im_end|>",)),
        Template("gemma3-zs", _GEMMA, stop=("<end_of_turn>",), is_zero_sum=True),
        Template(
            "llama-instruct-zs",
            _LLAMA,
            stop=("<|eot_id|>",),
            system="You play text games. You reason before you move.",
            is_zero_sum=True,
        ),
    )
}


def format_prompt(template_name: str, observation: str, num_players: int) -> str:
    """What the model is shown. Raises ConfigError for an unknown template."""
    template = TEMPLATES.get(template_name)
    if template is None:
        raise ConfigError(f"unknown prompt_template {template_name!r}; {suggestion(template_name, TEMPLATES)}")
    return template.prompt(observation, num_players)


def extract_boxed(text: str) -> tuple[str, bool]:
    r"""The last `\boxed{…}` as `[content]`, and True; if there is none or it is empty, the whole text, False.

    The last to open of those that close; braces inside are balanced. Content with a `[` stays as it is.
    """
    content = _last_boxed(text)
    if not content:
        return text, False
    return (content if "[" in content else f"[{content}]"), True


EXTRACTIONS: dict[str, Callable[[str], tuple[str, bool]]] = {"default": extract_boxed}


_MARKUP = re.compile(
    r"<(?=\|(?:im_start|im_end|endoftext|start_header_id|end_header_id|eot_id|begin_of_text|end_of_text)\|>"
    r"|(?:start_of_turn|end_of_turn|bos|eos)>)"
)
_BRACE = re.compile(r"\\boxed\{|[{}]")


def _without_markup(observation: str) -> str:
    """Chat markup that an opponent spells out in its words must not end our player's turn."""
    return _MARKUP.sub("< ", observation) if "<" in observation else observation


@cache
def _game(num_players: int, is_zero_sum: bool) -> str:
    if num_players == 1:
        return "You are playing a single-player game. Make valid moves and get as far as you can."
    number = {2: "two", 3: "three", 4: "four"}.get(num_players, str(num_players))
    kind = f"{number}-player zero-sum game" if is_zero_sum else f"{number}-player game"
    opponents = "your opponent" if num_players == 2 else "the other players"
    return f"You are playing a {kind} against {opponents}. Make valid moves and play to win."


def _last_boxed(text: str) -> str:
    """One pass over the braces, so that no input costs more than its length."""
    starts: list[int | None] = []
    """Of the open braces: where a box's content starts; None for other braces."""
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
