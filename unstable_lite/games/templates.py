r"""Turn an observation into a prompt, and an answer into an action.

Owns the wording, the chat markup and the parsing of `\boxed{}`. Knows nothing of tokens: the engine tokenises, adds the
begin-of-sequence token if the model has one and the prompt does not, and applies the tokenizer's own chat template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from unstable_lite import plugins
from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec, TemplateConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.thinking import END_OF_THINKING, OPEN, leaves_thinking_open, without_thinking

MARKUP = (
    *(f"<|{name}|>" for name in ("im_start", "im_end", "endoftext", "start_header_id", "end_header_id", "eot_id")),
    *("<|begin_of_text|>", "<|end_of_text|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>"),
)
"""Markup of the templates here; a run adds the control tokens of its model."""

MAX_PLAYERS = 64
"""Largest number of players that is recognised in a prompt."""
_OBSERVATION, _GAME = "{observation}", "{game}"


@dataclass(frozen=True, slots=True)
class Template:
    """One way to ask a model for its next move."""

    name: str
    text: str
    """Whole prompt: `{observation}` once, and `{game}` in place of a sentence that names the kind of game."""
    stop: tuple[str, ...] = ()
    """Strings that end the turn, besides the end-of-sequence tokens; a base model's do not include the template's."""
    is_zero_sum: bool = False
    """Whether the prompt calls games of several players zero-sum."""
    markup: tuple[str, ...] = MARKUP
    """Markup that is broken up in observations, so that an opponent cannot end our player's turn or begin one."""

    def prompt(self, observation: str, num_players: int) -> str:
        before, after = _around(self.text, num_players, self.is_zero_sum)
        return before + without_markup(observation, self.markup) + after

    @property
    def opened_thinking(self) -> str:
        """Return the end of the prompt that an answer continues: `<think>` if the prompt leaves one open."""
        return OPEN if leaves_thinking_open(self.text.partition(_OBSERVATION)[2]) else ""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Messages for the tokenizer's own chat template; a worker that has the tokenizer lays them out once."""

    name: str
    user: str
    """User's message, with `{observation}` and `{game}`."""
    system: str = ""
    assistant: str = ""
    """Beginning of the answer."""
    thinking: bool = True
    """Value of the chat template's `enable_thinking`, which many templates ignore."""
    stop: tuple[str, ...] = ()
    is_zero_sum: bool = False

    def message(self, observation: str, num_players: int) -> str:
        """Return only the user's message, for a model that an external endpoint serves."""
        return Template(self.name, self.user, is_zero_sum=self.is_zero_sum).prompt(observation, num_players)

    def observation_in(self, message: str) -> tuple[str, int] | None:
        """Return the observation and the number of players for which `message` is the user's message, if any."""
        for num_players in range(1, MAX_PLAYERS + 1):
            before, after = _around(self.user, num_players, self.is_zero_sum)
            if message.startswith(before) and message.endswith(after) and len(message) >= len(before) + len(after):
                return message[len(before) : len(message) - len(after)], num_players
        return None

    def laid_out(self, text: str, end_of_turn: tuple[str, ...]) -> Template:
        """Return the laid-out template.

        text: the messages in the tokenizer's markup. end_of_turn: strings that close an answer in it.
        """
        return Template(self.name, text + self.assistant, self.stop + end_of_turn, self.is_zero_sum)


AnyTemplate = Template | ChatTemplate

