"""The pool with everything real around it but processes: the scripted engine keeps its own book of adapters."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unstable_lite import publisher
from unstable_lite.config import Config, LeagueConfig
from unstable_lite.engines.client import EnginePool
from unstable_lite.engines.scripted import LOGPROB, ScriptedEngine
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.league.model_registry import ModelRegistry, Rating
from unstable_lite.opponent_pool import FIRST_RETURNED_VERSION, OpponentPool
from unstable_lite.publisher import CANARY_SEED, SAMPLED, SCORED, Publisher
from unstable_lite.transport.adapters import AdapterArena
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import Generate
from unstable_lite.types import Generation, LearnerLogprobs

PROMPT = "p"
NUM_SAMPLED, NUM_SCORED = SAMPLED[1], SCORED[1]
"""Completions of a check, as long as nobody has measured how long they are."""
CONFIG = {
    "engine": {"kind": "scripted", "replies": [16 * letter for letter in "abcdefgh"], "max_model_len": 64},
    "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1}],
}


def digest_of(weights: bytes) -> str:
    return hashlib.sha256(weights).hexdigest()


class LocalEngine:
    """A scripted engine without its process; what it cannot do is refused as a worker would."""

    def __init__(self, name: str, max_loras: int) -> None:
        config = Config.model_validate({**CONFIG, "engine": {**CONFIG["engine"], "max_loras": max_loras}})  # type: ignore[dict-item]
        spec = WorkerSpec(name=name, endpoint="", device="cpu", threads=1, config_json=config.model_dump_json())
        self.peer = SimpleNamespace(name=name, life=0, give_up=None)
        self.at_once = self.most_at_once = 0
        """Requests."""
        self.num_asked = 0
        self.silent_about: int | None = None
        """An adapter with which it does not answer for now."""
        self.loaded: dict[int, bytes] = {}
        self.most_loaded = 0
        self.loading = asyncio.Event()
        self.loading.set()
        self.num_refusals = 0
        """How often it still refuses to unload, as where a request is under way."""
        self.while_unloading: Callable[[], None] | None = None
        self.lie: float = 0.0
        """Added to the log-probabilities of what came back."""
        self.lies_about = FIRST_RETURNED_VERSION
        """And of every adapter that is later."""
        self.is_up = True
        self._spec, self._engine = spec, ScriptedEngine(spec)

    @property
    def adapters(self) -> set[int]:
        return set(self.loaded)

    async def adapter_digest(self, version: int) -> str:
        return digest_of(self.loaded[version])

    async def load_adapter(self, version: int, path: Path) -> None:
        await self.loading.wait()
        if version in self.loaded:
            return
        try:
            self._engine.load_adapter(version, path)
        except AdapterError as error:
            raise RequestError(str(error)) from error
        self.loaded[version] = (path / "adapter_model.safetensors").read_bytes()
        self.most_loaded = max(self.most_loaded, len(self.loaded))

    async def unload_adapter(self, version: int) -> None:
        await asyncio.sleep(0)
        if self.while_unloading is not None:
            self.while_unloading()
        if version in self.loaded:
            if self.num_refusals:
                self.num_refusals -= 1
                raise RequestError(f"adapter {version} is in use")
            self._engine.unload_adapter(version)
            del self.loaded[version]

    def take_back(self) -> None:
        self.is_up = True

    def start_again(self) -> None:
        self._engine = ScriptedEngine(self._spec)
        self.loaded, self.most_at_once = {}, 0

    async def generate(self, prompt: str, version: int, *, seed: int, max_tokens: int) -> Generation:
        self.at_once += 1
        self.num_asked += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        while version == self.silent_about:
            await asyncio.sleep(0)
        self.at_once -= 1
        request = Generate(
            request_id=0,
            prompt=prompt,
            adapter_version=version,
            max_tokens=max_tokens,
            temperature=1.0,
            top_p=1.0,
            stop=(),
            seed=seed,
        )
        self._engine.add_request(request)
        (done,) = self._engine.step()
        lie = np.float32(self.lie if version >= self.lies_about else 0.0)
        return replace(done.generation, logprobs=done.generation.logprobs + lie)


class LocalLearner:
    """Agrees with the scripted engine, and finds the base as far off as it is told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """How many completions each time."""
        self.while_scoring: Callable[[], Awaitable[None]] | None = None

    async def score(self, generations: Sequence[Generation]) -> list[LearnerLogprobs]:
        await asyncio.sleep(0)
        self.asked.append(len(generations))
        if self.while_scoring is not None:
            await self.while_scoring()
        same = [np.full(len(generation.completion_ids), LOGPROB, np.float32) for generation in generations]
        gaps = [np.float32(0.05 if generation.adapter_version else 0.0) for generation in generations]
        return [LearnerLogprobs(adapter=one, base=one - gap) for one, gap in zip(same, gaps, strict=True)]


