"""Real processes over real ZeroMQ with the scripted engine, because no test here is about models."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import uvloop
import zmq

from fakes.worker_processes import opened_router, worker_process
from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import ProtocolError, RequestError, WorkerDied
from unstable_lite.transport import rpc
from unstable_lite.transport.codec import PROTOCOL, encode
from unstable_lite.transport.messages import Crashed, Done, Generated, Ready, UnloadAdapter
from unstable_lite.transport.processes import WorkerGroup, WorkerProcess
from unstable_lite.transport.rpc import Router, WorkerChannel
from unstable_lite.transport.worker_main import ORPHANED, WorkerSpec
from unstable_lite.types import Generation

CONFIG = Config.model_validate(
    {
        "engine": {"kind": "scripted", "replies": ["\\boxed{[1]}", "two"]},
        "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
    }
)


@dataclass
class Wire:
    router: Router
    engine: EngineClient
    process: WorkerProcess


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    async with _engine(tmp_path, "unstable_lite.engines.worker") as started:
        await started.process.ready(30)
        yield started


@asynccontextmanager
async def _engine(tmp_path: Path, module: str) -> AsyncIterator[Wire]:
    with opened_router() as router:
        engine = EngineClient(router, "engine-0", CONFIG.engine)
        log_path = tmp_path / "logs" / "engine-0.log"
        process = worker_process(engine.channel, router.endpoint, CONFIG, module, log_path)
        await process.start()
        try:
            yield Wire(router, engine, process)
        finally:
            await process.stop()


async def test_each_of_a_thousand_requests_gets_its_own_reply_and_one_that_no_frame_holds_fails_alone(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = EnginePool([wire.engine])
    generations = await asyncio.gather(*(pool.generate(f"prompt {index}", 0) for index in range(1000)))
    for index, generation in enumerate(generations):
        assert bytes(generation.prompt_ids.astype("u1")).decode() == f"prompt {index}"
        assert len(generation.logprobs) == len(generation.completion_ids)
    assert wire.engine.channel.num_pending == 0
    results = await asyncio.gather(
        *(wire.engine.generate(prompt, 0) for prompt in ("one", "\ud800", "two")), return_exceptions=True
    )
    assert [isinstance(result, Generation) for result in results] == [True, False, True]
    assert isinstance(results[1], RequestError)
    assert "engine-0: Generate" in str(results[1])
    frames: list[int] = []
    send = wire.router._socket.send_multipart
    monkeypatch.setattr(wire.router._socket, "send_multipart", lambda parts: (frames.append(1), send(parts))[1])
    await asyncio.gather(*(wire.engine.generate("p", 0) for _ in range(100)))
    assert len(frames) == 1


async def test_killed_worker_fails_all_its_requests_is_named_with_its_log_and_can_be_replaced(wire: Wire) -> None:
    process, channel = wire.process, wire.engine.channel
    assert not process.spec.is_restart
    os.kill(process.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(wire.engine.generate("p", 0)) for _ in range(50)]
    await asyncio.sleep(0.1)
    process.log_path.write_text("the last line\n")
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"(?s)engine-0 was killed by SIGKILL.*the last line.*memory ran out.*`dmesg`"):
        await process.watch()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, WorkerDied) for result in results)
    with pytest.raises(WorkerDied):
        await wire.engine.generate("p", 0)
    shutil.rmtree(process.log_path.parent)
    identity = channel.identity
    await process.start()
    _sends(wire.router, identity, [encode([Ready(info={})])])  # a late frame of the dead worker
    assert (await process.ready(30))["kind"] == "scripted"
    assert wire.router.dropped_frames == 0
    assert process.log_path.is_file()
    assert process.spec.is_restart


async def test_worker_whose_death_is_not_known_yet_can_be_killed(wire: Wire) -> None:
    pid = wire.process.pid
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # a thread of asyncio may have reaped it already
        os.waitpid(pid, 0)
    assert wire.process.is_running  # as far as the event loop knows, which has not run since
    wire.process.kill()
    await wire.process.watch()
    assert not wire.process.is_running


async def test_signals_of_a_batch_system_leave_the_workers_to_the_orchestrator(wire: Wire) -> None:
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(wire.process.pid, signum)
    assert (await wire.engine.generate("p", 0)).adapter_version == 0
    os.kill(wire.process.pid, signal.SIGQUIT)
    async with asyncio.timeout(20):
        while "most recent call first" not in wire.process.log_path.read_text():
            await asyncio.sleep(0.05)
    assert (await wire.engine.generate("p", 0)).adapter_version == 0


async def test_worker_that_the_run_began_without_is_up_once_it_has_its_adapters(tmp_path: Path) -> None:
    async with _engine(tmp_path, "unstable_lite.engines.worker") as late:
        pool = EnginePool([late.engine])
        late.engine.channel.mark_late()
        await late.process.ready(30)
        for _ in range(2):
            assert pool.up == []
            pool.mark_ready(late.engine)
            assert pool.up == [late.engine]
            late.engine.channel.mark_late()


async def test_unanswered_request_fails_at_its_deadline(wire: Wire) -> None:
    os.kill(wire.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"engine-0: .*deadline"):
        await wire.engine.channel.ask(UnloadAdapter, 0.3, version=1)
    assert time.monotonic() - started < 10
    os.kill(wire.process.pid, signal.SIGCONT)
    assert (await wire.engine.generate("p", 0)).text  # the late reply to the failed request does no harm


async def test_orphaned_worker_exits_at_once(wire: Wire) -> None:
    process = wire.process._process
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 5) == ORPHANED
    wire.process._stopping = True


@pytest.mark.parametrize(
    ("variables", "reason", "is_final"),
    [({}, "UnstableError: lower this or that", True), ({"OWN_CODE": "1"}, "KeyError: 'name'", False)],
    ids=["a message of the package", "own code"],
)
async def test_group_dies_of_the_failed_rank_and_not_of_the_first_to_exit(
    alone: tuple[Router, EngineClient], tmp_path: Path, variables: dict[str, str], reason: str, is_final: bool
) -> None:
    router, _ = alone
    ranks = [
        worker_process(
            WorkerChannel(router, f"rank-{rank}"),
            router.endpoint,
            CONFIG,
            "fakes.crashing_ranks",
            tmp_path / f"{rank}.log",
            rank=rank,
            variables=variables,
        )
        for rank in range(2)
    ]
    group = WorkerGroup(ranks, tmp_path)
    await group.start()
    with pytest.raises(WorkerDied, match=f"rank-1: {reason}") as death:
        await group.watch()
    assert death.value.is_final == is_final
    assert not any(rank.is_running for rank in group.ranks)


def test_worker_that_dies_before_its_spec_is_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = asyncio.create_subprocess_exec

    async def created_and_dead(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*arguments, **options)
        process.kill()
        await process.wait()
        return process

    async def start() -> None:
        async with _engine(tmp_path, "unstable_lite.engines.worker") as wire:
            with pytest.raises(WorkerDied, match="engine-0 was killed by SIGKILL"):
                await wire.process.watch()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", created_and_dead)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in a run; its pipes raise once closed
        runner.run(start())


async def test_stop_ends_the_worker_with_exit_code_0(wire: Wire) -> None:
    await wire.process.stop()
    await wire.process.watch()
    assert not psutil.pid_exists(wire.process.pid)
    assert wire.process._process.returncode == 0


async def test_worker_that_does_not_stop_is_killed(wire: Wire) -> None:
    os.kill(wire.process.pid, signal.SIGSTOP)
    await wire.process.stop(grace_s=0.2)
    assert not psutil.pid_exists(wire.process.pid)


def _sends(router: Router, identity: bytes, *messages: list[bytes]) -> None:
    """Connect as an unknown peer and send each message with its parts."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(router.endpoint)
    try:
        for parts in messages:
            socket.send_multipart(parts)
    finally:
        context.destroy(linger=1000)


