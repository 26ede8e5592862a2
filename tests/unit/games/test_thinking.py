"""Text inside thinking is never read as an action."""

import asyncio

import pytest

from fakes.game_records import BASE, make_generation
from unstable_lite.games.answers import (
    KNOWN_TAGS,
    THINK,
    extract_boxed,
    find_extraction,
    find_tags,
    has_unknown_tags,
    without_thinking,
    written_answer,
)
from unstable_lite.games.players.policy import PolicyPlayer
from unstable_lite.games.templates import TEMPLATES, Template
from unstable_lite.types import AgentSpec


@pytest.mark.parametrize(
    ("text", "action"),
    [
        (r"<think>\boxed{1}", ""), (r"\boxed{1} <think> \boxed{2}", ""), (r"<think><think>\boxed{1}", ""),
        (r"<think>a</think>\boxed{1}<think>\boxed{2}", ""), (r"<think>\boxed{1}</thi nk>\boxed{2}", ""),
        (r"<think>\boxed{1}</think", ""), (r"<think>\boxed{1}< /think>", ""), ("<think>[1]", ""),
        (r"<think>\boxed{1}</think>\boxed{2}", "[2]"), (r"\boxed{1}</think>\boxed{2}", "[2]"),
        (r"\boxed{1}<think>\boxed{2}</think>", "[1]"), (r"<thi nk>\boxed{1}", "[1]"),
        (r"<think>\boxed{1}</think>\boxed{2}<think>\boxed{3}</think>", "[2]"),
        (r"<think>a<think>\boxed{1}</think>\boxed{2}", "[2]"),
        (r"<think>a<think>b</think>\boxed{1}</think>\boxed{2}", "[2]"),
    ],
)  # fmt: skip
def test_only_a_box_outside_closed_thinking_is_the_action(text, action):
    assert extract_boxed(text) == (action, bool(action))


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
        return make_generation([0], text=text, finish_reason="length")

    agent = AgentSpec(pid=0, model=BASE, collect_data=True, prompt_template="own", action_extraction_fn=extraction)
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


MAGISTRAL, HARMONY = KNOWN_TAGS[1:3]
CHANNEL = ("<|channel|>analysis<|message|>", "<|end|>")
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("tags", "text", "action"),
    [
        (MAGISTRAL, r"[THINK]\boxed{1}", ""),
        (MAGISTRAL, r"[THINK]a[/THINK]\boxed{2}", "[2]"),
        (MAGISTRAL, r"\boxed{1}[/THINK]\boxed{2}", "[2]"),
        (MAGISTRAL, r"[THINK]\boxed{1}</think>\boxed{2}", ""),
        (HARMONY, r"<|channel|>analysis<|message|>\boxed{1}", ""),
        (HARMONY, r"<|channel|>analysis<|message|>\boxed{1}<|end|><|start|>assistant", ""),
        (HARMONY, r"<|channel|>commentary<|message|>\boxed{1}", ""),
        (HARMONY, rf"<|channel|>analysis<|message|>\boxed{{1}}{FINAL}\boxed{{2}}", "[2]"),
        (HARMONY, r"<|channel|>final<|message|>\boxed{2}", "[2]"),
        (CHANNEL, r"<|channel|>analysis<|message|>\boxed{1}", ""),
        (CHANNEL, rf"<|channel|>analysis<|message|>\boxed{{1}}{FINAL}\boxed{{2}}", "[2]"),
        (("~", "~~"), r"~\boxed{1}", ""),
        (("~", "~~"), r"~\boxed{1}~~\boxed{2}", "[2]"),
        (("(a", "a)"), r"(a\boxed{1}a)\boxed{2}", "[2]"),
    ],
)
@pytest.mark.parametrize("extraction", ["default", "boxed"])
def test_thought_between_any_tags_is_never_read(tags, text, action, extraction):
    content = action.strip("[]") if extraction == "boxed" else action
    assert find_extraction(extraction, tags)(text) == (content, bool(action))
    template = Template("own", "{observation}", tags=tags)
    assert played(template, text, extraction) == (content, bool(action))


@pytest.mark.parametrize("tags", [*KNOWN_TAGS, CHANNEL])
def test_prompt_that_opens_any_thought_needs_its_close(tags):
    template = Template("own", f"{{observation}}\n{tags[0]}", tags=tags)
    assert played(template, r"\boxed{1}") == ("", False)
    assert played(template, rf"\boxed{{1}}{tags[1]}\boxed{{2}}") == ("[2]", True)
    answer = written_answer(template.prompt("o", 2), "3", tags)
    assert played(template, answer) == played(Template("own", "{observation}", tags=tags), answer) == ("[3]", True)


def test_written_answer_of_a_channel_begins_with_its_header():
    assert written_answer("<|start|>assistant", "3", HARMONY) == r"<|channel|>final<|message|>\boxed{3}"
    assert written_answer("<|start|>assistant<|channel|>final<|message|>", "3", HARMONY) == r"\boxed{3}"
    assert find_extraction("exact", HARMONY)(r"<|channel|>final<|message|>\boxed{[3]}") == ("[3]", True)


@pytest.mark.parametrize(
    ("chat_template", "tokens", "tags"),
    [
        ("content.split('</think>')", [], THINK),
        ("", ["<think>", "</think>"], THINK),
        ("nothing", ["[THINK]", "[/THINK]"], MAGISTRAL),
        ("<|start|>assistant<|channel|>analysis<|message|>", ["<|channel|>", "<|message|>"], HARMONY),
        ("says [THINK]", ["<think>", "[THINK]"], MAGISTRAL),
        ("enable_thinking", ["<|thinking|>"], None),
        ("{{ m.reasoning }}", [], None),
        ("{{ m.content }}", [], None),
        ("You may give your reasoning. Think before you call a tool.", [], None),
    ],
)
def test_tags_are_found_in_chat_template_or_vocabulary(chat_template, tokens, tags):
    assert find_tags(chat_template, tokens) == tags
    assert has_unknown_tags(chat_template, tokens) == (chat_template in ("enable_thinking", "{{ m.reasoning }}"))
