"""Groups of games that start within an earlier game, as an env sampler: docs/branching.md describes it.

`env_sampling_strategy = { "branching:Branching" = { share = 0.5, at = "random", chance = "fresh" } }` in a TOML, as in
examples/branching.toml. Python must be able to import the module.

It holds the newest games that were played from their start, as seeds and actions; the run reaches their states again.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import stdev
from typing import Any

import msgspec
from msgspec.structs import replace

import unstable_lite as unstable
from unstable_lite.config.env_ids import is_judged
from unstable_lite.config.games import parse_player
from unstable_lite.errors import ConfigError
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.local_game import hang_guard
from unstable_lite.games.players.scripted import lists_actions, random_legal_action
from unstable_lite.rng import derive_seed, digest_of, game_seed, restore, state_of
from unstable_lite.types import ENV_LOST, BranchPoint, GameRecord, GameSpec, ModelRef, PastTurn

GAMES = 64
"""Number of newest games that are kept for each env and its players who are not the policy."""
GROUPS = 32
"""Number of groups that the running mean of a turn's spread spans."""
LEAST = 0.05
"""Least weight of a turn, as a share of the largest one, so that every turn is measured again."""
TRIAL_GAMES, TRIAL_TURNS, TRIAL_S = 12, 200, 5.0
"""Games of each env that are played twice, their longest length, and the longest time of all."""


class Game(msgspec.Struct, frozen=True):
    seed: int
    turns: list[PastTurn]


