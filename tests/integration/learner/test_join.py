"""A rank that torchrun starts on another machine, here over the loopback interface."""

import subprocess
import sys
from typing import Any

import pytest

from fakes.http_servers import reserve_port
from fakes.worker_processes import opened_router, worker_process
from unstable_lite.learner import load_learner
from unstable_lite.planning.validation import find_problems
from unstable_lite.transport.messages import Update, Updated
from unstable_lite.transport.rpc import WorkerChannel


@pytest.mark.nightly
async def test_rank_started_by_torchrun_joins_by_address(make_config, make_items, tmp_path):
    address = f"127.0.0.1:{reserve_port()}"
    config = make_config(learner={"remote_ranks": 1, "rendezvous": address})
    command = ["-m", "torch.distributed.run", "--standalone", "-m", "unstable_lite.learner.remote_rank", address]
    items, log_path = tuple(make_items()), tmp_path / "elsewhere.log"
    with opened_router() as router, log_path.open("w") as log:
        channel, module = WorkerChannel(router, "learner"), "unstable_lite.learner.worker"
        process = worker_process(channel, router.endpoint, config, module, tmp_path / "log", num_ranks=2)
        elsewhere = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
        try:
            await process.start()
            await process.ready(250)
            updated: Updated = await channel.ask(Update, 120, items=items, version=1, path=str(tmp_path / "v1"))
            await process.stop(grace_s=60)
            assert elsewhere.wait(timeout=60) == 0, log_path.read_text()
        finally:
            await process.stop()
            elsewhere.kill()
    alone = load_learner(make_config(), "cpu").update(items, 1)
    assert updated.skipped is None
    for name in ("loss", "policy_grad_norm", "num_items", "num_tokens", "logp_mean"):
        assert updated.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-4)


def test_impossible_ranks_are_refused_before_start(make_config):
    def problems(**learner: Any) -> str:
        return "\n".join(find_problems(make_config(learner=learner)))

    assert "rendezvous" in problems(remote_ranks=1)
    assert "HOST:PORT" in problems(remote_ranks=1, rendezvous="here")
    assert "batch_size = 1" in problems(devices=["cpu"] * 3, batch_size=1)
    assert "devices" in problems(devices=["cpu", 0])
    assert not problems(devices=["cpu", "cpu"])