_ASK = (
    "Think it through step by step first. Then write the move you choose inside \\boxed{}, "
    "in the notation that the game asks for."
)
_SYSTEM = "You play text games. You reason before you move."
_CHATML = "<|im_start|>user\n{game}\n\n{observation}\n\n" + _ASK + "<|im_end|>\n<|im_start|>assistant\n"
_GEMMA = "<start_of_turn>user\n{game}\n\n{observation}\n\n" + _ASK + "<end_of_turn>\n<start_of_turn>model\n"
_LLAMA = (
    "<|start_header_id|>system<|end_header_id|>\n\n" + _SYSTEM + "<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{game}\n\n{observation}\n\n" + _ASK + "<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_PLAIN = "{game}\n\nObservation:\n{observation}\n\n" + _ASK + "\n\nAnswer:\n"
_QUESTION = "{observation}\n\nThink it through step by step first. Then write the final answer inside \\boxed{}."
_CHAT = "{game}\n\n{observation}\n\n" + _ASK

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template("default", _PLAIN, stop=("\nObservation:",)),
        Template("default-think", _PLAIN + "<think>", stop=("\nObservation:",)),
        Template("tiny", "<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n", stop=("<|im_end|>",)),
        Template("qwen3", _CHATML.replace("{game}\n\n", ""), stop=("<|im_end|>",)),
        Template("qwen3-zs", _CHATML, stop=("<|im_end|>",), is_zero_sum=True),
        # Three names for one text, kept from earlier versions: `{game}` adapts to the number of players.
        Template("qwen3-sp", _CHATML, stop=("<|im_end|>",)),
        Template("qwen3-mp", _CHATML, stop=("<|im_end|>",)),
        Template("qwen3-game", _CHATML, stop=("<|im_end|>",)),
        Template("qwen3-reasoning", _CHATML + "<think>", stop=("<|im_end|>",)),
        Template("gemma3-zs", _GEMMA, stop=("<end_of_turn>",), is_zero_sum=True),
        Template("llama-instruct-zs", _LLAMA, stop=("<|eot_id|>",), is_zero_sum=True),
    )
}
CHAT_TEMPLATES: dict[str, ChatTemplate] = {
    chat.name: chat
    for chat in (
        ChatTemplate("chat", _CHAT, _SYSTEM),
        ChatTemplate("chat-no-think", _CHAT, _SYSTEM, thinking=False),
        ChatTemplate("question", _QUESTION),
    )
}


def known_templates(own: Mapping[str, TemplateConfig]) -> dict[str, AnyTemplate]:
    """Return the built-in templates and the `[templates]` of a configuration, by name."""
    known: dict[str, AnyTemplate] = {**TEMPLATES, **CHAT_TEMPLATES}
    for name, made in own.items():
        if made.chat:
            known[name] = ChatTemplate(
                name, made.user, made.system, made.assistant, made.thinking, made.stop, made.zero_sum
            )
        else:
            known[name] = Template(name, made.system + made.user + made.assistant, made.stop, made.zero_sum)
    return known


def chats_in_use(config: Config) -> list[ChatTemplate]:
    """Return the chat templates that the envs of `config` use."""
    known = known_templates(config.templates)
    specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
    used = dict.fromkeys(spec.prompt_template for spec in specs)
    return [chat for name in used if isinstance(chat := known.get(name), ChatTemplate)]


def templates_for(config: Config, prompts: Mapping[str, Any]) -> dict[str, Template]:
    """Return every template that this run can use, by name.

    prompts: the engine's `Ready.info["prompts"]` (`Tokenizer.prompts`); empty for an engine without a tokenizer.
    Raises ConfigError for a chat template that the engine did not lay out.
    """
    laid_out, special_tokens = prompts.get("chats", {}), tuple(prompts.get("special_tokens", ()))
    templates = {
        name: known for name, known in known_templates(config.templates).items() if isinstance(known, Template)
    }
    for chat in chats_in_use(config):
        if chat.name not in laid_out:
            raise ConfigError(
                f"prompt_template {chat.name!r} needs the tokenizer's chat template, and engine.kind = "
                f"{config.engine.kind!r} has no tokenizer (a custom engine declares one in its facts: `prompts`)"
            )
        text, end_of_turn = laid_out[chat.name]
        templates[chat.name] = chat.laid_out(text, tuple(end_of_turn))
    return {name: replace(made, markup=MARKUP + special_tokens) for name, made in templates.items()}


def written_answer(prompt: str, action: str) -> str:
    """Return an action in the templates' notation; a thought that the prompt has opened stays empty."""
    thought = END_OF_THINKING if prompt.rstrip().endswith("<think>") else ""
    return f"{thought}\\boxed{{{action}}}"


def template_problems(own: Mapping[str, TemplateConfig]) -> list[str]:
    """Return the problems of the `[templates]` of a configuration."""
    problems = []
    for name, made in own.items():
        where = f"templates.{name}"
        if name in TEMPLATES or name in CHAT_TEMPLATES:
            problems.append(f"{where}: a built-in template has this name; choose another name")
        if (count := made.user.count(_OBSERVATION)) != 1:
            problems.append(f"{where}.user: must contain {_OBSERVATION} exactly once, not {count} times")
        for key, text in (("system", made.system), ("user", made.user), ("assistant", made.assistant)):
            if key != "user" and _OBSERVATION in text:
                problems.append(f"{where}.{key}: {_OBSERVATION} belongs in user")
            for placeholder in _PLACEHOLDER.findall(text):
                if placeholder not in (_OBSERVATION, _GAME):
                    hint = plugins.suggestion(placeholder, (_OBSERVATION, _GAME))
                    problems.append(f"{where}.{key}: unknown placeholder {placeholder}; {hint}")
        if not made.chat and not made.thinking:
            problems.append(f"{where}.thinking: only the tokenizer's chat template can turn it off; set chat = true")
    return problems


