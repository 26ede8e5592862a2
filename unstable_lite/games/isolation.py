"""Where the games' envs live: in this process, under a guard, or in processes that can be killed.

A handful of processes share the isolated games. One that does not answer for `run.env_timeout_s`, or dies, is replaced.
The game whose call it was in is void; the others are played again in the new one, from their seeds and actions, to
where they were. Knows nothing of players, nor of what becomes of a game.

What isolation costs: a round trip a turn. Measured with TicTacToe on a busy 2-core machine, a turn of 64 games at once
takes 0.05 ms of this process and 0.08 ms of the other, one game alone 0.17 ms of each, instead of 0.03 ms here; and
about 55 MB for each process.
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
from typing import Any, Protocol

from unstable_lite.errors import EnvError, RequestError, WorkerDied
from unstable_lite.games.env_process import file_of_call, game_under_way
from unstable_lite.games.environments import Environment, hang_guard, is_isolated
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import DropEnv, EnvState, MakeEnv, Message, StepEnv
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.transport.sockets import Peer, Router, make_socket_directory
from unstable_lite.types import GameSpec

log = logging.getLogger(__name__)

MODULE = "unstable_lite.games.env_process"
MOST_PROCESSES = 4
MOST_FAILED_STARTS = 3
"""In a row."""
START_TIMEOUT_S = 120.0


class GameEnvironment(Protocol):
    """The env of one game: `observe` once, then `play` until the game is over, then `close`."""

    def observe(self) -> tuple[int, str]:
        """Whose turn it is at the start, and what that player sees."""

    async def play(self, action: str) -> tuple[int, str] | None:
        """Whose turn it is after `action`, and what that player sees; None: the game is over."""

    @property
    def was_invalid(self) -> bool:
        """Whether the rules do not allow what was just played."""

    @property
    def has_teams(self) -> bool:
        """Whether its players win and lose together, in teams."""

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        """Rewards and the env's own remarks, for every player."""

    def rewards_so_far(self) -> dict[int, float]:
        """Rewards of every player if the game, which is not over, ends here."""

    def drop(self) -> None:
        """Nobody plays on, however far the game is."""


class InProcess:
    """An env that lives here."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def observe(self) -> tuple[int, str]:
        return self._environment.observe()

    async def play(self, action: str) -> tuple[int, str] | None:
        return self._environment.play(action)

    @property
    def was_invalid(self) -> bool:
        return self._environment.was_invalid

    @property
    def has_teams(self) -> bool:
        return self._environment.has_teams

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        return self._environment.close()

    def rewards_so_far(self) -> dict[int, float]:
        return self._environment.rewards_so_far()

    def drop(self) -> None:
        pass


def make_in_process(spec: GameSpec) -> InProcess:
    return InProcess(Environment(spec.env_id, spec.num_players, spec.seed, spec.observation))


class Environments:
    """The envs of one run; the processes are started when the first isolated game is."""

    def __init__(self, logs: Path, env_timeout_s: float) -> None:
        """`logs`: a directory for what the processes write, the stacks of one that hangs among it."""
        self._logs = logs
        self._limit_s = env_timeout_s
        self._hosts: list[_Host] = []
        self._is_starting = asyncio.Lock()
        self._sockets: Path | None = None
        self._router: Router | None = None

    async def make(self, spec: GameSpec) -> GameEnvironment:
        """Raises what the env raises; EnvError, where it is isolated. WorkerDied if no process starts."""
        if not is_isolated(spec.env_id, spec.num_players, spec.observation, spec.isolated):
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
        for index in range(min(MOST_PROCESSES, len(os.sched_getaffinity(0)))):
            peer = Peer(self._router, f"env-{index}")
            spec = WorkerSpec(name=peer.name, endpoint=self._router.endpoint, device="cpu", threads=1, config_json="{}")
            log_path = self._logs / f"{peer.name}.log"
            process = WorkerProcess(peer, log_path, MODULE, spec, {"CUDA_VISIBLE_DEVICES": "", **_keys()})
            self._hosts.append(_Host(process, file_of_call(spec.endpoint, spec.name), self._limit_s))

    async def close(self) -> None:
        await asyncio.gather(*(host.stop() for host in self._hosts))
        if self._router is not None and self._sockets is not None:
            self._router.close()
            shutil.rmtree(self._sockets, ignore_errors=True)


def _keys() -> dict[str, str]:
    """Of the API that games of TextArena's ask themselves, as TwentyQuestions does: workers are given no keys else."""
    return {name: os.environ[name] for name in ("OPENROUTER_API_KEY",) if name in os.environ}


@contextlib.asynccontextmanager
async def opened_environments(logs: Path, env_timeout_s: float) -> AsyncIterator[Environments]:
    """For the games of the event loop of this thread; no process is left afterwards."""
    with hang_guard(env_timeout_s):
        environments = Environments(logs, env_timeout_s)
        try:
            yield environments
        finally:
            await environments.close()


