"""Keep a number of training and evaluation games in flight, and play each to its one record.

Starts no training game while the waiting steps and those in flight are as many as the buffer allows. A game that fails
is neither trained on nor rated, and its slot starts the next game. In lock step the next requests of all games go to
the engines together.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.config.reference import COLLECTOR, from_reference
from unstable_lite.config.training import RunConfig
from unstable_lite.errors import OpponentError
from unstable_lite.games.env_pool import EnvPool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.policy import Generates
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.rollout.buffer import EpisodeBuffer, StepBuffer
from unstable_lite.rollout.run_game import GameRunner
from unstable_lite.types import GameRecord, GameSpec, Generation, ModelRef

T = TypeVar("T")

REDRAW_S = 1.0
"""Seconds between two draws while no opponent can play."""
NOTHING_TO_PLAY_S = 30.0
"""Seconds without an opponent to draw, with the budget spent, after which the run ends."""
NEWEST = 512
"""Number of the newest games of which evaluations may be `run.eval_share`."""


async def play_all(games: Iterable[T], play: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Play all of `games`, at most `concurrency` of them at once. The first error ends them all."""
    remaining = iter(games)

    async def work() -> None:
        for game in remaining:  # shared by all tasks
            await play(game)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())


_Request = tuple[Callable[[], Awaitable[Generation]], asyncio.Future[Generation]]
"""Function that asks an engine, and the future of its answer."""