def format_prompt(
    template_name: str, observation: str, num_players: int, templates: Mapping[str, Template] = TEMPLATES
) -> str:
    """Return the prompt for an observation. Raises ConfigError for an unknown template."""
    return plugins.find("prompt_template", template_name, templates).prompt(observation, num_players)


def extract_boxed(text: str) -> tuple[str, bool]:
    r"""Return the last `\boxed{…}` as `[content]`, and True; if there is none or it is empty, the whole text and False.

    Thinking (`games.thinking.without_thinking`) is left out first; an answer that never closed it is empty and False.
    The last is the closed box that opens last; braces inside are balanced. A single `\text{…}` is replaced by its
    content; content with a `[` is returned unchanged.
    """
    outside = without_thinking(text)
    if outside is None:
        return "", False
    text = outside
    content = _last_boxed(text)
    if content[:1] == "\\" and (wrapped := _TEXT.fullmatch(content)) is not None:
        content = wrapped.group(1).strip()
    if not content:
        return text, False
    return (content if "[" in content else f"[{content}]"), True


def boxed_content(text: str) -> tuple[str, bool]:
    r"""Return the content of the last `\boxed{…}` outside thinking, and whether there is one; see `extract_boxed`."""
    content = _last_boxed(without_thinking(text) or "")
    return content, bool(content)


def exact_box(text: str) -> tuple[str, bool]:
    r"""Return the action and True if the answer outside thinking is only `\boxed{[action]}`, otherwise "" and False.

    So an action has one spelling, and its probability is that of one answer.
    """
    answer = without_thinking(text) or ""
    match = _EXACT_BOX.fullmatch(answer if answer == text else answer.lstrip())
    return (match[1], True) if match else ("", False)


Extraction = Callable[[str], tuple[str, bool]]
"""Function from a whole answer to the env's action, and whether the action stood where the template asks for it."""

EXTRACTIONS: dict[str, Extraction] = {"default": extract_boxed, "boxed": boxed_content, "exact": exact_box}


def find_extraction(name: str) -> Extraction:
    """Return a built-in extraction by name, or a user's by `module:function`. Raises ConfigError."""
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


def without_markup(observation: str, markup: tuple[str, ...] = MARKUP) -> str:
    """Break chat markup, which an opponent may write, by a space after its first character."""
    for first, starts in _markup_starts(markup):
        if first in observation:
            observation = starts.sub(r"\g<0> ", observation)
    return observation


@cache
def _markup_starts(markup: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    """Return a pattern per first character. It matches only that character, so overlapping tokens are all found."""
    return [
        (first, re.compile(f"{re.escape(first)}(?={_start_of_any(rests)})"))
        for first, rests in _by_first_character(markup).items()
    ]


def _start_of_any(words: list[str]) -> str:
    """Return a pattern that is as fast for thousands of words as for one: a tree of their characters."""
    if "" in words:
        return ""
    branches = [re.escape(first) + _start_of_any(rests) for first, rests in _by_first_character(words).items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _by_first_character(words: Iterable[str]) -> dict[str, list[str]]:
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[0], []).append(word[1:])
    return by_first


_PLACEHOLDER = re.compile(r"(?<!\\boxed)\{[A-Za-z_]\w*\}")
"""Placeholder in a template's text; `\\boxed{move}` is not one."""
_TEXT = re.compile(r"\\(?:text|texttt|textbf|mathrm|mathbf)\{([^{}]*)\}")
_EXACT_BOX = re.compile(r"\\boxed\{(\[[^\[\]{}]+\])\}")
"""Word as models write it in LaTeX."""
_BRACE = re.compile(r"\\boxed[ \t]*\{|[{}]")


@cache
def _around(text: str, num_players: int, is_zero_sum: bool) -> tuple[str, str]:
    """Return the prompt's parts before and after the observation."""
    before, found, after = text.partition(_OBSERVATION)
    assert found, text
    game = _game(num_players, is_zero_sum)
    return before.replace(_GAME, game), after.replace(_GAME, game)


def _game(num_players: int, is_zero_sum: bool) -> str:
    if num_players == 1:
        return "You are playing a single-player game. Make valid moves and get as far as you can."
    number = {2: "two", 3: "three", 4: "four"}.get(num_players, str(num_players))
    kind = f"{number}-player zero-sum game" if is_zero_sum else f"{number}-player game"
    opponents = "your opponent" if num_players == 2 else "the other players"
    return f"You are playing a {kind} against {opponents}. Make valid moves and play to win."


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
