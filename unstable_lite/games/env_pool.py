"""Run the games' envs: in this process under a guard, or isolated in processes that can be killed.

A few processes share the isolated games. A process that dies or does not answer for `run.env_timeout_s` is replaced.
Its games are void: the one whose call was running for that reason, the others because their env is lost.
Knows nothing of players or of how results are used.

Isolation costs a round trip per turn. Measured with TicTacToe on a busy 2-core machine: with 64 concurrent games, a
turn takes 0.05 ms in this process and 0.08 ms in the other one; with a single game 0.17 ms in each; without isolation
0.03 ms. Each process needs about 55 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from unstable_lite.errors import EnvError, EnvRaised, RequestError, WorkerDied
from unstable_lite.games.env_catalogue import is_isolated
from unstable_lite.games.env_start import LocalEnvironment, environment_of, file_of_call, game_under_way
from unstable_lite.games.local_game import hang_guard
from unstable_lite.transport.cpus import usable_cpus
from unstable_lite.transport.messages import DropEnv, EnvState, MakeEnv, Message, StepEnv
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.rpc import Router, WorkerChannel, make_socket_directory
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import ENV_LOST, ENV_RAISED, GameSpec

log = logging.getLogger(__name__)

MODULE = "unstable_lite.games.env_worker"
MOST_PROCESSES = 4
MOST_FAILED_STARTS = 3
"""Number of consecutive failed starts after which a process is given up."""
START_TIMEOUT_S = 120.0
JUDGE_KEY = "OPENROUTER_API_KEY"
"""Key of the API that some TextArena games call, such as TwentyQuestions. Workers get no other keys."""


def make_in_process(spec: GameSpec) -> LocalEnvironment:
    return environment_of(spec, spec.seed)


class EnvPool:
    """The envs of one run; the first isolated game starts the processes."""

    def __init__(self, logs: Path, env_timeout_s: float) -> None:
        """Create a pool without processes. `logs`: directory for their output, including the stacks of a hung one."""
        self._logs = logs
        self._limit_s = env_timeout_s
        self._hosts: list[_Host] = []
        self._is_starting = asyncio.Lock()
        self._sockets: Path | None = None
        self._router: Router | None = None

    async def make(self, spec: GameSpec) -> GameEnvironment:
        """Create a game's env.

        Raises the env's own exceptions, or EnvError if it is isolated; WorkerDied if no process starts.
        """
        if not is_isolated(spec):
            return make_in_process(spec)
        async with self._is_starting:
            if not self._hosts:
                await self._start()
        environment = IsolatedEnvironment(min(self._hosts, key=lambda host: host.num_games), spec)
        with contextlib.ExitStack() as unless_it_starts:
            unless_it_starts.callback(environment.drop)
            await environment.start()
            unless_it_starts.pop_all()
        return environment

    async def _start(self) -> None:
        self._sockets = make_socket_directory()
        self._router = Router(self._sockets)
        self._logs.mkdir(parents=True, exist_ok=True)
        for index in range(min(MOST_PROCESSES, usable_cpus())):
            channel = WorkerChannel(self._router, f"env-{index}")
            spec = WorkerSpec(
                name=channel.name, endpoint=self._router.endpoint, device="cpu", threads=1, config_json="{}"
            )
            log_path = self._logs / f"{channel.name}.log"
            given = {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
            if (key := os.environ.get(JUDGE_KEY)) is not None:
                given[JUDGE_KEY] = key
            process = WorkerProcess(channel, log_path, MODULE, spec, given)
            self._hosts.append(_Host(process, file_of_call(spec.endpoint, spec.name), self._limit_s))

    async def close(self) -> None:
        await asyncio.gather(*(host.stop() for host in self._hosts))
        if self._router is not None and self._sockets is not None:
            self._router.close()
            shutil.rmtree(self._sockets, ignore_errors=True)


@contextlib.asynccontextmanager
async def opened_env_pool(logs: Path, env_timeout_s: float) -> AsyncIterator[EnvPool]:
    """Open an env pool for the event loop of this thread, and stop its processes on exit."""
    with hang_guard(env_timeout_s):
        environments = EnvPool(logs, env_timeout_s)
        try:
            yield environments
        finally:
            await environments.close()


class IsolatedEnvironment:
    """An env in another process, used like one in this process."""

    def __init__(self, host: _Host, spec: GameSpec) -> None:
        self._host = host
        self._spec = spec
        self._game = host.take_game()
        self._chance_seed: int | None = None
        """Seed for the next action."""
        # Set by `start`:
        self.was_invalid: bool
        self._life: int
        self._state: EnvState

    @property
    def teams(self) -> dict[int, str] | None:
        """Label of each player's team, as in the env itself."""
        return None if self._state.teams is None else dict(enumerate(self._state.teams))

    async def start(self) -> None:
        self._life = await self._host.wait_until_up()
        spec, shared = self._spec, ("env_id", "num_players", "seed", "observation", "reward_scale", "error_allowance")
        given = {name: getattr(spec, name) for name in shared}
        await self._call(MakeEnv, **given, env_kwargs=dict(spec.env_kwargs))

    def observe(self) -> tuple[int, str]:
        return self._state.pid, self._state.observation

    def reseed(self, seed: int) -> None:
        self._chance_seed = seed

    async def advance(self, action: str) -> tuple[int, str] | None:
        # A lone surrogate, which an API's JSON may hold, has no UTF-8: it becomes a question mark.
        action, chance_seed = action.encode("utf-8", "replace").decode(), self._chance_seed
        self._chance_seed = None
        await self._call(StepEnv, action=action, chance_seed=chance_seed)
        return None if self._state.is_over else self.observe()

    @property
    def eliminated(self) -> tuple[int, ...]:
        return self._state.eliminated

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        assert self._state.is_over
        game_info = {int(pid): remarks for pid, remarks in json.loads(self._state.game_info).items()}
        return self.rewards_so_far(), game_info

    def rewards_so_far(self) -> dict[int, float]:
        return dict(enumerate(self._state.rewards))

    def drop(self) -> None:
        self._host.drop_game(self._game)

    async def _call(self, message_type: Callable[..., Message], **fields: Any) -> None:
        try:
            self._state = await self._host.ask(message_type, self._life, game=self._game, **fields)
        except (EnvError, RequestError) as error:
            kind = EnvRaised if error.reason == ENV_RAISED else EnvError
            raise kind(f"{self._spec.env_id}: {error}", reason=error.reason) from None
        self.was_invalid = self._state.was_invalid