class Branching(unstable.samplers.UniformRandomEnvSampler):
    """Draws every env with the same probability, and lets a share of the groups start within an earlier game.

    To choose envs in another way, extend another sampler. Until a game has ended, every group starts at a game's start.
    """

    def __init__(
        self,
        train_envs: Sequence[unstable.TrainEnvSpec],
        eval_envs: Sequence[unstable.EvalEnvSpec] = (),
        rng_seed: int = 489,
        share: float = 0.5,
        at: str = "random",
        chance: str = "fresh",
    ) -> None:
        """Refuse envs that cannot branch; a few games of each are played twice.

        share: of the groups. at: "random", each turn of the policy in the newest games equally likely, or "uncertain",
        in proportion to the spread that returns had in the groups that started at the turn of this number so far.
        chance: after the start, "fresh", of its own in each game, or "same", as in the earlier game.
        """
        super().__init__(train_envs, eval_envs, rng_seed)
        if problems := list(problems_of(self.train_env_specs, share, at, chance)):
            raise ConfigError(*problems)
        self._share, self._at, self._chance = share, at, chance
        self._rng = random.Random(derive_seed(rng_seed, "branching"))
        self._chance_seed = derive_seed(rng_seed, "chance")
        self._games: dict[str, deque[Game]] = {}
        """Games by env and players."""
        self._spreads: dict[tuple[str, int, int], tuple[int, float]] = {}
        """Number of groups, at most `GROUPS`, and running mean of the standard deviation of their returns, by env, seat
        and turn of the branch."""
        self._returns: dict[int, list[float | None]] = {}
        """Returns of the games of each group that is not complete; None: a void game."""
        self._group_size = 0

    def fork(self, group: Sequence[GameSpec]) -> list[GameSpec]:
        """Return a group as it is or, with the configured probability, moved to a state within an earlier game.

        The state is one of the same env, with the same players at the seats that are not the policy's, in which a
        trained seat acts.
        """
        first, self._group_size = group[0], len(group)
        if len(group) == 1 or any(spec.agent_specs != first.agent_specs for spec in group):
            raise ConfigError(
                "branching compares the games that start from one state, so it needs run.group_size of 2 or more, and "
                "rewards.group_baseline = 'grpo', 'mean' or 'rloo', not 'duplicate'"
            )
        if self._rng.random() >= self._share or not (points := list(self._points_for(first))):
            return list(group)
        weights = None if self._at == "random" else self._weights(first.env_id, points)
        ((game, turn),) = self._rng.choices(points, weights)
        here = game.turns[turn]
        start = BranchPoint(turns=tuple(game.turns[:turn]), pid=here.pid, digest=here.digest)
        return [replace(spec, seed=game.seed, start=self._with_chance(start, spec.game_idx)) for spec in group]

    def add_record(self, record: GameRecord) -> None:
        """Keep a finished training game as a source of states, or count its return if it began at one of them."""
        spec, is_void = record.spec, record.end == "void"
        if spec.start is None:
            if not is_void:
                turns = [PastTurn(turn.pid, digest_of(turn.observation), turn.action) for turn in record.turns]
                self._games.setdefault(key_of(spec), deque(maxlen=GAMES)).append(Game(spec.seed, turns))
            return
        assert spec.group_idx is not None
        if is_void and record.reason != ENV_LOST:  # perhaps a state that this process does not reach after a resume
            self._games.pop(key_of(spec), None)
        returns = self._returns.setdefault(spec.group_idx, [])
        returns.append(None if is_void else record.rewards[spec.start.pid])
        if len(returns) == self._group_size:
            known = [each for each in self._returns.pop(spec.group_idx) if each is not None]
            if len(known) > 1:
                self._learn((spec.env_id, spec.start.pid, len(spec.start.turns)), stdev(known))

    def state_dict(self) -> dict[str, Any]:
        """Return games, spreads and the random streams; groups in flight are forgotten."""
        return super().state_dict() | {
            "rng": state_of(self._rng),
            "games": {key: msgspec.to_builtins(list(games)) for key, games in self._games.items()},
            "spreads": [[*turn, *spread] for turn, spread in self._spreads.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        restore(self._rng, state["rng"])
        self._games = {
            key: deque(msgspec.convert(games, list[Game]), maxlen=GAMES) for key, games in state["games"].items()
        }
        self._spreads = {(env_id, pid, turn): (n, mean) for env_id, pid, turn, n, mean in state["spreads"]}
        self._returns.clear()

    def _points_for(self, spec: GameSpec) -> Iterator[tuple[Game, int]]:
        """Yield (game, number of a turn), each as often as the state was visited: the states that the policy meets."""
        trained = {agent.pid for agent in spec.agent_specs if agent.collect_data}
        for game in self._games.get(key_of(spec), ()):
            for number in range(1, len(game.turns)):
                if game.turns[number].pid in trained:
                    yield game, number

    def _weights(self, env_id: str, points: Sequence[tuple[Game, int]]) -> list[float]:
        """Return the spread of returns at each point's turn; a turn that was never measured has the largest one."""
        spreads = [self._spreads.get((env_id, game.turns[turn].pid, turn)) for game, turn in points]
        largest = max((spread[1] for spread in spreads if spread is not None), default=0.0) or 1.0
        return [largest if spread is None else max(spread[1], LEAST * largest) for spread in spreads]

    def _learn(self, turn: tuple[str, int, int], spread: float) -> None:
        n, mean = self._spreads.get(turn, (0, 0.0))
        n = min(n + 1, GROUPS)
        self._spreads[turn] = n, mean + (spread - mean) / n

    def _with_chance(self, start: BranchPoint, game_idx: int) -> BranchPoint:
        if self._chance == "same":
            return start
        return replace(start, chance_seed=game_seed(self._chance_seed, "train", game_idx))


def key_of(spec: GameSpec) -> str:
    """Return the env, as it is played, and its players.

    One word stands for all checkpoints, which remember no turn. Each member of an average has its own, because the
    game's earlier moves say which of them plays.
    """
    played_how = spec.observation, spec.env_kwargs, spec.error_allowance, spec.max_turns
    return " | ".join([spec.env_id, str(played_how), *(_player(agent.model) for agent in spec.agent_specs)])


def _player(model: ModelRef) -> str:
    name = model.name or "policy"
    return f"{name} {model.adapter_version}" if parse_player(name).kind == "average" else name


def problems_of(train_envs: Sequence[unstable.TrainEnvSpec], share: float, at: str, chance: str) -> Iterator[str]:
    """Yield each reason why groups cannot start within an earlier game. Plays games of each training env twice."""
    if not 0 <= share < 1:
        yield f"branching: share = {share} must be at least 0 and below 1"
    if at not in ("random", "uncertain") or chance not in ("same", "fresh"):
        yield f"branching: at = {at!r} must be 'random' or 'uncertain', and chance = {chance!r} 'same' or 'fresh'"
    if all(is_judged(env.env_id) for env in train_envs):
        yield "branching: a question is one turn, so no group could start after it; add a game to train_envs"
    for index, env in enumerate(train_envs):
        where = f"branching: train_envs.{index}: {env.env_id}"
        if env.max_turns == 1:
            yield f"{where} has max_turns = 1, so no group can start after its first turn"
        elif (turn := first_difference(env)) is not None:
            yield f"{where} does not repeat: with the same seed and actions, a game differs from its turn {turn} on"


def first_difference(env: unstable.TrainEnvSpec) -> int | None:
    """Return the turn from which on a game differs if seed and actions are repeated, or None if none of a few did.

    The run itself compares the turns of isolated envs, which may hang.
    """
    # An env may not start, and the moves may be no moves of a custom one, which may then raise: `check` reports that.
    with contextlib.suppress(Exception), hang_guard(TRIAL_S):
        until = time.monotonic() + TRIAL_S
        for seed in takewhile(lambda _: time.monotonic() < until, range(0 if env.isolated else TRIAL_GAMES)):
            turns = turns_of(env, seed, [])
            again = turns_of(env, seed, [action for _, _, action in turns])
            if again != turns:
                return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turns, again, strict=False)))
    return None


def turns_of(env: unstable.TrainEnvSpec, seed: int, actions: Sequence[str]) -> list[tuple[int, str, str]]:
    """Play `actions`, and then random ones; return player, observation and action of each turn."""
    rng, environment, turns = random.Random(seed), environment_of(env, seed), list[tuple[int, str, str]]()
    turn: tuple[int, str] | None = environment.observe()
    while turn is not None and len(turns) < min(env.max_turns, TRIAL_TURNS):
        if len(turns) < len(actions):
            action = actions[len(turns)]
        else:
            action = random_legal_action(env.env_id, turn[1], rng) if lists_actions(env.env_id) else "[0]"
        turns.append((*turn, action))
        turn = environment.play(action)
    return turns
