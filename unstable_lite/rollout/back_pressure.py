"""Limit the training games in flight so that their steps are trained on before they are too old.

Owns the estimates of how many steps a game brings and how long games last, and the counts of the steps that were too
old, by the length of their game. Knows nothing of engines or learners.

The steps of a game are ready when it ends, and have the adapter version of its start or (`league.adapter_policy`
"turn") of their turn's start, so they age while the game is played. A game's lifetime is measured
in steps, as the number that all games brought during it, because each batch of steps is an update. By Little's law the
mean lifetime is the number of steps in flight, and a long game's lifetime is `spread` times as much. The buffer gives
out the oldest steps first, so a long game's steps are in the next batch after its end. Less than a batch waits when the
game starts, so its steps are trained on in time, at an age of at most `max_age` updates, if

    1 + spread * steps in flight / batch_size <= max_age.

If turns have different versions, `spread` is the ratio of a long age of a step to the mean lifetime. A further limit
then keeps turns so short that no adapter waits for their slots.

Steps that wait beyond a batch count as in flight, too. Games may always start while the learner would lack steps
without them: games that grow too old are better than a learner that waits for ever.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from unstable_lite.types import GameSpec, Step

T = TypeVar("T")

PRIOR_GAMES = 4
"""Weight, in games, of the initial estimate of a game's steps."""
GAMES = 256
"""Number of games that an env's running mean of steps spans."""
WINDOW = 512
"""Number of newest lifetimes from which `spread` is computed."""
FEW = 64
"""Number of lifetimes below which `spread` is at least `USUAL_SPREAD`: the first games to end are the short ones."""
USUAL_SPREAD = 2.0
IN_TIME = 0.99
"""Share of the steps whose age `spread` covers."""
PATIENCE = 8
"""Number of finished games that may wait for one game, per game of the largest number ever in flight at once. A game
that outlasts so many others is no longer waited for, so that a game that hangs stops no curve and memory stays bounded.
"""
AGES = 16
"""Most ages that represent the steps of one game whose turns have different versions."""
LENGTHS = (4, 8, 16, 32, 64)
"""Largest number of turns in each class of game length; longer games form one more class."""
UNKNOWN_LENGTH = "unknown turns"
"""Class of steps that were added without their game."""


def max_age(max_staleness: int, max_loras: int) -> int:
    """Return the age limit of a step when it is trained on, in updates.

    The next adapter would have to wait for the end of any game that is older than there are adapter slots.
    """
    return min(max_staleness, max_loras - 1)


def spread_of(lifetimes: Sequence[tuple[float, float]], ages: Iterable[tuple[float, float]] | None = None) -> float:
    """Return the ratio of a long age of a step to the mean lifetime, at least 1.

    Each lifetime or age comes with its number of steps. ages: of the steps at the end of their game; default: the
    lifetimes.
    """
    mean = fmean(lifetime for lifetime, _ in lifetimes)
    return max(1.0, _long(lifetimes if ages is None else ages) / mean) if mean else 1.0


