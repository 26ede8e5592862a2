"""Workers on other machines: real ones, started as a user starts them, over real links. The scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import links
import pytest
import zmq

from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.engines.remote import Link, LinkLost
from unstable_lite.errors import ConfigError
from unstable_lite.plan import find_problems
from unstable_lite.supervision import Attendant
from unstable_lite.transport.adapters import PART_BYTES, SHARED_MEMORY
from unstable_lite.transport.door import Door, RemoteWorker
from unstable_lite.transport.keys import make_keys, read_run_keys, read_worker_keys
from unstable_lite.transport.messages import PROTOCOL, Hello, Stop, encode

needs_namespaces = pytest.mark.skipif(links.why_not() is not None, reason=f"no network namespace: {links.why_not()}")
PATIENCE_S = 60.0
SILENCE_S = 4.0
LOOPBACK = "tcp://127.0.0.1:*"


class Run:
    """The orchestrator's side of a run with places for workers on other machines, without games."""

    def __init__(
        self,
        directory: Path,
        endpoint: str = LOOPBACK,
        places: int = 1,
        kind: str = "scripted",
        silence_s: float = SILENCE_S,
    ) -> None:
        self.directory = directory
        self.config = Config.model_validate(
            {
                "engine": {"kind": kind, "replies": ["\\boxed{[1]}"], "devices": []},
                "remote": {"workers": places, "keys": directory / "keys", "silence_s": silence_s},
                "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
            }
        )
        self.alarms: list[str] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.door = Door(endpoint, read_run_keys(directory / "keys"), self.config.remote.silence_s)
        self.engines = [EngineClient(self.door, f"engine-{index}", self.config.engine) for index in range(places)]
        self.pool = EnginePool(self.engines)
        self.workers = [RemoteWorker(self.door, e.peer, self.config, e.holds_already) for e in self.engines]
        self.held: dict[int, Path] = {}
        """What every engine is to hold."""
        self._is_closed = False
        self._attendants = [
            asyncio.create_task(Attendant(worker, self._restorer(engine), self.alarms.append, self._say).run())
            for worker, engine in zip(self.workers, self.engines, strict=True)
        ]

    def start_worker(
        self, *before: str, keys: Path | None = None, options: tuple[str, ...] = (), endpoint: str | None = None
    ) -> Worker:
        worker = Worker(endpoint or self.door.endpoint, keys or self.directory / "keys", before, options)
        self.processes.append(worker.process)
        return worker

    async def load(self, version: int, size: int) -> Path:
        path = self.directory / f"v{version}"
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_bytes(os.urandom(size))
        self.held[version] = path
        await self.pool.load_adapter(version, path)
        return path

    async def generate(self, num_requests: int, version: int = 0) -> None:
        prompts = [f"{index} ".ljust(2000, "x") for index in range(num_requests)]
        asked = asyncio.gather(*(self.pool.generate(prompt, version) for prompt in prompts))
        await asyncio.wait({asked, *self._attendants}, return_when=asyncio.FIRST_COMPLETED)
        for attendant in self._attendants:
            assert not attendant.done(), attendant.exception()
        generations = asked.result()
        for prompt, generation in zip(prompts, generations, strict=True):
            assert bytes(generation.prompt_ids.astype("u1")).decode() == prompt
            assert generation.adapter_version == version

    async def close(self) -> None:
        if not self._is_closed:
            for worker in self.workers:
                worker.stop()
            await self.vanish()

    async def vanish(self) -> None:
        """As if it were killed: nobody is told."""
        self._is_closed = True
        for attendant in self._attendants:
            attendant.cancel()
        await asyncio.gather(*self._attendants, return_exceptions=True)
        self.door.close()

    def _restorer(self, engine: EngineClient) -> Callable[[], Awaitable[None]]:
        async def restore() -> None:
            for version, path in self.held.items():
                await engine.load_adapter(version, path)
            self.pool.take_back(engine)

        return restore

    def _say(self, text: str) -> None:
        pass


