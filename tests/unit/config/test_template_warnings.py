"""Prompts that a model may not understand are a warning of `check` and of the start of a run."""

import json
from typing import Any

import pytest

from fakes.chat_configs import ASKED, CHATML, TURNS, chat_config
from fakes.odd_tokenizers import make_odd_tokenizer
from unstable_lite.games.run_prompts import prompt_warnings
from unstable_lite.games.templates import chats_in_use, templates_for
from unstable_lite.models.tokenization import Tokenizer
from unstable_lite.planning.envs import template_warnings, thinking_warnings
from unstable_lite.planning.plan import make_plan


@pytest.mark.parametrize(
    ("template", "unknown"),
    [
        ("tiny", None),
        ("qwen3", None),
        ("default-think", None),
        ("chat", None),
        ("gemma3-zs", "<start_of_turn>, <end_of_turn>"),
        ("llama-instruct-zs", "<|start_header_id|>, <|end_header_id|>, <|eot_id|>"),
    ],
)
def test_check_warns_of_markup_without_a_token_of_the_model(template, unknown):
    rows = make_plan(chat_config(template, {})).describe()
    warnings = [text for name, text in rows if name == "warning" and text.startswith("prompt_template")]
    assert len(warnings) == (unknown is not None)
    assert all(
        text.startswith(f"prompt_template {template!r}: builtin:tiny has no token {unknown},") for text in warnings
    )


def test_stop_string_without_a_token_is_warned_of(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<|im_start|>"}, 7]}))
    config = chat_config("mine", {"stop": ["<|im_end|>", "Observation:"]}, model_name=str(tmp_path))
    (warning,) = template_warnings(config)
    assert warning.startswith(f"prompt_template 'mine': {tmp_path} has no token <|im_end|>,")
    (tmp_path / "tokenizer.json").unlink()
    assert not [*template_warnings(config)], "the tokens are not known yet"
    scripted = config.engine.model_copy(update={"kind": "scripted"})
    assert not [*template_warnings(chat_config("gemma3-zs").model_copy(update={"engine": scripted}))]


@pytest.mark.parametrize(
    ("chat_template", "think", "is_warned"),
    [
        (CHATML + ASKED, None, False),
        (CHATML + ASKED + "{# enable_thinking #}", None, True),
        (CHATML + ASKED + "{# enable_thinking #}", ["<a>", "</a>"], False),
        (CHATML + ASKED + "{# reasoning [THINK] #}", None, False),
    ],
)
def test_unknown_tags_of_a_thought_are_warned_of(tmp_path, chat_template, think, is_warned):
    path = make_odd_tokenizer(tmp_path, special=TURNS, chat_template=chat_template)
    (tmp_path / "config.json").write_text("{}")
    config = chat_config("mine", {"think": think} if think else {}, model_name=path)
    prompts = Tokenizer(path).prompts(chats_in_use(config))
    for warnings in ([*template_warnings(config)], [*prompt_warnings(config, prompts)]):
        assert len(warnings) == is_warned
        assert all("no known tags open and close a thought" in text for text in warnings)


@pytest.mark.parametrize(
    ("date", "is_dated"),
    [
        ("{{ strftime_now('%d %b %Y') }}", True),
        ("{% if not date is defined %}{% set date = strftime_now(format='%Y') %}{% endif %}{{ date }}", True),
        ("{% if strftime_now('%Y') | int > 2050 %}!{% endif %}", True),
        ("{{ 100 // (strftime_now('%Y') | int - 2001) }}", True),
        ("{% if tools %}{{ strftime_now('%d %b %Y') }}{% endif %}", False),
        ("26 Jul 2024", False),
    ],
)
def test_layout_with_a_date_is_warned_of_at_the_start(tmp_path, date, is_dated):
    path = make_odd_tokenizer(tmp_path, special=TURNS, chat_template=date + CHATML + ASKED)
    config = chat_config("mine", {"chat": True}, model_name=path)
    prompts = Tokenizer(path).prompts(chats_in_use(config))
    warnings = [*prompt_warnings(config, prompts)]
    assert len(warnings) == is_dated
    assert all(text.startswith("prompt_template 'mine': the chat template of") for text in warnings)
    assert templates_for(config, prompts)["mine"].prompt("o", 2).endswith("o<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "switch", "is_warned"),
    [
        ("chat", "<think>\n", False),
        ("chat-no-think", "<think>\n", True),
        ("chat-no-think", "{% if thinking %}<think>{% else %}</think>{% endif %}", False),
    ],
)
def test_thought_that_cannot_be_turned_off_is_warned_of(tmp_path, name, switch, is_warned):
    asked = ASKED.replace("assistant\n", "assistant\n" + switch)
    config = chat_config(name, model_name=make_odd_tokenizer(tmp_path, special=TURNS, chat_template=CHATML + asked))
    warnings = [*prompt_warnings(config, Tokenizer(config.model_name).prompts(chats_in_use(config)))]
    assert ["opens <think> although thinking = false" in text for text in warnings] == [True] * is_warned


def test_engine_without_a_tokenizer_gives_no_warning():
    assert not [*prompt_warnings(chat_config("gemma3-zs"), {"end_of_thinking": [1]})]


TEMPLATES = {
    "own-think": {"user": "{observation}", "assistant": "<think>"},
    "closed": {"user": "{observation}", "assistant": "<think>\n\n</think>\n\n"},
    "chat-think": {"chat": True, "user": "{observation}", "assistant": "<think>\n"},
    "own-chat": {"chat": True, "user": "{observation}", "thinking": False},
}


def thoughtful(template: str) -> Any:
    return chat_config(template, templates=TEMPLATES, engine={"thinking_tokens": 8})


@pytest.mark.parametrize("template", ["tiny", "qwen3", "closed", "own-chat", "chat-no-think"])
def test_template_that_does_not_open_thinking_is_warned_of(template):
    (warning,) = thinking_warnings(thoughtful(template))
    assert warning.startswith(f"engine.thinking_tokens = 8: prompt_template {template!r} does not open <think>")
    assert template != "tiny" or ("warning", warning) in make_plan(thoughtful(template)).describe()
    for other in ("default-think", "qwen3-reasoning", "own-think", "chat-think"):
        assert not list(thinking_warnings(thoughtful(other)))
    assert not list(thinking_warnings(chat_config(template, templates=TEMPLATES)))


@pytest.mark.parametrize(("text", "warnings"), [("{{ messages }}<think>", 0), ("{{ messages }}", 1)])
def test_chat_template_of_a_model_that_does_not_think_is_warned_of(tmp_path, text, warnings):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": text}))
    config = thoughtful("chat").model_copy(update={"model_name": str(tmp_path)})
    assert len(list(thinking_warnings(config))) == warnings
