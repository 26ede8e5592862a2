"""Kill learners before, during and after an update: real processes, real training of a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from unstable_lite.adapters import peft_files
from unstable_lite.adapters.store import AdapterStore
from unstable_lite.config import Config
from unstable_lite.learner import load_learner, worker
from unstable_lite.learner.client import LearnerClient, train_items
from unstable_lite.orchestrator.supervisor import Supervisor
from unstable_lite.transport.messages import Update, Updated
from unstable_lite.transport.processes import WorkerGroup, WorkerProcess
from unstable_lite.transport.rpc import Router, WorkerChannel
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation, Step

VOCAB = 300


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("tiny-qwen3")
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return Config.model_validate(
        {
            "model_name": str(path),
            "run": {"max_restarts": 20, "restart_backoff_s": 0.0},
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
    """A supervised learner process."""

    client: LearnerClient
    process: WorkerProcess
    supervisor: Supervisor
    arena: AdapterStore
    alarms: list[str] = field(default_factory=list)

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


@pytest.fixture
async def learning(tmp_path: Path, config: Config) -> AsyncIterator[Learning]:
    async with _learning(tmp_path, config, num_ranks=1) as started:
        yield started


@pytest.fixture
async def learning_by_two(tmp_path: Path, config: Config) -> AsyncIterator[Learning]:
    async with _learning(tmp_path, config, num_ranks=2) as started:
        yield started


@asynccontextmanager
async def _learning(tmp_path: Path, config: Config, num_ranks: int) -> AsyncIterator[Learning]:
    (tmp_path / "bus").mkdir()
    router = Router(tmp_path / "bus")
    client = LearnerClient(router, config.learner)
    ranks = []
    for rank, channel in enumerate(
        [client.channel, *(WorkerChannel(router, f"learner-{rank}") for rank in range(1, num_ranks))]
    ):
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
        ranks.append(WorkerProcess(channel, log_path, "unstable_lite.learner.worker", spec, {}))
    process = WorkerGroup(ranks, tmp_path) if num_ranks > 1 else ranks[0]
    await process.start()
    await process.ready(120)
    alarms: list[str] = []
    supervisor = Supervisor(process, config.run, 120, 120, client.restore, alarms.append)
    arena = AdapterStore("learning", tmp_path, bytes_needed=1 << 60)
    yield Learning(client, process, supervisor, arena, alarms)
    await process.stop()
    router.close()
    arena.close()


def weights(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path / "adapter_model.safetensors")


async def test_every_update_is_made_once_whenever_the_learner_is_killed(learning: Learning, config: Config) -> None:
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(learning.supervisor.run())
        arena = learning.arena
        await learning.update(1)
        learning.kill()  # before an update
        steps = [(await learning.update(2)).metrics["step"]]
        tasks.create_task(learning.kill_when(lambda: learning.client.channel.num_pending > 0))  # at its start
        steps.append((await learning.update(3)).metrics["step"])
        partial = arena.directory / ".learner-4.unfinished"
        tasks.create_task(learning.kill_when(partial.exists))  # while it writes its state
        steps.append((await learning.update(4)).metrics["step"])
        tasks.create_task(learning.kill_when(arena.learner_state(5).exists))  # done, perhaps not yet reported
        steps.append((await learning.update(5)).metrics["step"])
        learning.kill()  # after an update
        steps.append((await learning.update(6)).metrics["step"])
        supervised.cancel()
    assert steps == [2, 3, 4, 5, 6]
    assert 3 <= learning.supervisor.restarts <= 5

    torch.set_num_threads(1)
    undisturbed = load_learner(config, "cpu")
    for version in range(1, 7):
        assert undisturbed.update(train_items(batch(version)), version).skipped is None
        tensors, _ = undisturbed.policy.adapter_state()
        made = weights(arena.path(version))
        assert all(torch.equal(tensors[name], made[name]) for name in tensors), version


@pytest.mark.nightly
async def test_death_of_one_rank_restarts_all_from_the_last_state(
    learning_by_two: Learning, config: Config, tmp_path: Path
) -> None:
    learning = learning_by_two
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(learning.supervisor.run())
        reported, first = [await learning.update(1)], learning.process.pid
        tasks.create_task(learning.kill_when(lambda: learning.client.channel.num_pending > 0, learning.kill_other_rank))
        reported.append(await learning.update(2))
        supervised.cancel()
    assert learning.supervisor.restarts == 1
    assert learning.process.pid != first
    assert any("learner-1 was killed by SIGKILL" in alarm for alarm in learning.alarms)
    ranks = [learning.process.pid, learning.process.others[0].pid]  # type: ignore[attr-defined]
    await learning.process.stop()
    assert not any(psutil.pid_exists(pid) for pid in ranks)

    torch.set_num_threads(1)
    undisturbed = load_learner(config, "cpu")
    for version, updated in enumerate(reported, start=1):
        metrics = undisturbed.update(train_items(batch(version)), version).metrics
        assert updated.metrics["step"] == version
        for name in ("loss", "policy_grad_norm", "num_tokens", "logp_mean"):
            assert updated.metrics[name] == pytest.approx(metrics[name], rel=1e-3)


async def test_only_the_newest_learner_state_is_kept(learning: Learning) -> None:
    for version in (1, 2, 3):
        await learning.update(version)
    assert [path.name for path in learning.arena.directory.glob("learner-*")] == ["learner-3"]


async def test_published_adapter_survives_a_learner_that_dies_before_it_saves(
    learning: Learning, config: Config
) -> None:
    """The adapter is changed on purpose: on a GPU the replacement's own update need not be equal."""
    await learning.update(1)
    reported = await learning.client.update(batch(2), 2, learning.arena)
    learning.kill()
    published = learning.arena.path(2)
    changed = {name: tensor + 0.01 for name, tensor in weights(published).items()}
    safetensors.torch.save_file(changed, published / "adapter_model.safetensors", {"format": "pt"})
    digest = peft_files.adapter_digest(published)
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(learning.supervisor.run())
        generations = [step.generation for step in batch(2) if step.generation is not None]
        scoring = tasks.create_task(learning.client.score(generations))  # as the canary does at this time
        await learning.client.save_state(2, learning.arena)
        supervised.cancel()
    policy = load_learner(config, "cpu").training.policy
    policy.load_adapter(published)
    for expected, scored in zip(policy.score(train_items(batch(2))), scoring.result(), strict=True):
        assert scored.adapter == pytest.approx(expected.adapter, abs=1e-5)
    state = learning.arena.learner_state(2)
    assert peft_files.adapter_digest(published) == peft_files.adapter_digest(state) == digest != reported.digest
    assert [path.name for path in learning.arena.directory.glob("learner-*")] == ["learner-2"]

    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(learning.supervisor.run())
        after = await learning.update(3)
        supervised.cancel()
    assert (learning.supervisor.restarts, after.metrics["step"]) == (1, 3)


