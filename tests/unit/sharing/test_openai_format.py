"""Requests that are served, and those that are refused with their reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unstable_lite.sharing.openai_format import ChatRequest, CompletionRequest, Refusal, parse

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps(ASKED | fields).encode(), ChatRequest)


def test_fields_without_effect_are_ignored() -> None:
    neutral = {"tools": [], "frequency_penalty": 0, "logprobs": False, "response_format": {"type": "text"}}
    asked = chat(**neutral, tool_choice="none", user="me", metadata={"a": 1}, temperature=0, top_p=None)
    assert asked.temperature == 0 and asked.top_p is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("frequency_penalty", 0.5),
        ("logprobs", True),
        ("response_format", {"type": "json_object"}),
        ("temperature", -1),
        ("temperature", "1"),
        ("top_p", 0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("n", 65),
        ("stop", ["a", ""]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": None}]),
        ("num_players", 0),
    ],
)
def test_field_that_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Refusal, match=field) as caught:
        chat(**{field: value})
    assert caught.value.status == 400


def test_limit_and_stop_have_two_spellings() -> None:
    assert chat(max_tokens=3).limit == chat(max_completion_tokens=3).limit == 3
    assert chat(stop="a").stops == chat(stop=["a"]).stops == ("a",)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "ab"


@given(st.one_of(st.binary(max_size=50), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)))
def test_no_body_breaks_the_server(body: Any) -> None:
    content = body if isinstance(body, bytes) else json.dumps(ASKED | {"prompt": body, "seed": body}).encode()
    for kind in (ChatRequest, CompletionRequest):
        try:
            parse(content, kind)
        except Refusal as refusal:
            assert refusal.body["error"]["message"]
    with pytest.raises(Refusal):
        parse(b"[" * 100_000, ChatRequest)
