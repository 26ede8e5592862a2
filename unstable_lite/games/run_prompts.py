"""Prompts of a run: their layouts as its first start made them (templates.json), and those that do not fit a model.

Another person may have written the file, so it is data: texts whose placeholders are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.files import replaced
from unstable_lite.games.answers import has_unknown_tags
from unstable_lite.games.templates import ChatTemplate, Template, chats_in_use, templates_for, templates_in_use

FILE = "templates.json"


class Layout(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Text of one chat template, and the messages of which it is made."""

    system: str
    user: str
    thinking: bool
    text: str
    end_of_turn: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.text.count("{observation}") != 1:
            raise ValueError("a text must contain {observation} once")


def recorded_prompts(
    config: Config, prompts: Mapping[str, Any], run: Path | None, is_own: bool = False
) -> dict[str, Any]:
    """Return an engine's facts about prompts, with the layouts that the directory `run` has recorded.

    A layout of other messages, because the config was changed, is not used. is_own: record those that are missing.
    Raises ConfigError for a damaged file, UnstableError if it cannot be written.
    """
    chats = dict(prompts.get("chats", {}))
    if run is None:
        return {**prompts, "chats": chats}
    path = run / FILE
    try:
        known = msgspec.json.decode(path.read_bytes(), type=dict[str, Layout]) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is damaged: {error}. Remove it to have the chat templates laid out by the tokenizer"
        ) from error
    layouts = dict(known)
    for chat in chats_in_use(config):
        made = known.get(chat.name)
        if made is not None and (made.system, made.user, made.thinking) == (chat.system, chat.user, chat.thinking):
            chats[chat.name] = [made.text, made.end_of_turn]
        elif chat.name in chats:
            text, ends = chats[chat.name]
            layouts[chat.name] = Layout(
                system=chat.system, user=chat.user, thinking=chat.thinking, text=text, end_of_turn=tuple(ends)
            )
    if is_own and layouts != known:
        try:
            with replaced(path) as partial:
                partial.write_bytes(msgspec.json.format(msgspec.json.encode(layouts)) + b"\n")
        except OSError as error:
            raise UnstableError(f"cannot write {path}: {error.strerror}; free some space") from error
    return {**prompts, "chats": chats}


_MARKUP_LIKE = re.compile(r"<\|\w+\|>|</?(?:start|end)_of_turn>|\[/?INST\]")


def prompt_warnings(config: Config, prompts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why a model may not understand the prompts of `config`, or why they differ from day to day.

    prompts: see `templates_for`; `check` knows only `special_tokens` and `chat_template`.
    """
    if "chat_template" not in prompts:  # an engine without a tokenizer
        return
    model, tokens, own = config.model_name, prompts["special_tokens"], config.templates
    used = templates_in_use(config)
    for template in used:
        found = _MARKUP_LIKE.findall("".join([template.text, *template.stop])) if isinstance(template, Template) else []
        if unknown := [token for token in dict.fromkeys(found) if token not in tokens]:
            yield (
                f"prompt_template {template.name!r}: {model} has no token {', '.join(unknown)}, so it reads plain "
                "characters and may never write them; choose a template for this model, such as 'chat'"
            )
    has_default_tags = any(template.name not in own or own[template.name].think is None for template in used)
    if has_default_tags and has_unknown_tags(prompts["chat_template"], tokens):
        yield (
            f"{model}: its chat template speaks of thinking, and no known tags open and close a thought, so an action "
            'is also read inside one; set think = ["<open>", "<close>"] in [templates.NAME]'
        )
    laid_out = templates_for(config, prompts) if prompts.get("chats") else {}
    for chat in (chat for chat in used if isinstance(chat, ChatTemplate) and not (chat.thinking or chat.assistant)):
        if chat.name in laid_out and (opened := laid_out[chat.name].opened_thinking):
            yield (
                f"prompt_template {chat.name!r}: the chat template of {model} opens {opened} although thinking = false,"
                " so the model thinks before each answer"
            )
    for name in prompts.get("dated", ()):
        yield (
            f"prompt_template {name!r}: the chat template of {model} writes the date. A run keeps the text of its "
            "first day (templates.json), but another run on another day has other prompts"
        )
