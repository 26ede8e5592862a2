"""Worker processes: start a fresh interpreter, watch it, end it.

A worker's stdout and stderr go to `logs/<name>.log`; the last lines of that file are in the error if it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unstable_lite.errors import MEMORY_ADVICE, UnstableError, WorkerDied
from unstable_lite.transport.child import DUMP_STACKS, WorkerSpec
from unstable_lite.transport.messages import Stop
from unstable_lite.transport.sockets import Peer

TAIL_LINES = 15
DUMP_S = 0.5
"""What a stuck worker is given to write its stacks."""


class WorkerProcess:
    """One child process and its `Peer`; after its death another one can take its place."""

    def __init__(
        self, peer: Peer, log_path: Path, module: str, spec: WorkerSpec, environment: Mapping[str, str]
    ) -> None:
        self.peer = peer
        self.log_path = log_path
        self._module = module
        self.spec = spec
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._is_stuck = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def ranks(self) -> list[WorkerProcess]:
        """The processes that it consists of; itself is the first."""
        return [self]

    async def start(self) -> None:
        """Start a worker whose `main` is in the module; returns at once, `peer.ready` tells when the worker is up."""
        if self.peer.is_dead:
            self.peer.revive()
            self._is_stuck = False
            self.spec = replace(self.spec, goes_on=True)
        with self.log_path.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "unstable_lite.transport",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                # What its parent can import, a script's neighbours included, a worker can. Keys of APIs are none of its
                # business; HF_TOKEN is, for a gated model.
                env={name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
                | {"PYTHONPATH": os.pathsep.join(sys.path), **self._environment},
                start_new_session=True,  # a Ctrl-C at the terminal is the orchestrator's to handle
            )
        assert self._process.stdin is not None
        self._process.stdin.write(replace(self.spec, identity=self.peer.identity.decode()).to_line().encode())
        await self._process.stdin.drain()

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """The worker's facts. Raises WorkerDied if it ends first, UnstableError if it is not up in time."""
        death, up = asyncio.create_task(self.watch()), asyncio.create_task(self._facts())
        either: set[asyncio.Future[Any]] = {death, up}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                death.result()
            if not up.done():
                raise UnstableError(
                    f"{self.peer.name} was not up after start_timeout_s = {timeout_s:g}; see {self.log_path}"
                )
            return up.result()
        finally:
            death.cancel()
            up.cancel()

    async def watch(self) -> None:
        """Return when the worker ends after `stop`; raise WorkerDied if it ends by itself."""
        assert self._process is not None
        code = await self._process.wait()
        if not self._stopping:
            error = self._death(code)
            self.peer.fail_all(error)
            raise error

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ask the worker to end; kill it if it has not after `grace_s`."""
        self._stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        self.peer.tell(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def kill_stuck(self) -> None:
        """Kill it as if it had died by itself, after it wrote its threads' stacks to its log."""
        assert self._process is not None
        self._is_stuck = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, DUMP_STACKS)
            await asyncio.sleep(DUMP_S)
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL, now, to the worker and to whatever it started."""
        self._stopping = True
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _facts(self) -> dict[str, Any]:
        """What it says of itself once it is up."""
        return await asyncio.shield(self.peer.ready)

    def _death(self, code: int) -> WorkerDied:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if (crash := self.peer.crash) is not None:
            return WorkerDied(f"{self.peer.name}: {crash.error}\n(log: {self.log_path})", crash.is_final)
        lines = self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        tail = "\n".join(f"  {line}" for line in lines) or "  (empty)"
        if code == -signal.SIGKILL and not self._is_stuck:
            tail += f"\n(if nobody killed it, the system did, because memory ran out: {MEMORY_ADVICE}; `dmesg` tells)"
        return WorkerDied(f"{self.peer.name} {how}; the last lines of {self.log_path}:\n{tail}")


class WorkerGroup(WorkerProcess):
    """Ranks of one worker, in processes that live and die together.

    Rank 0 is the one that is asked; its peer, process id and log stand for the group.
    """

    def __init__(self, ranks: Sequence[WorkerProcess], directory: Path) -> None:
        """directory: of this user's alone; where the ranks meet."""
        first, *self.others = ranks
        super().__init__(first.peer, first.log_path, first._module, first.spec, first._environment)
        self._directory = directory
        self._num_starts = 0

    @property
    def ranks(self) -> list[WorkerProcess]:
        return [self, *self.others]

    async def start(self) -> None:
        """All of them anew."""
        self._num_starts += 1
        # A place that ranks have met in is never another group's.
        rendezvous = str(self._directory / f"{self.peer.name}-{self._num_starts}")
        for process in self.ranks:
            process.spec = replace(process.spec, rendezvous=rendezvous)
        await super().start()
        for process in self.others:
            await process.start()

    async def _facts(self) -> dict[str, Any]:
        facts, *_ = await asyncio.gather(*(asyncio.shield(each.peer.ready) for each in self.ranks))
        return facts

    async def watch(self) -> None:
        """As for one; when a rank ends by itself the others are killed, and its death is the group's."""
        lives = [super().watch(), *(process.watch() for process in self.others)]
        watches = [asyncio.ensure_future(life) for life in lives]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            first = [error for watch in done if isinstance(error := watch.exception(), WorkerDied)]
            if first:
                self._kill_all()
            ends = await asyncio.gather(*watches, return_exceptions=True)
        finally:
            for watch in watches:
                watch.cancel()
        if first:
            # The others die of losing one that could not go on, or was killed, and may be seen to end before it.
            reasons = [end for end in ends if isinstance(end, WorkerDied) and end.is_final]
            raise (reasons or [death for death in first if "was killed" in str(death)] or first)[0]

    async def stop(self, grace_s: float = 5.0) -> None:
        """Rank 0 passes it on."""
        await asyncio.gather(super().stop(grace_s), *(process.stop(grace_s) for process in self.others))

    async def kill_stuck(self) -> None:
        await asyncio.gather(super().kill_stuck(), *(process.kill_stuck() for process in self.others))

    def kill(self) -> None:
        super().kill()
        for process in self.others:
            process.kill()

    def _kill_all(self) -> None:
        for process in self.ranks:
            if process.is_running:
                os.killpg(process.pid, signal.SIGKILL)
