"""Turn a GameSpec into its one GameRecord, even if the game fails.

A game is void if its env raises, if an answer does not come, or if it takes too long; its record says why. An env that
fails repeatedly is an error. Knows nothing of how the game was chosen or how its record is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Iterator

from unstable_lite.config.training import RunConfig
from unstable_lite.errors import ConfigError, EnvError, OpponentError, WorkerDied
from unstable_lite.games.env_pool import EnvPool, make_in_process
from unstable_lite.games.players.factory import PlayerFactory, is_remote
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameRecord, GameSpec

log = logging.getLogger(__name__)


class _Caught:
    """Captures any exception except those that end the task or the process."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None


class GameRunner:
    def __init__(self, seats: PlayerFactory, config: RunConfig, environments: EnvPool | None = None) -> None:
        """Create a runner. Without `environments`, every env runs in this process."""
        self._seats = seats
        self._config = config
        self._environments = environments
        self._voids_in_a_row: Counter[str] = Counter()
        self._deadlines: dict[asyncio.Timeout, float] = {}
        """Deadlines of the running games, in the order of their start."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopped_at: float | None = None
        """Time of the event loop at which the games' clock was stopped; None: it runs."""

    async def play(self, spec: GameSpec, waits_for_opponents: bool = True) -> GameRecord:
        """Play one game and return its record.

        waits_for_opponents: False if the caller has made sure that they can play now.
        Raises EnvError if an env fails `max_void_games` times in a row, WorkerDied if no engine is left, ConfigError
        if a player's answer is not a Reply.
        """
        record, environments = new_record(spec), self._environments
        await asyncio.sleep(0)  # other tasks must run, too, even if no game ever waits
        caught = _Caught()
        with caught:
            if waits_for_opponents:
                await self._seats.wait_for_opponents(spec)
            async with asyncio.timeout(None) as timeout:
                self._start_clock(timeout)
                try:
                    environment = make_in_process(spec) if environments is None else await environments.make(spec)
                    try:
                        await run_game(record, environment, self._seats.players(spec), self._config.max_action_chars)
                    finally:
                        environment.drop()
                finally:
                    self._deadlines.pop(timeout, None)
        self._settle(record, caught.error)
        return record

    @contextlib.contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Stop the games' clock while no game can continue."""
        loop = asyncio.get_running_loop()
        self._stopped_at = loop.time()
        try:
            yield
        finally:
            stopped_s = loop.time() - self._stopped_at
            self._stopped_at = None
            self._deadlines = {timeout: deadline + stopped_s for timeout, deadline in self._deadlines.items()}
            if self._timer is None:
                self._end_overdue(loop)

    def _start_clock(self, timeout: asyncio.Timeout) -> None:
        """Start a game's clock. All games share one timer: one per game would cost more than a turn's messages."""
        loop = asyncio.get_running_loop()
        started = loop.time() if self._stopped_at is None else self._stopped_at
        self._deadlines[timeout] = started + self._config.game_timeout_s
        if self._timer is None and self._stopped_at is None:
            self._timer = loop.call_at(self._deadlines[timeout], self._end_overdue, loop)

    def _end_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._stopped_at is not None:
            return
        now = loop.time()
        for timeout in [timeout for timeout, deadline in self._deadlines.items() if deadline <= now]:
            del self._deadlines[timeout]
            timeout.reschedule(now)
        next_one = min(self._deadlines.values(), default=None)
        if next_one is not None:
            self._timer = loop.call_at(next_one, self._end_overdue, loop)

    def _settle(self, record: GameRecord, error: BaseException | None) -> None:
        """Count and log a void game; raise an error that no other game can survive either."""
        env_id = record.spec.env_id
        if error is None:
            self._voids_in_a_row[env_id] = 0
            return
        if isinstance(error, WorkerDied | ConfigError):
            raise error
        if isinstance(error, TimeoutError):
            # A remote opponent may be the slow part, so do not blame the env.
            has_remote = any(is_remote(agent.model) for agent in record.spec.agent_specs)
            kind = OpponentError if has_remote else EnvError
            error = kind(f"not over after run.game_timeout_s = {self._config.game_timeout_s:g}")
        record.end, record.error = "void", f"{type(error).__name__}: {error}"
        if isinstance(error, OpponentError):  # neither the env's fault nor a reason to end the run
            log.warning("void game %d of %s: %s", record.spec.game_idx, env_id, record.error)
            return
        actions = [(turn.pid, turn.action) for turn in record.turns]
        log.warning(
            "void game %d of %s (seed %d, after %s): %s\n%s",
            record.spec.game_idx,
            env_id,
            record.spec.seed,
            actions,
            record.error,
            "".join(traceback.format_exception(error)),
        )
        if record.spec.start is not None:  # perhaps only this state is not reached again, and the run forgets it
            return
        self._voids_in_a_row[env_id] += 1
        if self._voids_in_a_row[env_id] >= self._config.max_void_games:
            raise EnvError(
                f"{env_id} failed {self._voids_in_a_row[env_id]} times in a row, the last time with {record.error} "
                f"(seed {record.spec.seed}, actions {actions}). Remove the env from the config, or see "
                "logs/orchestrator.log for the tracebacks."
            ) from error
