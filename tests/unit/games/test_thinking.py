"""Text inside thinking is never read as an action."""

import asyncio

import numpy as np
import pytest

from unstable_lite.games.players.policy import PolicyPlayer
from unstable_lite.games.templates import TEMPLATES, Template, extract_boxed
from unstable_lite.games.thinking import without_thinking
from unstable_lite.types import AgentSpec, Generation, ModelRef


@pytest.mark.parametrize(
    "text",
    [
        r"<think>\boxed{1}",
        r"\boxed{1} <think> \boxed{2}",
        r"<think>a</think>\boxed{1}<think>\boxed{2}",
        r"<think><think>\boxed{1}",
        r"<think>\boxed{1}</thi nk>\boxed{2}",
        r"<think>\boxed{1}</think",
        r"<think>\boxed{1}< /think>",
        "<think>[1]",
    ],
)
def test_answer_that_ends_inside_thinking_has_no_action(text):
    assert extract_boxed(text) == ("", False)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (r"<think>\boxed{1}</think>\boxed{2}", "[2]"),
        (r"\boxed{1}</think>\boxed{2}", "[2]"),
        (r"\boxed{1}<think>\boxed{2}</think>", "[1]"),
        (r"<think>\boxed{1}</think>\boxed{2}<think>\boxed{3}</think>", "[2]"),
        (r"<think>a<think>\boxed{1}</think>\boxed{2}", "[2]"),
        (r"<think>a<think>b</think>\boxed{1}</think>\boxed{2}", "[2]"),
        (r"<thi nk>\boxed{1}", "[1]"),
    ],
)
def test_only_a_box_outside_thinking_is_the_action(text, action):
    assert extract_boxed(text) == (action, True)


@pytest.mark.parametrize(
    "text",
    [r"<think>\boxed{1}</think> I play 2", r"\bo<think></think>xed{1}", r"\boxed{1}<think></think>\boxed{2}</think>3"],
)
def test_closed_thinking_without_a_box_after_it_is_badly_formatted(text):
    action, format_ok = extract_boxed(text)
    assert not format_ok
    assert "<think>" not in action
    assert action == without_thinking(text)


def whole_answer(text):
    return text, True


def played(template, text, extraction="default"):
    """Return the action and whether the format is right, as a policy plays an answer."""

    async def generate(prompt, version, stop, seed):
        ids, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
        return Generation(
            prompt_ids=ids,
            completion_ids=ids,
            logprobs=logprobs,
            text=text,
            finish_reason="length",
            adapter_version=version,
        )

    model = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
    agent = AgentSpec(
        pid=0, model=model, collect_data=True, prompt_template=template.name, action_extraction_fn=extraction
    )
    reply = asyncio.run(PolicyPlayer(generate, template, agent, 2).act("o <think>"))
    assert reply.text == text, "the record holds what was sampled"
    return reply.action, reply.format_ok


OPENING = [
    TEMPLATES["default-think"],
    TEMPLATES["qwen3-reasoning"],
    Template("own", "{observation}\n<think>\nLet me see: "),
]


@pytest.mark.parametrize("template", OPENING, ids=lambda template: template.name)
def test_thinking_that_the_prompt_opened_must_be_closed(template):
    assert played(template, r"\boxed{1}") == ("", False)
    assert played(template, r"<think>\boxed{1}") == ("", False)
    assert played(template, r"\boxed{1}</think>\boxed{2}") == ("[2]", True)
    assert played(template, r"<think>\boxed{1}</think>\boxed{2}") == ("[2]", True)


@pytest.mark.parametrize(
    "template", [TEMPLATES["default"], Template("closed", "<think>{observation}<think>\n\n</think>\n\n")]
)
def test_prompt_without_open_thinking_needs_no_close(template):
    assert played(template, r"\boxed{1}") == ("[1]", True)


def test_custom_extraction_receives_the_answer_as_generated():
    assert played(OPENING[0], r"\boxed{1}", f"{__name__}:whole_answer") == (r"\boxed{1}", True)
