"""Text inside thinking is never read as an action; a budget ends it after at most two generations."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fakes.game_records import BASE, make_generation
from unstable_lite.config.training import EngineConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.answers import (
    END_OF_THINKING,
    KNOWN_TAGS,
    THINK,
    end_of_thinking,
    extract_boxed,
    find_extraction,
    find_tags,
    has_unknown_tags,
    without_thinking,
    written_answer,
)
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.policy import PolicyPlayer, ThinkingBudget, thinking_budget
from unstable_lite.games.templates import TEMPLATES, Template
from unstable_lite.types import AgentSpec, FinishReason, GameSpec, Generation, ModelRef, Reply


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


MAGISTRAL, HARMONY = KNOWN_TAGS[1:3]
CHANNEL = ("<|channel|>analysis<|message|>", "<|end|>")
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
OPENING = [
    TEMPLATES["default-think"],
    TEMPLATES["qwen3-reasoning"],
    Template("own", "{observation}\n<think>\nLet me see: "),
    *(Template(tags[0], f"{{observation}}\n{tags[0]}", tags=tags) for tags in (*KNOWN_TAGS, CHANNEL)),
]


@pytest.mark.parametrize("template", OPENING, ids=lambda template: template.name)
def test_thinking_that_the_prompt_opened_must_be_closed(template):
    opens, closes = template.tags
    for text in ("", opens):
        assert played(template, rf"{text}\boxed{{1}}") == ("", False)
        assert played(template, rf"{text}\boxed{{1}}{closes}\boxed{{2}}") == ("[2]", True)
    if not template.text.rstrip().endswith(opens):
        return  # an answer can be written only directly after the tag
    answer = written_answer(template.prompt("o", 2), "3", template.tags)
    assert played(template, answer) == ("[3]", True)
    assert played(Template("own", "{observation}", tags=template.tags), answer) == ("[3]", True)


@pytest.mark.parametrize(
    "template", [TEMPLATES["default"], Template("closed", "<think>{observation}<think>\n\n</think>\n\n")]
)
def test_prompt_without_open_thinking_needs_no_close(template):
    assert played(template, r"\boxed{1}") == ("[1]", True)


def test_custom_extraction_receives_the_answer_as_generated():
    assert played(OPENING[0], r"\boxed{1}", f"{__name__}:whole_answer") == (r"\boxed{1}", True)


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


END_IDS = list(END_OF_THINKING.encode())
INFO = {"prompts": {"end_of_thinking": END_IDS}, "max_model_len": 100}
MODEL = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
AGENT = AgentSpec(pid=0, model=MODEL, collect_data=True, prompt_template="own", action_extraction_fn="default")
ENGINE = EngineConfig(thinking_tokens=6, max_generation_len=10)


class Sampler:
    """Function that answers requests by the given texts, a byte a token, cut at the request's limit."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[dict[str, Any]] = []

    async def generate(
        self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None, **options: Any
    ) -> Generation:
        self.asked.append({"prompt": prompt, "version": version, "stop": stop, "seed": seed, **options})
        ids = np.frombuffer(self.texts.pop(0).encode(), np.uint8).astype(np.int32)
        sampled = ids[: options["max_tokens"]]
        reason: FinishReason = "stop" if len(sampled) == len(ids) else "length"
        said: dict[str, Any] = {"finish_reason": reason, "adapter_version": version}
        said["prompt_ids"] = options.get("prompt_ids", list(prompt.encode()))
        return make_generation(sampled, -sampled, text=bytes(sampled.tolist()).decode(), **said)


def budget(**changes: Any) -> ThinkingBudget:
    made = thinking_budget(ENGINE, INFO | changes)
    assert made is not None
    return made


async def answered(sampler: Sampler, opened: str = "<think>", seed: int | None = 5, **changes: Any) -> Generation:
    return await budget(**changes).generate(sampler.generate, opened, "p?", 3, ("stop",), seed)


async def test_open_thinking_is_closed_and_the_answer_continues_exactly_these_ids():
    sampler = Sampler("I wonder what", "7")
    answer = await answered(sampler)
    first, second = sampler.asked
    assert second["prompt_ids"].tolist() == [*b"p?", *b"I wond", *END_IDS]
    assert second["prompt_ids"].dtype == np.int32
    assert (first["max_tokens"], second["max_tokens"]) == (6, 4)
    assert {"version": 3, "stop": ("stop",), "prompt": "p?"}.items() <= second.items()
    assert answer.prompt_ids.tolist() == [*b"p?"]
    assert answer.completion_ids.tolist() == [*b"I wond", *b"7"], "only sampled ids"
    assert answer.logprobs.tolist() == [-id for id in (*b"I wond", *b"7")]
    assert (answer.forced.at, answer.forced.ids.tolist()) == (6, END_IDS)
    assert answer.text == f"I wond{END_OF_THINKING}7"
    assert (answer.finish_reason, answer.adapter_version) == ("stop", 3)


