import asyncio
import gc
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fakes.game_records import Observer, Records, make_generation, offer
from fakes.openai_server import Server, chat_reply, serving
from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config.games import EvalEnvSpec, OpponentsConfig, TrainEnvSpec
from unstable_lite.config.training import RunConfig
from unstable_lite.errors import OpponentError, RequestError, WorkerDied
from unstable_lite.games.players import openai_compatible
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import FixedOpponentModelSampler, UniformRandomEnvSampler
from unstable_lite.reward_transformations import GROUP_BASELINES
from unstable_lite.rollout import collector, run_game
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.rollout.collector import Collector, LockStep
from unstable_lite.types import GameRecord, Generation

TICTACTOE = TrainEnvSpec(env_id="TicTacToe-v0-train", num_players=2, num_actors=1, prompt_template="tiny")
EVAL = EvalEnvSpec(
    env_id="Nim-v0-train", num_players=2, prompt_template="tiny", fixed_opponent="scripted:random", max_turns=60
)
MIRROR = TrainEnvSpec(env_id="TicTacToe-v0-train", num_players=2, num_actors=2, prompt_template="tiny")


def answer(text: str, version: int = 0) -> Generation:
    return make_generation([2], text=text, adapter_version=version)


async def any_cell(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
    await asyncio.sleep(0)
    return answer(f"\\boxed{{[{random.Random(prompt).randrange(9)}]}}", version)


async def never(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
    await asyncio.sleep(3600)
    raise AssertionError


def failing(every: int, generate: Any) -> Any:
    """Return a function that generates as another one does, and fails at every so many calls."""
    calls = itertools.count(1)

    async def fails_sometimes(*asked: Any) -> Generation:
        if next(calls) % every == 0:
            raise RuntimeError("the engine refused")
        return await generate(*asked)  # type: ignore[no-any-return]

    return fails_sometimes


class League:
    """A collector with real parts around it except the engines."""

    def __init__(
        self,
        tmp_path: Path,
        generate: Any = any_cell,
        buffer_size: int = 10_000,
        env: TrainEnvSpec = TICTACTOE,
        group_size: int = 1,
        fixed_opponents: tuple[str, ...] = ("scripted:random",),
        opponents: OpponentsConfig | None = None,
        eval_env: EvalEnvSpec = EVAL,
        **run: Any,
    ) -> None:
        self.records = Records()
        self.registry = ModelRegistry()
        for name in fixed_opponents:
            self.registry.add_fixed(name)
        sampler = FixedOpponentModelSampler(self.registry, random.Random(0))
        self.scheduler = GameScheduler(sampler, UniformRandomEnvSampler([env], [eval_env]), 0, group_size)
        baseline = GROUP_BASELINES["grpo"] if group_size > 1 else None
        self.buffer = StepBuffer(
            buffer_size,
            filter_opponent_invalid=run.get("filter_opponent_invalid", False),
            group_size=group_size,
            group_baseline=baseline,
        )
        self.table = AdapterTable(8)
        self.config = RunConfig(**run)
        self.use(PlayerFactory(generate, opponents=opponents))

    def use(self, seats: PlayerFactory, lock_step: LockStep | None = None) -> None:
        """Make the collector, with these seats."""
        self.seats = seats
        self.collector = Collector(
            self.scheduler, self.buffer, seats, self.table, self.config, [self.records], lock_step
        )

    @asynccontextmanager
    async def playing(self, workers: int = 8, eval_workers: int = 0) -> AsyncIterator[asyncio.Task[None]]:
        """Collect games for the time of the context, at most a minute."""
        task = asyncio.create_task(self.collector.run(workers, eval_workers))
        try:
            async with asyncio.timeout(60):
                yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def collect_until(self, is_enough: Callable[[], bool], workers: int = 8, eval_workers: int = 0) -> None:
        async with self.playing(workers, eval_workers) as task:
            while not is_enough():
                await asyncio.sleep(0.001)
                if task.done():
                    await task


async def test_games_start_only_while_unpaused_and_none_outlives_the_collector(tmp_path):
    league, before = League(tmp_path), asyncio.all_tasks()
    league.collector.unpaused.clear()
    async with league.playing(20, 5):
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not league.records
        league.collector.unpaused.set()
        while len(league.records) < 10:
            await asyncio.sleep(0.001)
    assert asyncio.all_tasks() == before
    assert league.collector.games_in_flight.total() == 0


async def test_finished_game_is_released_before_the_next_starts(tmp_path):
    def alive() -> int:
        gc.collect()
        # isinstance would read each object's class, which makes torch warn of its deprecations.
        return sum(type(one) is GameRecord for one in gc.get_objects())

    gc.freeze()  # what other modules made is not looked at
    ended, looked, kept = 0, 0, set[int]()

    async def look(*asked: Any) -> Generation:
        nonlocal looked
        if ended > looked:
            looked = ended
            kept.add(alive())
        return await any_cell(*asked)

    def count(record: GameRecord) -> None:
        nonlocal ended
        ended += 1

    league = League(tmp_path, look)
    offer(league.table, 1)
    league.collector._listeners = [Observer(count)]
    await league.collect_until(lambda: ended >= 3, workers=1, eval_workers=1)
    gc.unfreeze()
    assert kept and kept <= {1, 2}, "one training game and one evaluation game"


async def test_dead_worker_ends_the_run_instead_of_voiding_games(tmp_path):
    async def dead(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        raise WorkerDied("engine-0 was killed")

    league = League(tmp_path, dead)
    with pytest.raises(ExceptionGroup) as caught:
        await league.collector.run(2, 0)
    assert caught.group_contains(WorkerDied, match="engine-0")
    assert league.records == []


async def test_game_over_its_time_limit_is_void_unless_the_clock_is_stopped(tmp_path):
    league = League(tmp_path, never, game_timeout_s=1.5)
    ended: list[float] = []

    async def play(after_s: float) -> None:
        (spec,) = league.scheduler.next_train_group()
        await asyncio.sleep(after_s)
        record = await league.collector.runner.play(spec)
        ended.append(time.monotonic())
        assert record.end == "void" and "run.game_timeout_s = 1.5" in str(record.error)

    playing = asyncio.gather(play(0.0), play(0.4), play(1.2))
    await asyncio.sleep(0.75)
    for _ in range(2):
        with league.collector.runner.clock_stopped():
            await asyncio.sleep(0.9)
    is_restart = time.monotonic()
    await asyncio.wait_for(playing, 30)
    first, second, last = (at - is_restart for at in ended)
    assert 0 < first < second
    assert last > 1.49, "it began while the clock was stopped, and keeps its full time"


async def test_game_that_ends_with_the_run_is_still_counted(tmp_path):
    league = League(tmp_path)
    before = asyncio.all_tasks()
    task = asyncio.create_task(league.collector.run(8, 2))
    while not league.collector._ended:
        await asyncio.sleep(0)
    over = list(league.collector._ended)
    for running in asyncio.all_tasks() - before:
        running.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not league.collector._ended
    counted = [record.spec.game_idx for record in league.records]
    assert len(counted) == len(set(counted))
    assert {record.spec.game_idx for record in over} <= set(counted)
    steps = sum(len(t.steps) for record in league.records for t in record.trajectories if record.spec.kind == "train")
    assert league.buffer.added == steps


@pytest.mark.parametrize(("eval_share", "least", "most"), [(0.1, 0.05, 0.1), (0.4, 0.2, 0.4), (1, 0.25, 1)])
async def test_evaluations_take_at_most_their_share_of_the_games(tmp_path, eval_share, least, most):
    league = League(tmp_path, eval_share=eval_share, buffer_size=50)
    quota = asyncio.create_task(league.collector.evaluate(EVAL, league.registry.current, 40, "before", concurrency=2))

    def learn() -> bool:  # now and then, so that training games often wait
        if league.buffer.is_full and random.random() < 0.1:
            league.buffer.drain()
        return len(league.records) >= 300 + 40 and quota.done()

    await league.collect_until(learn, workers=40, eval_workers=16)
    seats = Counter(a.pid for r in await quota for a in r.spec.agent_specs if a.model.uid == "base")
    assert seats == {0: 20, 1: 20}
    trained = [record for record in league.records if record.spec.kind == "train"]
    assert league.buffer.added == sum(len(t.steps) for record in trained for t in record.trajectories)
    lately = [record.spec.kind == "eval" for record in league.records if record.spec.eval_label is None]
    assert least <= sum(lately) / len(lately) <= most
    assert league.collector.eval_share == sum(lately[-512:]) / len(lately[-512:])
    resumed = League(tmp_path, eval_share=eval_share)
    resumed.collector.load_state_dict(league.collector.state_dict())
    assert resumed.collector.eval_share == league.collector.eval_share
    resumed.collector.load_state_dict({"eval_games_of": {}})  # of an earlier version


# groups


async def any_cell_of_many(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
    """Return a different answer to the same prompt each time, as an engine with its own random stream does."""
    for _ in range(STREAM.randrange(5)):
        await asyncio.sleep(0)
    return answer(f"\\boxed{{[{STREAM.randrange(9)}]}}", version)


STREAM = random.Random(0)


@pytest.mark.parametrize(
    ("buffer_size", "workers", "group_size"), [(5, 4, 1), (5, 3, 4), (5, 20, 4), (12, 1, 4), (40, 5, 4)]
)
async def test_full_buffer_starts_no_game_discards_no_step_and_lets_started_groups_end(
    tmp_path, buffer_size, workers, group_size
):
    league = League(tmp_path, any_cell_of_many, buffer_size, MIRROR, group_size=group_size)
    async with league.playing(workers):
        for _ in range(3):
            await league.buffer.get_batch(5, 0)
            # No step is taken now: all started games end, and no step waits outside the full buffer.
            while league.collector.games_in_flight["train"] or league.collector._ended or not league.buffer.is_full:
                await asyncio.sleep(0.001)
            finished = len(league.records)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(league.records) == finished
            assert league.buffer.steps_in_groups == 0
            assert league.buffer.size() == league.buffer.added - league.buffer.taken >= buffer_size
            assert league.buffer.size() <= buffer_size + 9 * (workers + 3)
            while league.buffer.is_full:  # the last of these batches makes room
                await league.buffer.get_batch(5, 0)


async def test_game_whose_engine_fails_is_void_shrinks_its_group_and_blocks_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(run_game, "MAX_VOID_GAMES", 1000)
    league = League(tmp_path, failing(4, any_cell_of_many), 30, MIRROR, group_size=2)
    groups = league.buffer.group_counts
    async with league.playing():
        while groups["of_one"] < 3 or groups["whole"] - groups["of_one"] < 3:
            await league.buffer.get_batch(2, 0)
    errors = [str(record.error) for record in league.records if record.end == "void"]
    assert all("the engine refused" in error for error in errors)
    assert league.registry.get("base").games == len(league.records) - len(errors)


async def test_adapters_of_a_group_are_held_until_its_last_game_or_the_end(tmp_path):
    league = League(tmp_path, any_cell_of_many, group_size=6)
    offer(league.table, 1)
    offer(league.table, 2)
    league.registry.add_policy("ckpt-1", adapter_version=1, iteration=1)
    async with league.playing(1):
        while not league.records:
            await asyncio.sleep(0.001)
        league.registry.add_policy("ckpt-2", adapter_version=2, iteration=2)
        assert league.table.adapters[1].num_users > 1
        while league.collector._rest_of_group or league.collector.games_in_flight["train"]:
            assert league.table.adapters[1].num_users > 1
            await asyncio.sleep(0)
        assert {agent.model.adapter_version for r in league.records[:6] for agent in r.spec.agent_specs} == {1, None}
        while len(league.records) < 8:
            await asyncio.sleep(0)
        assert league.table.adapters[1].num_users == 1
    assert not any(adapter.leases for adapter in league.table.adapters.values())


# opponents behind an endpoint

Remote = tuple[Callable[..., "League"], Server]
"""Function that makes leagues with an opponent on a server, and the server."""
REMOTE = "vendor/model"
REMOTE_EVAL = EVAL.model_copy(update={"env_id": TICTACTOE.env_id, "fixed_opponent": REMOTE})
DOWN = (500, {"error": {"message": "down"}})


def free_cell(body: dict[str, Any]) -> Any:
    board = body["messages"][0]["content"].rpartition("Available Moves:")[2]
    return chat_reply("\\boxed{" + random.choice(re.findall(r"\[\d\]", board)) + "}")


@pytest.fixture
async def remote_league(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Remote]:
    leagues: list[League] = []
    for name, value in (("MAX_RETRIES", 0), ("PAUSE_S", 0.1), ("MAX_PAUSE_S", 0.1)):
        monkeypatch.setattr(openai_compatible, name, value)
    with serving() as server:
        server.answer = free_cell

        def new(limits: dict[str, Any], **league: Any) -> League:
            config = OpponentsConfig(base_url=server.url, **limits)
            leagues.append(League(tmp_path, opponents=config, **league))
            return leagues[-1]

        yield new, server
        for league in leagues:
            async with league.seats:
                pass


def against(records: list[GameRecord], name: str, is_void: bool) -> int:
    seated = [r for r in records if any(agent.model.name == name for agent in r.spec.agent_specs)]
    return sum((record.end == "void") == is_void for record in seated)


async def test_failed_opponent_is_avoided_until_it_is_back(remote_league, monkeypatch):
    new, server = remote_league
    for name in ("PAUSE_S", "MAX_PAUSE_S"):  # long enough that a slow machine makes few requests
        monkeypatch.setattr(openai_compatible, name, 0.7)
    league = new({}, fixed_opponents=("scripted:random", REMOTE))
    server.answer = lambda _body: DOWN
    others: list[int] = []

    def is_enough() -> bool:
        if against(league.records, "scripted:random", is_void=False) >= 100 and not others:
            others.append(len(server.bodies))
            server.answer = free_cell
        return against(league.records, REMOTE, is_void=False) >= 10

    await league.collect_until(is_enough)
    void = [record for record in league.records if record.end == "void"]
    assert len(void) == others[0] < 20, "each void game made one request, and there were few of them"
    assert all("OpponentError" in str(record.error) and "'vendor/model'" in str(record.error) for record in void)
    assert league.registry.get(f"fixed-{REMOTE}").games == against(league.records, REMOTE, is_void=False)


async def test_league_with_only_a_failed_opponent_waits_for_it(remote_league, monkeypatch):
    new, server = remote_league
    monkeypatch.setattr(collector, "REDRAW_S", 0.02)
    league = new({}, fixed_opponents=(REMOTE,))
    server.answer = lambda _body: DOWN

    def is_enough() -> bool:
        if len(server.bodies) >= 14:
            server.answer = free_cell
        return against(league.records, REMOTE, is_void=False) >= 5

    await league.collect_until(is_enough)
    assert 8 <= against(league.records, REMOTE, is_void=True) <= 24


@pytest.mark.parametrize("others", [("scripted:random",), ()])
async def test_spent_budget_removes_its_opponents_and_ends_a_run_without_others(remote_league, monkeypatch, others):
    new, server = remote_league
    monkeypatch.setattr(collector, "REDRAW_S", 0.02)
    monkeypatch.setattr(collector, "NOTHING_TO_PLAY_S", 0.1)
    league = new({"max_requests": 90}, fixed_opponents=(*others, REMOTE))
    if others:
        await league.collect_until(
            lambda: bool(league.seats.spent) and against(league.records, "scripted:random", is_void=False) > 100
        )
    else:
        with pytest.raises(ExceptionGroup) as caught:
            await league.collector.run(8, 0)
        assert caught.group_contains(OpponentError, match="max_requests = 90")
    assert 90 - 8 <= len(server.bodies) <= 90  # pending requests of 8 games are not sent
    assert against(league.records, REMOTE, is_void=False) >= 3
    assert against(league.records, REMOTE, is_void=True) <= 8


async def test_slow_opponent_does_not_get_its_env_quarantined(remote_league):
    new, server = remote_league
    server.answer = lambda body: time.sleep(0.2) or free_cell(body)
    league = new({}, fixed_opponents=(REMOTE,), game_timeout_s=0.05)
    await league.collect_until(lambda: len(league.records) >= 3 * run_game.MAX_VOID_GAMES)
    assert all(str(r.error).startswith("OpponentError: ") and "0.05" in str(r.error) for r in league.records)


async def test_evaluation_waits_for_its_opponent_for_a_limited_time(remote_league, monkeypatch):
    new, server = remote_league
    monkeypatch.setattr(openai_compatible, "POLL_S", 0.02)
    monkeypatch.setattr(openai_compatible, "OUTAGE_S", 30)
    league = new({})
    answers = iter([DOWN] * 6)
    server.answer = lambda body: next(answers, None) or free_cell(body)
    records = await league.collector.evaluate(REMOTE_EVAL, league.registry.current, 30, "before", concurrency=4)
    assert len(records) == 30
    assert 3 <= against(records, REMOTE, is_void=True) <= 6
    monkeypatch.setattr(openai_compatible, "OUTAGE_S", 1)
    server.answer = lambda _body: DOWN
    asked = len(server.bodies)
    records = await league.collector.evaluate(REMOTE_EVAL, league.registry.current, 30, "after", concurrency=4)
    assert against(records, REMOTE, is_void=True) == len(records) == 30
    assert len(server.bodies) - asked < 20
    assert any("down" in str(record.error) for record in records)


async def test_concurrent_evaluation_skips_a_failed_opponent(remote_league, monkeypatch):
    new, server = remote_league
    monkeypatch.setattr(openai_compatible, "PAUSE_S", 60)
    league = new({}, eval_env=REMOTE_EVAL)
    server.answer = lambda _body: DOWN
    await league.collect_until(
        lambda: against(league.records, "scripted:random", is_void=False) >= 60 and len(server.bodies) >= 3,
        workers=4,
        eval_workers=6,
    )
    assert len(server.bodies) <= 8


# lock step: no request leaves before every game has asked


class EngineInWaves:
    """A fake engine that records which requests arrive together, and answers after a random time."""

    def __init__(self) -> None:
        self.waves: list[list[int | None]] = [[]]
        self.in_flight = 0
        self.chance = random.Random(1)

    async def generate(self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None) -> Generation:
        if not self.in_flight:
            self.waves.append([])
        self.waves[-1].append(seed)
        self.in_flight += 1
        try:
            await asyncio.sleep(self.chance.random() / 100)
            if prompt == "refused":
                raise RequestError("no")
        finally:
            self.in_flight -= 1
        return answer(prompt, version)


async def test_requests_leave_in_seed_order_once_every_game_asked_or_ended():
    engine, chance, order = EngineInWaves(), random.Random(2), list[int]()
    lock_step = LockStep(engine.generate)

    async def game(number: int, turns: int) -> int:
        for turn in range(turns):
            await asyncio.sleep(chance.random() / 100)
            await lock_step.generate("p", 0, (), 10 * turn + number)
            order.append(10 * turn + number)
        return number

    assert await lock_step.play([game(0, 2), game(1, 3), game(2, 0), game(3, 1)]) == [0, 1, 2, 3]
    assert engine.waves[1:] == [[0, 1, 3], [10, 11], [21]]
    assert order == [0, 1, 3, 10, 11, 21]


async def test_failed_or_abandoned_request_does_not_delay_other_games():
    engine = EngineInWaves()
    lock_step = LockStep(engine.generate)

    async def refused() -> str:
        with pytest.raises(RequestError):
            await lock_step.generate("refused", 0, (), 1)
        return "refused"

    async def impatient() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await lock_step.generate("p", 0, (), 2)
        return "gave up"

    async def slow() -> str:
        await asyncio.sleep(0.1)
        return (await lock_step.generate("last", 0, (), 3)).text

    async with asyncio.timeout(5):
        assert await lock_step.play([refused(), impatient(), slow()]) == ["refused", "gave up", "last"]
    assert engine.waves[1:] == [[1, 3]]


async def test_error_in_one_game_ends_the_round_and_the_next_is_complete():
    engine = EngineInWaves()
    lock_step = LockStep(engine.generate)

    async def broken() -> None:
        raise ValueError("broken")

    async def waits(seed: int) -> None:
        await lock_step.generate("p", 0, (), seed)

    async with asyncio.timeout(5):
        with pytest.raises(ExceptionGroup):
            await lock_step.play([waits(1), broken()])
        await lock_step.play([waits(2), waits(3)])