class Worker:
    def __init__(
        self,
        endpoint: str,
        keys: Path,
        before: tuple[str, ...],
        options: tuple[str, ...],
        program: tuple[str, ...] = ("-m", "unstable_lite"),
    ) -> None:
        command = [*before, sys.executable, *program, "worker", "--connect", endpoint]
        command += ["--keys", str(keys), "--device", "cpu", "--threads", "1", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    async def ended(self) -> tuple[int, str]:
        out, _ = await asyncio.to_thread(self.process.communicate, timeout=PATIENCE_S)
        return self.process.returncode, out

    @property
    def adapters(self) -> dict[str, bytes]:
        """Every file of the adapters that it holds, by version and name."""
        mine = [path for path in SHARED_MEMORY.glob("unstable_lite-worker-*") if _is_open_in(path, self.process.pid)]
        files = (file for path in mine for file in path.glob("v*/*"))
        return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("remote")
    make_keys(directory / "keys")
    return directory / "keys"


@pytest.fixture
async def run(tmp_path: Path, keys: Path) -> AsyncIterator[Run]:
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def _a_run(
    directory: Path,
    endpoint: str = LOOPBACK,
    places: int = 1,
    kind: str = "scripted",
    silence_s: float = SILENCE_S,
) -> AsyncIterator[Run]:
    made = Run(directory, endpoint, places, kind, silence_s)
    try:
        yield made
    finally:
        await made.close()
        for process in made.processes:
            await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)


@pytest.fixture
def link() -> Iterator[links.Link]:
    with links.other_host() as made:
        yield made


async def test_a_worker_fetches_adapters_serves_them_and_goes_when_the_run_is_over(run: Run) -> None:
    worker = run.start_worker()
    await run.generate(50)
    path = await run.load(1, size=3 * PART_BYTES + 17)
    await run.generate(50, version=1)
    assert worker.adapters["v1/adapter_model.safetensors"] == (path / "adapter_model.safetensors").read_bytes()
    await run.load(2, size=2 * PART_BYTES)  # to the last byte a whole number of parts
    await run.pool.unload_adapter(1)
    assert {name.partition("/")[0] for name in worker.adapters} == {"v2"}
    await run.close()
    code, out = await worker.ended()
    assert code == 0, out
    assert "serving as engine-0" in out
    assert not worker.adapters


async def test_an_adapter_that_the_engine_refuses_does_not_stay_in_memory(run: Run) -> None:
    worker = run.start_worker()
    await run.generate(1)
    await run.load(1, size=1000)
    (run.directory / "bad").mkdir()
    (run.directory / "bad" / "adapter_model.safetensors").write_bytes(bytes(PART_BYTES + 1))
    with pytest.raises(ExceptionGroup) as failures:
        await run.pool.load_adapter(2, run.directory / "bad")
    assert "no adapter_config.json" in str(failures.value.exceptions[0])
    assert {name.partition("/")[0] for name in worker.adapters} == {"v1"}


async def test_an_adapter_that_was_on_its_way_when_the_link_was_lost_does_not_stay_in_memory(run: Run) -> None:
    async with links.tunnel(run.door.endpoint) as tunnel:
        worker = run.start_worker(endpoint=tunnel.endpoint, options=("--patience", "20"))
        await run.generate(1)
        await run.load(1, size=1000)
        tunnel.bytes_to_come = 3 * PART_BYTES
        loading = asyncio.create_task(run.load(2, size=20 * PART_BYTES))
        async with asyncio.timeout(PATIENCE_S):
            while "v2/adapter_model.safetensors" not in worker.adapters:
                await asyncio.sleep(0.01)
            await loading
        del run.held[2]  # retired meanwhile
        tunnel.bytes_to_come = math.inf
        await run.generate(1, version=1)
        assert {name.partition("/")[0] for name in worker.adapters} == {"v1"}
        await run.close()


async def test_an_adapter_that_the_run_has_no_more_is_not_loaded(run: Run, tmp_path: Path) -> None:
    run.start_worker()
    await run.generate(1)
    with pytest.raises(ExceptionGroup) as failures:
        await run.pool.load_adapter(3, tmp_path / "gone")
    assert "adapter version 3: tcp" in str(failures.value.exceptions[0])
    await run.generate(1)


async def test_a_worker_with_a_wrong_key_gets_nothing_and_is_counted(run: Run, tmp_path: Path, keys: Path) -> None:
    make_keys(tmp_path / "wrong")
    (tmp_path / "wrong" / "run.key").write_bytes((keys / "run.key").read_bytes())
    code, out = await run.start_worker(keys=tmp_path / "wrong").ended()
    assert code == 1
    assert "refuses this worker's key" in out
    assert "connected" not in out
    assert run.door.refused > 0
    assert run.workers[0].peer.is_dead


