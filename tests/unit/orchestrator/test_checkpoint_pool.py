"""The pool with real parts around it except processes; the scripted engine keeps track of its adapters."""

import asyncio
import hashlib
import json
import random
import re
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import BASE_ORIGIN, AdapterTable, Origin
from unstable_lite.config import Config
from unstable_lite.engines.base import LOGPROB, ScriptedEngine
from unstable_lite.engines.client import EnginePool
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.ratings import Rating
from unstable_lite.orchestrator import adapter_sync as sync_module
from unstable_lite.orchestrator.adapter_sync import AdapterSync
from unstable_lite.orchestrator.canary_checks import CANARY_SEED, SAMPLED, SCORED, CanaryChecks
from unstable_lite.orchestrator.checkpoint_pool import FIRST_RETURNED_VERSION, CheckpointPool, TrainedPolicy
from unstable_lite.rollout.buffer import StepBuffer
from unstable_lite.transport.messages import Generate
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation, LearnerLogprobs

PROMPT = "p"
NUM_SAMPLED, NUM_SCORED = SAMPLED[1], SCORED[1]
"""Number of completions of a check before their length was measured."""
CONFIG = {
    "engine": {"kind": "scripted", "replies": [16 * letter for letter in "abcdefgh"], "max_model_len": 64},
    "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1}],
}


def digest_of(weights: bytes) -> str:
    return hashlib.sha256(weights).hexdigest()


