"""A rank that another machine's torchrun starts; here on the loopback interface."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unstable_lite.config import Config
from unstable_lite.learners import load_learner
from unstable_lite.plan import find_problems
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import Update, Updated
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.sockets import Peer, Router

MakeConfig = Callable[..., Config]


async def test_a_rank_that_torchrun_starts_joins_the_run_by_its_address_alone(
    make_config: MakeConfig, make_items: Callable[..., Any], tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = make_config(learner={"remote_ranks": 1, "rendezvous": address})
    (tmp_path / "bus").mkdir()
    router = Router(tmp_path / "bus")
    spec = WorkerSpec(
        name="learner",
        endpoint=router.endpoint,
        device="cpu",
        threads=1,
        config_json=config.model_dump_json(),
        num_ranks=2,
    )
    process = WorkerProcess(Peer(router, "learner"), tmp_path / "log", "unstable_lite.learners.worker", spec, {})
    command = ["-m", "torch.distributed.run", "--standalone", "-m", "unstable_lite.learners.join", address]
    with (tmp_path / "elsewhere.log").open("w") as log:
        elsewhere = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
    try:
        await process.start()
        await process.ready(250)
        items = tuple(make_items())
        paths = {"path": str(tmp_path / "v1"), "state_path": str(tmp_path / "state-1")}
        updated: Updated = await process.peer.ask(Update, 120, items=items, version=1, **paths)
        await process.stop(grace_s=60)
        assert elsewhere.wait(timeout=60) == 0, (tmp_path / "elsewhere.log").read_text()
    finally:
        await process.stop()
        elsewhere.kill()
        router.close()
    alone = load_learner(make_config(), "cpu").update(items, 1)
    assert updated.skipped is None
    for name in ("loss", "policy_grad_norm", "num_items", "num_tokens", "logp_mean"):
        assert updated.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4)


def test_ranks_that_cannot_be_are_refused_before_anything_starts(make_config: MakeConfig) -> None:
    def problems(**learner: Any) -> str:
        return "\n".join(find_problems(make_config(learner=learner)))

    assert "shard_base needs several ranks" in problems(shard_base=True)
    assert "need each other" in problems(remote_ranks=1)
    assert "HOST:PORT" in problems(remote_ranks=1, rendezvous="here")
    assert "batch_size = 1 leaves some of 3 ranks" in problems(devices=["cpu"] * 3, batch_size=1)
    assert "all on GPUs or all on the CPU" in problems(devices=["cpu", 0])
    assert not problems(devices=["cpu", "cpu"], shard_base=True)