async def test_a_worker_that_takes_another_for_its_run_tells_it_nothing(run: Run, tmp_path: Path, keys: Path) -> None:
    make_keys(tmp_path / "other")
    (tmp_path / "other" / "worker.key_secret").write_bytes((keys / "worker.key_secret").read_bytes())
    code, out = await run.start_worker(keys=tmp_path / "other", options=("--patience", "3")).ended()
    assert code == 1
    assert "could not be reached for 3 s" in out
    assert "`run.key` is not that of the run" in out
    assert run.workers[0].peer.is_dead


async def test_a_tunnel_that_hangs_up_while_the_run_is_down_is_no_refusal(run: Run) -> None:
    async with links.tunnel(leads_to=None) as tunnel:
        impatient = run.start_worker(endpoint=tunnel.endpoint, options=("--patience", "2"))
        worker = run.start_worker(endpoint=tunnel.endpoint)
        code, out = await impatient.ended()
        assert code == 1
        assert "could not be reached for 2 s" in out
        assert "a tunnel, a load balancer" in out
        tunnel.leads_to = run.door.endpoint
        await run.generate(5)
        await run.close()
        code, out = await worker.ended()
        assert code == 0, out


async def test_who_has_a_key_and_sends_rubbish_is_dropped_and_counted(run: Run, keys: Path) -> None:
    mine = read_worker_keys(keys)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = (
            mine.run_public,
            mine.public,
            mine.secret,
        )
        socket.connect(run.door.endpoint)
        for frame in (b"", b"rubbish", encode([Stop()]), encode([])):
            socket.send(frame)
        async with asyncio.timeout(PATIENCE_S):
            while run.door.dropped_frames < 4:
                await asyncio.sleep(0.02)
    run.start_worker()
    await run.generate(5)


async def test_a_worker_of_another_protocol_version_ends_and_names_both_versions(run: Run) -> None:
    older = (
        "import unstable_lite.transport.messages as messages\n"
        f"messages.PROTOCOL = {PROTOCOL - 1}\n"
        "from unstable_lite.cli import app\n"
        "app()\n"
    )
    worker = Worker(run.door.endpoint, run.directory / "keys", (), ("--patience", "10"), ("-c", older))
    run.processes.append(worker.process)
    code, out = await worker.ended()
    assert code == 1
    assert f"peer speaks protocol {PROTOCOL}, this side speaks {PROTOCOL - 1}" in out
    assert "worker and run must be of one unstable_lite" in out
    assert run.door.dropped_frames > 0
    run.start_worker()
    await run.generate(5)


async def test_when_one_of_two_workers_is_killed_the_other_answers_and_its_place_is_taken_again(
    tmp_path: Path, keys: Path
) -> None:
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path, places=2) as run:
        first, second = run.start_worker(), run.start_worker()
        await run.generate(1)
        await run.load(1, size=1000)
        async with asyncio.timeout(PATIENCE_S):
            while len(run.pool.up) < 2:
                await asyncio.sleep(0.05)
        first.process.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(run.generate(40, version=1))
        await asyncio.sleep(0.1)
        first.process.kill()
        await asked
        assert run.pool.resent > 0
        assert "cannot be reached any more" in run.alarms[0]
        third = run.start_worker()
        async with asyncio.timeout(PATIENCE_S):
            while len(run.pool.up) < 2:
                await asyncio.sleep(0.05)
        second.process.kill()
        await run.generate(10, version=1)
        assert "v1/adapter_model.safetensors" in third.adapters


def small_shared_memory(size: str, *environment: str) -> tuple[str, ...]:
    """Before a command that is to have no more of it, and this in its environment."""
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec env "$@"'
    namespace = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    made = subprocess.run([*namespace, mount, "-", "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no mount of one's own: {made.stderr.strip()}")
    return (*namespace, mount, "-", *environment)


async def test_where_shared_memory_is_full_a_worker_puts_adapters_elsewhere(run: Run) -> None:
    worker = run.start_worker(*small_shared_memory("2m"))
    await run.generate(1)
    await run.load(1, size=PART_BYTES)
    await run.load(2, size=3 * PART_BYTES)
    await run.load(3, size=PART_BYTES)
    for version in (1, 2, 3):
        await run.generate(1, version=version)
    await run.close()
    code, out = await worker.ended()
    assert code == 0, out
    assert out.count("From now on adapters go through") == 1


async def test_a_worker_that_has_no_room_at_all_is_given_up_and_the_others_go_on(tmp_path: Path, keys: Path) -> None:
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path, places=2) as run:
        run.start_worker()
        await run.generate(1)
        run.start_worker(*small_shared_memory("2m", "TMPDIR=/dev/shm"), options=("--patience", "3"))
        async with asyncio.timeout(PATIENCE_S):
            while len(run.pool.up) < 2:
                await asyncio.sleep(0.05)
        await run.load(1, size=3 * PART_BYTES)
        assert len(run.pool.up) == 1
        await run.generate(10, version=1)
        async with asyncio.timeout(PATIENCE_S):
            while not run.alarms:
                await asyncio.sleep(0.05)
        assert "could not load adapter 1: " in run.alarms[0]
        assert "No space left on device" in run.alarms[0]