GameEnvironment = LocalEnvironment | IsolatedEnvironment
"""The env of one game: `observe` once, `advance` until the game is over, then `close`; at last `drop`. After `reseed`,
chance has another seed from the next action on."""


class _Host:
    """One process and its replacements."""

    def __init__(self, process: WorkerProcess, file_of_call: Path, limit_s: float) -> None:
        self.num_games = 0
        self._process = process
        self._peer = process.channel
        self._file_of_call = file_of_call
        self._limit_s = limit_s
        self._games = itertools.count()
        self._is_killed = False
        self._change = asyncio.Event()
        self._living = asyncio.create_task(self._live())

    def take_game(self) -> int:
        self.num_games += 1
        return next(self._games)

    def drop_game(self, game: int) -> None:
        self.num_games -= 1
        if self._peer.is_up:
            self._peer.tell(DropEnv(game=game))

    async def wait_until_up(self) -> int:
        """Return the life of the process once it is up. Raises WorkerDied or UnstableError if it does not start."""
        while not self._peer.is_up:
            if self._living.done():
                self._living.result()
            await self._change.wait()
        return self._peer.life

    async def ask(self, message_type: Callable[..., Message], life: int, /, game: int, **fields: Any) -> EnvState:
        """Call an env that was made in this life of the process. Raises EnvError if the process dies or has died."""
        log_path = self._process.log_path
        if self._peer.life == life:
            try:
                state: EnvState = await self._peer.ask(message_type, math.inf, game=game, **fields)
                return state
            except WorkerDied as death:
                if game_under_way(self._file_of_call) == game:
                    hung = f"a call did not return within run.env_timeout_s = {self._limit_s:g}; its process was killed"
                    problem = hung if self._is_killed else str(death).partition(";")[0]
                    reason = "env_timeout" if self._is_killed else "env_died"
                    raise EnvError(f"{problem} (log: {log_path})", reason=reason) from None
        raise EnvError(f"its process died, but in no call of this game (log: {log_path})", reason=ENV_LOST)

    async def stop(self) -> None:
        self._living.cancel()
        await asyncio.gather(self._living, return_exceptions=True)
        if not self._peer.is_up:
            self._process.kill()  # it does not receive messages yet
        await self._process.stop()

    async def _live(self) -> None:
        """Restart the process until cancelled. Raises WorkerDied or UnstableError if it does not start."""
        try:
            failed_starts = 0
            while True:
                try:
                    failed_starts += 1
                    await self._process.start()
                    await self._process.ready(START_TIMEOUT_S)
                    failed_starts, self._is_killed = 0, False
                    self._peer.mark_ready()
                    self._notify()
                    killing = asyncio.create_task(self._kill_when_silent())
                    try:
                        await self._process.watch()
                    finally:
                        killing.cancel()
                except WorkerDied as death:
                    if failed_starts == MOST_FAILED_STARTS:
                        raise
                    log.warning("%s", death)
        finally:
            self._notify()

    async def _kill_when_silent(self) -> None:
        await self._peer.wait_for_stall(self._limit_s, look_every_s=self._limit_s / 4)
        self._is_killed = True
        await self._process.kill_stuck()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
