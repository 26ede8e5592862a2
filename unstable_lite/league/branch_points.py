"""States within earlier training games, at which groups of games start (config section `branching`).

Holds the newest games that were played from their start, as seeds and actions; `run_game` reaches their states
again. It is part of the scheduler, not of the buffer: the scheduler chooses games, and gets every record.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import stdev
from typing import Any

import msgspec
from msgspec.structs import replace

from unstable_lite.config.games import BranchingConfig
from unstable_lite.rng import derive_seed, game_seed, restore, state_of
from unstable_lite.types import BranchPoint, GameRecord, GameSpec, PastTurn

GAMES = 64
"""Number of newest games that are kept for each env and its players who are not the policy."""
GROUPS = 32
"""Number of groups that the running mean of a turn's spread spans."""
LEAST = 0.05
"""Least weight of a turn, as a share of the largest one, so that every turn is measured again."""


def digest_of(observation: str) -> str:
    """Return a short text that differs for two observations."""
    return hashlib.blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class _Game(msgspec.Struct, frozen=True):
    seed: int
    turns: list[PastTurn]


class BranchPoints:
    def __init__(self, config: BranchingConfig, group_size: int, run_seed: int = 0) -> None:
        """Start without a game; until one has ended, every group starts at a game's start."""
        self._config = config
        self._group_size = group_size
        self._run_seed = run_seed
        self._rng = random.Random(derive_seed(run_seed, "branching"))
        self._games: dict[str, deque[_Game]] = {}
        """Games by env and players."""
        self._spreads: dict[tuple[str, int, int], tuple[int, float]] = {}
        """Number of groups, at most `GROUPS`, and running mean of the standard deviation of their returns, by env, seat
        and turn of the branch."""
        self._returns: dict[int, list[float | None]] = {}
        """Returns of the games of each group that is not complete; None: a void game."""

    def fork(self, group: Sequence[GameSpec]) -> list[GameSpec]:
        """Return a group as it is or, with the configured probability, moved to a state within an earlier game.

        The state is one of the same env, with the same players at the seats that are not the policy's, in which a
        trained seat acts.
        """
        first = group[0]
        if self._rng.random() >= self._config.share or not (points := list(self._points_for(first))):
            return list(group)
        weights = None if self._config.at == "random" else self._weights(first.env_id, points)
        ((game, turn),) = self._rng.choices(points, weights)
        here = game.turns[turn]
        start = BranchPoint(turns=tuple(game.turns[:turn]), pid=here.pid, digest=here.digest)
        return [replace(spec, seed=game.seed, start=self._with_chance(start, spec.game_idx)) for spec in group]

    def update(self, record: GameRecord) -> None:
        """Keep a finished training game as a source of states, or count its return if it began at one of them."""
        spec, is_void = record.spec, record.end == "void"
        if spec.start is None:
            if not is_void:
                turns = [PastTurn(turn.pid, digest_of(turn.observation), turn.action) for turn in record.turns]
                self._games.setdefault(_key(spec), deque(maxlen=GAMES)).append(_Game(spec.seed, turns))
            return
        assert spec.group_idx is not None
        if is_void:  # perhaps a state from before the run was resumed, which this process does not reach
            self._games.pop(_key(spec), None)
        returns = self._returns.setdefault(spec.group_idx, [])
        returns.append(None if is_void else record.rewards[spec.start.pid])
        if len(returns) == self._group_size:
            known = [each for each in self._returns.pop(spec.group_idx) if each is not None]
            if len(known) > 1:
                self._learn((spec.env_id, spec.start.pid, len(spec.start.turns)), stdev(known))

    def state_dict(self) -> dict[str, Any]:
        """Return games, spreads and the random stream; groups in flight are forgotten."""
        return {
            "rng": state_of(self._rng),
            "games": {key: msgspec.to_builtins(list(games)) for key, games in self._games.items()},
            "spreads": [[*turn, *spread] for turn, spread in self._spreads.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self._rng, state["rng"])
        self._games = {
            key: deque(msgspec.convert(games, list[_Game]), maxlen=GAMES) for key, games in state["games"].items()
        }
        self._spreads = {(env_id, pid, turn): (n, mean) for env_id, pid, turn, n, mean in state["spreads"]}
        self._returns.clear()

    def _points_for(self, spec: GameSpec) -> Iterator[tuple[_Game, int]]:
        """Yield (game, number of a turn), each as often as the state was visited: the states that the policy meets."""
        trained = {agent.pid for agent in spec.agent_specs if agent.collect_data}
        for game in self._games.get(_key(spec), ()):
            for number in range(1, len(game.turns)):
                if game.turns[number].pid in trained:
                    yield game, number

    def _weights(self, env_id: str, points: Sequence[tuple[_Game, int]]) -> list[float]:
        """Return the spread of returns at each point's turn; a turn that was never measured has the largest one."""
        spreads = [self._spreads.get((env_id, game.turns[turn].pid, turn)) for game, turn in points]
        largest = max((spread[1] for spread in spreads if spread is not None), default=0.0) or 1.0
        return [largest if spread is None else max(spread[1], LEAST * largest) for spread in spreads]

    def _learn(self, turn: tuple[str, int, int], spread: float) -> None:
        n, mean = self._spreads.get(turn, (0, 0.0))
        n = min(n + 1, GROUPS)
        self._spreads[turn] = n, mean + (spread - mean) / n

    def _with_chance(self, start: BranchPoint, game_idx: int) -> BranchPoint:
        if self._config.chance == "same":
            return start
        return replace(start, chance_seed=game_seed(derive_seed(self._run_seed, "chance"), "train", game_idx))


def _key(spec: GameSpec) -> str:
    """Return the env, as it is played, and its players: one word for all checkpoints, which remember no turn."""
    played_how = spec.observation, spec.env_kwargs, spec.error_allowance, spec.max_turns
    return " | ".join([spec.env_id, str(played_how), *(agent.model.name or "policy" for agent in spec.agent_specs)])