class League:
    def __init__(
        self, tmp_path: Path, size: int, max_loras: int | None = None, engines: int = 1, **league: Any
    ) -> None:
        self.max_loras = max_loras or size + 2
        local = [LocalEngine(f"engine-{index}", self.max_loras) for index in range(engines)]
        self.engines: Any = EnginePool(local)  # type: ignore[arg-type]
        self.arena = AdapterArena("pool", tmp_path, bytes_needed=1 << 60)
        self.registry = ModelRegistry()
        self.learner = LocalLearner()
        self.publisher = Publisher(
            self.engines,
            self.learner,  # type: ignore[arg-type]
            self.arena,
            [PROMPT],
            self.max_loras,
            tolerance=0.2,
            alarm=lambda text: self.alarms.append(text),
        )
        self.disk = tmp_path / "adapters"
        self.alarms: list[str] = []
        config = LeagueConfig(**{"opponent_lag": (1, 1000), **league})
        self.pool = OpponentPool(config, size, self.registry, self.arena, self.publisher, self.disk, self.alarms.append)
        self.updates = 0
        self._tasks = [
            asyncio.create_task(self.pool.run()),
            asyncio.create_task(self.publisher.retire_unreferenced()),
        ]

    async def update(self, extra_file: str | None = None) -> None:
        """One update of the learner, as training makes it."""
        version = self.updates + 1
        path = self.arena.path(version)
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(f"weights of ckpt-{version}")
        if extra_file:
            (path / extra_file).symlink_to(path / "absent")  # cannot be copied
        self.pool.make_room()
        digest = digest_of(f"weights of ckpt-{version}".encode())
        await asyncio.wait_for(self.publisher.publish(version, digest), 10)
        self.updates += 1
        self.pool.admit(f"ckpt-{version}", version, self.updates)

    async def settle(self) -> None:
        """Until the pool has done its part and every adapter that nobody holds is unloaded."""
        async with asyncio.timeout(20):
            done = asyncio.ensure_future(self.pool.settled())
            await asyncio.wait({done, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            while not self._holds_only(self.arena.live_versions):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.001)
        for task in self._tasks:
            if task.done():
                task.result()

    def _holds_only(self, versions: set[int]) -> bool:
        in_memory = {path.name for path in self.arena.directory.glob("v*")}
        loaded = [set(engine.loaded) for engine in self.engines.engines]
        return in_memory == {f"v{version}" for version in versions} and loaded == [versions] * len(loaded)

    async def every_game_is_over(self) -> None:
        """Those at least that play with somebody who has left."""
        async with asyncio.timeout(20):
            while not self._holds_only({meta.adapter_version or 0 for meta in self.registry.checkpoints()} - {0}):
                await asyncio.sleep(0.001)

    def rate(self, **mu: float) -> None:
        for uid, value in mu.items():
            self.registry.get(uid.replace("_", "-")).ratings["E"] = Rating(value, 1.0)

    @property
    def active(self) -> list[str]:
        return [meta.uid for meta in self.registry.checkpoints()]

    def check_what_is_active_is_loaded_as_itself(self) -> None:
        for meta in self.registry.checkpoints():
            for engine in self.engines.engines:
                if meta.adapter_version:
                    assert engine.loaded[meta.adapter_version].decode() == f"weights of {meta.uid}"

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.arena.close()


async def a_league_of(tmp_path: Path, updates: int, size: int, **options: Any) -> League:
    league = League(tmp_path, size, **options)
    for _ in range(updates):
        await league.update()
        await league.settle()
    return league


async def test_the_learner_is_asked_once_for_the_canaries_of_all_engines_and_once_for_each_answer(
    tmp_path: Path,
) -> None:
    league = League(tmp_path, 3, engines=5)
    seeds = range(CANARY_SEED, CANARY_SEED + NUM_SCORED)
    said = [await league.engines.engines[0].generate(PROMPT, 0, seed=s, max_tokens=16) for s in seeds]
    distinct = len({generation.text for generation in said})
    await league.update()
    await league.update()
    assert league.learner.asked == [distinct, distinct]
    assert [engine.most_at_once for engine in league.engines.engines] == [NUM_SAMPLED] * 5
    await league.close()


async def test_an_engine_that_died_while_its_canary_was_scored_is_asked_again(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 1, size=3, engines=2)
    engine = league.engines.engines[1]
    before = engine.num_asked

    async def die() -> None:
        engine.peer.life = 1

    league.learner.while_scoring = die
    await league.update()
    assert engine.num_asked - before == 2 * NUM_SAMPLED
    assert len(league.publisher._remembered[2]["engine-1"]) == NUM_SAMPLED
    await league.close()


async def test_what_is_retired_is_unloaded_even_where_an_engine_refuses_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "UNLOAD_RETRY_S", 0.05)
    league = await a_league_of(tmp_path, 1, size=1, engines=2)
    first, second = league.engines.engines
    first.num_refusals = 2
    await league.update()
    await league.publisher.retired()
    assert set(first.loaded) == set(second.loaded) == {2}
    await league.close()