async def test_a_busy_worker_takes_more_than_one_part_of_an_adapter_between_two_steps(
    tmp_path: Path, keys: Path
) -> None:
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path, kind="stepwise_engines:Unhurried") as run:
        worker = run.start_worker()
        await run.generate(1)
        asked = [asyncio.create_task(run.generate(1)) for _ in range(60)]
        await asked[0]
        before = sum(one.done() for one in asked)
        path = await run.load(1, size=24 * PART_BYTES + 5)
        num_steps = sum(one.done() for one in asked) - before
        assert 0 < num_steps < 20
        assert worker.adapters["v1/adapter_model.safetensors"] == (path / "adapter_model.safetensors").read_bytes()
        await asyncio.gather(*asked)


@pytest.mark.parametrize("engine", ["Unhurried", "ForgetsNothing"])
async def test_a_worker_that_gets_another_place_answers_nothing_that_the_first_one_was_asked(
    tmp_path: Path, keys: Path, engine: str
) -> None:
    """Every answer is compared with its prompt; both places count their requests from 1."""
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path, places=2, kind=f"stepwise_engines:{engine}") as run:
        worker = run.start_worker()
        await run.generate(1)
        first = run.pool.up[0]
        asked = asyncio.create_task(run.generate(40))
        await asyncio.sleep(0.1)
        first.peer.unreachable.set()
        await asked
        assert run.pool.resent > 0
        assert first not in run.pool.up
        assert run.door.dropped_frames == 0
    code, out = await worker.ended()
    assert code == 0, out
    assert ("starting afresh" in out) == (engine == "ForgetsNothing")


async def test_a_run_that_is_started_again_finds_the_worker_made_afresh(tmp_path: Path, keys: Path) -> None:
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path) as run:
        worker = run.start_worker()
        await run.generate(1)
        await run.load(1, size=1000)
        await run.vanish()
        run.processes.clear()  # the next one's
    (tmp_path / "v1").rename(tmp_path / "old")
    async with _a_run(tmp_path, run.door.endpoint) as again:
        again.processes.append(worker.process)
        await again.generate(1)
        path = await again.load(1, size=2000)
        assert worker.adapters["v1/adapter_model.safetensors"] == (path / "adapter_model.safetensors").read_bytes()
    code, out = await worker.ended()
    assert code == 0, out
    assert "starting afresh" in out


async def test_a_worker_that_is_heard_and_hears_nothing_gives_the_link_up_after_silence_s_and_not_before(
    tmp_path: Path, keys: Path
) -> None:
    """Its answers go on coming, one every tenth of a second: the run has no reason to give it up."""
    (tmp_path / "keys").symlink_to(keys)
    silence_s = 3.0
    async with (
        _a_run(tmp_path, kind="stepwise_engines:Unhurried", silence_s=silence_s) as run,
        links.tunnel(run.door.endpoint) as tunnel,
    ):
        worker = run.start_worker(endpoint=tunnel.endpoint, options=("--patience", "20"))
        await run.generate(1)
        asked = asyncio.create_task(run.generate(90))
        await asyncio.sleep(0.2)
        tunnel.bytes_to_come = 0
        await asyncio.sleep(silence_s / 2)
        tunnel.bytes_to_come = math.inf
        await asyncio.sleep(silence_s / 2)
        assert not run.alarms
        tunnel.bytes_to_come = 0
        async with asyncio.timeout(2 * silence_s):
            while not run.alarms:
                await asyncio.sleep(0.05)
        assert "cannot be reached any more" in run.alarms[0]
        asked.cancel()
        tunnel.bytes_to_come = math.inf
        await run.generate(1)
        await run.close()
        code, out = await worker.ended()
        assert code == 0, out
        assert out.count("connecting again") == 1


