"""Real processes over real ZeroMQ; the scripted engine, since none of this is about models."""

from __future__ import annotations

import asyncio
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

import numpy as np
import psutil
import pytest
import zmq

from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import ProtocolError, RequestError, WorkerDied
from unstable_lite.transport import sockets
from unstable_lite.transport.child import ORPHANED, WorkerSpec
from unstable_lite.transport.messages import (
    PROTOCOL,
    Crashed,
    Done,
    Generated,
    LoadAdapter,
    Ready,
    UnloadAdapter,
    encode,
)
from unstable_lite.transport.processes import WorkerGroup, WorkerProcess
from unstable_lite.transport.sockets import Peer, Router
from unstable_lite.types import Generation

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
    async with _engine(tmp_path, "unstable_lite.engines.worker") as started:
        await started.process.ready(30)
        yield started


@asynccontextmanager
async def _engine(tmp_path: Path, module: str) -> AsyncIterator[Wire]:
    directory = Path(tempfile.mkdtemp(prefix="unstable_lite-"))
    router = Router(directory)
    engine = EngineClient(router, "engine-0", CONFIG.engine)
    spec = WorkerSpec(
        name="engine-0", endpoint=router.endpoint, device="cpu", threads=1, config_json=CONFIG.model_dump_json()
    )
    process = WorkerProcess(engine.peer, tmp_path / "engine-0.log", module, spec, {})
    await process.start()
    try:
        yield Wire(router, engine, process)
    finally:
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


