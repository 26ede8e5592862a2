"""Real processes over real ZeroMQ; the scripted engine, since none of this is about models."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import zmq

from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import RequestError, WorkerDied
from unstable_lite.transport.child import ORPHANED, WorkerSpec
from unstable_lite.transport.messages import Done, LoadAdapter, Ready, UnloadAdapter, encode
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.sockets import Router

CONFIG = Config.model_validate(
    {
        "engine": {"kind": "scripted", "replies": ["\\boxed{[1]}", "two"], "request_timeout_s": 20},
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
    directory = Path(tempfile.mkdtemp(prefix="unstable_lite-"))
    router = Router(directory)
    engine = EngineClient(router, "engine-0", CONFIG.engine)
    spec = WorkerSpec(
        name="engine-0", endpoint=router.endpoint, device="cpu", threads=1, config_json=CONFIG.model_dump_json()
    )
    process = WorkerProcess(engine.peer, tmp_path / "engine-0.log", "unstable_lite.engines.worker", spec, {})
    await process.start()
    await process.ready(30)
    yield Wire(router, engine, process)
    await process.stop()
    router.close()
    shutil.rmtree(directory)


async def test_a_thousand_requests_get_a_thousand_replies_each_its_own(wire: Wire) -> None:
    pool = EnginePool([wire.engine])
    generations = await asyncio.gather(*(pool.generate(f"prompt {index}", 0) for index in range(1000)))
    for index, generation in enumerate(generations):
        assert bytes(generation.prompt_ids.astype("u1")).decode() == f"prompt {index}"
        assert len(generation.logprobs) == len(generation.completion_ids)
    assert wire.engine.peer.num_pending == 0


async def test_an_unknown_adapter_is_refused_and_the_engine_goes_on(wire: Wire) -> None:
    with pytest.raises(RequestError, match="engine-0: adapter version 7"):
        await wire.engine.generate("p", 7)
    assert (await wire.engine.generate("p", 0)).adapter_version == 0


async def test_an_adapter_is_loaded_used_unloaded_and_then_refused(wire: Wire, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    await wire.engine.load_adapter(3, tmp_path)
    assert (await wire.engine.generate("p", 3)).adapter_version == 3
    await wire.engine.unload_adapter(3)
    with pytest.raises(RequestError):
        await wire.engine.generate("p", 3)


async def test_a_killed_worker_fails_every_waiting_request_and_is_named_with_its_log(wire: Wire) -> None:
    os.kill(wire.process.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(wire.engine.generate("p", 0)) for _ in range(50)]
    await asyncio.sleep(0.1)
    wire.process.log_path.write_text("the last line\n")
    os.kill(wire.process.pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied, match=r"(?s)engine-0 was killed by SIGKILL.*the last line.*memory ran out: .*`dmesg`"
    ):
        await wire.process.watch()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, WorkerDied) for result in results)
    with pytest.raises(WorkerDied):
        await wire.engine.generate("p", 0)


async def test_a_worker_that_does_not_answer_fails_the_request_at_its_deadline(wire: Wire) -> None:
    os.kill(wire.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RequestError, match="engine-0: no reply before its deadline"):
        await wire.engine.peer.ask(UnloadAdapter, 0.3, version=1)
    assert time.monotonic() - started < 10
    os.kill(wire.process.pid, signal.SIGCONT)
    assert (await wire.engine.generate("p", 0)).text  # the late reply to the dead request harms nobody


async def test_a_worker_whose_orchestrator_is_gone_exits_at_once(wire: Wire) -> None:
    process = wire.process._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(process.wait(), 5) == ORPHANED
    wire.process._stopping = True


async def test_stop_ends_the_worker_with_exit_code_0(wire: Wire) -> None:
    await wire.process.stop()
    await wire.process.watch()
    assert not psutil.pid_exists(wire.process.pid)
    assert wire.process._process is not None
    assert wire.process._process.returncode == 0


async def test_a_worker_that_does_not_stop_is_killed(wire: Wire) -> None:
    os.kill(wire.process.pid, signal.SIGSTOP)
    await wire.process.stop(grace_s=0.2)
    assert not psutil.pid_exists(wire.process.pid)


async def test_frames_from_strangers_and_garbage_are_dropped_and_counted(wire: Wire) -> None:
    context = zmq.Context()
    for identity, frame in [(b"stranger", encode([Done(request_id=1, seconds=0.0)])), (b"engine-1", b"\xc1garbage")]:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.connect(wire.router.endpoint)
        socket.send(frame)
        socket.close(linger=1000)
    while wire.router.dropped_frames < 2:
        await asyncio.sleep(0.01)
    assert (await wire.engine.generate("p", 0)).text
    context.destroy()


async def test_what_a_dead_worker_sent_is_not_taken_for_its_successors(wire: Wire) -> None:
    peer, late = wire.engine.peer, zmq.Context.instance().socket(zmq.DEALER)
    late.setsockopt(zmq.IDENTITY, peer.identity)
    os.kill(wire.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await wire.process.watch()
    peer.revive()
    late.connect(wire.router.endpoint)
    late.send(encode([Ready(facts={})]))
    await asyncio.sleep(0.3)
    assert not peer.ready.done()
    assert wire.router.dropped_frames == 0
    late.close(linger=0)
    await wire.process.start()
    assert (await wire.process.ready(30))["kind"] == "scripted"


async def test_the_engine_worker_with_the_scripted_engine_loads_no_torch(wire: Wire) -> None:
    maps = Path(f"/proc/{wire.process.pid}/maps").read_text()
    assert "libtorch" not in maps


async def test_requests_of_one_moment_travel_in_one_frame(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    frames: list[int] = []
    send = wire.router._socket.send_multipart
    monkeypatch.setattr(wire.router._socket, "send_multipart", lambda parts: (frames.append(1), send(parts))[1])
    await asyncio.gather(*(wire.engine.generate("p", 0) for _ in range(100)))
    assert len(frames) == 1


def test_a_reply_that_no_request_waits_for_is_ignored() -> None:
    async def scenario() -> None:
        directory = Path(tempfile.mkdtemp(prefix="unstable_lite-"))
        router = Router(directory)
        EngineClient(router, "engine-0", CONFIG.engine).peer.receive(Done(request_id=99, seconds=0.0))
        router.close()
        shutil.rmtree(directory)

    asyncio.run(scenario())


def test_the_message_types_of_requests_have_a_request_id() -> None:
    assert {"request_id"} <= set(LoadAdapter.__dataclass_fields__) & set(UnloadAdapter.__dataclass_fields__)
