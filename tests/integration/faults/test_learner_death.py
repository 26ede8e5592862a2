"""Kill learners before, during and after an update: real processes, real training of a tiny model."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from msgspec import structs

from fakes import numpy_learner
from unstable_lite.adapters import peft_files
from unstable_lite.adapters.store import AdapterStore
from unstable_lite.config import Config
from unstable_lite.config.games import PolicyConfig
from unstable_lite.learner import load_learner, worker
from unstable_lite.learner.client import LearnerClient, restore_all, train_items
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.transport.messages import LoadLearner, SaveLearner, Score, Scored, Update, Updated
from unstable_lite.transport.processes import WorkerGroup, WorkerProcess
from unstable_lite.transport.rpc import Router, WorkerChannel
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation, Step

VOCAB = 300
REAL, TORCHLESS = "unstable_lite.learner.worker", numpy_learner.__name__


@pytest.fixture(autouse=True)
def _restarts_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstable_lite.orchestrator.supervisor.BACKOFF_S", 0.0)


@pytest.fixture(scope="session")
def config() -> Config:
    return Config.model_validate(
        {
            "model_name": "builtin:tiny",
            "run": {"max_restarts": 20},
            "learner": {"dtype": "float32", "learning_rate": 1e-2},
            "lora": {"lora_rank": 4},
            "train_envs": [{"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}],
        }
    )


def batch(seed: int, num: int = 12) -> list[Step]:
    rng = np.random.default_rng(seed)

    def step() -> Step:
        generation = Generation(
            prompt_ids=rng.integers(0, VOCAB, 40).astype(np.int32),
            completion_ids=rng.integers(0, VOCAB, 20).astype(np.int32),
            logprobs=rng.uniform(-7, -5, 20).astype(np.float32),
            text="",
            finish_reason="stop",
            adapter_version=0,
        )
        return Step(pid=0, obs="", act="", reward=float(rng.normal()), env_id="Nim-v0-train", generation=generation)

    return [step() for _ in range(num)]


@dataclass
class Learning:
    clients: dict[str, LearnerClient]
    process: WorkerProcess
    supervisor: Supervisor
    arena: AdapterStore
    alarms: list[str] = field(default_factory=list)

    @property
    def client(self) -> LearnerClient:
        return next(iter(self.clients.values()))

    async def update(self, version: int) -> Updated:
        updated = await self.client.update(batch(version), version, self.arena)
        await self.client.save_state(version, self.arena)
        return updated

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def kill_other_rank(self) -> None:
        assert isinstance(self.process, WorkerGroup)
        os.kill(self.process.others[0].pid, signal.SIGKILL)

    async def kill_when(self, condition: Callable[[], bool], kill: Callable[[], None] | None = None) -> None:
        while not condition():
            await asyncio.sleep(0.0005)
        (kill or self.kill)()


@asynccontextmanager
async def started(tmp_path: Path, config: Config, module: str = REAL, num_ranks: int = 1) -> AsyncIterator[Learning]:
    (tmp_path / "bus").mkdir()
    router = Router(tmp_path / "bus")
    names = ["learner", *(f"learner-{rank}" for rank in range(1, num_ranks))]
    ranks, channels = [], [WorkerChannel(router, name) for name in names]
    clients = {name: LearnerClient(channels[0], name) for name in config.shares}
    for rank, channel in enumerate(channels):
        spec = WorkerSpec(
            name=channel.name,
            endpoint=router.endpoint,
            device="cpu",
            threads=1,
            config_json=config.model_dump_json(),
            rank=rank,
            num_ranks=num_ranks,
        )
        log_path = tmp_path / f"{channel.name}.log"
        ranks.append(WorkerProcess(channel, log_path, module, spec, {}))
    process = WorkerGroup(ranks, tmp_path) if num_ranks > 1 else ranks[0]
    await process.start()
    await process.ready(120)
    alarms: list[str] = []
    supervisor = Supervisor(process, config.run, 120, 120, partial(restore_all, [*clients.values()]), alarms.append)
    arena = AdapterStore("learning", tmp_path, bytes_needed=1 << 60)
    learning = Learning(clients, process, supervisor, arena, alarms)
    try:
        async with asyncio.TaskGroup() as tasks:
            supervised = tasks.create_task(supervisor.run())
            yield learning
            supervised.cancel()
    finally:
        await process.stop()
        router.close()
        arena.close()


def undisturbed(module: str, config: Config, last: int, first: int = 1) -> Iterator[dict[str, np.ndarray]]:
    """Yield the adapters `first` to `last` of a learner that never dies."""
    torch.set_num_threads(1)
    real = load_learner(config, "cpu") if module == REAL else None
    spec = WorkerSpec(name="learner", endpoint="", device="cpu", threads=1, config_json=config.model_dump_json())
    torchless = numpy_learner.NumpyLearner(spec)
    for version in range(first, last + 1):
        items = train_items(batch(version))
        if real is not None:
            assert real.update(items, version).skipped is None
            yield {name: tensor.numpy() for name, tensor in real.training.policy.adapter_state()[0].items()}
        else:
            torchless.learn(items, version)
            yield torchless.tensors


@pytest.mark.parametrize("module", [pytest.param(REAL, marks=pytest.mark.nightly), TORCHLESS])
async def test_every_update_is_made_once_whenever_the_learner_is_killed(
    tmp_path: Path, config: Config, module: str
) -> None:
    async with started(tmp_path, config, module) as learning, asyncio.TaskGroup() as tasks:
        arena, steps = learning.arena, list[float]()

        async def update(version: int) -> None:
            steps.append((await learning.update(version)).metrics["step"])

        await update(1)
        paths = arena.directory / ".learner-2.unfinished", arena.learner_state(2)
        tasks.create_task(learning.kill_when(lambda: any(map(Path.exists, paths))))  # while it writes its state
        await update(2)
        reported = await learning.client.update(batch(3), 3, arena)
        learning.kill()  # before it saves: the replacement repeats the update alone
        await learning.client.save_state(3, arena)
        await update(4)
        if module == TORCHLESS:
            learning.kill()  # before an update
            await update(5)
            tasks.create_task(learning.kill_when(lambda: learning.client.channel.num_pending > 0))  # at its start
            await update(6)
            tasks.create_task(learning.kill_when(arena.learner_state(7).exists))  # done, perhaps not yet reported
            await update(7)
        made, kills = (7, 5) if module == TORCHLESS else (4, 2)
        assert [*steps[:2], reported.metrics["step"], *steps[2:]] == list(range(1, made + 1))
        assert kills - 1 <= learning.supervisor.restarts <= kills
        assert [path.name for path in arena.directory.glob("learner-*")] == [f"learner-{made}"]
        for version, expected in enumerate(undisturbed(module, config, made), start=1):
            found = safetensors.numpy.load_file(arena.path(version) / peft_files.WEIGHTS)
            assert all(np.array_equal(tensor, found[name]) for name, tensor in expected.items()), version
        assert reported.digest == peft_files.adapter_digest(arena.path(3))


@pytest.mark.parametrize(
    ("module", "num_ranks"),
    [
        (TORCHLESS, 1),
        pytest.param(REAL, 1, marks=pytest.mark.nightly),
        pytest.param(REAL, 2, marks=pytest.mark.nightly),
    ],
)
async def test_learner_that_dies_between_updates_of_two_policies_makes_each_once(
    tmp_path: Path, config: Config, module: str, num_ranks: int
) -> None:
    policies = {"main": PolicyConfig(), "exploiter": PolicyConfig(algorithm="grpo", learner={"learning_rate": 2e-2})}
    both = config.changed(policies=policies)
    first = {"main": 1, "exploiter": (1 << 24) + 1}
    made: dict[str, list[Updated]] = {name: [] for name in first}
    async with started(tmp_path, both, module, num_ranks) as learning:
        arena = learning.arena

        async def update(name: str, index: int, is_saved: bool = True) -> None:
            client, version = learning.clients[name], first[name] + index
            made[name].append(await client.update(batch(version), version, arena))
            if is_saved:
                await client.save_state(version, arena)

        for name in first:
            await learning.clients[name].write_adapter(first[name], arena)
        await update("main", 1)
        await update("exploiter", 1, is_saved=False)
        learning.kill()  # the replacement repeats the exploiter's update alone
        await update("main", 2)
        await learning.clients["exploiter"].save_state(first["exploiter"] + 1, arena)
        learning.kill()
        await update("exploiter", 2)
        await update("main", 3)
        await learning.clients["exploiter"].save(tmp_path / "saved")
        assert learning.supervisor.restarts == 2
        assert {path.name for path in arena.directory.glob("learner-*")} == {f"learner-{4}", f"learner-{2**24 + 3}"}
        for name, updates in made.items():
            assert [each.metrics["step"] for each in updates] == list(range(1, len(updates) + 1)), name
            last = first[name] + len(updates)
            *_, expected = undisturbed(module, both.of_policy(name), last, first[name] + 1)
            found = safetensors.numpy.load_file(arena.path(last) / peft_files.WEIGHTS)
            difference = max(float(np.abs(found[key] - tensor).max()) for key, tensor in expected.items())
            # Sums of two ranks round otherwise, which Adam enlarges where a gradient is near 0; a step is near 1e-2.
            assert difference <= (1e-3 if num_ranks > 1 else 0), name
        assert peft_files.adapter_digest(tmp_path / "saved") == made["exploiter"][-1].digest


@pytest.mark.parametrize("module", [TORCHLESS, pytest.param(REAL, marks=pytest.mark.nightly)])
async def test_training_that_began_again_survives_the_learners_death(
    tmp_path: Path, config: Config, module: str
) -> None:
    async with started(tmp_path, config, module) as learning, asyncio.TaskGroup() as tasks:
        arena, client = learning.arena, learning.client
        for version in (1, 2):
            await learning.update(version)
        paths = arena.directory / ".learner-3.unfinished", arena.learner_state(3)
        tasks.create_task(learning.kill_when(lambda: any(map(Path.exists, paths))))  # while it writes its state
        fresh = await client.write_adapter(3, arena, seed=5)
        assert fresh == peft_files.adapter_digest(arena.path(3)) != peft_files.adapter_digest(arena.path(2))
        learning.kill()
        assert (await learning.update(4)).metrics["step"] == 1
        assert await client.write_adapter(5, arena, seed=5) == fresh
        assert await client.write_adapter(6, arena, seed=6) != fresh
        copied = await client.write_adapter(7, arena, seed=5, adapter=arena.path(4))
        assert copied == peft_files.adapter_digest(arena.path(4))
        assert (await learning.update(8)).metrics["step"] == 1
        assert learning.supervisor.restarts in (1, 2)


async def test_replacement_of_a_learner_that_did_not_save_adopts_what_is_published(
    tmp_path: Path, config: Config
) -> None:
    """The adapter is changed on purpose: on a GPU the replacement's own update need not be equal."""
    async with started(tmp_path, config, TORCHLESS) as learning:
        await learning.update(1)
        reported = await learning.client.update(batch(2), 2, learning.arena)
        learning.kill()
        published = learning.arena.path(2)
        digest = change(published)
        generations = [step.generation for step in batch(2) if step.generation is not None]
        scoring = asyncio.create_task(learning.client.score(generations))  # as the canary does at this time
        await learning.client.save_state(2, learning.arena)
        assert len(await scoring) == len(generations)
        state = learning.arena.learner_state(2)
        assert peft_files.adapter_digest(published) == peft_files.adapter_digest(state) == digest != reported.digest
        assert (await learning.update(3)).metrics["step"] == 3
        assert learning.supervisor.restarts == 1