async def _dropped(router: Router, count: int) -> None:
    while router.dropped_frames < count:
        await asyncio.sleep(0.01)


DONE = encode([Done(request_id=1)])


async def test_frames_of_unknown_peers_are_dropped_and_counted(wire: Wire) -> None:
    frames = [
        (b"unknown", [DONE]),
        (b"engine-1", [b"\xc1garbage"]),
        (b"engine-0", [DONE]),  # without a life number
        (b"\xff" * 255, [DONE]),
        (b"unknown", [DONE, DONE]),
        (b"unknown", [b""] * 100),
    ]
    for number, (identity, parts) in enumerate(frames, start=1):
        _sends(wire.router, identity, parts)
        await _dropped(wire.router, number)
        assert (await wire.engine.generate("p", 0)).text


@pytest.fixture
async def alone() -> AsyncIterator[tuple[Router, EngineClient]]:
    """Yield a router that waits for a worker that is never started, and its client."""
    with opened_router() as router:
        yield router, EngineClient(router, "engine-0", CONFIG.engine)


async def test_garbage_from_a_known_worker_is_dropped_and_valid_frames_count(
    alone: tuple[Router, EngineClient],
) -> None:
    router, engine = alone
    engine.channel.receive(Done(request_id=99))  # a reply without a waiting request
    ready = encode([Ready(info={"kind": "x"})])
    _sends(
        router,
        engine.channel.identity,
        [ready],
        [b"garbage"],
        [DONE, DONE],
        [encode([Crashed(error="e", is_final=True)])],
    )
    await _dropped(router, 2)
    while engine.channel.crash is None:
        await asyncio.sleep(0.01)
    assert (await engine.channel.ready) == {"kind": "x"}


