"""Real games between scripted players until there are enough turns to imitate."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes.game_records import make_generation
from fakes.openai_server import chat_reply, serving
from unstable_lite.config import Config
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.errors import EnvError, OpponentError, RequestError
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.sft.pairs import Pair, read_pairs, write_line
from unstable_lite.sft.session import Collected, adapter_versions, collect_pairs
from unstable_lite.types import ENV_LOST, Generation


def config(workers: int = 8, **sft: Any) -> Config:
    env = {"num_players": 2, "num_actors": 2, "prompt_template": "tiny"}
    return Config.model_validate(
        {
            "run": {"num_collection_workers": workers},
            "sft": {"players": ("scripted:random",), "pairs": 40} | sft,
            "train_envs": [{"env_id": name, **env} for name in ("TicTacToe-v0-train", "Nim-v0-train")],
        }
    )


async def collect(given: Config, generate: Any = None) -> tuple[list[Pair], Collected]:
    pairs: list[Pair] = []
    async with PlayerFactory(generate, opponents=given.opponents) as seats:
        collected = await collect_pairs(given, seats, pairs.append, lambda _: None)
    assert collected.pairs == len(pairs)
    return pairs, collected


async def box_it(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
    """Answer after a delay that depends on the prompt, so that games end in another order than they began."""
    await asyncio.sleep(len(prompt) % 7 / 1000)
    text = "\\boxed{[1 1]}" if "Nim" in prompt else f"\\boxed{{{prompt.split('[')[-1][:2]}]}}"
    return make_generation([2], text=text, adapter_version=version)


async def test_games_are_played_until_there_are_enough_pairs_of_winners() -> None:
    pairs, collected = await collect(config())
    assert len(pairs) == 40
    assert {pair.outcome for pair in pairs} == {"win"}
    assert {pair.env_id for pair in pairs} == {"TicTacToe-v0-train", "Nim-v0-train"}
    assert collected.left_out["not the winner's"] > 0
    assert collected.games < 40


async def test_pairs_depend_on_the_seed_and_not_on_concurrency() -> None:
    given = config(players=("base", "scripted:random"), filter=(), workers=1)
    at_once = given.model_copy(update={"run": given.run.model_copy(update={"num_collection_workers": 16})})
    reseeded = given.model_copy(update={"run": given.run.model_copy(update={"seed": 1})})
    one, _ = await collect(given, box_it)
    many, _ = await collect(at_once, box_it)
    other, _ = await collect(reseeded, box_it)
    assert one == many
    assert one != other


async def test_games_lost_with_their_env_process_are_no_failures_in_a_row() -> None:
    calls = itertools.count()

    async def generate(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        if next(calls) < 30:
            raise EnvError("its process died", reason=ENV_LOST)
        return await box_it(prompt, version, stop, seed)

    pairs, collected = await collect(config(players=("base",), filter=()), generate)
    assert (len(pairs), collected.void_games) == (40, 30)


async def test_players_alternate_seats_within_each_env() -> None:
    pairs, _ = await collect(config(players=("base", "scripted:random"), filter=(), pairs=60), box_it)
    first = Counter((pair.env_id, pair.player) for pair in pairs if pair.turn == 0)
    for env_id in ("TicTacToe-v0-train", "Nim-v0-train"):
        counts = [first[env_id, name] for name in ("base", "scripted:random")]
        assert min(counts) > 0 and abs(counts[0] - counts[1]) <= 1


async def test_no_more_than_max_games_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstable_lite.sft.session.MAX_GAMES", 3)
    pairs, collected = await collect(config(pairs=10_000))
    assert collected.games == 3
    assert 0 < len(pairs) < 30


async def test_failed_game_gives_no_pair_and_the_last_reason_is_reported() -> None:
    calls = 0

    async def break_once(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RequestError("one answer was lost")
        return await box_it(prompt, version, stop)

    _, collected = await collect(config(players=("base",), filter=()), break_once)
    assert collected.void_games == 1

    class Broken:
        """An engine or endpoint that refuses every request."""

        def __init__(self, error: type[RequestError]) -> None:
            self._error = error

        async def __call__(
            self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None
        ) -> Generation:
            raise self._error("refused")

    for error in (RequestError, OpponentError):
        with pytest.raises(EnvError, match="refused"):
            await collect(config(players=("base",)), Broken(error))


async def test_model_with_empty_answers_leaves_readable_pairs(tmp_path: Path) -> None:
    async def say_nothing_at_times(
        prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None
    ) -> Generation:
        generation = await box_it(prompt, version, stop)
        return replace(generation, text=("", " \n", generation.text)[len(prompt) % 3])

    pairs, collected = await collect(config(players=("base", "scripted:random"), filter=()), say_nothing_at_times)
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(map(write_line, pairs)))
    assert read_pairs(path) == pairs
    assert collected.left_out["an empty answer"] > 0
    assert {pair.player for pair in pairs} == {"base", "scripted:random"}


async def test_truncated_answer_is_never_imitated() -> None:
    async def cut_off_at_times(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        generation = await box_it(prompt, version, stop)
        if len(prompt) % 2:
            return generation
        return replace(generation, text=f"{generation.text} length", finish_reason="length")

    with serving() as server:
        reasons = itertools.cycle(["stop", "length", "eos", "content_filter"])
        server.answer = lambda _body: chat_reply(f"\\boxed{{[1 1]}} {(reason := next(reasons))}", finish_reason=reason)
        given = config(players=("base", "vendor/model"), filter=())
        given = given.model_copy(update={"opponents": OpponentsConfig(base_url=server.url)})
        pairs, collected = await collect(given, cut_off_at_times)
    assert not any(pair.completion.endswith((" length", " content_filter")) for pair in pairs)
    assert {pair.player for pair in pairs} == {"base", "vendor/model"}
    assert set(collected.left_out) == {"cut off at max_generation_len", "cut off at the endpoint's max_tokens"}


def test_adapters_are_numbered_and_the_base_is_version_0() -> None:
    names = ("scripted:random", "adapter:x", "base", "adapter:y", "adapter:x")
    assert adapter_versions(names) == {"adapter:x": 1, "adapter:y": 2, "base": 0}