async def test_learner_that_dies_before_it_saves_repeats_its_update_alone(learning: Learning, config: Config) -> None:
    """The repeated update is equal bit for bit on a CPU, with its moments."""
    await learning.update(1)
    reported = await learning.client.update(batch(2), 2, learning.arena)
    async with asyncio.TaskGroup() as tasks:
        supervised = tasks.create_task(learning.supervisor.run())
        learning.kill()
        await learning.client.save_state(2, learning.arena)
        await learning.update(3)
        supervised.cancel()
    torch.set_num_threads(1)
    undisturbed = load_learner(config, "cpu")
    for version in (1, 2, 3):
        undisturbed.update(train_items(batch(version)), version)
    expected, _ = undisturbed.policy.adapter_state()
    made = weights(learning.arena.learner_state(3))
    assert all(torch.equal(tensor, made[name]) for name, tensor in expected.items())
    assert reported.digest == peft_files.adapter_digest(learning.arena.path(2))


def test_adapter_of_an_unreported_update_is_written_again(config: Config, tmp_path: Path) -> None:
    message = Update(request_id=1, items=train_items(batch(1)), version=1, path=str(tmp_path / "v1"))
    first, second = (worker._Worker(load_learner(config, "cpu"), config) for _ in range(2))
    first.answer(message)
    made = peft_files.adapter_digest(tmp_path / "v1")
    (tmp_path / "v1" / "adapter_model.safetensors").write_bytes(b"of another update")
    updated = second.answer(message)
    assert isinstance(updated, Updated)
    assert updated.digest == peft_files.adapter_digest(tmp_path / "v1") == made
