"""Lengths that contradict each other are refused by name, and a budget that no prompt makes a model use is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.config.reading import parse_config
from unstable_lite.planning.lengths import length_problems, thinking_warnings
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.validation import find_problems

TEMPLATES = {
    "own-think": {"user": "{observation}", "assistant": "<think>"},
    "closed": {"user": "{observation}", "assistant": "<think>\n\n</think>\n\n"},
    "chat-think": {"chat": True, "user": "{observation}", "assistant": "<think>\n"},
    "own-chat": {"chat": True, "user": "{observation}", "thinking": False},
}


def config_of(template: str = "tiny", **engine: Any) -> Any:
    env = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": template}
    config, problems = parse_config({"train_envs": [env], "engine": engine, "templates": TEMPLATES})
    assert config is not None, problems
    return config


@pytest.mark.parametrize("budget", [64, 65])
def test_budget_that_leaves_no_answer_is_refused_by_name(budget: int) -> None:
    config = config_of(thinking_tokens=budget, max_generation_len=64)
    problem = f"engine.thinking_tokens = {budget} leaves no room for an answer in engine.max_generation_len = 64"
    assert list(length_problems(config.engine)) == [problem]
    assert problem in find_problems(config)
    assert not list(length_problems(config_of(thinking_tokens=63, max_generation_len=64).engine))


@pytest.mark.parametrize("budget", [0, -1, 1.5, "many"])
def test_budget_must_be_a_positive_number_of_tokens(budget: Any) -> None:
    _, problems = parse_config({"engine": {"thinking_tokens": budget}})
    assert any("engine.thinking_tokens" in problem for problem in problems)


@pytest.mark.parametrize("template", ["tiny", "qwen3", "closed", "own-chat", "chat-no-think"])
def test_template_that_does_not_open_thinking_is_warned_of(template: str) -> None:
    config = config_of(template, thinking_tokens=8)
    (warning,) = thinking_warnings(config)
    assert warning.startswith(f"engine.thinking_tokens = 8: prompt_template {template!r} does not open <think>")
    assert not list(thinking_warnings(config_of(template)))


@pytest.mark.parametrize("template", ["default-think", "qwen3-reasoning", "own-think", "chat-think"])
def test_template_that_opens_thinking_is_not(template: str) -> None:
    assert not list(thinking_warnings(config_of(template, thinking_tokens=8)))


@pytest.mark.parametrize(("text", "warnings"), [("{{ messages }}<think>", 0), ("{{ messages }}", 1)])
def test_chat_template_of_a_model_that_does_not_think_is_warned_of(tmp_path: Path, text: str, warnings: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
    config = config_of("chat", thinking_tokens=8).model_copy(update={"model_name": str(tmp_path)})
    assert len(list(thinking_warnings(config))) == warnings


def test_check_shows_the_warning() -> None:
    rows = make_plan(config_of(thinking_tokens=8)).describe()
    assert any(name == "warning" and "thinking_tokens = 8" in text for name, text in rows)
