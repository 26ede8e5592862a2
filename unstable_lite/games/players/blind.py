"""The best player that ignores the position: the bar for "the policy learned the game".

It has one list of preferences per seat and plays the first legal action on it. The lists are searched for by direct
play against one scripted opponent and then fixed: a policy that earns no more points than this player against the same
opponent may have learned only a habit.

The search depends only on env id, opponent and seed. It takes some seconds, once per process, when such a player is
first made or checked, and never during a game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean

from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import EnvError
from unstable_lite.games.env_catalogue import probe
from unstable_lite.games.env_start import LocalEnvironment, environment_of
from unstable_lite.games.players.scripted import RandomLegalPlayer, ScriptedPlayer, legal_actions
from unstable_lite.rng import derive_seed

EXACT_CLIMBS, SAMPLED_CLIMBS = 40, 4
"""Number of lists from which the search starts, with exact and with sampled points."""
GAMES = 100
"""Number of games that compare two lists if their points are not exact."""
PATIENCE = 4
"""Number of consecutive failed changes, per action in the list, after which a climb ends."""
FEW_POSITIONS = 1500
"""Largest number of positions that a list can meet if its points are computed exactly."""
_Seen = tuple[int, str]
"""Current player and its observation."""
_OWN_SEAT = re.compile(r"Player (\d+)")
"""Pattern of the seat in an observation: every env family with a reader of legal actions names it first."""


class BlindPlayer(ScriptedPlayer):
    """Plays the first legal action of a fixed list. Subclasses name the opponent of the search."""

    opponent: type[ScriptedPlayer] = RandomLegalPlayer

    def candidates(self, observation: str) -> list[str]:
        preferences = best_preferences(
            self.env_id,
            self.opponent,  # type: ignore[arg-type]  # mypy takes the class's own __hash__ for type's
            self._seat(observation),
        )
        return [first_legal(preferences, legal_actions(self.env_id, observation))]

    def _seat(self, observation: str) -> int:
        seat = _OWN_SEAT.search(observation)
        if seat is None:
            raise EnvError(f"{self.env_id}: no 'Player N' in the observation {observation[:200]!r}")
        return int(seat[1])


def first_legal(preferences: Sequence[str], actions: Sequence[str]) -> str:
    """Return the first of `preferences` that is among `actions`, or else the first of `actions`."""
    return next((action for action in preferences if action in actions), actions[0])


@cache
def best_preferences(env_id: str, opponent: type[ScriptedPlayer], seat: int, seed: int = 0) -> tuple[str, ...]:
    """Search for the list that earns the most points in games of two at `seat` against `opponent`.

    Hill climbing from several random lists: move one action to another place, and keep the list if it earns more.
    Points are exact for a board game with few positions, else a mean over games with the same seeds for every list.
    Raises the exceptions of `opponent` and `legal_actions`.
    """
    rng = random.Random(derive_seed(seed, "blind player", env_id, opponent.__name__, seat))
    games = _Games(env_id, opponent, seat)
    actions = games.legal_actions()
    points = games.exact_points if games.is_small(actions) else games.sampled_points
    num_climbs = EXACT_CLIMBS if points == games.exact_points else SAMPLED_CLIMBS
    found = [_climb(points, rng.sample(actions, len(actions)), rng) for _ in range(num_climbs)]
    return max(found)[1]


def _climb(
    points: Callable[[Sequence[str]], float], start: Sequence[str], rng: random.Random
) -> tuple[float, tuple[str, ...]]:
    """Improve a list until moving one action no longer helps; return its points and the list."""
    best, best_points, num_failed = list(start), points(start), 0
    while num_failed < PATIENCE * len(best):
        tried = list(best)
        moved = tried.pop(rng.randrange(len(tried)))
        # Actions near the front matter more.
        tried.insert(min(int(rng.expovariate(1 / 3)), len(tried)), moved)
        tried_points = points(tried) if tried != best else best_points
        if tried_points > best_points:
            best, best_points, num_failed = tried, tried_points, 0
        else:
            num_failed += 1
    return best_points, tuple(best)


class _TooManyPositions(Exception):
    pass


class _Games:
    """Games of two at one seat of an env against one opponent."""

    def __init__(self, env_id: str, opponent: type[ScriptedPlayer], seat: int) -> None:
        self._env_id, self._opponent, self._seat = env_id, opponent, seat
        self._other = opponent(env_id, 0)
        self._path: dict[str, tuple[str, ...]] = {}
        """Actions that first led to a position. Board games only: the observation is the position."""
        # The actions in a position, and the turn after each, are computed once over all lists.
        self._actions = cache(self._actions_at)
        self._after = cache(self._reached)

    def legal_actions(self) -> list[str]:
        """Return every action that was legal at this seat in some games of random legal play."""
        legal: set[str] = set()
        for game in range(GAMES):
            rng = random.Random(game)

            def choose(actions: Sequence[str], rng: random.Random = rng) -> str:
                legal.update(actions)
                return rng.choice(actions)

            self._play(game, choose)
        return sorted(legal)

    def sampled_points(self, preferences: Sequence[str]) -> float:
        """Return the mean points (win 1, draw 1/2) over a fixed set of games."""
        return fmean(self._play(game, lambda actions: first_legal(preferences, actions)) for game in range(GAMES))

    def is_small(self, preferences: Sequence[str]) -> bool:
        """Return whether the env is a board game with at most `FEW_POSITIONS` reachable positions."""
        if probe(self._env_id, 2, "board").problem is not None:
            return False
        try:
            self.exact_points(preferences)
        except _TooManyPositions:
            return False
        return True

    def exact_points(self, preferences: Sequence[str]) -> float:
        """Return the expected points over every possible game."""
        known: dict[str, float] = {}

        def value(seen: _Seen | float) -> float:
            if isinstance(seen, float):
                return seen
            pid, observation = seen
            if observation not in known:
                if len(known) > FEW_POSITIONS:
                    raise _TooManyPositions
                actions = self._actions(pid, observation)
                if pid == self._seat:
                    actions = [first_legal(preferences, actions)]
                known[observation] = fmean(value(self._after(observation, action)) for action in actions)
            return known[observation]

        return value(self._after())

    def _actions_at(self, pid: int, observation: str) -> list[str]:
        """Return the actions that the player may choose in a position."""
        is_own = pid == self._seat
        return legal_actions(self._env_id, observation) if is_own else self._other.candidates(observation)

    def _reached(self, position: str | None = None, action: str = "") -> _Seen | float:
        """Return the turn, or the points, after an action in a position; without one the first turn."""
        path = () if position is None else (*self._path[position], action)
        environment = environment_of(EnvSpec(env_id=self._env_id, num_players=2, observation="board"), 0)
        seen = environment.observe()
        for chosen in path:
            if environment.step(chosen):
                return self._points(environment)
            seen = environment.observe()
        self._path.setdefault(seen[1], path)
        return seen

    def _play(self, game: int, choose: Callable[[Sequence[str]], str]) -> float:
        seed = derive_seed(game, "blind player's env") % 2**31
        environment = environment_of(EnvSpec(env_id=self._env_id, num_players=2), seed)
        other, is_over = self._opponent(self._env_id, game), False
        while not is_over:
            pid, observation = environment.observe()
            own = pid == self._seat
            action = choose(legal_actions(self._env_id, observation)) if own else other.action(observation)
            is_over = environment.step(action)
        return self._points(environment)

    def _points(self, environment: LocalEnvironment) -> float:
        rewards, _ = environment.close()
        own, other = rewards[self._seat], rewards[1 - self._seat]
        return float(own > other) + (own == other) / 2
