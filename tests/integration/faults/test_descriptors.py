"""Play 1,024 games at once on 256 file descriptors: real games, a real engine process, the scripted engine."""

import asyncio
import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_engine_death import started_fleet

from unstable_lite.config.games import OpponentsConfig
from unstable_lite.games.players.factory import DESCRIPTORS_BESIDES, PlayerFactory, opponent_problem
from unstable_lite.types import AgentSpec, GameSpec, ModelRef

GAMES = 1024


@contextlib.contextmanager
def descriptor_limit(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def test_thousands_of_games_need_few_descriptors_and_leak_none(tmp_path: Path) -> None:
    with descriptor_limit(256):
        async with started_fleet(tmp_path) as fleet:
            await fleet.evaluate(50)
            before, most_games, most_open = num_open(), 0, 0
            playing = asyncio.create_task(fleet.evaluate(GAMES, concurrency=GAMES))
            while not playing.done():
                most_games = max(most_games, fleet.collector.games_in_flight["eval"])
                most_open = max(most_open, num_open())
                await asyncio.sleep(0.02)
            assert len(playing.result()) == GAMES
            assert not [record.error for record in playing.result() if record.end == "void"]
            assert most_games == GAMES
            assert most_open <= before + 2
            assert num_open() <= before


async def test_endpoint_connections_raise_the_descriptor_limit() -> None:
    opponents = OpponentsConfig(base_url="http://127.0.0.1:9/v1", max_concurrent_requests=150)
    agent = AgentSpec(
        pid=0,
        model=ModelRef(uid="fixed-vendor/model", kind="fixed", name="vendor/model"),
        collect_data=False,
        prompt_template="tiny",
        action_extraction_fn="default",
    )
    spec = GameSpec(
        game_idx=0, kind="eval", env_id="Nim-v0-train", num_players=1, seed=1, agent_specs=(agent,), max_turns=9
    )
    with descriptor_limit(200):
        async with PlayerFactory(None, opponents=opponents) as seats:  # type: ignore[arg-type]
            seats._player(spec, agent)
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 150 + DESCRIPTORS_BESIDES


def test_more_connections_than_system_limit_are_refused_before_start() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system sets no limit")
    opponents = OpponentsConfig(base_url="http://127.0.0.1:9/v1", max_concurrent_requests=hard)
    problem = opponent_problem("vendor/model", "Nim-v0-train", None, opponents)
    assert "open files" in problem and str(hard) in problem