async def test_an_engine_that_comes_back_and_refuses_to_unload_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "UNLOAD_RETRY_S", 0.05)
    league = await a_league_of(tmp_path, 1, size=1, engines=2)
    first, second = league.engines.engines
    league.arena.retain(1)
    await league.update()
    second.is_up, second.num_refusals = False, 1
    first.while_unloading = second.take_back
    league.arena.release(1)
    await league.settle()
    assert set(first.loaded) == set(second.loaded) == {2}
    await league.close()


async def test_an_engine_that_comes_back_with_retired_adapters_in_its_slots_makes_room_first(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 3, size=3, max_loras=4, engines=2)
    other, away = league.engines.engines
    assert away.adapters == {1, 2, 3}
    away.is_up = False
    for _ in range(4):
        await league.update()
    async with asyncio.timeout(20):
        while other.adapters != league.arena.live_versions:
            await asyncio.sleep(0.001)
    assert not other.adapters & away.adapters
    await league.publisher.restore(away)
    assert away.is_up
    assert away.loaded == other.loaded
    await league.update()
    await league.close()


@pytest.mark.parametrize("is_back_first", [True, False])
async def test_an_adapter_that_is_published_while_an_engine_comes_back_is_tried_by_one_or_the_other(
    tmp_path: Path, is_back_first: bool
) -> None:
    league = await a_league_of(tmp_path, 1, size=3, engines=2)
    engine = league.engines.engines[1]
    engine.start_again()
    engine.peer.life, engine.is_up = 1, False
    engine.lie, engine.lies_about = 0.5, 2
    engine.silent_about = None if is_back_first else 1
    restoring: list[asyncio.Task[None]] = []

    async def come_back() -> None:
        if not restoring:
            restoring.append(asyncio.create_task(league.publisher.restore(engine)))
            while not (engine.is_up or (engine.silent_about and set(engine.loaded) == {1, 2})):
                await asyncio.sleep(0)

    league.learner.while_scoring = come_back
    if is_back_first:
        with pytest.raises(AdapterError, match="engine-1 does not compute what the learner does with adapter 2"):
            await league.update()
        await restoring[0]
    else:
        await league.update()
        engine.silent_about = None
        with pytest.raises(AdapterError, match="engine-1 does not answer as it once did"):
            await restoring[0]
    await league.close()


