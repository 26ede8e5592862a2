"""Decide how many training games may be in flight, so that their steps are trained on before they are too old.

Owns the estimates: how many steps a game brings, and how long games last. Knows nothing of engines or learners.

All steps of a game have the adapter version of its start, so a game ages while it is played. Its lifetime is counted
in steps here: those that all games brought meanwhile, because each batch of them is an update. By Little's law the mean
lifetime is the number of steps in flight, and a long game's lifetime is `spread` times as much. The buffer gives out
the oldest steps first, so that a long game's steps are in the next batch after its end. Less than a batch waits when it
starts, so they are trained on in time, at an age of at most `max_age` updates, if

    1 + spread * steps in flight / batch_size <= max_age.

What waits beyond a batch counts as in flight, too. Games may always start while the learner would lack steps without
them: games that grow too old are better than a learner that waits for ever.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any

from unstable_lite.types import GameSpec

PRIOR_GAMES = 4
"""Weight of the expected steps of a game, in games, beside those that were counted."""
GAMES = 256
"""Games of an env over which its running mean of steps goes."""
WINDOW = 512
"""Lifetimes from which `spread` is computed."""
FEW = 64
"""With fewer lifetimes `spread` is at least `USUAL_SPREAD`: the first games to end are the short ones."""
USUAL_SPREAD = 2.0
IN_TIME = 0.99
"""Share of the steps whose lifetime `spread` covers."""


def max_age(max_staleness: int, max_loras: int) -> int:
    """Return how many updates old a step may be when it is trained on.

    Games that are older than there are adapter slots for would make the next adapter wait for their end.
    """
    return min(max_staleness, max_loras - 1)


def most_in_flight(batch_size: int, max_age: int, spread: float) -> float:
    """Return how many steps may be in flight while less than a batch waits."""
    return batch_size * max(0, max_age - 1) / spread


def spread_of(lifetimes: Iterable[tuple[float, float]]) -> float:
    """Return how many times the mean lifetime a long one is. Each lifetime comes with its number of steps.

    The long one is the shortest that `IN_TIME` of all steps do not exceed.
    """
    longest_first = sorted(lifetimes, reverse=True)
    mean = fmean(lifetime for lifetime, _ in longest_first)
    beyond = (1 - IN_TIME) * sum(steps for _, steps in longest_first)
    if not mean or not beyond:
        return 1.0
    so_far = accumulate(steps for _, steps in longest_first)
    longest = next(life for (life, _), steps in zip(longest_first, so_far, strict=True) if steps > beyond)
    return max(1.0, longest / mean)


@dataclass(slots=True)
class _Game:
    env_id: str
    seats: int
    """Number of seats whose steps are collected."""
    born: int
    """Steps that all games had brought when it started."""
    steps: int | None = None
    """Number of steps that it brought; None while it is played."""


class InFlight:
    """The training games that have started and not ended, and what they will bring."""

    def __init__(
        self,
        batch_size: int,
        least: int,
        max_age: int | None,
        steps_per_seat: Mapping[str, float],
    ) -> None:
        """Start without a game.

        least: steps that the learner waits for. max_age: updates from the start of a game to the training on its
        steps, at most; None: any. steps_per_seat: by env id, what a seat is expected to bring before any game ended.
        """
        self._batch_size = batch_size
        self.least = least
        """Number of steps that the learner waits for."""
        self._max_age = max_age
        self._means = dict(steps_per_seat)
        self._ended: Counter[str] = Counter()
        """Games that a mean is of, by env id."""
        self._seats: Counter[str] = Counter()
        """Collecting seats in flight, by env id."""
        self._games: dict[int, _Game] = {}
        self._in_order: deque[_Game] = deque()
        """Games by their start, from the first one in flight on."""
        self._produced = 0
        self._lifetimes: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self.spread = USUAL_SPREAD
        """How many times the mean lifetime of a game a long one is."""

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
        return most_in_flight(self._batch_size, self._max_age, self.spread)

    def has_room(self, held: int) -> bool:
        """Whether a game may start while `held` steps wait."""
        steps = self.steps
        return held + steps < self.least or max(0, held - self.least) + steps < self.limit

    def begin(self, spec: GameSpec) -> None:
        """Count a game that starts now."""
        seats = sum(agent.collect_data for agent in spec.agent_specs)
        game = self._games[spec.game_idx] = _Game(spec.env_id, seats, self._produced)
        self._in_order.append(game)
        self._seats[spec.env_id] += seats
        self._means.setdefault(spec.env_id, float(spec.max_turns) / spec.num_players)

    def end(self, game_idx: int, steps: int) -> int:
        """Count a game's end and its steps; return when it was born, for `arrive`."""
        game = self._games.pop(game_idx, None)
        if game is None:  # of a buffer that is used without a collector
            return self._produced
        self._seats[game.env_id] -= game.seats
        self._produced += steps
        game.steps = steps
        self._learn()
        return game.born

    def arrive(self, born: int, steps: int) -> None:
        """Take the lifetime of a game, or group, whose steps are ready for the learner."""
        self._lifetimes.append((self._produced - born, steps))

    def measure(self) -> None:
        """Compute `spread` from the newest lifetimes."""
        if self._lifetimes:
            spread = spread_of(self._lifetimes)
            self.spread = spread if len(self._lifetimes) >= FEW else max(spread, USUAL_SPREAD)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimates; games in flight are lost with the process that plays them."""
        return {
            "means": {env_id: [self._ended[env_id], mean] for env_id, mean in self._means.items()},
            "lifetimes": [list(one) for one in self._lifetimes],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for env_id, (ended, mean) in state["means"].items():
            self._ended[env_id], self._means[env_id] = ended, mean
        self._lifetimes.extend((lifetime, steps) for lifetime, steps in state["lifetimes"])
        self.measure()

    def _learn(self) -> None:
        """Update the means in the order in which games started: the first ones to end are short ones."""
        order = self._in_order
        while order:
            game = order[0]
            if game.steps is None:
                if len(order) <= len(self._games) + WINDOW:
                    return
                order.rotate(-1)  # one game that lasts very long does not stop the estimate
                continue
            order.popleft()
            self._ended[game.env_id] += 1
            rate = max(2 / (self._ended[game.env_id] + 1 + PRIOR_GAMES), 1 / GAMES)
            self._means[game.env_id] += rate * (game.steps / max(game.seats, 1) - self._means[game.env_id])