async def test_answer_without_open_thinking_is_continued_without_forced_ids():
    sampler = Sampler("plain text", "text")
    answer = await answered(sampler, opened="")
    assert sampler.asked[1]["prompt_ids"].tolist() == [*b"p?", *b"plain "]
    assert (answer.text, answer.forced, answer.finish_reason) == ("plain text", None, "stop")
    closed = replace(budget(), thinking_tokens=11, max_tokens=20)
    sampler = Sampler("a</think>xyz", "z")
    answer = await closed.generate(sampler.generate, "<think>", "p?", 3, (), None)
    assert sampler.asked[1]["prompt_ids"].tolist() == [*b"p?", *b"a</think>xy"]
    assert (answer.text, answer.forced) == ("a</think>xyz", None)


@pytest.mark.parametrize(
    ("texts", "text", "finish_reason"),
    [
        (["short"], "short", "stop"),  # within the budget
        (["a</think>xyz", "7"], f"a</thi{END_OF_THINKING}7", "stop"),  # the budget ends inside a tag
        (["I wonder what", "a long answer"], f"I wond{END_OF_THINKING}a lo", "length"),  # all tokens are used
    ],
)
async def test_number_of_generations_and_end_follow_from_the_length(texts, text, finish_reason):
    sampler = Sampler(*texts)
    answer = await answered(sampler)
    assert (answer.text, answer.finish_reason, len(sampler.asked)) == (text, finish_reason, len(texts))
    assert (answer.forced is not None) == (END_OF_THINKING in text)


async def test_engine_that_cannot_end_or_complete_a_thought_is_refused():
    sampler = Sampler("I wonder what", "7")

    async def generate(*asked: Any, prompt_ids: Any = None, **options: Any) -> Generation:
        return await sampler.generate(*asked, **options)

    with pytest.raises(ConfigError, match=r"engine.kind = 'auto' does not complete the ids"):
        await budget().generate(generate, "<think>", "p?", 3, (), None)
    with pytest.raises(ConfigError, match=r"engine.thinking_tokens: engine.kind = 'auto' does not say which ids"):
        thinking_budget(ENGINE, {"max_model_len": 100})
    assert thinking_budget(EngineConfig(), {}) is None
    made = replace(budget(), tags=("[THINK]", "[/THINK]"))
    with pytest.raises(ConfigError, match=r"no ids for '\\n\[/THINK\]"):
        await made.generate(Sampler("I wonder what").generate, "", "p?", 3, (), None)


@pytest.mark.parametrize(("max_model_len", "requests"), [(8 + len(END_IDS), 1), (9 + len(END_IDS), 2)])
async def test_no_second_generation_without_room_for_a_token(max_model_len, requests):
    sampler = Sampler("I wonder what", "7")
    answer = await answered(sampler, max_model_len=max_model_len)
    assert len(sampler.asked) == requests
    assert (answer.finish_reason, answer.forced is None) == (("length", True) if requests == 1 else ("stop", False))


async def test_each_generation_has_its_own_seed_that_repeats():
    seeds = []
    for seed in (5, 5, None):
        sampler = Sampler("I wonder what", "7")
        await answered(sampler, seed=seed)
        seeds.append([request["seed"] for request in sampler.asked])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2
    assert seeds[2] == [None, None]


async def test_both_generations_of_a_turn_have_the_adapter_that_was_newest_before_it():
    sampler, leased = Sampler("I wonder what", "7"), list[int]()

    @contextlib.contextmanager
    def newest(_policy: str) -> Iterator[int]:
        leased.append(8 + len(leased))
        yield leased[-1]
        assert len(sampler.asked) == 2, "the adapter is leased until the turn is over"

    generate = partial(budget().generate, sampler.generate, "<think>")
    template = Template("own", "{observation}<think>")
    reply = await PolicyPlayer(generate, template, AGENT, 2, newest=newest).act("o")
    assert leased == [8]
    assert [request["version"] for request in sampler.asked] == [8, 8]
    assert reply.generation is not None and reply.generation.adapter_version == 8


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("tags", KNOWN_TAGS)
async def test_budget_of_a_run_ends_the_thoughts_of_each_template(tags, is_open):
    end = end_of_thinking(tags)
    ends = {"end_of_thinking": END_IDS, "ends_of_thinking": {end: [*end.encode()]}}
    given = replace(budget(prompts=ends, max_model_len=999), thinking_tokens=60, max_tokens=120)
    spec = GameSpec(game_idx=0, kind="train", env_id="x", num_players=2, seed=0, agent_specs=(AGENT,), max_turns=9)
    template = Template("own", "{observation}" + tags[0] * is_open, tags=tags)

    async def reply_to(thought: str) -> Reply:
        sampler = Sampler(("" if is_open else tags[0]) + thought, r"\boxed{2}")
        factory = PlayerFactory(sampler.generate, {"own": template}, thinking=given)
        return await factory.players(spec)[0].act("o")

    reply = await reply_to(r"\boxed{1}" + "hm " * 40)
    assert (reply.action, reply.format_ok, reply.is_cut_off) == ("[2]", True, False)
    assert reply.generation is not None and reply.generation.forced is not None
    assert reply.generation.forced.ids.tolist() == [*end.encode()]
    assert end.endswith((tags[1], f"{tags[1]}\n\n")) and reply.text.endswith(rf"{end}\boxed{{2}}")
    reply = await reply_to(f"hm{tags[1]}{'so ' * 40}")
    assert reply.generation is not None and reply.generation.forced is None, "this thought was closed"
