"""The adapter of each turn (`league.adapter_policy`), with real parts around the collector except the engines."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_collector import EVAL, MIRROR, TICTACTOE, League, answer

from fakes.game_records import offer
from unstable_lite.adapters.table import AdapterState
from unstable_lite.config.games import TrainEnvSpec
from unstable_lite.dashboards.report.games import read_games
from unstable_lite.files import to_line
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import UniformRandomEnvSampler
from unstable_lite.league.samplers.model_samplers import BaseModelSampler
from unstable_lite.rollout.collector import LockStep, leased_newest
from unstable_lite.tracking.records import record_to_json, transcript
from unstable_lite.types import GameRecord, Generation, ModelRef


class Engine:
    """Engine that answers a request for each call of `answer_one`."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """Adapter versions of the requests."""
        self.error: Exception | None = None
        self._may_answer = asyncio.Semaphore(0)

    async def generate(self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        self.asked.append(version)
        await self._may_answer.acquire()
        if self.error is not None:
            raise self.error
        board = prompt.rpartition("Available Moves:")[2] or prompt
        return answer(f"\\boxed{{[{next(cell for cell in '012345678' if f'[{cell}]' in board)}]}}", version)

    async def answer_one(self) -> None:
        """Answer a request and wait until the next one, if any, has come."""
        self._may_answer.release()
        for _ in range(50):
            await asyncio.sleep(0)


class FirstCheckpoint(BaseModelSampler):
    """Sampler whose opponent is `ckpt-1`."""

    def sample_opponent(self, env_id: str) -> ModelRef:
        return self.registry.get("ckpt-1").ref


class Turns(League):
    """A league whose trained seats use the newest adapter in each turn; the current policy is `ckpt-1`."""

    def __init__(self, tmp_path: Path, env: TrainEnvSpec = MIRROR, policy: str = "turn") -> None:
        super().__init__(tmp_path, env=env)
        self.engine = Engine()
        self.newest = partial(leased_newest, self.registry, self.table)
        self.use(PlayerFactory(self.engine.generate, newest=self.newest if policy == "turn" else None))
        self.publish(1)
        self._task: asyncio.Task[None] | None = None

    def publish(self, version: int) -> None:
        """Make a new version the current policy; the one before loses its pin."""
        before = self.registry.current.adapter_version
        offer(self.table, version)
        self.registry.add_policy(f"ckpt-{version}", adapter_version=version, iteration=version)
        if before:
            self.table.unpin(before)

    async def start(self) -> None:
        """Start one game after the other, and wait for the first request."""
        self._task = asyncio.create_task(self.collector.run(1, 0))
        while not self.engine.asked and not self._task.done():
            await asyncio.sleep(0)

    async def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def is_loaded(self, version: int) -> bool:
        return self.table.adapters[version].state is AdapterState.OFFERED

    async def play_a_game(self) -> GameRecord:
        """Play the first game, with a new version during each of its turns."""
        await self.start()
        while not self.records:
            self.publish(self.registry.current.adapter_version + 1)  # type: ignore[operator]
            await self.engine.answer_one()
        return self.records[0]


@pytest.fixture
async def make_league(tmp_path: Path) -> AsyncIterator[Callable[..., Turns]]:
    made: list[Turns] = []

    def make(**options: Any) -> Turns:
        made.append(Turns(tmp_path, **options))
        return made[-1]

    yield make
    for league in made:
        await league.cancel()


@pytest.fixture
def league(make_league: Callable[..., Turns]) -> Turns:
    return make_league()


async def test_each_turn_of_both_mirror_seats_uses_the_newest_adapter_and_every_record_names_it(league, tmp_path):
    record = await league.play_a_game()
    versions = [step.generation.adapter_version for step in record.trajectories[0].steps]
    assert record.adapter_versions == list(range(1, len(record.turns) + 1))
    assert versions == record.adapter_versions[record.trajectories[0].pid :: 2]
    line = record_to_json(record, keep_tokens=False)
    assert line["adapter_versions"] == record.adapter_versions
    assert [agent["model"] for agent in line["agents"]] == ["ckpt-1", "ckpt-1"]
    assert "started as ckpt-1, now adapter 2" in transcript(record)
    (tmp_path / "games.jsonl").write_bytes(to_line(line))
    (game,) = read_games(tmp_path, None, 10).kept
    assert [turn["adapter"] for turn in game["turns"]] == record.adapter_versions


async def test_game_that_keeps_its_adapter_uses_it_in_every_turn(make_league):
    record = await make_league(policy="game").play_a_game()
    assert set(record.adapter_versions) == {1}
    assert not record.changes_adapter


async def test_turn_holds_its_adapter_while_it_waits_for_an_engine_and_no_longer(league):
    await league.start()
    league.publish(2)
    league.publish(3)
    assert league.is_loaded(1), "a turn waits for an engine that may be restarting"
    assert not league.is_loaded(2)
    await league.engine.answer_one()
    assert league.engine.asked == [1, 3]
    assert not league.is_loaded(1)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_failed_or_cancelled_turn_gives_its_adapter_back(league, is_cancelled):
    await league.start()
    league.publish(2)
    assert league.is_loaded(1)
    if is_cancelled:
        await league.cancel()
        assert not any(adapter.leases for adapter in league.table.adapters.values())
    else:
        league.engine.error = RuntimeError("the engine refused")
        await league.engine.answer_one()
        assert league.records[0].end == "void"
    assert not league.is_loaded(1)


async def test_policy_may_start_without_an_adapter(league):
    league.registry.load_state_dict(ModelRegistry().state_dict())
    await league.start()
    league.publish(2)
    await league.engine.answer_one()
    assert league.engine.asked == [0, 2]


async def test_opponent_that_is_a_checkpoint_keeps_its_adapter_for_the_game(make_league):
    league = make_league(env=TICTACTOE)
    sampler = FirstCheckpoint(league.registry, random.Random(0))
    league.collector._scheduler = GameScheduler(sampler, UniformRandomEnvSampler([TICTACTOE], [EVAL]), 0)
    league.table.pin(1)  # as the checkpoint pool does
    league.publish(2)
    await league.start()
    league.table.unpin(1)
    league.publish(3)
    assert league.is_loaded(1)
    while not league.records:
        await league.engine.answer_one()
        assert league.is_loaded(1) or league.records
    (record,) = league.records
    (opponent,) = [agent.pid for agent in record.spec.agent_specs if not agent.collect_data]
    of_opponent = {v for turn, v in zip(record.turns, record.adapter_versions, strict=True) if turn.pid == opponent}
    assert of_opponent == {1}
    assert 3 in record.adapter_versions


async def test_evaluation_keeps_the_adapter_that_it_evaluates(league):
    evaluation = asyncio.create_task(
        league.collector.evaluate(EVAL, league.registry.current, 1, "before", concurrency=1)
    )
    while not league.engine.asked:
        await asyncio.sleep(0)
    league.publish(2)
    assert league.is_loaded(1)
    evaluation.cancel()
    await asyncio.gather(evaluation, return_exceptions=True)
    assert not league.is_loaded(1)


async def test_result_is_the_rating_of_the_version_that_began_the_game(make_league):
    league = make_league(env=TICTACTOE)
    record = await league.play_a_game()
    assert record.changes_adapter
    assert league.registry.get("ckpt-1").games == 1
    assert league.registry.get("ckpt-2").games == 0
    assert {trajectory.model.uid for trajectory in record.trajectories} == {"ckpt-1"}


async def test_new_steps_of_a_long_game_survive_when_its_old_ones_are_stale(league):
    record = await league.play_a_game()
    newest = record.adapter_versions[-1]
    assert newest is not None
    league.buffer.max_staleness = 2
    assert league.buffer.has_batch(3, newest)
    assert league.buffer.dropped_stale == len(record.turns) - 3
    kept = await league.buffer.get_batch(3, newest)
    assert sorted(step.generation.adapter_version for step in kept) == [newest - 2, newest - 1, newest]


async def test_sync_round_plays_every_turn_with_the_policy_of_its_start(league):
    lock_step = LockStep(league.engine.generate)
    league.use(PlayerFactory(lock_step.generate, sampling_seed=0, newest=league.newest), lock_step)
    playing = asyncio.create_task(league.collector.play_round(3))
    while not playing.done():
        await league.engine.answer_one()
    await playing
    assert {version for record in league.records for version in record.adapter_versions} == {1}