async def test_a_worker_in_the_place_of_one_that_died_is_told_so(wire: Wire) -> None:
    assert not wire.process.spec.goes_on
    os.kill(wire.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await wire.process.watch()
    await wire.process.start()
    await wire.process.ready(30)
    assert wire.process.spec.goes_on


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


async def test_a_group_dies_of_the_rank_that_could_not_go_on_and_not_of_the_one_that_was_gone_first(
    alone: tuple[Router, EngineClient], tmp_path: Path
) -> None:
    router, _ = alone
    ranks = []
    for rank in range(2):
        name, log_path, config = f"rank-{rank}", tmp_path / f"{rank}.log", CONFIG.model_dump_json()
        spec = WorkerSpec(name=name, endpoint=router.endpoint, device="cpu", threads=1, config_json=config, rank=rank)
        ranks.append(WorkerProcess(Peer(router, name), log_path, "crashing_ranks", spec, {}))
    group = WorkerGroup(ranks, tmp_path)
    await group.start()
    with pytest.raises(WorkerDied, match="rank-1: UnstableError: lower this or that") as death:
        await group.watch()
    assert death.value.is_final
    assert not any(rank.is_running for rank in group.ranks)


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


def _sends(router: Router, identity: bytes, *messages: list[bytes]) -> None:
    """One connection of a stranger; each message has its parts."""
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


DONE = encode([Done(request_id=1, seconds=0.0)])


@pytest.mark.parametrize(
    ("identity", "parts"),
    [
        (b"stranger", [DONE]),
        (b"engine-1", [b"\xc1garbage"]),
        (b"engine-0", [DONE]),  # without a life
        (b"\xff" * 255, [DONE]),
        (b"stranger", [DONE, DONE]),
        (b"stranger", [b""] * 100),
    ],
)
async def test_what_strangers_send_is_dropped_and_counted_and_harms_nobody(
    wire: Wire, identity: bytes, parts: list[bytes]
) -> None:
    _sends(wire.router, identity, parts)
    await _dropped(wire.router, 1)
    assert (await wire.engine.generate("p", 0)).text


@pytest.fixture
async def alone() -> AsyncIterator[tuple[Router, EngineClient]]:
    """A router that waits for a worker that nobody starts."""
    directory = Path(tempfile.mkdtemp(prefix="unstable_lite-"))
    router = Router(directory)
    yield router, EngineClient(router, "engine-0", CONFIG.engine)
    router.close()
    shutil.rmtree(directory)


async def test_what_is_garbage_from_a_known_worker_is_dropped_and_what_is_right_is_taken(
    alone: tuple[Router, EngineClient],
) -> None:
    router, engine = alone
    ready = encode([Ready(facts={"kind": "x"})])
    _sends(
        router,
        engine.peer.identity,
        [ready],
        [b"garbage"],
        [DONE, DONE],
        [encode([Crashed(error="e", is_final=True)])],
    )
    await _dropped(router, 2)
    while engine.peer.crash is None:
        await asyncio.sleep(0.01)
    assert (await engine.peer.ready) == {"kind": "x"}


async def test_a_reply_of_another_kind_than_was_asked_for_is_dropped_and_the_right_one_taken(
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
    _sends(router, engine.peer.identity, [encode([Done(request_id=1, seconds=0), Crashed(error="e", is_final=False)])])
    await _dropped(router, 1)
    assert engine.peer.crash is not None, "the rest of the frame"
    assert engine.peer.num_pending == 1
    _sends(router, engine.peer.identity, [encode([Generated(request_id=1, generation=right)])])
    assert (await asked).text == "right"
    assert router.dropped_frames == 1


async def test_a_worker_of_another_protocol_version_ends_the_start_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "older_worker.py").write_text(
        "from unstable_lite.transport import messages\n"
        "messages.PROTOCOL = 1\n"
        "from unstable_lite.engines.worker import main, run_worker\n"
        "run_worker(main)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    async with _engine(tmp_path, "older_worker") as wire:
        with pytest.raises(ProtocolError, match=f"engine-0: peer speaks protocol 1, this side speaks {PROTOCOL}.*same"):
            await wire.process.ready(30)


async def test_a_frame_over_the_limit_is_refused_by_zeromq_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 100_000)
    directory = Path(tempfile.mkdtemp(prefix="unstable_lite-"))
    router = Router(directory)
    _sends(router, b"too large", [bytes(100_001)])
    _sends(router, b"stranger", [bytes(100_000)])
    await _dropped(router, 1)
    await asyncio.sleep(0.2)
    assert router.dropped_frames == 1
    router.close()
    shutil.rmtree(directory)


async def test_a_flood_waits_at_its_sender_and_not_in_our_memory(alone: tuple[Router, EngineClient]) -> None:
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
    # While this runs, our event loop does not.
    done = subprocess.run([sys.executable, "-c", flood, router.endpoint], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10_000


async def test_a_flood_takes_turns_with_the_rest_and_does_not_fill_the_log(
    alone: tuple[Router, EngineClient], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router, _ = alone
    monkeypatch.setattr(sockets, "FRAMES_AT_ONCE", 10)
    _sends(router, b"stranger", *[[b"x"]] * 500)
    time.sleep(0.3)
    router.receive_waiting()
    assert router.dropped_frames == 10
    await _dropped(router, 500)
    assert len(caplog.records) == 9


async def test_a_request_that_no_frame_can_hold_fails_alone(wire: Wire) -> None:
    """A lone surrogate is text in Python, and none on the wire."""
    results = await asyncio.gather(
        *(wire.engine.generate(prompt, 0) for prompt in ("one", "\ud800", "two")), return_exceptions=True
    )
    assert [isinstance(result, Generation) for result in results] == [True, False, True]
    assert isinstance(results[1], RequestError)
    assert "engine-0: Generate cannot be sent" in str(results[1])


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


def test_a_worker_that_is_orphaned_while_it_imports_does_not_stay(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(60)")
    spec = WorkerSpec(name="w", endpoint="ipc:///none", device="cpu", threads=1, config_json=CONFIG.model_dump_json())
    worker = subprocess.Popen(
        [sys.executable, "-m", "unstable_lite.transport", "slow_to_import"],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        text=True,
    )
    assert worker.stdin is not None
    worker.stdin.write(spec.to_line())
    worker.stdin.close()
    assert worker.wait(30) == ORPHANED


def test_workers_meet_where_the_place_for_temporary_files_has_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))

    async def scenario() -> None:
        directory = sockets.make_socket_directory()
        Router(directory).close()
        shutil.rmtree(directory)

    asyncio.run(scenario())
    assert not list(long.iterdir())
