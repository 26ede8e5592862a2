"""Worker processes: start a fresh interpreter, watch it, stop it.

A worker's stdout and stderr go to `logs/<name>.log`; if it dies, the error quotes the last lines of that file.
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
from unstable_lite.files import open_log
from unstable_lite.plugins import environment_without_keys
from unstable_lite.transport.messages import Stop
from unstable_lite.transport.rpc import WorkerChannel
from unstable_lite.transport.worker_main import DUMP_STACKS, WorkerSpec

TAIL_LINES = 15
DUMP_S = 0.5
"""Time in seconds that a stuck worker has to write its stacks."""


class WorkerProcess:
    """One child process and its `WorkerChannel`. After its death it can be restarted."""

    def __init__(
        self, channel: WorkerChannel, log_path: Path, module: str, spec: WorkerSpec, environment: Mapping[str, str]
    ) -> None:
        self.channel = channel
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
        """Processes of this worker, the first of which is rank 0."""
        return [self]

    async def start(self) -> None:
        """Start the worker. Returns at once; `channel.ready` is done when the worker is up."""
        if self.channel.is_dead:
            self.channel.reset()
            self._is_stuck = False
            self.spec = replace(self.spec, is_restart=True)
        with open_log(self.log_path) as log_file:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "unstable_lite.transport",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                # A worker can import the same modules as its parent, including those beside a script. It gets no API
                # keys; HF_TOKEN stays, because a gated model needs it.
                env=environment_without_keys() | {"PYTHONPATH": os.pathsep.join(sys.path), **self._environment},
                start_new_session=True,  # the orchestrator handles a Ctrl-C at the terminal
            )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has died already, which `watch` reports
            self._process.stdin.write(replace(self.spec, identity=self.channel.identity.decode()).to_line().encode())
            await self._process.stdin.drain()

    async def ready(self, timeout_s: float) -> dict[str, Any]:
        """Return the worker's `Ready.info`. Raises WorkerDied if it dies, UnstableError if it is not up in time."""
        infos = (asyncio.shield(process.channel.ready) for process in self.ranks)
        death, up = asyncio.create_task(self.watch()), asyncio.gather(*infos)
        either: set[asyncio.Future[Any]] = {death, up}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                death.result()
            if not up.done():
                raise UnstableError(
                    f"{self.channel.name} was not up after start_timeout_s = {timeout_s:g}; see {self.log_path}"
                )
            return up.result()[0]  # rank 0's
        finally:
            death.cancel()
            up.cancel()
            up.add_done_callback(lambda up: up.cancelled() or up.exception())  # a death ends both; it is reported once

    async def watch(self) -> None:
        """Return when the worker exits after `stop`. Raises WorkerDied if it exits by itself."""
        assert self._process is not None
        code = await self._process.wait()
        if not self._stopping:
            error = self._death(code)
            self.channel.fail_all(error)
            raise error

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ask the worker to exit; kill it if it has not exited after `grace_s`."""
        self._stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        self.channel.tell(Stop())
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    async def kill_stuck(self) -> None:
        """Let the worker write its threads' stacks to its log, then kill it; `watch` reports a death."""
        assert self._process is not None
        self._is_stuck = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, DUMP_STACKS)
            await asyncio.sleep(DUMP_S)
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Send SIGKILL to the worker and to all processes that it started."""
        self._stopping = True
        self._kill_group()

    def _kill_group(self) -> None:
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):  # it has just died, and asyncio does not know it yet
                os.killpg(self.pid, signal.SIGKILL)

    def _death(self, code: int) -> WorkerDied:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if (crash := self.channel.crash) is not None:
            text = f"{self.channel.name}: {crash.error}\n(log: {self.log_path})"
            return WorkerDied(text, crash.is_final, crash.is_away, crash.place)
        lines = []
        with contextlib.suppress(OSError):  # the log was removed
            lines = self.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        tail = "\n".join(f"  {line}" for line in lines) or "  (empty)"
        if code == -signal.SIGKILL and not self._is_stuck:
            tail += f"\n(if no person killed it, the system did because memory ran out; see `dmesg`: {MEMORY_ADVICE})"
        return WorkerDied(f"{self.channel.name} {how}; the last lines of {self.log_path}:\n{tail}")


class WorkerGroup(WorkerProcess):
    """Ranks of one worker, in processes that live and die together.

    Requests go to rank 0; its channel, process id and log represent the group.
    """

    def __init__(self, ranks: Sequence[WorkerProcess], directory: Path) -> None:
        """`directory`: private to this user; holds the rendezvous file of the ranks."""
        first, *self.others = ranks
        super().__init__(first.channel, first.log_path, first._module, first.spec, first._environment)
        self._directory = directory
        self._num_starts = 0

    @property
    def ranks(self) -> list[WorkerProcess]:
        return [self, *self.others]

    async def start(self) -> None:
        """Start all ranks with a new rendezvous file."""
        self._num_starts += 1
        # A rendezvous file is used for one start only.
        rendezvous = str(self._directory / f"{self.channel.name}-{self._num_starts}")
        for process in self.ranks:
            process.spec = replace(process.spec, rendezvous=rendezvous)
        await super().start()
        for process in self.others:
            await process.start()

    async def watch(self) -> None:
        """Watch all ranks. If a rank dies, kill the others and raise its WorkerDied."""
        lives = [super().watch(), *(process.watch() for process in self.others)]
        watches = [asyncio.ensure_future(life) for life in lives]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            first = [error for watch in done if isinstance(error := watch.exception(), WorkerDied)]
            if first:
                for process in self.ranks:
                    process._kill_group()
            ends = await asyncio.gather(*watches, return_exceptions=True)
        finally:
            for watch in watches:
                watch.cancel()
        if first:
            # Ranks fail if they lose a rank that crashed or was killed, and their exits may be seen before its exit.
            deaths = [end for end in ends if isinstance(end, WorkerDied)]
            killed = [death for death in first if "was killed" in str(death)]
            raise ([d for d in deaths if d.is_final] or killed or [d for d in deaths if d.place] or first)[0]

    async def stop(self, grace_s: float = 5.0) -> None:
        """Stop all ranks. Rank 0 forwards `Stop` to the others."""
        await asyncio.gather(super().stop(grace_s), *(process.stop(grace_s) for process in self.others))

    async def kill_stuck(self) -> None:
        await asyncio.gather(super().kill_stuck(), *(process.kill_stuck() for process in self.others))

    def kill(self) -> None:
        super().kill()
        for process in self.others:
            process.kill()
