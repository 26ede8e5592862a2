"""Keep a number of training and evaluation games in flight, and play each to its one record.

Starts no training game while the waiting steps and those in flight are as many as the buffer allows. A game that fails
is neither trained on nor rated, and its slot starts the next game.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.config.training import RunConfig
from unstable_lite.errors import OpponentError
from unstable_lite.games.env_pool import EnvPool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.rollout.episode_buffer import EpisodeBuffer
from unstable_lite.rollout.game_runner import GameRunner
from unstable_lite.rollout.lockstep import LockStep
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.types import GameRecord, GameSpec, ModelRef

REDRAW_S = 1.0
"""Seconds between two draws while no opponent can play."""
NOTHING_TO_PLAY_S = 30.0
"""Seconds without an opponent to draw, with the budget spent, after which the run ends."""


class GameListener(Protocol):
    """Part of a run that observes games."""

    def begin_game(self, spec: GameSpec) -> None:
        """Receive a training game that begins; they come in the order of their numbers."""

    def add_record(self, record: GameRecord) -> None:
        """Receive a finished game of any kind, before the buffer."""


class Collector:
    def __init__(
        self,
        scheduler: GameScheduler,
        buffer: StepBuffer | EpisodeBuffer,
        seats: PlayerFactory,
        table: AdapterTable,
        config: RunConfig,
        listeners: Sequence[GameListener] = (),
        lock_step: LockStep | None = None,
        environments: EnvPool | None = None,
        unpaused: asyncio.Event | None = None,
    ) -> None:
        """Create a collector without games.

        lock_step: receiver of the seats' requests if games are played in lock step. environments: pool of envs, unless
        all run in this process. unpaused: training games start only while it is set (always, if not given).
        """
        self.games_in_flight: Counter[str] = Counter()
        """Number of games by kind: "train", "eval"."""
        self.unpaused = unpaused or asyncio.Event()
        """Event that lets games start while it is set."""
        if unpaused is None:
            self.unpaused.set()
        self._scheduler = scheduler
        self._buffer = buffer
        self.seats = seats
        self.runner = GameRunner(seats, config, environments)
        self._table = table
        self._config = config
        self._listeners = listeners
        self._lock_step = lock_step
        self.evaluating: Counter[str] = Counter()
        """Number of evaluation games without a quota that are in flight, by the checkpoint's uid."""
        self._eval_games_of: Counter[str] = Counter()
        """Number of these games that are over, by the checkpoint's uid."""
        self._new_checkpoint = asyncio.Event()
        self._rest_of_group: deque[GameSpec] = deque()
        """Games of the newest group that have not started yet; their adapters are leased."""
        self._ended: list[GameRecord] = []
        """Games that are over and will be counted in the next turn of the event loop."""
        self._idle_since: float | None = None
        """Time since which no draw of a training game has found an opponent; None: the last draw found one."""

    async def run(self, num_train_workers: int, num_eval_workers: int) -> None:
        """Play until cancelled.

        Raises EnvError if an env fails `max_void_games` times in a row, OpponentError if the budget for opponents is
        spent and there are no others to train against.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_train_workers):
                    tasks.create_task(self._play_train_games())
                for _ in range(num_eval_workers):
                    tasks.create_task(self._play_eval_games())
        finally:
            while self._rest_of_group:
                self._end_leases(self._rest_of_group.popleft())

    async def evaluate(
        self,
        env: EvalEnvSpec,
        model: ModelRef,
        num_games: int,
        label: str,
        concurrency: int,
        records: list[GameRecord] | None = None,
    ) -> list[GameRecord]:
        """Play a quota of evaluation games of one model; return the records, including void ones.

        records: empty list that gets the records as the games end.
        """
        records = [] if records is None else records

        def draw(number: int) -> GameSpec:
            return self._scheduler.next_eval_job(env, model, label, number=number)

        with self._table.leased(_version(model)):
            if self._lock_step is not None:
                await self._evaluate_in_rounds(self._lock_step, draw, num_games, concurrency, records)
                return records
            specs = iter([draw(number) for number in range(num_games)])

            async def play() -> None:
                for spec in specs:  # shared by all workers
                    self._lease(spec)
                    record = await self._to_its_end(spec, waits_for_opponents=True)
                    await self._count_with_others(record)
                    records.append(record)

            async with asyncio.TaskGroup() as tasks:
                for _ in range(concurrency):
                    tasks.create_task(play())
        return records

    async def _evaluate_in_rounds(
        self,
        lock_step: LockStep,
        draw: Callable[[int], GameSpec],
        num_games: int,
        concurrency: int,
        records: list[GameRecord],
    ) -> None:
        """Play the quota in lock step. If cancelled, restore the scheduler, so that the evaluation can be repeated."""
        before = self._scheduler.state_dict()
        try:
            while len(records) < num_games:
                first = len(records)
                specs = [draw(number) for number in range(first, min(first + concurrency, num_games))]
                for spec in specs:
                    self._lease(spec)
                records += await lock_step.play([self._to_its_end(spec, waits_for_opponents=True) for spec in specs])
        except asyncio.CancelledError:
            self._scheduler.load_state_dict(before)
            raise
        self._count(records)

    async def play_round(self, num_games: int) -> None:
        """Play training games to their end, in whole groups and in lock step; needs `lock_step`.

        Play at most `num_games` (and the rest of a group), and no more than fill the buffer.
        """
        assert self._lock_step is not None
        while not self._rest_of_group or (len(self._rest_of_group) < num_games and not self._buffer.is_full):
            await self._begin_group()
        games = [self._to_its_end(spec, waits_for_opponents=True) for spec in self._rest_of_group]
        self._rest_of_group.clear()
        self._count(await self._lock_step.play(games))

    async def _play_train_games(self) -> None:
        while True:
            # Start all games of a group that has begun: half a group beside a full buffer would wait for ever.
            while not self._rest_of_group:
                await self._buffer.wait_for_room(has_game=lambda: bool(self._rest_of_group))
                if not self._rest_of_group:  # no other task has begun a group
                    await self._begin_group()
                    self._buffer.wake(len(self._rest_of_group) - 1)  # to start the other games of the group
            # Give the record no name, which would keep it in memory until the next game is over.
            await self._count_with_others(await self._to_its_end(self._rest_of_group.popleft()))

    async def _begin_group(self) -> None:
        """Begin a group, or wait `REDRAW_S` if no opponent can play. Raises OpponentError if none can any more."""
        try:
            group = self._scheduler.next_train_group(self.seats.can_play)
        except OpponentError as error:
            now = time.monotonic()
            self._idle_since = self._idle_since or now
            if self.seats.spent and now - self._idle_since > NOTHING_TO_PLAY_S:
                raise OpponentError(
                    f"{self.seats.spent}, and there is no other opponent to train against: raise the limit, or name "
                    "another opponent in league.opponent_sampling_strategy"
                ) from error
            await asyncio.sleep(REDRAW_S)
            return
        self._idle_since = None
        for spec in group:
            for listener in self._listeners:
                listener.begin_game(spec)
            self._lease(spec)
            self._buffer.begin_game(spec)
            self._rest_of_group.append(spec)

    async def _play_eval_games(self) -> None:
        most = self._config.max_eval_games_per_ckpt
        while True:
            while most is not None and self._num_begun(self._scheduler.registry.get_current_ckpt()) >= most:
                await self._new_checkpoint.wait()
            try:
                spec = self._scheduler.next_eval_job(can_play=self.seats.can_play)
            except OpponentError:
                await asyncio.sleep(REDRAW_S)
                continue
            uid = self._scheduler.registry.get_current_ckpt()
            self.evaluating[uid] += 1
            try:
                self._lease(spec)
                await self._count_with_others(await self._to_its_end(spec))
                self._eval_games_of[uid] += 1
            finally:
                self.evaluating[uid] -= 1

    def _num_begun(self, uid: str) -> int:
        return self._eval_games_of[uid] + self.evaluating[uid]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of finished games; a game in flight does not count, because it is played again."""
        return {"eval_games_of": dict(self._eval_games_of)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._eval_games_of = Counter(state["eval_games_of"])

    def tell_new_checkpoint(self) -> None:
        """Resume the evaluation games that wait for the registry's next current policy."""
        self._new_checkpoint.set()
        self._new_checkpoint = asyncio.Event()

    def _lease(self, spec: GameSpec) -> None:
        """Lease until the game is over the adapter of every seat that keeps one; others lease one for each turn."""
        for version in self._kept_versions(spec):
            self._table.lease(version)

    def _end_leases(self, spec: GameSpec) -> None:
        for version in self._kept_versions(spec):
            self._table.end_lease(version)

    def _kept_versions(self, spec: GameSpec) -> set[int]:
        return {_version(agent.model) for agent in spec.agent_specs if self.seats.keeps_adapter(agent)}

    async def _to_its_end(self, spec: GameSpec, waits_for_opponents: bool = False) -> GameRecord:
        """Play one game with leased adapters to its one record, and end the leases in any case."""
        self.games_in_flight[spec.kind] += 1
        try:
            await self.unpaused.wait()
            return await self.runner.play(spec, waits_for_opponents)
        finally:
            self.games_in_flight[spec.kind] -= 1
            self._end_leases(spec)

    async def _count_with_others(self, record: GameRecord) -> None:
        """Count a game together with all others that end in the same turn of the event loop."""
        self._ended.append(record)
        try:
            await asyncio.sleep(0)
        finally:
            ended, self._ended = self._ended, []
            self._count(ended)

    def _count(self, records: Sequence[GameRecord]) -> None:
        """Pass finished games to the scheduler, the listeners and the buffer, one kind of work after the other.

        Alternating the kinds game by game would evict their code from the processor's caches: a sixth of the cost of a
        turn (bench/LOG.md).
        """
        for record in records:
            self._scheduler.update(record)
        for listener in self._listeners:
            for record in records:
                listener.add_record(record)
        for record in records:
            if record.spec.kind == "train":
                self._buffer.add_game(record)


def _version(model: ModelRef) -> int:
    """Return the model's adapter version; 0 if it needs no adapter."""
    return model.adapter_version or 0