async def test_a_worker_that_waits_for_a_place_gives_a_silent_link_up_too(tmp_path: Path, keys: Path) -> None:
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path, places=0, silence_s=1.0) as run, links.tunnel(run.door.endpoint) as tunnel:
        link = Link(tunnel.endpoint, read_worker_keys(keys))
        link.send(Hello(host="here", device="cpu", run_token=""))
        for _ in range(30):
            assert await asyncio.to_thread(link.receive, 0.1) == []
        assert link.is_connected
        tunnel.bytes_to_come = 0
        with pytest.raises(LinkLost):
            for _ in range(40):
                await asyncio.to_thread(link.receive, 0.1)
        link.close()


@needs_namespaces
async def test_a_link_that_is_slow_and_loses_packets_costs_time_and_nothing_else(
    link: links.Link, tmp_path: Path, keys: Path
) -> None:
    link.loss, link.delay_s, link.bytes_per_s = 0.02, 0.01, 2e6
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path, f"tcp://{links.HERE}:*") as run:
        worker = run.start_worker(*link.on_host)
        await run.generate(100)
        path = await run.load(1, size=PART_BYTES)
        await run.generate(100, version=1)
        assert worker.adapters["v1/adapter_model.safetensors"] == (path / "adapter_model.safetensors").read_bytes()
        assert link.lost > 0
        assert link.carried > PART_BYTES
        link.loss = link.delay_s = 0.0  # that the end of the run is told is another test's


@needs_namespaces
async def test_over_a_link_that_was_cut_the_worker_comes_back_with_what_it_held(
    link: links.Link, tmp_path: Path, keys: Path
) -> None:
    (tmp_path / "keys").symlink_to(keys)
    async with _a_run(tmp_path, f"tcp://{links.HERE}:*") as run:
        run.start_worker(*link.on_host)
        await run.generate(1)
        await run.load(1, size=1000)
        link.is_cut = True
        asked = asyncio.create_task(run.generate(30, version=1))
        async with asyncio.timeout(PATIENCE_S):
            while run.pool.up:
                await asyncio.sleep(0.05)
        carried = link.carried
        link.is_cut = False
        await asked
        assert run.pool.resent == 30
        assert len(run.alarms) == 1
        assert "cannot be reached any more" in run.alarms[0]
        assert run.engines[0].adapters == {1}
        await run.load(2, size=1000)
        await run.generate(3, version=2)
        assert link.carried > carried


def test_what_is_wrong_with_section_remote_is_told_before_anything_starts(tmp_path: Path) -> None:
    raw = {
        "run": {"mode": "sync"},
        "engine": {"devices": []},
        "remote": {"workers": 2, "bind": "7355", "keys": tmp_path / "keys"},
        "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
    }
    text = "\n".join(find_problems(Config.model_validate(raw)))
    for expected in ("remote.bind = '7355'", "unstable-lite keys", "run.mode = 'sync'", "name engine.kind"):
        assert expected in text
    no_places = {**raw, "run": {}, "remote": {}}
    assert "engine.devices = []: name at least one" in "\n".join(find_problems(Config.model_validate(no_places)))


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    written = make_keys(tmp_path / "keys", ["a", "b"])
    secrets = [path for path in written if path.suffix == ".key_secret"]
    assert len(secrets) == 3
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in secrets)
    content = (tmp_path / "keys" / "run.key_secret").read_bytes()
    make_keys(tmp_path / "keys", ["c"])
    assert (tmp_path / "keys" / "run.key_secret").read_bytes() == content
    with pytest.raises(ConfigError, match="a key 'a' already"):
        make_keys(tmp_path / "keys", ["a"])
    for name in ("run", "../x"):
        with pytest.raises(ConfigError, match="cannot be the name"):
            make_keys(tmp_path / "keys", [name])
    (tmp_path / "keys" / "run.key_secret").write_text("no key")
    with pytest.raises(ConfigError, match=r"run\.key_secret: .*; `unstable-lite keys"):
        read_run_keys(tmp_path / "keys")


def _is_open_in(directory: Path, pid: int) -> bool:
    """Whether the process holds the directory's lock."""
    with contextlib.suppress(OSError):
        return any(entry.resolve() == directory / "lock" for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False
