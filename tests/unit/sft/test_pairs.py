"""The turns that are worth imitating, the file that holds them, and the games that are played for them."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from fakes.game_records import make_generation, make_record, make_spec
from fakes.openai_server import chat_reply, serving
from unstable_lite.config import Config
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.config.training import SftConfig
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import ConfigError, EnvError, OpponentError, RequestError
from unstable_lite.files import to_line
from unstable_lite.games.answers import extract_boxed, written_answer
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.orchestrator.workers import while_alive
from unstable_lite.sft.pairs import Pair, pairs_of_game, read_pairs
from unstable_lite.sft.session import Collected, collect_pairs
from unstable_lite.types import ENV_LOST, GameRecord, Generation, ModelRef, Turn

ENV_IDS = ("Nim-v0-train", "TicTacToe-v0-train")


def game(*players: str, wins: int | None = 0, invalid: tuple[int, ...] = (), badly_formed: int = -1) -> GameRecord:
    """Return a game of six turns, the players alternating; turn `badly_formed` does not have the requested form."""
    models = [ModelRef(uid=name, kind="fixed", name=name) for name in players]
    last_turns = {n % len(players): n for n in range(6)}
    bad = [last_turns[pid] for pid in invalid]
    turns = [
        Turn(
            pid=n % len(players),
            observation=f"o{n}",
            text=f"said {n}",
            action=f"[{n}]",
            format_ok=n != badly_formed,
            is_invalid=n in bad,
        )
        for n in range(6)
    ]
    rewards = [float(pid == wins) for pid in range(len(players))]
    ends: dict[str, Any] = {"end": "invalid" if invalid else "natural", "invalid_pids": invalid}
    return make_record(make_spec(*models, game_idx=7, env_id="Nim-v0-train"), *rewards, turns=turns, **ends)


def kept(record: GameRecord, **sft: Any) -> tuple[list[int], dict[str, int]]:
    pairs, left_out = pairs_of_game(record, SftConfig(**sft))
    return [pair.turn for pair in pairs], dict(left_out)


@pytest.mark.parametrize(
    ("record", "sft", "turns", "left_out"),
    [
        (game("a", "b"), {"filter": ()}, [0, 1, 2, 3, 4, 5], {}),
        (game("a", "b"), {"filter": ("winners",)}, [0, 2, 4], {"not the winner's": 3}),
        (game("a", "b", wins=None), {"filter": ("winners",)}, [], {"not the winner's": 6}),
        (game("a", "b", invalid=(1,)), {"filter": ("valid",)}, [0, 1, 2, 3, 4], {"not valid": 1}),
        (game("a", "b", badly_formed=2), {"filter": ("valid",)}, [0, 1, 3, 4, 5], {"not valid": 1}),
        (game("a", "b", invalid=(1,), badly_formed=2), {}, [0, 4], {"not the winner's": 3, "not valid": 1}),
        (
            game("a", "b"),
            {"filter": (), "imitate": ("b",), "players": ("a", "b")},
            [1, 3, 5],
            {"by a player that is not imitated": 3},
        ),
    ],
)
def test_filter_keeps_matching_turns_and_counts_the_rest(record, sft, turns, left_out):
    assert kept(record, **sft) == (turns, left_out)


def test_any_reward_above_0_wins_a_single_player_game():
    lost = game("a", wins=None)
    lost.outcomes = {0: "na"}
    assert kept(lost) == ([], {"not the winner's": 6})
    lost.rewards = {0: 0.2}
    assert kept(lost)[0] == [0, 1, 2, 3, 4, 5]


def test_model_text_is_kept_and_a_scripted_player_writes_only_its_action():
    record = game("scripted:random", "google/gemini")
    record.turns = [
        replace(turn, text=turn.action if turn.pid == 0 else f"said {number}")
        for number, turn in enumerate(record.turns)
    ]
    record.turns[3] = replace(record.turns[3], text="[3]")
    pairs, _ = pairs_of_game(record, SftConfig(filter=()))
    assert pairs[3].completion == "[3]", "a model's missing form is not added"
    assert (pairs[0].observation, pairs[0].action, pairs[0].completion) == ("o0", "[0]", "")
    assert (pairs[1].observation, pairs[1].action, pairs[1].completion) == ("o1", "[1]", "said 1")
    assert (pairs[0].player, pairs[0].outcome, pairs[0].game, pairs[0].turn) == ("scripted:random", "win", 7, 0)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda template: template.name)
def test_answer_in_every_template_is_read_as_the_action(template):
    for action in ("[4]", "[col 3]", "[Bid: 2, 5]", "[A] [B]"):
        answer = written_answer(template.prompt("o", 2), action)
        assert extract_boxed(answer) == (action, True)
        assert ("</think>" in answer) == template.text.endswith("<think>")


def test_missing_and_extra_keys_of_a_pair_are_tolerated(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        '{"observation": "o", "action": "[1]"}\n\n{"prompt": "p", "completion": "c", "reward": 3, "env_id": null}\n'
    )
    assert read_pairs(path, ENV_IDS) == [Pair(observation="o", action="[1]"), Pair(prompt="p", completion="c")]


@pytest.mark.parametrize(("completion", "read"), [("h\u2028i", "h\u2028i"), ("a\ud800", "a?")])
def test_pair_is_one_line_of_utf8_with_any_text(tmp_path, completion, read):
    pair = Pair(observation="a\u2028b\x85c\u2029d\x1e\x0be\r\nf\rg", completion=completion)
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(to_line(pair))
    assert read_pairs(path, ENV_IDS) == [msgspec.structs.replace(pair, completion=read)]


def test_bad_lines_are_refused_together_with_their_numbers(tmp_path):
    bad = [
        ('{"prompt": "p", "completion": ', "truncated"),
        ('{"prompt": "p", "answer": "c"}', "'action'"),
        ('{"completion": "c"}', "'observation'"),
        ('["p", "c"]', "got `array`"),
        ('{"prompt": 1, "completion": "c"}', "got `int` - at `$.prompt`"),
        ('{"prompt": "p", "completion": "c", "turn": "first"}', "got `str` - at `$.turn`"),
        ('{"prompt": "p", "completion": "\\ud800 and more text"}', "surrogate"),
        ('{"prompt": "p", "completion": "c", "env_id": "Nim-v0-trian"}', "did you mean 'Nim-v0-train'?"),
        (f'{{"prompt": "p", "completion": {"[" * 100_000}', "recursion"),
        ('{"prompt": "p", "completion": "\udcff"}', "utf-8"),
    ]
    path = tmp_path / "given.jsonl"
    lines = ['{"prompt": "p", "completion": "c"}', *(line for line, _ in bad)]
    path.write_text("\n".join(lines), errors="surrogateescape")
    with pytest.raises(ConfigError) as caught:
        read_pairs(path, ENV_IDS)
    for number, (problem, (_, says)) in enumerate(zip(caught.value.problems, bad, strict=True), start=2):
        assert f"{path}:{number}: " in problem and says in problem.replace("UTF-8", "utf-8")  # msgspec 0.23
    path.write_text("{\n" * 30)
    with pytest.raises(ConfigError, match="20 more"):
        read_pairs(path, ENV_IDS)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no pair"):
        read_pairs(path, ENV_IDS)


def sft_config(workers: int = 8, **sft: Any) -> Config:
    env = {"num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
    return Config.model_validate(
        {
            "run": {"num_collection_workers": workers},
            "sft": {"players": ("scripted:random",), "pairs": 40} | sft,
            "train_envs": [{"env_id": name, **env} for name in ("TicTacToe-v0-train", "Nim-v0-train")],
        }
    )


def ref(name: str) -> ModelRef:
    version = 0 if name == "base" else None
    return ModelRef(uid=f"fixed-{name}", kind="fixed", name=name, adapter_version=version)


async def collect(given: Config, generate: Any = None) -> tuple[list[Pair], Collected]:
    file, players = io.BytesIO(), [ref(name) for name in given.sft.players]
    async with PlayerFactory(generate, opponents=given.opponents) as seats:
        collected = await while_alive([], collect_pairs(given, players, seats, file, TerminalInterface(quiet=True)))
    pairs = [msgspec.json.decode(line, type=Pair) for line in file.getvalue().splitlines()]
    assert collected.pairs == len(pairs)
    return pairs, collected


async def box_it(prompt: str, version: int, *_: object) -> Generation:
    """Answer after a delay that depends on the prompt, so that games end in another order than they began."""
    await asyncio.sleep(len(prompt) % 7 / 1000)
    text = "\\boxed{[1 1]}" if "Nim" in prompt else f"\\boxed{{{prompt.split('[')[-1][:2]}]}}"
    return make_generation([2], text=text, adapter_version=version)


async def test_games_are_played_until_there_are_enough_pairs_of_winners():
    pairs, collected = await collect(sft_config())
    assert len(pairs) == 40
    assert {pair.outcome for pair in pairs} == {"win"}
    assert {pair.env_id for pair in pairs} == {"TicTacToe-v0-train", "Nim-v0-train"}
    assert collected.left_out["not the winner's"] > 0
    assert collected.games < 40


@pytest.mark.parametrize("players", [("base", "scripted:random"), ("scripted:random",)])
async def test_pairs_depend_on_the_seed_and_not_on_concurrency(players):
    given = sft_config(players=players, filter=(), workers=1)
    at_once = given.model_copy(update={"run": given.run.model_copy(update={"num_collection_workers": 16})})
    reseeded = given.model_copy(update={"run": given.run.model_copy(update={"seed": 1})})
    one, counted = await collect(given, box_it)
    many, counted_at_once = await collect(at_once, box_it)
    other, _ = await collect(reseeded, box_it)
    assert one == many and counted == counted_at_once
    assert one != other


def failing(error: Exception, times: float) -> Any:
    """Return a function that raises at the first requests and answers the others."""
    calls = itertools.count()

    async def generate(prompt: str, version: int, *_: object) -> Generation:
        if next(calls) < times:
            raise error
        return await box_it(prompt, version)

    return generate


@pytest.mark.parametrize(
    ("players", "error", "times", "void_games"),
    [
        (("base",), RequestError("one answer was lost"), 1, [1]),
        (("base",), EnvError("its process died", reason=ENV_LOST), 30, [30]),
        (("base", "scripted:random", "scripted:optimal"), OpponentError("is away"), math.inf, range(11, 500)),
    ],
    ids=["one-request", "env-process", "one-player-of-three"],
)
async def test_failed_games_that_are_not_all_in_a_row_only_give_no_pair(players, error, times, void_games):
    # Failed games end first, but count in the order of their numbers.
    pairs, collected = await collect(sft_config(players=players, filter=(), workers=64), failing(error, times))
    assert len(pairs) == 40 and collected.void_games in void_games


@pytest.mark.parametrize("error", [RequestError, OpponentError])
async def test_collection_ends_with_the_last_reason_if_all_games_in_a_row_fail(error):
    with pytest.raises(EnvError, match=r"20 games in a row failed; .* is away"):
        await collect(sft_config(players=("base",), workers=64), failing(error("is away"), math.inf))


async def test_players_alternate_seats_within_each_env():
    pairs, _ = await collect(sft_config(players=("base", "scripted:random"), filter=(), pairs=60), box_it)
    first = Counter((pair.env_id, pair.player) for pair in pairs if pair.turn == 0)
    for env_id in ("TicTacToe-v0-train", "Nim-v0-train"):
        counts = [first[env_id, name] for name in ("base", "scripted:random")]
        assert min(counts) > 0 and abs(counts[0] - counts[1]) <= 1


async def test_model_with_empty_answers_leaves_readable_pairs(tmp_path):
    async def say_nothing_at_times(prompt: str, version: int, *_: object) -> Generation:
        generation = await box_it(prompt, version)
        return replace(generation, text=("", " \n", generation.text)[len(prompt) % 3])

    pairs, collected = await collect(sft_config(players=("base", "scripted:random"), filter=()), say_nothing_at_times)
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b"".join(map(to_line, pairs)))
    assert read_pairs(path, ENV_IDS) == pairs
    assert collected.left_out["an empty answer"] > 0
    assert {pair.player for pair in pairs} == {"base", "scripted:random"}


async def test_no_more_than_max_games_are_played(monkeypatch):
    monkeypatch.setattr("unstable_lite.sft.session.MAX_GAMES", 3)
    pairs, collected = await collect(sft_config(pairs=10_000))
    assert collected.games == 3
    assert 0 < len(pairs) < 30


async def test_truncated_answer_is_never_imitated():
    async def cut_off_at_times(prompt: str, version: int, *_: object) -> Generation:
        generation = await box_it(prompt, version)
        if len(prompt) % 2:
            return generation
        return replace(generation, text=f"{generation.text} length", finish_reason="length")

    with serving() as server:
        reasons = itertools.cycle(["stop", "length", "eos", "content_filter"])
        server.answer = lambda _body: chat_reply(f"\\boxed{{[1 1]}} {(reason := next(reasons))}", finish_reason=reason)
        given = sft_config(players=("base", "vendor/model"), filter=())
        given = given.model_copy(update={"opponents": OpponentsConfig(base_url=server.url)})
        pairs, collected = await collect(given, cut_off_at_times)
    assert not any(pair.completion.endswith((" length", " content_filter")) for pair in pairs)
    assert {pair.player for pair in pairs} == {"base", "vendor/model"}
    assert set(collected.left_out) == {"cut off at max_generation_len", "cut off at the endpoint's max_tokens"}