class LocalEngine:
    """A scripted engine without its process; it refuses as a worker would."""

    def __init__(self, name: str, max_loras: int) -> None:
        config = Config.model_validate({**CONFIG, "engine": {**CONFIG["engine"], "max_loras": max_loras}})  # type: ignore[dict-item]
        spec = WorkerSpec(name=name, endpoint="", device="cpu", threads=1, config_json=config.model_dump_json())
        self.channel = SimpleNamespace(name=name, life=0, give_up=None, mark_ready=self.mark_ready)
        self.at_once = self.most_at_once = 0
        """Largest number of simultaneous requests."""
        self.num_asked = 0
        self.silent_about: int | None = None
        """Adapter whose requests are not answered for now."""
        self.loaded: dict[int, bytes] = {}
        self.most_loaded = 0
        self.num_refusals = 0
        """Number of unloads still to refuse, as if a request were running."""
        self.while_unloading: Callable[[], None] | None = None
        self.lie: float = 0.0
        """Added to the log-probabilities of wrong adapters."""
        self.lies_about = FIRST_RETURNED_VERSION
        """First version that is wrong."""
        self.is_up = True
        self._spec, self._engine = spec, ScriptedEngine(spec)

    @property
    def adapters(self) -> set[int]:
        return set(self.loaded)

    async def load_adapter(self, version: int, path: Path) -> str:
        if version in self.loaded:
            return digest_of(self.loaded[version])
        try:
            self._engine.load_adapter(version, path)
        except AdapterError as error:
            raise RequestError(str(error)) from error
        self.loaded[version] = (path / "adapter_model.safetensors").read_bytes()
        self.most_loaded = max(self.most_loaded, len(self.loaded))
        return digest_of(self.loaded[version])

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

    def mark_ready(self) -> None:
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
    """A learner that agrees with the scripted engine and has a fixed distance from adapter to base."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        """Number of completions of each request."""
        self.while_scoring: Callable[[], Awaitable[None]] | None = None

    async def score(self, generations: Sequence[Generation], adapter: Path | None = None) -> list[LearnerLogprobs]:
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
        tmp_path.mkdir(exist_ok=True)
        self.max_loras = max_loras or size + 2
        local = [LocalEngine(f"engine-{index}", self.max_loras) for index in range(engines)]
        self.engines: Any = EnginePool(local)  # type: ignore[arg-type]
        self.store = AdapterStore("pool", tmp_path, bytes_needed=1 << 60)
        self.table = AdapterTable(self.max_loras)
        self.registry = ModelRegistry()
        self.learner: Any = LocalLearner()
        self.alarms: list[str] = []
        self.canaries = CanaryChecks(self.engines, [self.learner], self.table, [PROMPT], 0.2, self.alarms.append)
        self.adapter_sync = AdapterSync(self.engines, self.store, self.table, self.canaries)
        self.disk = tmp_path / "adapters"
        config = Config.model_validate({**CONFIG, "league": {"opponent_lag": (1, 1000), **league}})
        policy = TrainedPolicy(name="", number=0, config=config, registry=self.registry, buffer=StepBuffer(1))
        parts = self.table, self.store, self.adapter_sync, self.disk
        self.pool = CheckpointPool(policy, size, *parts, self.alarms.append)
        self.updates = 0
        self._tasks = [asyncio.create_task(self.pool.run()), asyncio.create_task(self.adapter_sync.run())]
        OPEN.append(self)

    async def update(self, extra_file: str | None = None) -> None:
        """Make an update as training does."""
        version = self.updates + 1
        path = self.store.path(version)
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(f"weights of ckpt-{version}")
        if extra_file:
            (path / extra_file).symlink_to(path / "absent")  # cannot be copied
        self.pool.evict_if_needed()
        digest = digest_of(f"weights of ckpt-{version}".encode())
        await asyncio.wait_for(self.adapter_sync.sync(version, digest), 10)
        self.updates += 1
        self.pool.admit(f"ckpt-{version}", version, self.updates)

    async def play(self, updates: int) -> None:
        for _ in range(updates):
            await self.update()
            await self.settle()

    async def settle(self) -> None:
        """Wait until the pool is done and every unused adapter is unloaded."""
        async with asyncio.timeout(20):
            done = asyncio.ensure_future(self.pool.settled())
            await asyncio.wait({done, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            while not self._holds_only(self.used):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.001)

    @property
    def used(self) -> set[int]:
        return {id for id, adapter in self.table.adapters.items() if adapter.num_users}

    def _holds_only(self, versions: set[int]) -> bool:
        in_memory = {path.name for path in self.store.directory.glob("v*")}
        loaded = [set(engine.loaded) for engine in self.engines.engines]
        return in_memory == {f"v{version}" for version in versions} and loaded == [versions] * len(loaded)

    async def every_game_is_over(self) -> None:
        """Wait until no game uses a checkpoint that has left."""
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
        self.store.close()


OPEN: list[League] = []


@pytest.fixture(autouse=True)
async def every_league_is_closed() -> AsyncIterator[None]:
    yield
    while OPEN:
        await OPEN.pop().close()


async def make_league(tmp_path: Path, updates: int, size: int, **options: Any) -> League:
    league = League(tmp_path, size, **options)
    await league.play(updates)
    return league


async def test_learner_scores_all_distinct_canary_answers_in_one_request(tmp_path):
    league = League(tmp_path, 3, engines=5)
    seeds = range(CANARY_SEED, CANARY_SEED + NUM_SCORED)
    generations = [await league.engines.engines[0].generate(PROMPT, 0, seed=s, max_tokens=16) for s in seeds]
    distinct = len({generation.text for generation in generations})
    await league.update()
    await league.update()
    assert league.learner.asked == [distinct, distinct]
    assert [engine.most_at_once for engine in league.engines.engines] == [NUM_SAMPLED] * 5


async def test_engine_that_died_during_its_canary_is_checked_again(tmp_path):
    league = await make_league(tmp_path, 1, size=3, engines=2)
    engine = league.engines.engines[1]
    before = engine.num_asked

    async def die() -> None:
        engine.channel.life = 1

    league.learner.while_scoring = die
    await league.update()
    assert engine.num_asked - before == 2 * NUM_SAMPLED
    assert len(league.table.weights[Origin("update", "2")].answers["engine-1"]) == NUM_SAMPLED


async def test_engine_that_refuses_to_unload_is_asked_again_also_while_another_returns(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_module, "UNLOAD_RETRY_S", 0.05)
    league = await make_league(tmp_path, 1, size=1, engines=2)
    first, second = league.engines.engines
    first.num_refusals = 2
    await league.update()
    await league.adapter_sync.retired()
    assert set(first.loaded) == set(second.loaded) == {2}
    league.table.lease(2)
    await league.update()
    second.is_up, second.num_refusals = False, 1
    first.while_unloading = second.mark_ready
    league.table.end_lease(2)
    await league.settle()
    assert set(first.loaded) == set(second.loaded) == {3}


async def test_returning_engine_frees_slots_of_retired_adapters_first(tmp_path):
    league = await make_league(tmp_path, 3, size=3, max_loras=4, engines=2)
    other, away = league.engines.engines
    assert away.adapters == {1, 2, 3}
    away.is_up = False
    for _ in range(4):
        await league.update()
    async with asyncio.timeout(20):
        while other.adapters != league.used:
            await asyncio.sleep(0.001)
    assert not other.adapters & away.adapters
    await league.adapter_sync.restore(away)
    assert away.is_up
    assert away.loaded == other.loaded
    await league.update()


@pytest.mark.parametrize("is_back_first", [True, False])
async def test_adapter_made_during_an_engine_return_is_checked_once(tmp_path, is_back_first):
    league = await make_league(tmp_path, 1, size=3, engines=2)
    engine = league.engines.engines[1]
    engine.start_again()
    engine.channel.life, engine.is_up = 1, False
    engine.lie, engine.lies_about = 0.5, 2
    engine.silent_about = None if is_back_first else 1
    restoring: list[asyncio.Task[None]] = []

    async def come_back() -> None:
        if not restoring:
            restoring.append(asyncio.create_task(league.adapter_sync.restore(engine)))
            while not (engine.is_up or (engine.silent_about and set(engine.loaded) == {1, 2})):
                await asyncio.sleep(0)

    league.learner.while_scoring = come_back
    if is_back_first:
        with pytest.raises(AdapterError, match=r"engine-1 .*adapter 2\b"):
            await league.update()
        await restoring[0]
    else:
        await league.update()
        engine.silent_about = None
        with pytest.raises(AdapterError, match="engine-1"):
            await restoring[0]


async def test_returning_engine_is_checked_on_all_adapters_at_once(tmp_path):
    league = await make_league(tmp_path, 3, size=3, engines=2)
    engine = league.engines.engines[1]
    engine.start_again()
    await league.adapter_sync.restore(engine)
    assert set(engine.loaded) == {1, 2, 3}
    assert engine.most_at_once == 3 * NUM_SCORED


async def test_canary_records_survive_json(tmp_path):
    league = await make_league(tmp_path / "one", 3, size=4, engines=2)
    saved = json.loads(json.dumps(league.adapter_sync.state_dict()))["canaries"]
    assert saved["evidence"] == saved["base_evidence"] == {}, "evidence for an engine is not kept"
    assert [known["evidence"] for _, known in saved["weights"]] == [{}] * 3
    for engine in league.engines.engines:
        engine._engine._replies, engine.lie, engine.lies_about = ["aaaaaaa"], 0.5, 4
    await league.update()
    assert "engine-1" in league.alarms[-1]
    text = json.dumps(league.adapter_sync.state_dict())
    assert json.loads(text)["canaries"]["num_doubts"] > 0
    assert json.loads(text)["canaries"]["evidence"] != {}
    other = League(tmp_path / "other", 3)
    other.adapter_sync.load_state_dict(json.loads(text))
    assert json.dumps(other.adapter_sync.state_dict()) == text
    ours, theirs = (one.table.weights[Origin("update", "2")].answers["engine-1"][1] for one in (league, other))
    assert ours.seed == theirs.seed
    for name in ("completion_ids", "logprobs", "base_logprobs"):
        was, got = getattr(ours, name), getattr(theirs, name)
        assert was.dtype == got.dtype
        assert np.array_equal(was, got)


async def test_loaded_answers_and_those_of_this_run_keep_their_prompts(tmp_path):
    league = await make_league(tmp_path / "one", 3, size=3)
    state = json.loads(json.dumps(league.adapter_sync.state_dict()))
    state["canaries"]["prompts"] = ["a prompt of that run"]
    other = League(tmp_path / "other", 3)
    await other.canaries.check_base()
    other.adapter_sync.load_state_dict(state)

    def prompts_of(origin: Origin) -> set[str]:
        answers = other.table.weights[origin].answers["engine-0"]
        return {other.canaries._asked[answer.prompt] for answer in answers}

    assert prompts_of(BASE_ORIGIN) == {PROMPT}
    assert prompts_of(Origin("update", "2")) == {"a prompt of that run"}


def forget(state: dict[str, Any], adapters: Path) -> None:
    weights = state["adapter_sync"]["canaries"]["weights"]
    weights[:] = [[origin, known] for origin, known in weights if known["stored_as"] != "ckpt-1"]


def damage(state: dict[str, Any], adapters: Path) -> None:
    (adapters / "ckpt-1" / "adapter_model.safetensors").write_text("weights of ckpt-l")


def nothing(state: dict[str, Any], adapters: Path) -> None: ...


@pytest.mark.parametrize(
    ("change", "max_loras", "missing", "reason"),
    [
        pytest.param(forget, 5, ["ckpt-1"], "stored", id="not stored"),
        pytest.param(nothing, 2, ["ckpt-1", "ckpt-2"], "slot", id="no slots"),
        pytest.param(damage, 5, ["ckpt-1"], "damaged", id="damaged"),
    ],
)
async def test_resumed_league_explains_each_missing_opponent(tmp_path, change, max_loras, missing, reason):
    first, parts = await make_league(tmp_path, 3, size=3), ("registry", "adapter_sync", "pool")
    state = json.loads(json.dumps({part: getattr(first, part).state_dict() for part in parts}))
    await first.close()
    change(state, tmp_path / "adapters")
    league = League(tmp_path, 3, max_loras=max_loras)
    for part in parts:
        getattr(league, part).load_state_dict(state[part])
    shutil.copytree(tmp_path / "adapters" / "ckpt-3", league.store.path(3))
    await league.adapter_sync.sync(3, digest_of(b"weights of ckpt-3"))
    await league.pool.resume()
    assert sorted(alarm.split()[0] for alarm in league.alarms) == missing
    assert all(reason in alarm for alarm in league.alarms)
    assert league.active == [uid for uid in ("ckpt-1", "ckpt-2", "ckpt-3") if uid not in missing]
    league.check_what_is_active_is_loaded_as_itself()


@pytest.mark.parametrize(
    ("updates", "options", "active", "on_disk"),
    [
        pytest.param(6, {"size": 3}, ["ckpt-4", "ckpt-5", "ckpt-6"], None, id="the newest, up to the pool's size"),
        pytest.param(3, {"size": 1}, ["ckpt-3"], set(), id="without a pool only the policy"),
        pytest.param(4, {"size": 1, "keep_every": 2}, ["ckpt-4"], {"ckpt-2", "ckpt-4"}, id="keeping needs no pool"),
        pytest.param(
            3, {"size": 2, "opponent_lag": (5, 9)}, ["base", "ckpt-3"], None, id="the oldest until one is old"
        ),
        pytest.param(
            12,
            {"size": 2, "opponent_lag": (1, 3), "keep_checkpoints": (2,), "keep_every": 5},
            ["ckpt-11", "ckpt-12"],
            {"ckpt-2", "ckpt-5", "ckpt-10"} | {"ckpt-9", "ckpt-11", "ckpt-12"},
            id="those that may return or are kept stay on disk",
        ),
    ],
)
async def test_active_checkpoints_are(tmp_path, updates, options, active, on_disk):
    league = await make_league(tmp_path, updates, **options)
    assert league.active == active
    assert set(league.engines.engines[0].loaded) == {int(uid[5:]) for uid in active if uid != "base"}
    assert league.pool.num_returned == 0
    stored = {path.parent.name: path.read_text() for path in league.disk.glob("*/adapter_model.safetensors")}
    assert on_disk is None or stored == {uid: f"weights of {uid}" for uid in on_disk}


async def test_lag_returns_each_checkpoint_on_time_under_a_new_version(tmp_path):
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
    assert league.adapter_sync.num_waits == 0


@pytest.mark.parametrize("rule", ["match-quality", "nearest-rating"])
async def test_ratings_decide_which_checkpoints_stay_and_return(tmp_path, rule):
    league = await make_league(tmp_path, 4, size=3, active_checkpoints_by=rule)
    league.rate(base=0, ckpt_1=25, ckpt_2=10, ckpt_3=24, ckpt_4=25)
    await league.play(1)
    assert league.active == ["ckpt-1", "ckpt-4", "ckpt-5"]
    league.rate(ckpt_2=25, ckpt_4=40, ckpt_1=50)
    await league.play(1)
    assert league.active == ["ckpt-2", "ckpt-5", "ckpt-6"]
    league.check_what_is_active_is_loaded_as_itself()
    assert league.registry.get("ckpt-2").rating == Rating(25, 1.0)


async def test_return_never_takes_the_slot_of_the_next_update(tmp_path):
    league = await make_league(tmp_path, 4, size=2, active_checkpoints_by="nearest-rating")
    for version in (3, 4):
        league.table.lease(version)
    league.rate(base=0, ckpt_1=25, ckpt_2=0, ckpt_3=0, ckpt_4=0)
    await league.update()  # games still use ckpt-3 and ckpt-4; the free slot is for the update
    league.rate(ckpt_5=25)
    await league.settle()
    assert league.pool.num_returned == 0
    assert league.table.has_free_slot
    league.table.end_lease(3)
    league.table.end_lease(4)
    await league.settle()
    await league.update()
    league.rate(ckpt_5=0, ckpt_6=25)
    await league.settle()
    assert league.adapter_sync.num_waits == 0
    assert league.pool.num_returned == 1
    assert league.active == ["ckpt-1", "ckpt-6"]


async def test_unused_opponent_makes_room_if_slots_are_short(tmp_path):
    league = await make_league(tmp_path, 4, size=3)
    for version in (2, 3):
        league.table.lease(version)  # endless games
    await league.play(2)
    assert set(league.engines.engines[0].loaded) == {2, 3, 4, 5, 6}
    await asyncio.wait_for(league.update(), 5)
    assert league.active == ["ckpt-5", "ckpt-6", "ckpt-7"]


@pytest.mark.parametrize("extra_file", [None, "nowhere"], ids=["no directory", "a file that cannot be copied"])
async def test_failed_copy_is_an_alarm_leaves_no_part_and_training_continues(tmp_path, extra_file):
    league = League(tmp_path, size=2)
    if extra_file is None:
        league.disk.write_text("in the way")
    for _ in range(3):
        await league.update(extra_file)
        await league.settle()
    assert len(league.alarms) == 3
    assert all("disk" in alarm for alarm in league.alarms)
    assert league.active == ["ckpt-2", "ckpt-3"]
    assert list(league.disk.glob("*")) == []


async def test_training_does_not_wait_for_a_returning_checkpoint(tmp_path):
    league = await make_league(tmp_path, 4, size=3, active_checkpoints_by="nearest-rating")
    (engine,) = league.engines.engines
    load = engine.load_adapter

    async def slow_for_returning(version: int, path: Path) -> str:
        if version >= FIRST_RETURNED_VERSION:
            await asyncio.sleep(3600)
        return await load(version, path)

    engine.load_adapter = slow_for_returning  # type: ignore[method-assign]
    league.rate(base=0, ckpt_1=25, ckpt_2=0, ckpt_3=0, ckpt_4=25)
    for _ in range(5):
        await asyncio.wait_for(league.update(), 5)
    assert league.pool.num_returned == 0
    assert league.adapter_sync.num_waits == 0


@pytest.mark.parametrize(
    ("lie", "match"), [(0.5, r"engine-1.* 0\.5000"), (-0.05, "engine-1")], ids=["differently", "as the base"]
)
async def test_engine_that_answers_differently_than_before_ends_the_run(tmp_path, lie, match):
    league = League(tmp_path, size=2, opponent_lag=(2, 9), engines=2)
    league.engines.engines[1].lie = lie
    with pytest.raises(AdapterError, match=match):
        await league.play(9)


async def test_engine_that_reads_another_adapter_ends_the_run(tmp_path):
    league = await make_league(tmp_path, 1, size=2, engines=2)
    engine = league.engines.engines[1]
    load = engine.load_adapter

    async def load_previous(version: int, path: Path) -> str:
        await load(version, path)
        engine.loaded[version] = engine.loaded[1]
        return digest_of(engine.loaded[version])

    engine.load_adapter = load_previous
    old, new = (digest_of(f"weights of ckpt-{version}".encode()) for version in (1, 2))
    with pytest.raises(AdapterError, match=f"engine-1 .*version 2 .*{old}.*{new}"):
        await league.update()


@pytest.mark.parametrize("is_started_again", [True, False])
async def test_engine_that_returns_with_other_weights_ends_the_run(tmp_path, is_started_again):
    """The engine either loaded its adapters again, or slept and forgot them."""
    league = await make_league(tmp_path, 2, size=2)
    (engine,) = league.engines.engines
    if is_started_again:
        engine.start_again()
        (league.store.path(2) / "adapter_model.safetensors").write_text("weights of ckpt-3")
    else:
        engine.loaded[2] = b"nothing"
    with pytest.raises(AdapterError, match=r"engine-0 .*version 2\b"):
        await league.adapter_sync.restore(engine)


@pytest.mark.parametrize("is_missing", [False, True])
async def test_adapter_damaged_on_disk_does_not_return_and_training_continues(tmp_path, is_missing):
    league = await make_league(tmp_path, 2, size=2, opponent_lag=(2, 9), engines=2)
    if is_missing:
        (league.disk / "ckpt-1" / "adapter_config.json").unlink()
    else:
        (league.disk / "ckpt-1" / "adapter_model.safetensors").write_text("weights of ckpt-l")
    await league.play(3)
    (alarm,) = league.alarms
    assert re.search(r"ckpt-1 " if is_missing else r"ckpt-1 .*damaged", alarm)
    assert league.active == ["ckpt-3", "ckpt-5"]
    assert len(league.engines.engines[0].loaded) == 2


async def test_model_with_one_possible_token_only_raises_an_alarm(tmp_path):
    league = League(tmp_path, 2)
    (engine,) = league.engines.engines
    engine._engine._replies = [""]
    metrics = await league.canaries.check_base()
    assert metrics["canary/n"] == 1
    for _ in range(3):
        await league.update()
    assert len(league.alarms) == 1
    assert "only 1 " in league.alarms[0]
    assert league.canaries.num_doubts == 4


async def test_files_needed_by_the_last_two_saved_states_stay_on_disk(tmp_path):
    """A killed run resumes from the last saved state, or from the one before if the last is damaged."""
    league = await make_league(tmp_path, 2, size=2, opponent_lag=(1, 1))
    stored: list[set[str]] = []
    for _ in range(3):
        needed = set(league.table.stored())
        league.pool.tell_saving()
        await league.play(2)  # while it is being written
        assert {path.name for path in league.disk.iterdir()} >= needed
        await league.pool.tell_saved()
        stored.append(needed)
        assert {path.name for path in league.disk.iterdir()} <= set(league.table.stored()).union(*stored[-2:])
        await league.play(2)
        assert {path.name for path in league.disk.iterdir()} >= set.union(*stored[-2:])
    assert "ckpt-1" not in {path.name for path in league.disk.iterdir()}


async def test_kept_checkpoint_may_return_at_any_age(tmp_path):
    league = await make_league(
        tmp_path, 8, size=2, opponent_lag=(1, 2), keep_checkpoints=(2,), active_checkpoints_by="nearest-rating"
    )
    await league.update()
    league.rate(ckpt_2=25, ckpt_3=25, ckpt_7=0, ckpt_8=0, ckpt_9=25)
    await league.settle()
    assert league.active == ["ckpt-2", "ckpt-9"]


async def test_ending_run_waits_for_a_copy_in_progress(tmp_path, monkeypatch):
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
    assert not closing.done()  # otherwise the copy would restore what close removes
    may_end.set()
    await asyncio.wait_for(closing, 10)
    assert not league.store.directory.exists()


@pytest.mark.parametrize("rule", ["recency", "match-quality", "nearest-rating"])
@pytest.mark.parametrize("seed", range(2))
async def test_long_league_has_enough_slots_never_stalls_and_mixes_up_no_adapter(tmp_path, rule, seed):
    """Games of random lengths hold their adapters; ratings change; two engines keep track of them."""
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
                league.table.lease(version)
            for _ in range(rng.randrange(1, 6)):
                assert held <= set(league.engines.engines[0].loaded)
                await asyncio.sleep(0.0005)
            for version in held:
                league.table.end_lease(version)

    games = [asyncio.create_task(play()) for _ in range(8)]
    for _ in range(30):
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
    assert league.adapter_sync.num_waits == 0
