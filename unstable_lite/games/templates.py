"""Turn an observation into a prompt, and its legal actions into the answers that it allows.

Owns the wording and the chat markup. Knows nothing of tokens: the engine tokenises, adds the tokenizer's prefix (a
begin-of-sequence token) unless the prompt begins with it or with AS_IS, and applies the tokenizer's own chat template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from unstable_lite import plugins
from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec, TemplateConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.answers import (
    KNOWN_TAGS,
    THINK,
    Tags,
    find_extraction,
    find_tags,
    leaves_thinking_open,
    written_answer,
)
from unstable_lite.games.players.scripted import legal_actions

AS_IS = "<|as_is|>"
"""Mark at the beginning of a prompt to which the tokenizer adds nothing; the mark itself is left out."""
MARKUP = (
    AS_IS,
    *(f"<|{name}|>" for name in ("im_start", "im_end", "endoftext", "start_header_id", "end_header_id", "eot_id")),
    *("<|begin_of_text|>", "<|end_of_text|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>"),
)
"""Markup of the templates here; a run adds the control tokens of its model."""

TRIM = "{trim}"
"""Mark beside `{observation}` in a laid-out template: whitespace at this end of an observation is left out."""
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
    tags: Tags = THINK
    """Texts that open and close a thought."""

    def prompt(self, observation: str, num_players: int) -> str:
        before, after = _around(self.text, num_players, self.is_zero_sum)
        if before.endswith(TRIM):
            before, observation = before.removesuffix(TRIM), observation.lstrip()
        if after.startswith(TRIM):
            after, observation = after.removeprefix(TRIM), observation.rstrip()
        return before + without_markup(observation, self.markup) + after

    @property
    def opened_thinking(self) -> str:
        """Return the end of the prompt that an answer continues: `<think>` if the prompt leaves one open."""
        return self.tags[0] if leaves_thinking_open(self.text.partition(_OBSERVATION)[2], self.tags) else ""


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
    """Value of the chat template's `enable_thinking` or `thinking`, which many templates ignore."""
    stop: tuple[str, ...] = ()
    is_zero_sum: bool = False
    tags: Tags | None = None
    """Texts that open and close a thought; None: those of the model."""

    def message(self, observation: str, num_players: int) -> str:
        """Return only the user's message, for a model that an external endpoint serves."""
        return Template(self.name, self.user, is_zero_sum=self.is_zero_sum).prompt(observation, num_players)

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
                name, made.user, made.system, made.assistant, made.thinking, made.stop, made.zero_sum, made.think
            )
        else:
            text = made.system + made.user + made.assistant
            known[name] = Template(name, text, made.stop, made.zero_sum, tags=made.think or THINK)
    return known


def templates_in_use(config: Config) -> list[AnyTemplate]:
    """Return the templates that the envs of `config` use, except unknown ones."""
    known = known_templates(config.templates)
    specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
    return [known[name] for name in dict.fromkeys(spec.prompt_template for spec in specs) if name in known]


def chats_in_use(config: Config) -> list[ChatTemplate]:
    """Return the chat templates that the envs of `config` use."""
    return [chat for chat in templates_in_use(config) if isinstance(chat, ChatTemplate)]


def own_tags(config: Config) -> list[Tags]:
    """Return the tags of thoughts that the `[templates]` of a configuration name."""
    return [made.think for made in config.templates.values() if made.think is not None]


def templates_for(config: Config, prompts: Mapping[str, Any]) -> dict[str, Template]:
    """Return every template that this run can use, by name.

    prompts: the engine's `Ready.info["prompts"]` (`Tokenizer.prompts`); empty for an engine without a tokenizer.
    Raises ConfigError for a chat template that the engine did not lay out.
    """
    laid_out, special_tokens = prompts.get("chats", {}), tuple(prompts.get("special_tokens", ()))
    templates = {name: made for name, made in known_templates(config.templates).items() if isinstance(made, Template)}
    for chat in chats_in_use(config):
        if chat.name not in laid_out:
            raise ConfigError(
                f"prompt_template {chat.name!r} needs the tokenizer's chat template, and engine.kind = "
                f"{config.engine.kind!r} has no tokenizer (a custom engine declares one in its facts: `prompts`)"
            )
        text, end_of_turn = laid_out[chat.name]
        templates[chat.name] = chat.laid_out(text, tuple(end_of_turn))
    of_model = find_tags(prompts.get("chat_template", ""), special_tokens) or THINK
    for name, made in templates.items():
        own, after = config.templates.get(name), made.text.partition(_OBSERVATION)[2]
        opened = (tags for tags in KNOWN_TAGS if leaves_thinking_open(after, tags))
        tags = (own and own.think) or next(opened, of_model)
        templates[name] = replace(made, markup=MARKUP + special_tokens, tags=tags)
    return templates


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
        if made.think is not None and made.think[0] == made.think[1]:
            problems.append(f"{where}.think: the text that opens a thought must differ from the text that closes it")
        if {*(made.think or ())} & {*made.stop}:
            problems.append(f"{where}.think: a text that marks a thought must not be in stop, which ends the answer")
        if not made.chat and not made.thinking:
            problems.append(f"{where}.thinking: only the tokenizer's chat template can turn it off; set chat = true")
    return problems


def format_prompt(
    template_name: str, observation: str, num_players: int, templates: Mapping[str, Template] = TEMPLATES
) -> str:
    """Return the prompt for an observation. Raises ConfigError for an unknown template."""
    return plugins.find("prompt_template", template_name, templates).prompt(observation, num_players)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: str
    actions: tuple[str, ...]
    answers: tuple[str, ...]
    """Text with which a model chooses each action."""


def questions(env: EnvSpec, template: Template, observations: Sequence[str]) -> Iterator[Question]:
    """Yield one question for each observation.

    Raises UnsupportedEnvError for an env family whose legal actions cannot be listed, EnvError for an observation of
    another env, ConfigError if the env's extraction does not read an answer as its action.
    """
    for observation in observations:
        prompt, actions = template.prompt(observation, env.num_players), legal_actions(env.env_id, observation)
        answers = tuple(written_answer(prompt, action, template.tags) for action in actions)
        for action, answer in zip(actions, answers, strict=True):
            check_read(env, action, answer, template.tags)
        yield Question(prompt=prompt, actions=tuple(actions), answers=answers)


def allowance_problem(env: EnvSpec) -> str | None:
    """Return the reason why an env has no exact result if it lets players repeat invalid moves, or None."""
    if not env.error_allowance:
        return None
    return (
        f"{env.env_id}: exact results count an illegal answer as the end of the game, and error_allowance = "
        f"{env.error_allowance}; set it to 0"
    )


def check_read(env: EnvSpec, action: str, answer: str, tags: Tags = THINK) -> None:
    """Raise ConfigError if the env's extraction does not read an answer as this action."""
    if find_extraction(env.action_extraction_fn, tags)(answer) != (action, True):
        raise ConfigError(
            f"action_extraction_fn {env.action_extraction_fn!r} does not read {answer!r} as {action!r}, so the "
            "probability of an action is not that of one answer"
        )