class IsolatedEnvironment:
    """An env that lives in another process."""

    def __init__(self, host: _Host, spec: GameSpec) -> None:
        self._host = host
        self._spec = spec
        self._game = host.take_game()
        self._life = -1
        """In which life of its process the game is there."""
        self._num_calls = 0
        """That it has had in that life: one that made it, and one for each action."""
        self._actions: list[str] = []
        self._state: EnvState | None = None

    async def start(self) -> None:
        self._state = await self._advance()

    def observe(self) -> tuple[int, str]:
        assert self._state is not None
        return self._state.pid, self._state.observation

    async def play(self, action: str) -> tuple[int, str] | None:
        # A lone surrogate, which an API's JSON may hold, has no UTF-8: it becomes a question mark.
        self._actions.append(action.encode("utf-8", "replace").decode())
        self._state = await self._advance()
        return None if self._state.is_over else (self._state.pid, self._state.observation)

    @property
    def was_invalid(self) -> bool:
        assert self._state is not None
        return self._state.was_invalid

    @property
    def has_teams(self) -> bool:
        assert self._state is not None
        return self._state.has_teams

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        assert self._state is not None
        assert self._state.is_over
        game_info = {int(pid): remarks for pid, remarks in json.loads(self._state.game_info).items()}
        return dict(enumerate(self._state.rewards)), game_info

    def rewards_so_far(self) -> dict[int, float]:
        assert self._state is not None
        return dict(enumerate(self._state.rewards))

    def drop(self) -> None:
        self._host.drop_game(self._game)

    async def _advance(self) -> EnvState:
        """To after the last of its actions; in a process that has just started, from the beginning.

        One call each, for each has its own `run.env_timeout_s`.
        """
        spec = self._spec
        while True:
            life = await self._host.wait_until_up()
            if life != self._life:
                self._life, self._num_calls = life, 0
            if self._num_calls == 0:
                asked = self._host.ask(
                    spec.env_id,
                    MakeEnv,
                    game=self._game,
                    env_id=spec.env_id,
                    num_players=spec.num_players,
                    seed=spec.seed,
                    observation=spec.observation,
                )
            else:
                action = self._actions[self._num_calls - 1]
                asked = self._host.ask(spec.env_id, StepEnv, game=self._game, action=action)
            try:
                state = await asked
            except RequestError as error:
                raise EnvError(f"{spec.env_id}: {error}") from None
            except WorkerDied:
                continue  # in another game's call
            self._num_calls += 1
            if self._num_calls > len(self._actions):
                return state


class _Host:
    """One process, and who takes its place."""

    def __init__(self, process: WorkerProcess, file_of_call: Path, limit_s: float) -> None:
        self.num_games = 0
        self._process = process
        self._peer = process.peer
        self._file_of_call = file_of_call
        self._limit_s = limit_s
        self._games = itertools.count()
        self._is_killed = False
        self._is_started = False
        self._change = asyncio.Event()
        self._living = asyncio.create_task(self._live())

    def take_game(self) -> int:
        self.num_games += 1
        return next(self._games)

    def drop_game(self, game: int) -> None:
        self.num_games -= 1
        if self._is_started and self._peer.is_up:
            self._peer.tell(DropEnv(game=game))

    async def wait_until_up(self) -> int:
        """In which life. Raises WorkerDied, UnstableError if it does not start."""
        while not (self._is_started and self._peer.is_up):
            if self._living.done():
                self._living.result()
            await self._change.wait()
        return self._peer.life

    async def ask(self, env_id: str, message_type: Callable[..., Message], /, game: int, **fields: Any) -> EnvState:
        """Raises EnvError if the process ends in this very call, WorkerDied if it does in another one."""
        try:
            state: EnvState = await self._peer.ask(message_type, math.inf, game=game, **fields)
        except WorkerDied as death:
            if game_under_way(self._file_of_call) != game:
                raise
            how = f"a call did not return within run.env_timeout_s = {self._limit_s:g}, and its process was killed"
            what = how if self._is_killed else str(death).partition(";")[0]
            raise EnvError(f"{env_id}: {what} (log: {self._process.log_path})") from None
        return state

    async def stop(self) -> None:
        self._living.cancel()
        await asyncio.gather(self._living, return_exceptions=True)
        if not (self._is_started and self._peer.is_up):
            self._process.kill()  # it listens to nobody yet
        await self._process.stop()

    async def _live(self) -> None:
        """Again and again, until cancelled. Raises WorkerDied, UnstableError if it does not start."""
        try:
            failed_starts = 0
            while True:
                try:
                    failed_starts += 1
                    await self._process.start()
                    await self._process.ready(START_TIMEOUT_S)
                    failed_starts, self._is_started, self._is_killed = 0, True, False
                    self._peer.take_back()
                    self._tell_change()
                    await self._watch()
                except WorkerDied as death:
                    if failed_starts == MOST_FAILED_STARTS:
                        raise
                    log.warning("%s", death)
        finally:
            self._tell_change()

    async def _watch(self) -> None:
        """Raises WorkerDied when it dies; kills it where it hangs."""
        watching = asyncio.ensure_future(self._process.watch())
        silence = asyncio.ensure_future(self._peer.fall_silent(self._limit_s, look_every_s=self._limit_s / 4))
        either: set[asyncio.Future[Any]] = {watching, silence}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                self._is_killed = True
                await self._process.kill_stuck()
            await watching
        finally:
            watching.cancel()
            silence.cancel()

    def _tell_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
