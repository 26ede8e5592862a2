"""Keep games in flight: so many for training, so many for evaluation, each played to its one record.

Starts no training game while the steps that wait and those in flight are as many as the buffer allows. Of a game that
breaks nothing is trained or rated, and its slot goes on with the next game.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from unstable_lite.buffers import EpisodeBuffer, StepBuffer
from unstable_lite.config import RunConfig
from unstable_lite.engines.lock_step import LockStep
from unstable_lite.errors import OpponentError
from unstable_lite.games.game_runner import GameRunner
from unstable_lite.games.isolation import Environments
from unstable_lite.games.seats import Seats
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.transport.adapters import AdapterArena
from unstable_lite.types import EvalEnvSpec, GameRecord, GameSpec, ModelRef

REDRAW_S = 1.0
"""Between two draws where no opponent can play."""
NOTHING_TO_PLAY_S = 30.0
"""So long without an opponent to draw, with the budget spent, is for good."""


class Collector:
    def __init__(
        self,
        scheduler: GameScheduler,
        buffer: StepBuffer | EpisodeBuffer,
        seats: Seats,
        arena: AdapterArena,
        config: RunConfig,
        on_record: Callable[[GameRecord], None],
        lock_step: LockStep | None = None,
        environments: Environments | None = None,
        on_begin: Callable[[GameSpec], None] = lambda spec: None,  # noqa: ARG005
    ) -> None:
        """`lock_step`: what the seats ask, where games are played in rounds, at one pace; `environments`: where envs
        live, if not all of them here; `on_begin`: called for each training game, in the order of their numbers."""
        self.games_in_flight: Counter[str] = Counter()
        """By kind: "train", "eval"."""
        self.going = asyncio.Event()
        """Games start while it is set."""
        self.going.set()
        self._scheduler = scheduler
        self._buffer = buffer
        self.seats = seats
        self._runner = GameRunner(seats, config, environments)
        self._arena = arena
        self._config = config
        self._on_record = on_record
        self._on_begin = on_begin
        self._lock_step = lock_step
        self.evaluating: Counter[str] = Counter()
        """Evaluation games without a quota that are in flight, by the checkpoint's uid."""
        self._eval_games_of: Counter[str] = Counter()
        """Those that are over, by the checkpoint's uid."""
        self._new_checkpoint = asyncio.Event()
        self._rest_of_group: deque[GameSpec] = deque()
        """Games of the group begun last that nobody plays yet; what they need is retained."""
        self._ended: list[GameRecord] = []
        """Games that are over and not counted yet: until the next turn of the event loop."""
        self._idle_since: float | None = None
        """Since when no training game could be drawn for want of an opponent."""

    async def run(self, num_train_workers: int, num_eval_workers: int) -> None:
        """Play until cancelled.

        Raises EnvError when an env breaks `max_void_games` times in a row, OpponentError when the budget for opponents
        is spent and there are no others to train against.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_train_workers):
                    tasks.create_task(self._play_train_games())
                for _ in range(num_eval_workers):
                    tasks.create_task(self._play_eval_games())
        finally:
            while self._rest_of_group:
                self._release(self._rest_of_group.popleft())

    async def evaluate(
        self,
        env: EvalEnvSpec,
        model: ModelRef,
        num_games: int,
        label: str,
        concurrency: int,
        records: list[GameRecord] | None = None,
    ) -> list[GameRecord]:
        """Play a quota of evaluation games of one model; returns the records, void ones included. `records`: an empty
        list to put them in, one by one as the games end.
        """
        records = [] if records is None else records

        def draw(number: int) -> GameSpec:
            return self._scheduler.next_eval_job(env, model, label, number=number)

        with self._arena.held(_version(model)):
            if self._lock_step is not None:
                await self._evaluate_in_rounds(self._lock_step, draw, num_games, concurrency, records)
                return records
            specs = iter([draw(number) for number in range(num_games)])

            async def play() -> None:
                for spec in specs:  # shared by all workers
                    self._retain(spec)
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
        """Of an evaluation that is broken off nothing stays, so that it can be made again, the same."""
        before = self._scheduler.state_dict()
        try:
            while len(records) < num_games:
                first = len(records)
                specs = [draw(number) for number in range(first, min(first + concurrency, num_games))]
                for spec in specs:
                    self._retain(spec)
                records += await self._play_round(lock_step, specs)
        except asyncio.CancelledError:
            self._scheduler.load_state_dict(before)
            raise
        self._count(records)

    def clock_stopped(self) -> AbstractContextManager[None]:
        """While entered, no time passes that `run.game_timeout_s` counts."""
        return self._runner.clock_stopped()

    async def play_round(self, num_games: int) -> None:
        """Play training games, in whole groups and at one pace, to their end; needs `lock_step`.

        At most `num_games` (and the rest of a group), and no more than bring the buffer what the learner waits for.
        """
        assert self._lock_step is not None
        while not self._rest_of_group or (len(self._rest_of_group) < num_games and not self._buffer.is_full):
            await self._begin_group()
        specs = list(self._rest_of_group)
        self._rest_of_group.clear()
        self._count(await self._play_round(self._lock_step, specs))

    async def _play_round(self, lock_step: LockStep, specs: Sequence[GameSpec]) -> list[GameRecord]:
        """Games that are retained, to their end. Nothing follows from them yet: that is for all of them, in order."""
        return await lock_step.play([self._to_its_end(spec, waits_for_opponents=True) for spec in specs])

    async def _play_train_games(self) -> None:
        while True:
            # A group that is begun is played to its end: half a group in a full buffer would wait for ever.
            while not self._rest_of_group:
                await self._buffer.wait_for_room(has_game=lambda: bool(self._rest_of_group))
                if not self._rest_of_group:  # nor has anyone begun one meanwhile
                    await self._begin_group()
                    self._buffer.wake(len(self._rest_of_group) - 1)  # to play the others of the group
            # No name for the record: it would be kept until the next game is over.
            await self._count_with_others(await self._to_its_end(self._rest_of_group.popleft()))

    async def _begin_group(self) -> None:
        """Or wait a little, if no opponent can play. Raises OpponentError if none will any more."""
        try:
            group = self._scheduler.next_train_group(self.seats.can_play)
        except OpponentError as error:
            now = time.monotonic()
            self._idle_since = self._idle_since or now
            if self.seats.spent and now - self._idle_since > NOTHING_TO_PLAY_S:
                raise OpponentError(
                    f"{self.seats.spent}, and there is nobody else to train against: raise the limit, or name "
                    "another opponent in league.opponent_sampling_strategy"
                ) from error
            await asyncio.sleep(REDRAW_S)
            return
        self._idle_since = None
        for spec in group:
            self._on_begin(spec)
            self._retain(spec)
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
                self._retain(spec)
                await self._count_with_others(await self._to_its_end(spec))
                self._eval_games_of[uid] += 1
            finally:
                self.evaluating[uid] -= 1

    def _num_begun(self, uid: str) -> int:
        return self._eval_games_of[uid] + self.evaluating[uid]

    def state_dict(self) -> dict[str, Any]:
        """Games in flight, or broken off, are played anew, and so do not count."""
        return {"eval_games_of": dict(self._eval_games_of)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._eval_games_of = Counter(state["eval_games_of"])

    def tell_new_checkpoint(self) -> None:
        """The registry has a new current policy: evaluation games that waited for one go on."""
        self._new_checkpoint.set()
        self._new_checkpoint = asyncio.Event()

    def _retain(self, spec: GameSpec) -> None:
        """Hold the adapters of every seat until the game is over."""
        for version in _versions(spec):
            self._arena.retain(version)

    def _release(self, spec: GameSpec) -> None:
        for version in _versions(spec):
            self._arena.release(version)

    async def _to_its_end(self, spec: GameSpec, waits_for_opponents: bool = False) -> GameRecord:
        """One game, from its spec, which is retained, to its one record, whatever happens in between."""
        self.games_in_flight[spec.kind] += 1
        try:
            await self.going.wait()
            return await self._runner.play(spec, waits_for_opponents)
        finally:
            self.games_in_flight[spec.kind] -= 1
            self._release(spec)

    async def _count_with_others(self, record: GameRecord) -> None:
        """Others end in the same turn of the event loop, and all are counted together."""
        self._ended.append(record)
        try:
            await asyncio.sleep(0)
        finally:
            ended, self._ended = self._ended, []
            self._count(ended)

    def _count(self, records: Sequence[GameRecord]) -> None:
        """What follows from games that are over: one kind of work after the other.

        All of it game after game would find none of its code in the processor's caches: a sixth of the cost of a turn
        (bench/LOG.md).
        """
        for record in records:
            self._scheduler.update(record)
        for record in records:
            self._on_record(record)
        for record in records:
            if record.spec.kind == "train":
                self._buffer.add_game(record)


def _versions(spec: GameSpec) -> set[int]:
    return {_version(agent.model) for agent in spec.agent_specs}


def _version(model: ModelRef) -> int:
    """0 for models that need no adapter."""
    return model.adapter_version or 0