def change(adapter: Path) -> str:
    """Change every number of an adapter; return its digest."""
    file = adapter / peft_files.WEIGHTS
    changed = {name: tensor + 0.01 for name, tensor in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(changed, file, {"format": "pt"})
    return peft_files.adapter_digest(adapter)


def test_repeated_update_takes_the_adapter_that_is_published(config: Config, tmp_path: Path) -> None:
    first, second = (worker._Worker(load_learner(config, "cpu"), config) for _ in range(2))
    messages = [
        Update(request_id=n, items=train_items(batch(n)), version=n, path=str(tmp_path / f"v{n}")) for n in (1, 2, 3)
    ]
    state, repeated = str(tmp_path / "state"), structs.replace(messages[1], is_published=True)
    first.answer(messages[0])
    first.answer(SaveLearner(request_id=4, path=state))
    first.answer(messages[1])
    digest = change(tmp_path / "v2")
    second.answer(LoadLearner(request_id=5, path=state))
    updated = second.answer(repeated)
    assert isinstance(updated, Updated) and updated.digest == digest
    policy = load_learner(config, "cpu").training.policy
    policy.load_adapter(tmp_path / "v2")
    scored = second.answer(Score(request_id=6, items=messages[1].items))
    assert isinstance(scored, Scored)
    for expected, found in zip(policy.score(messages[1].items), scored.logprobs, strict=True):
        assert found.adapter == pytest.approx(expected.adapter, abs=1e-5)
    after = second.answer(messages[2])
    assert isinstance(after, Updated) and after.metrics["step"] == 3


@pytest.mark.nightly
async def test_death_of_one_rank_restarts_all_from_the_last_state(config: Config, tmp_path: Path) -> None:
    async with started(tmp_path, config, num_ranks=2) as learning, asyncio.TaskGroup() as tasks:
        reported, first = [await learning.update(1)], learning.process.pid
        tasks.create_task(learning.kill_when(lambda: learning.client.channel.num_pending > 0, learning.kill_other_rank))
        reported.append(await learning.update(2))
        assert learning.supervisor.restarts == 1
        assert learning.process.pid != first
        assert any("learner-1 was killed by SIGKILL" in alarm for alarm in learning.alarms)
        ranks = [learning.process.pid, learning.process.others[0].pid]  # type: ignore[attr-defined]
    assert not any(psutil.pid_exists(pid) for pid in ranks)

    torch.set_num_threads(1)
    undisturbed = load_learner(config, "cpu")
    for version, updated in enumerate(reported, start=1):
        metrics = undisturbed.update(train_items(batch(version)), version).metrics
        assert updated.metrics["step"] == version
        for name in ("loss", "policy_grad_norm", "num_tokens", "logp_mean"):
            assert updated.metrics[name] == pytest.approx(metrics[name], rel=1e-3)


def test_adapter_of_an_unreported_update_is_written_again(config: Config, tmp_path: Path) -> None:
    message = Update(request_id=1, items=train_items(batch(1)), version=1, path=str(tmp_path / "v1"))
    first, second = (worker._Worker(load_learner(config, "cpu"), config) for _ in range(2))
    first.answer(message)
    made = peft_files.adapter_digest(tmp_path / "v1")
    (tmp_path / "v1" / "adapter_model.safetensors").write_bytes(b"of another update")
    updated = second.answer(message)
    assert isinstance(updated, Updated)
    assert updated.digest == peft_files.adapter_digest(tmp_path / "v1") == made