class LockStep:
    """Receiver of the requests of games that are played in lock step.

    An engine rounds differently if the other requests of its batch differ, and these are random if each game runs at
    its own pace. Here requests leave when every game of the round has asked or is over, in the order of their seeds, so
    that the generated text depends on the games alone.
    """

    def __init__(self, generate: Generates) -> None:
        self._generate = generate
        self._num_playing = 0
        self._asked: dict[int, _Request] = {}
        """Requests that wait for those of the other games, by seed."""
        self._waves: set[asyncio.Task[None]] = set()

    async def play(self, games: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Play all of `games` to their end and return their results; the first error ends them all."""
        self._num_playing += len(games)
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(self._counted(game)) for game in games]
        return [task.result() for task in playing]

    async def generate(
        self, prompt: str, version: int, stop: tuple[str, ...], seed: int | None, **options: Any
    ) -> Generation:
        """Return one completion for a game that `play` plays; `seed` is required, and no two requests may share it."""
        assert seed is not None and seed not in self._asked
        reply: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._asked[seed] = partial(self._generate, prompt, version, stop, seed, **options), reply
        self._send_if_all_asked()
        try:
            return await reply
        finally:
            self._asked.pop(seed, None)  # its game was abandoned before the others had asked

    async def _counted(self, game: Coroutine[Any, Any, T]) -> T:
        try:
            return await game
        finally:
            self._num_playing -= 1
            self._send_if_all_asked()

    def _send_if_all_asked(self) -> None:
        if self._asked and len(self._asked) == self._num_playing:
            wave = [self._asked.pop(seed) for seed in sorted(self._asked)]
            task = asyncio.create_task(self._answer(wave))
            self._waves.add(task)
            task.add_done_callback(self._waves.discard)

    async def _answer(self, wave: Sequence[_Request]) -> None:
        """Deliver all replies together and in order, so that the games continue in order, too."""
        results = await asyncio.gather(*(ask() for ask, _ in wave), return_exceptions=True)
        for (_, reply), result in zip(wave, results, strict=True):
            if reply.done():
                continue
            if isinstance(result, BaseException):
                reply.set_exception(result)
            else:
                reply.set_result(result)


class GameListener(Protocol):
    """Part of a run that observes games."""

    def begin_game(self, spec: GameSpec) -> None:  # noqa: ARG002
        """Receive a training game that begins; they come in the order of their numbers."""
        return  # mypy does not let a subclass inherit an empty body

    def add_record(self, record: GameRecord) -> None:
        """Receive a finished game of any kind, before the buffer."""


@from_reference(kept=COLLECTOR)
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
        buffers = buffer.room.buffers if hasattr(buffer, "room") else [buffer]
        self._buffers: dict[str, Any] = {getattr(one, "policy", ""): one for one in buffers}
        """Buffer of each policy, by the policy's name."""
        self._buffer = buffer
        self.seats = seats
        self.runner = GameRunner(seats, config, environments)
        self._table = table
        self._config = config
        self._listeners = listeners
        self._lock_step = lock_step
        self.evaluating: Counter[str] = Counter()
        """Number of evaluation games without a quota that are in flight, by the checkpoint's uid."""
        self._lately: deque[bool] = deque(maxlen=NEWEST)
        """Whether each of the newest games was an evaluation without a quota; those with a quota are left out."""
        self._may_change = asyncio.Event()
        """Event after which a waiting evaluation game may perhaps start."""
        self._rest_of_group: deque[GameSpec] = deque()
        """Games of the newest group that have not started yet; their adapters are leased."""
        self._ended: list[GameRecord] = []
        """Games that are over and will be counted in the next turn of the event loop."""
        self._idle_since: float | None = None
        """Time since which no draw of a training game has found an opponent; None: the last draw found one."""

    async def run(self, num_train_workers: int, num_eval_workers: int) -> None:
        """Play until cancelled.

        Raises EnvError if an env fails `MAX_VOID_GAMES` times in a row, OpponentError if the budget for opponents is
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
        opponent = self._scheduler.registry.eval_opponent(env.fixed_opponent) if env.num_players > 1 else model
        # The opponent's, too, because another policy's newest adapter may retire before the last game.
        with self._table.leased(model.adapter_version, opponent.adapter_version):
            before = self._scheduler.state_dict() if self._lock_step is not None else {}
            specs = [self._scheduler.next_eval_job(env, model, label, number=number) for number in range(num_games)]
            if self._lock_step is None:

                async def play(spec: GameSpec) -> None:
                    record = await self._to_its_end(spec, waits_for_opponents=True)
                    await self._count_with_others(record)
                    records.append(record)

                await play_all(specs, play, concurrency)
                return records
            try:
                for first in range(0, num_games, concurrency):
                    records += await self._in_lock_step(specs[first : first + concurrency])
            except asyncio.CancelledError:
                self._scheduler.load_state_dict(before)  # so that the evaluation can be repeated
                raise
            self._count(records)
        return records

    async def play_round(self, num_games: int, policy: str = "") -> None:
        """Play training games for a policy to their end, in whole groups and in lock step; needs `lock_step`.

        Play at most `num_games` (and the rest of a group), and no more than fill its buffer.
        """
        buffer = self._buffers[policy]
        while not self._rest_of_group or (len(self._rest_of_group) < num_games and not buffer.is_full):
            await self._begin_group(policy)
        games = list(self._rest_of_group)
        self._rest_of_group.clear()
        self._count(await self._in_lock_step(games))

    async def _in_lock_step(self, games: Sequence[GameSpec]) -> list[GameRecord]:
        assert self._lock_step is not None
        return await self._lock_step.play([self._to_its_end(spec, waits_for_opponents=True) for spec in games])

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

    async def _begin_group(self, first: str | None = None) -> None:
        """Begin a group, or wait `REDRAW_S` if no opponent can play. Raises OpponentError if none can any more.

        The policies whose buffers have room want it, in the order of their need, after the one that is `first`, if any.
        """
        wanting = []
        if len(self._buffers) > 1:  # a custom scheduler knows one policy
            names = [name for name, buffer in self._buffers.items() if name == first or not buffer.is_full]
            wanting = [sorted(names, key=lambda name: (name != first, self._buffers[name].load))]
        try:
            group = self._scheduler.next_train_group(self.seats.can_play, *wanting)
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
            for buffer in self._buffers_of(spec):
                buffer.begin_game(spec)
            self._rest_of_group.append(spec)

    def _buffers_of(self, spec: GameSpec) -> list[StepBuffer | EpisodeBuffer]:
        """Return the buffers of the policies that learn from a training game."""
        if len(self._buffers) == 1:
            return [self._buffer]
        policies = {agent.model.policy: None for agent in spec.agent_specs if agent.collect_data}
        return [self._buffers[policy] for policy in policies]

    async def _play_eval_games(self) -> None:
        while True:
            while not self._may_evaluate():
                await self._may_change.wait()
            try:
                spec = self._scheduler.next_eval_job(can_play=self.seats.can_play)
            except OpponentError:
                await asyncio.sleep(REDRAW_S)
                continue
            uid = next(agent.model.uid for agent in spec.agent_specs if agent.model.name is None)
            self.evaluating[uid] += 1
            try:
                await self._count_with_others(await self._to_its_end(spec))
            finally:
                self.evaluating[uid] -= 1

    @property
    def eval_share(self) -> float:
        """Share of evaluations without a quota of the newest games."""
        return sum(self._lately) / max(len(self._lately), 1)

    def _may_evaluate(self) -> bool:
        """Return whether a further evaluation game may start, of the current checkpoint and of the newest games."""
        num_playing = self.evaluating.total()
        room = self._config.eval_share * (len(self._lately) + num_playing + 1)
        return sum(self._lately) + num_playing + 1 <= max(room, 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the newest finished games; a game in flight does not count, because it is played again."""
        return {"lately": [*map(int, self._lately)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._lately.extend(map(bool, state.get("lately", ())))

    def tell_new_checkpoint(self) -> None:
        """Resume the evaluation games that wait for the registry's next current policy, or for their share."""
        self._may_change.set()
        self._may_change = asyncio.Event()

    def _lease(self, spec: GameSpec) -> None:
        """Lease until the game is over the adapter of every seat that keeps one; others lease one for each turn."""
        for version in self._kept_versions(spec):
            self._table.lease(version)

    def _end_leases(self, spec: GameSpec) -> None:
        for version in self._kept_versions(spec):
            self._table.end_lease(version)

    def _kept_versions(self, spec: GameSpec) -> set[int]:
        return {agent.model.adapter_version or 0 for agent in spec.agent_specs if self.seats.keeps_adapter(agent)}

    async def _to_its_end(self, spec: GameSpec, waits_for_opponents: bool = False) -> GameRecord:
        """Play one game with leased adapters to its one record, and end the leases in any case."""
        if spec.kind == "eval":  # the adapters of a training game are leased since its group began
            self._lease(spec)
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
        self._lately += (record.spec.kind == "eval" for record in records if record.spec.eval_label is None)
        if self._may_evaluate():
            self.tell_new_checkpoint()
        for record in records:
            self._scheduler.update(record)
        for listener in self._listeners:
            for record in records:
                listener.add_record(record)
        for record in records:
            if record.spec.kind == "train":
                for buffer in self._buffers_of(record.spec):
                    buffer.add_game(record)


@contextlib.contextmanager
def leased_newest(registry: ModelRegistry, table: AdapterTable, policy: str = "") -> Iterator[int]:
    """Lease the newest adapter of a policy and yield its version, 0 if it is the base.

    Nothing is awaited between the two, so the adapter cannot retire between them.
    """
    version = (registry.of(policy) if policy else registry).current.adapter_version or 0
    with table.leased(version):
        yield version