def ages_by_turn(lifetimes: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield ages of steps at the end of their game, and their numbers, if each step's age starts at its own turn.

    Assumes that a game's turns take equally long.
    """
    for lifetime, steps in lifetimes:
        n = max(1, min(AGES, round(steps)))
        yield from ((lifetime * (n - k) / n, steps / n) for k in range(n))


def turn_spread_of(lifetimes: Sequence[tuple[float, float]]) -> float:
    """Return the ratio of a long turn to the mean lifetime.

    A long turn takes `USUAL_SPREAD` times as long as the turns of the slowest games take on average, not counting the
    turns of others.
    """
    mean = fmean(lifetime for lifetime, _ in lifetimes)
    turns = ((lifetime / steps, steps) for lifetime, steps in lifetimes if steps)
    return USUAL_SPREAD * _long(turns) / mean if mean else USUAL_SPREAD


def _long(ages: Iterable[tuple[float, float]]) -> float:
    """Return the lowest age that a share of `IN_TIME` of all steps does not exceed; 0 without a step."""
    longest_first = sorted(ages, reverse=True)
    beyond = (1 - IN_TIME) * sum(steps for _, steps in longest_first)
    so_far = accumulate(steps for _, steps in longest_first)
    return next((age for (age, _), steps in zip(longest_first, so_far, strict=True) if steps > beyond), 0.0)


class InOrder(Generic[T]):
    """Results of games by game number, released in the order in which the games began.

    Short games end first: until the first wave of games is over, a mean over the finished games is the mean of short
    games. In the order in which they began, they are an unbiased sample. Waiting results are not saved: a resumed run
    does not finish the games that were in flight, and without those the finished games behind them are short ones.
    """

    def __init__(self) -> None:
        self._begun: deque[int] = deque()
        """Games that were not released yet, in order."""
        self._in_flight: set[int] = set()
        self._ended: dict[int, T] = {}
        self._most_in_flight = 0

    def begin(self, number: int) -> None:
        self._begun.append(number)
        self._in_flight.add(number)
        self._most_in_flight = max(self._most_in_flight, len(self._in_flight))

    def end(self, number: int, left: T) -> list[T]:
        """Return the results to release now. They include this one if no other game waits for it."""
        if number not in self._in_flight:
            return [left]
        self._in_flight.discard(number)
        self._ended[number] = left
        released = []
        while self._begun:
            first = self._begun[0]
            if first in self._ended:
                released.append(self._ended.pop(first))
            elif len(self._ended) > PATIENCE * self._most_in_flight:
                self._in_flight.discard(first)
            else:
                break
            self._begun.popleft()
        return released


class _Game(NamedTuple):
    env_id: str
    seats: int
    """Number of seats whose steps are collected."""
    born: int


class InFlight:
    """Training games that have started and not ended, and the steps expected from them.

    A game's birth is the number of steps that all games had brought when it started.
    """

    def __init__(
        self,
        batch_size: int,
        least: int,
        max_age: int | None,
        steps_per_seat: Mapping[str, float],
        max_turn_age: int | None = None,
    ) -> None:
        """Start without a game.

        least: number of steps that the learner waits for. max_age: largest number of updates from the sampling of a
        step to the training on it; None: unlimited. steps_per_seat: initial estimate of a seat's steps, by env id.
        max_turn_age: largest number of updates during a turn, if each turn has the version of its own start; None: all
        turns have the version of their game's start.
        """
        self._batch_size = batch_size
        self.least = least
        self._max_age = max_age
        self._means = dict(steps_per_seat)
        self._ended: Counter[str] = Counter()
        """Number of games in each mean, by env id."""
        self._seats: Counter[str] = Counter()
        """Number of collecting seats in flight, by env id."""
        self._games: dict[int, _Game] = {}
        self._ends: InOrder[tuple[_Game, int | None]] = InOrder()
        """Games that are over and their steps."""
        self._produced = 0
        self._lifetimes: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self.spread = USUAL_SPREAD
        """Ratio of a long age of a step, at the end of its game, to the mean lifetime of games."""
        self.turn_spread = USUAL_SPREAD
        """Ratio of a long turn to the mean lifetime of games; used with `max_turn_age`."""
        self._max_turn_age = max_turn_age

    def __len__(self) -> int:
        """Return the number of games."""
        return len(self._games)

    @property
    def steps(self) -> float:
        """Number of steps that the games in flight are expected to bring."""
        return sum(seats * self._means[env_id] for env_id, seats in self._seats.items())

    @property
    def limit(self) -> float:
        """Number of steps, waiting and in flight, at which no further game starts."""
        if self._max_age is None:
            return float("inf")
        limit = self._batch_size * max(0, self._max_age - 1) / self.spread
        if self._max_turn_age is None or not self.turn_spread:
            return limit
        return min(limit, self._batch_size * self._max_turn_age / self.turn_spread)

    def has_room(self, held: int) -> bool:
        """Return whether a game may start while `held` steps wait."""
        steps = self.steps
        return held + steps < self.least or max(0, held - self.least) + steps < self.limit

    def begin(self, spec: GameSpec, policy: str = "") -> None:
        """Count a game that starts now, with the collected seats of `policy`."""
        seats = sum(agent.collect_data and agent.model.policy == policy for agent in spec.agent_specs)
        self._games[spec.game_idx] = _Game(spec.env_id, seats, self._produced)
        self._ends.begin(spec.game_idx)
        self._seats[spec.env_id] += seats
        self._means.setdefault(spec.env_id, float(spec.max_turns) / spec.num_players)

    def end(self, game_idx: int, steps: int | None) -> int | None:
        """Count a game's end and its steps; return its birth, for `arrive`.

        steps: None for a game of which steps are dropped because their lineage has ended; it says nothing of others,
        and neither does its birth, which is None.
        """
        game = self._games.pop(game_idx, None)
        if game is None:  # the buffer is used without a collector
            return self._produced
        self._seats[game.env_id] -= game.seats
        self._produced += steps or 0
        for ended, brought in self._ends.end(game_idx, (game, steps)):
            if brought is not None:
                self._ended[ended.env_id] += 1
                rate = max(2 / (self._ended[ended.env_id] + 1 + PRIOR_GAMES), 1 / GAMES)
                self._means[ended.env_id] += rate * (brought / max(ended.seats, 1) - self._means[ended.env_id])
        return None if steps is None else game.born

    def arrive(self, born: int | None, steps: int) -> None:
        """Record the lifetime of a game or group whose steps are ready for the learner."""
        if born is not None:
            self._lifetimes.append((self._produced - born, steps))

    def measure(self) -> None:
        """Compute the spreads from the newest lifetimes."""
        if self._lifetimes:
            self.set_spreads(self._lifetimes)
            if len(self._lifetimes) < FEW:
                self.spread = max(self.spread, USUAL_SPREAD)

    def set_spreads(self, lifetimes: Sequence[tuple[float, float]]) -> None:
        """Compute the spreads from lifetimes of games, which come with their numbers of steps."""
        if self._max_turn_age is None:
            self.spread = spread_of(lifetimes)
        else:
            self.spread, self.turn_spread = spread_of(lifetimes, ages_by_turn(lifetimes)), turn_spread_of(lifetimes)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates; games in flight are lost when the process ends."""
        return {
            "means": {env_id: [self._ended[env_id], mean] for env_id, mean in self._means.items()},
            "lifetimes": [list(one) for one in self._lifetimes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for env_id, (ended, mean) in state["means"].items():
            self._ended[env_id], self._means[env_id] = ended, mean
        self._lifetimes.extend((lifetime, steps) for lifetime, steps in state["lifetimes"])
        self.measure()


class Room:
    """Callers that wait until the buffer of any policy has room for a game."""

    def __init__(self, buffers: list[Any]) -> None:
        self.buffers = buffers
        self._waiting: deque[asyncio.Future[None]] = deque()

    def _is_full(self) -> bool:
        return all(buffer.is_full for buffer in self.buffers)

    async def wait(self, has_game: Callable[[], bool]) -> None:
        """Wait until there is room or `has_game` returns True; `wake` makes callers check again.

        The caller must start the game before it awaits anything else.
        """
        while self._is_full() and not has_game():
            room = asyncio.get_running_loop().create_future()
            self._waiting.append(room)
            try:
                await room
            except asyncio.CancelledError:
                if room in self._waiting:
                    self._waiting.remove(room)
                self.wake_if_free()  # if this caller was woken, wake another one instead
                raise
            self.wake_if_free()  # the next caller checks after this one has started its game

    def wake(self, num_callers: int) -> None:
        """Make `num_callers` callers of `wait` check again."""
        while self._waiting and num_callers:
            room = self._waiting.popleft()
            if not room.done():
                room.set_result(None)
                num_callers -= 1

    def wake_if_free(self) -> None:
        """Wake one caller of `wait` if a game may start."""
        if self._waiting and not self._is_full():
            self.wake(1)


def length_class(num_turns: int) -> str:
    """Return the class of a game's length, as metrics name it: `9-16 turns`, `65+ turns`."""
    index = bisect_left(LENGTHS, num_turns)
    least = LENGTHS[index - 1] + 1 if index else 1
    return f"{least}-{LENGTHS[index]} turns" if index < len(LENGTHS) else f"{least}+ turns"


FATES = ("played", "trained", "dropped")
"""Fates of a collected step: it was in a game that ended and was not void, the learner took it, it became too stale."""


class CountsByLength(defaultdict[tuple[str, str], Counter[str]]):
    """Numbers of steps by fate since the start of the run, by env id and class of game length."""

    def __init__(self) -> None:
        super().__init__(Counter)

    @classmethod
    def of(cls, state: Iterable[Iterable[Any]]) -> CountsByLength:
        """Return the counts that `state_dict` returned."""
        made = cls()
        for env_id, turns, *counts in state:
            made[env_id, turns].update(dict(zip(FATES, counts, strict=True)))
        return made

    def state_dict(self) -> list[list[Any]]:
        return [[*key, *(counts[fate] for fate in FATES)] for key, counts in self.items()]

    def add(self, steps: Iterable[Step], fate: Literal["played", "trained", "dropped"]) -> None:
        for step in steps:
            self[step.env_id, step.step_info.get("game_length", UNKNOWN_LENGTH)][fate] += 1

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics, of each class of length and of all."""
        metrics: dict[str, float] = {}
        for (env_id, turns), counts in self.items():
            for fate in FATES:
                total = f"collection-{env_id}/Steps {fate.capitalize()}"
                metrics[total] = metrics.get(total, 0) + counts[fate]
                metrics[f"{total} ({turns})"] = counts[fate]
        return metrics

    def most_dropped(self) -> str | None:
        """Return the env and class of game length with the largest share of dropped steps, and that share; or None."""
        shares = {key: c["dropped"] / c["played"] for key, c in self.items() if c["dropped"] and c["played"]}
        if not shares:
            return None
        env_id, turns = max(shares, key=shares.__getitem__)
        return f"{env_id}, {turns}: {shares[env_id, turns]:.1%}"