async def test_reply_of_the_wrong_type_is_dropped_and_the_right_one_accepted(
    alone: tuple[Router, EngineClient],
) -> None:
    router, engine = alone
    asked = asyncio.ensure_future(engine.generate("p", 0))
    ids = np.array([1], np.int32)
    right = Generation(
        prompt_ids=ids,
        completion_ids=ids,
        logprobs=np.array([-1], np.float32),
        text="right",
        finish_reason="stop",
        adapter_version=0,
    )
    _sends(router, engine.channel.identity, [encode([Done(request_id=1), Crashed(error="e", is_final=False)])])
    await _dropped(router, 1)
    assert engine.channel.crash is not None, "the rest of the frame is processed"
    assert engine.channel.num_pending == 1
    _sends(router, engine.channel.identity, [encode([Generated(request_id=1, generation=right)])])
    assert (await asked).text == "right"
    assert router.dropped_frames == 1


async def test_worker_of_another_protocol_version_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "older_worker.py").write_text(
        "from unstable_lite.transport import codec\n"
        "codec.PROTOCOL = 1\n"
        "from unstable_lite.engines.worker import main, run_worker\n"
        "run_worker(main)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with _engine(tmp_path, "older_worker") as wire:
        with pytest.raises(ProtocolError, match=rf"engine-0: .* 1\b.* {PROTOCOL}\b"):
            await wire.process.ready(30)


async def test_zeromq_refuses_a_frame_over_the_limit_before_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_FRAME_BYTES", 100_000)
    with opened_router() as router:
        _sends(router, b"too large", [bytes(100_001)])
        _sends(router, b"unknown", [bytes(100_000)])
        await _dropped(router, 1)
        await asyncio.sleep(0.2)
        assert router.dropped_frames == 1


async def test_flood_waits_at_its_sender_and_not_in_our_memory(alone: tuple[Router, EngineClient]) -> None:
    router, _ = alone
    flood = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
accepted, refused = 0, 0
while accepted < 30_000 and refused < 50:
    try:
        socket.send(bytes(1000), zmq.NOBLOCK)
        accepted += 1
    except zmq.Again:
        refused += 1
        time.sleep(0.01)
print(accepted)
"""
    # Our event loop is blocked while this runs.
    done = subprocess.run([sys.executable, "-c", flood, router.endpoint], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10_000


async def test_flood_does_not_block_other_work_and_does_not_fill_the_log(
    alone: tuple[Router, EngineClient], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router, _ = alone
    monkeypatch.setattr(rpc, "FRAMES_AT_ONCE", 10)
    _sends(router, b"unknown", *[[b"x"]] * 500)
    time.sleep(0.3)
    router.receive_waiting()
    assert router.dropped_frames == 10
    await _dropped(router, 500)
    assert len(caplog.records) == 9


def test_worker_orphaned_during_its_imports_exits(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)")
    spec = WorkerSpec(name="w", endpoint="ipc:///none", device="cpu", threads=1, config_json=CONFIG.model_dump_json())
    worker = subprocess.Popen(
        [sys.executable, "-m", "unstable_lite.transport", "slow_to_import"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        text=True,
    )
    worker.stdin.write(spec.to_line())
    worker.stdin.close()
    assert worker.wait(30) == ORPHANED


async def test_sockets_work_if_the_temporary_directory_has_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 120)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with opened_router():
        pass
    assert not list(long.iterdir())
