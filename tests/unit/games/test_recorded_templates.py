"""A run keeps the texts that its tokenizer laid out at the first start; its file is data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fakes.chat_configs import chat_config
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.games.run_prompts import FILE, recorded_prompts
from unstable_lite.games.templates import Template, templates_for

MINE = {"chat": True, "system": "Be brief.", "user": "See {observation}", "assistant": "So:", "stop": ["###"]}


def facts(date: str) -> dict[str, Any]:
    """Return what an engine says on a day."""
    return {"chats": {"mine": [f"{date}|Be brief.|See {{observation}}|", ["<end>"]]}, "special_tokens": ["<end>"]}


def template_of(config: Config, prompts: dict[str, Any]) -> Template:
    return templates_for(config, prompts)["mine"]


def test_prompts_of_the_first_start_outlive_the_day(tmp_path: Path) -> None:
    config = chat_config("mine", MINE)
    first = template_of(config, recorded_prompts(config, facts("Monday"), tmp_path, is_own=True))
    for is_own in (False, True):
        later = template_of(config, recorded_prompts(config, facts("Tuesday"), tmp_path, is_own))
        assert later == first
    assert first.prompt("o", 2) == "Monday|Be brief.|See o|So:"
    assert first.stop == ("###", "<end>")
    assert set(json.loads((tmp_path / FILE).read_text())) == {"mine"}


def test_only_the_run_itself_writes_its_templates(tmp_path: Path) -> None:
    config = chat_config("mine", MINE)
    assert recorded_prompts(config, facts("Monday"), tmp_path)["chats"] == facts("Monday")["chats"]
    assert recorded_prompts(config, facts("Monday"), None) == facts("Monday")
    assert not [*tmp_path.iterdir()], "a run of an earlier version stays as it is"
    plain = Config.model_validate({"train_envs": [config.train_envs[0].model_dump() | {"prompt_template": "default"}]})
    recorded_prompts(plain, {}, tmp_path, is_own=True)
    assert not [*tmp_path.iterdir()], "there is nothing to record"


@pytest.mark.parametrize("changes", [{"user": "Look: {observation}"}, {"system": "Be long."}, {"thinking": False}])
def test_changed_messages_are_laid_out_and_recorded_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    recorded_prompts(chat_config("mine", MINE), facts("Monday"), tmp_path, is_own=True)
    for date in ("Tuesday", "Wednesday"):
        made = template_of(
            chat_config("mine", MINE | changes),
            recorded_prompts(chat_config("mine", MINE | changes), facts(date), tmp_path, True),
        )
        assert made.text.startswith("Tuesday")


def test_templates_of_another_person_are_text_and_no_program(tmp_path: Path) -> None:
    config, text = chat_config("mine", MINE), "{{ 7 * 7 }}{% include 'x' %}{observation}{0.__class__}%s${HOME}{game}"
    recorded_prompts(config, {"chats": {"mine": [text, []]}}, tmp_path, is_own=True)
    made = template_of(config, recorded_prompts(config, facts("Monday"), tmp_path))
    prompt = made.prompt("{observation}{{ 1 }}", 1)
    assert prompt.startswith("{{ 7 * 7 }}{% include 'x' %}{observation}{{ 1 }}{0.__class__}%s${HOME}You are playing")


SEE = {"system": "Be brief.", "user": "See {observation}", "thinking": True}
LAYOUT = SEE | {"text": "{observation}", "end_of_turn": []}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"\xff", b'{"mine": {}}', b"[" * 100_000, {"text": "no place"}, {"text": 7},
        {"text": "{observation} {observation}"}, {"end_of_turn": [None]}, {"loader": "evil:Player"},
    ],
)  # fmt: skip
def test_damaged_file_of_templates_is_an_error_with_its_path(tmp_path: Path, content: Any) -> None:
    text = content if isinstance(content, bytes) else json.dumps({"mine": LAYOUT | content}).encode()
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(ConfigError, match=rf"{tmp_path / FILE} is damaged: .* Remove it"):
        recorded_prompts(chat_config("mine", MINE), facts("Monday"), tmp_path)


def test_templates_that_cannot_be_written_are_an_error_with_the_path(tmp_path: Path) -> None:
    with pytest.raises(UnstableError, match=f"cannot write {tmp_path / 'gone' / FILE}: No such file"):
        recorded_prompts(chat_config("mine", MINE), facts("Monday"), tmp_path / "gone", is_own=True)