async def test_an_engine_that_is_there_again_is_asked_everything_at_once(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 3, size=3, engines=2)
    engine = league.engines.engines[1]
    engine.start_again()
    await league.publisher.restore(engine)
    assert set(engine.loaded) == {1, 2, 3}
    assert engine.most_at_once == 3 * NUM_SCORED
    engine.start_again()
    engine.lie, engine.lies_about = 0.5, 3
    with pytest.raises(AdapterError, match="engine-1 does not answer as it once did"):
        await league.publisher.restore(engine)
    await league.close()


async def test_what_is_remembered_of_canaries_survives_json(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    league = await a_league_of(tmp_path / "one", 3, size=3, engines=2)
    text = json.dumps(league.publisher.state_dict())
    other = League(tmp_path / "other", 3)
    other.publisher.load_state_dict(json.loads(text))
    assert json.dumps(other.publisher.state_dict()) == text
    ours, theirs = (one.publisher._remembered[2]["engine-1"][1] for one in (league, other))
    assert ours.seed == theirs.seed
    for name in ("completion_ids", "logprobs", "base_logprobs"):
        was, got = getattr(ours, name), getattr(theirs, name)
        assert was.dtype == got.dtype
        assert np.array_equal(was, got)
    await league.close()
    await other.close()


@pytest.mark.parametrize(("max_loras", "for_want_of"), [(5, "was not stored"), (2, "have no slot left")])
async def test_a_league_that_goes_on_says_of_each_opponent_that_stays_away_why(
    tmp_path: Path, max_loras: int, for_want_of: str
) -> None:
    first = await a_league_of(tmp_path, 3, size=3)
    parts = ("registry", "publisher", "pool")
    state = json.loads(json.dumps({part: getattr(first, part).state_dict() for part in parts}))
    await first.close()
    if max_loras == 5:
        del state["pool"]["published_as"]["ckpt-1"]
    league = League(tmp_path, 3, max_loras=max_loras)
    for part in parts:
        getattr(league, part).load_state_dict(state[part])
    path = league.arena.path(3)
    shutil.copytree(tmp_path / "adapters" / "ckpt-3", path)
    await league.publisher.publish(3, digest_of(b"weights of ckpt-3"))
    await league.pool.resume()
    missing = ["ckpt-1"] if max_loras == 5 else ["ckpt-1", "ckpt-2"]
    assert sorted(alarm.split()[0] for alarm in league.alarms) == missing
    assert all(for_want_of in alarm for alarm in league.alarms)
    assert league.active == [uid for uid in ("ckpt-2", "ckpt-3") if uid not in missing]
    league.check_what_is_active_is_loaded_as_itself()
    await league.close()


async def test_the_newest_are_active_and_no_more_than_the_pool_holds(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 6, size=3)
    assert league.active == ["ckpt-4", "ckpt-5", "ckpt-6"]
    assert set(league.engines.engines[0].loaded) == {4, 5, 6}
    assert league.pool.num_returned == 0
    await league.close()


async def test_without_a_pool_only_the_current_policy_is_active_and_nothing_is_kept(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 3, size=1)
    assert league.active == ["ckpt-3"]
    assert not league.disk.exists()
    await league.close()


async def test_before_there_is_anyone_old_enough_the_oldest_is_the_opponent(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 3, size=2, opponent_lag=(5, 9))
    assert league.active == ["base", "ckpt-3"]
    await league.close()


async def test_a_lag_brings_each_checkpoint_back_when_its_time_has_come_under_a_version_of_its_own(
    tmp_path: Path,
) -> None:
    league = League(tmp_path, size=3, opponent_lag=(3, 4), engines=2)
    versions: dict[str, set[int | None]] = {}
    for _ in range(12):
        await league.update()
        await league.settle()
        league.check_what_is_active_is_loaded_as_itself()
        for meta in league.registry.checkpoints():
            versions.setdefault(meta.uid, set()).add(meta.adapter_version)
        if league.updates >= 5:
            assert league.active == [f"ckpt-{league.updates - lag}" for lag in (4, 3, 0)]
    assert versions["ckpt-5"] == {5, FIRST_RETURNED_VERSION + 4}
    returned = [v for vs in versions.values() for v in vs if v and v >= FIRST_RETURNED_VERSION]
    assert len(returned) == len(set(returned)) == league.pool.num_returned == 9
    assert league.publisher.num_waits == 0
    await league.close()


@pytest.mark.parametrize("rule", ["match-quality", "nearest-rating"])
async def test_ratings_decide_who_stays_and_who_comes_back(tmp_path: Path, rule: str) -> None:
    league = await a_league_of(tmp_path, 4, size=3, active_checkpoints_by=rule)
    league.rate(base=0, ckpt_1=25, ckpt_2=10, ckpt_3=24, ckpt_4=25)
    await league.update()
    await league.settle()
    assert league.active == ["ckpt-1", "ckpt-4", "ckpt-5"]
    league.rate(ckpt_2=25, ckpt_4=40, ckpt_1=50)
    await league.update()
    await league.settle()
    assert league.active == ["ckpt-2", "ckpt-5", "ckpt-6"]
    league.check_what_is_active_is_loaded_as_itself()
    assert league.registry.get("ckpt-2").rating == Rating(25, 1.0)
    await league.close()


async def test_who_comes_back_is_looked_at_every_so_many_updates(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 4, size=2, active_checkpoints_by="nearest-rating", rotate_checkpoints_every=3)
    league.rate(base=0, ckpt_1=25, ckpt_2=0, ckpt_3=0, ckpt_4=25)
    await league.update()
    league.rate(ckpt_4=30)
    await league.settle()
    assert league.active == ["ckpt-4", "ckpt-5"]
    await league.update()
    await league.settle()
    assert "ckpt-4" not in league.active
    await league.close()


async def test_an_adapter_stays_while_a_game_plays_it_and_its_slot_is_free_afterwards(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 3, size=2)
    league.arena.retain(2)  # a game with the opponent ckpt-2 …
    await league.update()
    await league.settle()
    assert "ckpt-2" not in league.active
    assert 2 in league.engines.engines[0].loaded
    assert league.arena.path(2).is_dir()
    league.arena.release(2)  # … is over
    await league.settle()
    assert 2 not in league.engines.engines[0].loaded
    assert not league.arena.path(2).exists()
    await league.close()


async def test_a_return_never_takes_the_slot_of_the_next_update_and_comes_when_there_is_room(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 4, size=2, active_checkpoints_by="nearest-rating")
    for version in (3, 4):
        league.arena.retain(version)
    league.rate(base=0, ckpt_1=25, ckpt_2=0, ckpt_3=0, ckpt_4=0)
    await league.update()  # ckpt-3 and ckpt-4 are still played: one slot of four is free, and it is not ckpt-1's
    league.rate(ckpt_5=25)
    await league.settle()
    assert league.pool.num_returned == 0
    assert league.publisher.has_slot
    league.arena.release(3)
    league.arena.release(4)
    await league.settle()
    await league.update()
    league.rate(ckpt_5=0, ckpt_6=25)
    await league.settle()
    assert league.publisher.num_waits == 0
    assert league.pool.num_returned == 1
    assert league.active == ["ckpt-1", "ckpt-6"]
    await league.close()


async def test_where_slots_are_short_an_opponent_that_nobody_plays_makes_room(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 4, size=3)
    for version in (2, 3):
        league.arena.retain(version)  # games that go on and on
    for _ in range(2):
        await league.update()
        await league.settle()
    assert set(league.engines.engines[0].loaded) == {2, 3, 4, 5, 6}
    await asyncio.wait_for(league.update(), 5)
    assert league.active == ["ckpt-5", "ckpt-6", "ckpt-7"]
    await league.close()


async def test_half_a_copy_never_lies_where_a_whole_one_is_looked_for(tmp_path: Path) -> None:
    league = League(tmp_path, size=2)
    await league.update(extra_file="nowhere")
    await league.settle()
    assert len(league.alarms) == 1
    assert list(league.disk.iterdir()) == []
    await league.close()


async def test_training_does_not_wait_for_a_checkpoint_that_comes_back(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 4, size=3, active_checkpoints_by="nearest-rating")
    (engine,) = league.engines.engines
    load = engine.load_adapter

    async def slow_for_what_returns(version: int, path: Path) -> None:
        if version >= FIRST_RETURNED_VERSION:
            await asyncio.sleep(3600)
        await load(version, path)

    engine.load_adapter = slow_for_what_returns  # type: ignore[method-assign]
    league.rate(base=0, ckpt_1=25, ckpt_2=0, ckpt_3=0, ckpt_4=25)
    for _ in range(5):
        await asyncio.wait_for(league.update(), 5)
    assert league.pool.num_returned == 0
    assert league.publisher.num_waits == 0
    await league.close()


async def test_an_engine_that_answers_otherwise_than_it_did_ends_the_run(tmp_path: Path) -> None:
    league = League(tmp_path, size=2, opponent_lag=(2, 9), engines=2)
    league.engines.engines[1].lie = 0.5
    with pytest.raises(AdapterError, match=r"engine-1 does not answer as it once did.*differ by 0\.5000"):
        for _ in range(4):
            await league.update()
            await league.settle()
    await league.close()


async def test_an_engine_that_answers_as_the_base_where_the_two_can_be_told_apart_ends_the_run(tmp_path: Path) -> None:
    league = League(tmp_path, size=2, opponent_lag=(2, 9))
    league.engines.engines[0].lie = -0.05
    with pytest.raises(AdapterError, match="does not answer as it once did"):
        for _ in range(9):
            await league.update()
            await league.settle()
    await league.close()


async def test_an_engine_that_reads_another_adapter_than_was_written_ends_the_run(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 1, size=2, engines=2)
    engine = league.engines.engines[1]
    load = engine.load_adapter

    async def load_the_one_before(version: int, path: Path) -> None:
        await load(version, path)
        engine.loaded[version] = engine.loaded[1]

    engine.load_adapter = load_the_one_before
    old, new = (digest_of(f"weights of ckpt-{version}".encode()) for version in (1, 2))
    with pytest.raises(AdapterError, match=f"engine-1 holds another adapter as version 2 .*is {old}, the.*is {new}"):
        await league.update()
    await league.close()


@pytest.mark.parametrize("is_started_again", [True, False])
async def test_an_engine_that_holds_something_else_when_it_is_there_again_ends_the_run(
    tmp_path: Path, is_started_again: bool
) -> None:
    """Whether it was given its adapters again, or had slept and forgotten them."""
    league = await a_league_of(tmp_path, 2, size=2)
    (engine,) = league.engines.engines
    if is_started_again:
        engine.start_again()
        (league.arena.path(2) / "adapter_model.safetensors").write_text("weights of ckpt-3")
    else:
        engine.loaded[2] = b"nothing"
    with pytest.raises(AdapterError, match="engine-0 holds another adapter as version 2"):
        await league.publisher.restore(engine)
    await league.close()


async def test_an_adapter_that_was_damaged_on_disk_does_not_come_back_and_training_goes_on(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 2, size=2, opponent_lag=(2, 9), engines=2)
    (league.disk / "ckpt-1" / "adapter_model.safetensors").write_text("weights of ckpt-l")
    for _ in range(3):
        await league.update()
        await league.settle()
    assert len(league.alarms) == 1
    assert "ckpt-1 cannot come back as an opponent: its files were damaged" in league.alarms[0]
    assert league.active == ["ckpt-3", "ckpt-5"]
    await league.close()


async def test_a_run_that_goes_on_knows_the_digests_of_those_that_may_come_back(tmp_path: Path) -> None:
    first = await a_league_of(tmp_path, 3, size=3)
    parts = ("registry", "publisher", "pool")
    state = json.loads(json.dumps({part: getattr(first, part).state_dict() for part in parts}))
    await first.close()
    league = League(tmp_path, 3)
    for part in parts:
        getattr(league, part).load_state_dict(state[part])
    shutil.copytree(tmp_path / "adapters" / "ckpt-3", league.arena.path(3))
    await league.publisher.publish(3, digest_of(b"weights of ckpt-3"))
    (league.disk / "ckpt-1" / "adapter_model.safetensors").write_text("weights of ckpt-l")
    await league.pool.resume()
    assert [alarm.partition(":")[0] for alarm in league.alarms][:1] == ["ckpt-1 cannot come back as an opponent"]
    assert league.active == ["ckpt-2", "ckpt-3"]
    await league.close()


async def test_what_speaks_against_an_engine_survives_json(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    league, other = League(tmp_path / "one", 2), League(tmp_path / "other", 2)
    (engine,) = league.engines.engines
    engine._engine._replies = ["aaaaaaa"]
    engine.lie, engine.lies_about = 0.5, 1
    await league.update()
    state = json.loads(json.dumps(league.publisher.state_dict()))
    assert state["num_doubts"] > 0
    assert "stays open whether engine-0" in league.alarms[-1]
    other.publisher.load_state_dict(state)
    assert other.publisher.state_dict()["evidence"] == state["evidence"] != []
    await league.close()
    await other.close()


async def test_a_model_that_says_one_token_is_an_alarm_and_no_more(tmp_path: Path) -> None:
    league = League(tmp_path, 2)
    (engine,) = league.engines.engines
    engine._engine._replies = [""]
    figures = await league.publisher.check_base()
    assert figures["canary/n"] == 1
    for _ in range(3):
        await league.update()
    assert len(league.alarms) == 1
    assert "have only 1 different tokens" in league.alarms[0]
    assert league.publisher.num_doubts == 4
    await league.close()


async def test_an_adapter_that_is_gone_from_disk_is_an_alarm_and_training_goes_on(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 2, size=2, opponent_lag=(2, 9))
    (league.disk / "ckpt-1" / "adapter_config.json").unlink()
    for _ in range(3):
        await league.update()
        await league.settle()
    assert ["ckpt-1 cannot come back" in alarm for alarm in league.alarms] == [True]
    assert league.active == ["ckpt-3", "ckpt-5"]
    assert len(league.engines.engines[0].loaded) == 2
    await league.close()


async def test_a_disk_that_cannot_be_written_to_is_an_alarm_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "adapters").write_text("in the way")
    league = await a_league_of(tmp_path, 3, size=2)
    assert len(league.alarms) == 3
    assert all("is not kept on disk" in alarm for alarm in league.alarms)
    assert league.active == ["ckpt-2", "ckpt-3"]
    await league.close()


async def test_adapters_stay_on_disk_while_they_may_return_and_those_to_be_kept_for_ever(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 12, size=2, opponent_lag=(1, 3), keep_checkpoints=(2,), keep_every=5)
    kept = {path.name for path in league.disk.iterdir()}
    assert kept == {"ckpt-2", "ckpt-5", "ckpt-10"} | {"ckpt-9", "ckpt-11", "ckpt-12"}
    for uid in kept:
        assert (league.disk / uid / "adapter_model.safetensors").read_text() == f"weights of {uid}"
    await league.close()


async def test_what_the_last_two_saved_states_may_need_stays_on_disk(tmp_path: Path) -> None:
    """A run that is killed goes back to the last one, or to the one before it, where that is damaged."""
    league = await a_league_of(tmp_path, 2, size=2, opponent_lag=(1, 1))
    stored: list[set[str]] = []
    for _ in range(3):
        needed = set(league.pool.state_dict()["published_as"])
        league.pool.tell_saving()
        for _ in range(2):  # while it is being written
            await league.update()
            await league.settle()
        assert {path.name for path in league.disk.iterdir()} >= needed
        await league.pool.tell_saved()
        stored.append(needed)
        assert {path.name for path in league.disk.iterdir()} <= set(league.pool.state_dict()["published_as"]).union(
            *stored[-2:]
        )
        for _ in range(2):
            await league.update()
            await league.settle()
        assert {path.name for path in league.disk.iterdir()} >= set.union(*stored[-2:])
    assert "ckpt-1" not in {path.name for path in league.disk.iterdir()}
    await league.close()


async def test_a_checkpoint_that_is_kept_for_ever_may_return_at_any_age(tmp_path: Path) -> None:
    league = await a_league_of(
        tmp_path, 8, size=2, opponent_lag=(1, 2), keep_checkpoints=(2,), active_checkpoints_by="nearest-rating"
    )
    await league.update()
    league.rate(ckpt_2=25, ckpt_3=25, ckpt_7=0, ckpt_8=0, ckpt_9=25)
    await league.settle()
    assert league.active == ["ckpt-2", "ckpt-9"]
    await league.close()


async def test_keeping_for_ever_needs_no_pool(tmp_path: Path) -> None:
    league = await a_league_of(tmp_path, 4, size=1, keep_every=2)
    assert {path.name for path in league.disk.iterdir()} == {"ckpt-2", "ckpt-4"}
    assert league.active == ["ckpt-4"]
    await league.close()


async def test_a_run_that_ends_waits_for_a_copy_that_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    league = League(tmp_path, size=2)
    has_begun, may_end = threading.Event(), threading.Event()
    copy = shutil.copytree

    def slow_copy(source: Path, target: Path) -> Path:
        has_begun.set()
        may_end.wait(20)
        return copy(source, target)

    monkeypatch.setattr(shutil, "copytree", slow_copy)
    await league.update()
    while not has_begun.is_set():
        await asyncio.sleep(0.001)
    closing = asyncio.create_task(league.close())
    await asyncio.sleep(0.02)
    assert not closing.done()  # else the copy would bring back what close removes
    may_end.set()
    await asyncio.wait_for(closing, 10)
    assert not league.arena.directory.exists()


@pytest.mark.parametrize("rule", ["recency", "match-quality", "nearest-rating"])
@pytest.mark.parametrize("seed", range(3))
async def test_through_a_long_league_slots_suffice_nothing_stalls_and_everyone_is_who_he_says(
    tmp_path: Path, rule: str, seed: int
) -> None:
    """Games of random lengths hold their adapters; ratings wander; two engines keep the book."""
    rng = random.Random(seed)
    size = rng.choice([2, 3, 5])
    least = rng.choice([1, 2, 4])
    league = League(tmp_path, size, engines=2, active_checkpoints_by=rule, opponent_lag=(least, 12), keep_every=7)
    is_over = False

    async def play() -> None:
        while not is_over:
            metas = rng.sample(league.registry.checkpoints(), k=min(2, len(league.active)))
            held = {meta.adapter_version for meta in metas} - {0}
            for version in held:
                league.arena.retain(version)
            for _ in range(rng.randrange(1, 6)):
                assert held <= set(league.engines.engines[0].loaded)
                await asyncio.sleep(0.0005)
            for version in held:
                league.arena.release(version)

    games = [asyncio.create_task(play()) for _ in range(8)]
    for _ in range(40):
        await league.update()
        for meta in league.registry.checkpoints():
            meta.ratings["E"] = Rating(meta.rating.mu + rng.gauss(0, 3), 2.0)
        await league.settle()
        await league.every_game_is_over()
        assert len(league.active) <= size
        league.check_what_is_active_is_loaded_as_itself()
    is_over = True
    await asyncio.gather(*games)
    assert league.alarms == []
    assert all(engine.most_loaded <= league.max_loras for engine in league.engines.engines)
    assert league.publisher.num_waits == 0
    await league.close()
