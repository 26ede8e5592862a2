"""The only user of TextArena: one fresh env per game, each with its own random streams.

TextArena's envs draw from the global `random` (a few from `numpy.random`), and every reset re-seeds it. Stand-ins for
both in its modules delegate to the streams of the game whose env is being called; the rest of the process does not see
them. Calls into an env are synchronous, and short if the env works.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import math
import random
import sys
import threading
import types
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite import plugins
from unstable_lite.errors import EnvError, UnstableError
from unstable_lite.games.local_game import STEP_ERRORS, LocalGame, Overdue, guarded_call
from unstable_lite.types import Observation, Outcome

WORD_LISTS = "textarena.envs.utils.word_lists"


class _LoadsLate(importlib.abc.MetaPathFinder):
    """Load TextArena's word lists only for envs that use them: they import nltk, which takes 17 MB and a second."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if fullname == WORD_LISTS else None
        if spec is not None and spec.loader is not None:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _LoadsLate())

import textarena as ta  # noqa: E402
from textarena.wrappers.ObservationWrappers.llm_observation_wrapper import (  # noqa: E402
    FirstLastObservationWrapper,
    GameBoardObservationWrapper,
)

_TEAMS: dict[str, Callable[[Any, int], Any]] = {
    "Codenames": lambda _env, pid: pid // 2,
    "SecretMafia": lambda env, pid: env.player_roles[pid] == "Mafia",
    "Taboo": lambda env, pid: pid // env.team_size,
}
"""Team of a player in TextArena's envs of teams, by family. A custom env may have an attribute `teams`."""
_ELIMINATED: dict[str, Callable[[Any, int], bool]] = {
    "SecretMafia": lambda game, pid: pid not in game["alive_players"],
    "Snake": lambda game, pid: not game["snakes"][pid].alive,
    "Surround": lambda game, pid: not game["players"][pid].alive,
}
"""Whether a player is out in TextArena's envs whose state has no `elimination_order`, by family."""
_OBSERVED_BY = {"first-last": FirstLastObservationWrapper, "board": GameBoardObservationWrapper}


class _Thread(threading.local):
    """The game whose env is being called."""

    game: Environment | None = None


_thread = _Thread()


class _StandIn(types.ModuleType):
    """Stand-in for a module inside TextArena: the stream's names are those of the current game's stream."""

    def __init__(self, module: types.ModuleType, stream_class: type, stream: str) -> None:
        super().__init__(module.__name__)
        self._module, self._stream_class, self._stream = module, stream_class, stream

    def seed(self, *arguments: Any, **named: Any) -> None:
        game = _thread.game
        of_game = game if self._module is random else game and game.numpy_random
        (of_game or self._module).seed(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        game = _thread.game
        is_drawn = game is not None and hasattr(self._stream_class, name)
        return getattr(getattr(game, self._stream) if is_drawn else self._module, name)


_numpy = types.ModuleType("numpy")
vars(_numpy).update(__getattr__=partial(getattr, np))
_numpy.random = _StandIn(np.random, np.random.RandomState, "numpy_random")  # type: ignore[attr-defined]
_STAND_INS = {id(random): _StandIn(random, random.Random, "stream"), id(np): _numpy}


class Environment(LocalGame):
    """One game of one env."""

    def __init__(
        self,
        env_id: str,
        num_players: int,
        seed: int,
        observation: Observation = "env",
        env_kwargs: tuple[tuple[str, Any], ...] = (),
        error_allowance: int = 0,
    ) -> None:
        """Make and reset the env. TextArena's exceptions are passed through."""
        self.env_id = env_id
        self.num_players = num_players
        self._seed = seed
        self._seeding = seed, 2
        self._stream: random.Random | None = None
        self._numpy_random: np.random.RandomState | None = None
        self.was_invalid = False
        """Whether the last action broke the rules."""
        self._offenders: set[int] = set()
        self._env = self._call(
            self._start, _prepare(env_id), observation, {name: _with_lists(value) for name, value in env_kwargs}
        )
        self._env.state.error_allowance = error_allowance
        self._unwrapped = self._env  # wrappers look up `state` slowly
        while isinstance(self._unwrapped, ta.Wrapper):
            self._unwrapped = self._unwrapped.env

    @property
    def teams(self) -> dict[int, str] | None:
        """Label of each player's team, if they win and lose together; empty if the env does not name the teams."""
        if not isinstance(self._unwrapped.state, ta.TeamMultiPlayerState):
            return None
        team_of, env = _TEAMS.get(self.env_id.partition("-v")[0]), self._unwrapped
        try:
            return {pid: str(team_of(env, pid) if team_of else env.teams[pid]) for pid in range(self.num_players)}
        except (AttributeError, TypeError, LookupError):
            return {}

    @property
    def eliminated(self) -> tuple[int, ...]:
        """Players whom the rules have eliminated."""
        state = self._unwrapped.state
        is_out, order = _ELIMINATED.get(self.env_id.partition("-v")[0]), getattr(state, "elimination_order", ())
        pids = range(self.num_players)
        return tuple(pid for pid in pids if pid in order or (is_out is not None and is_out(state.game_state, pid)))

    def seed(self, a: Any = None, version: int = 2) -> None:
        """Seed `random` before its next draw: all envs seed it, most never draw, and seeding takes half a turn."""
        self._seeding, self._stream = (a, version), None

    def reseed(self, seed: int) -> None:
        """Give the env other random streams from here on."""
        self.seed(seed, 2)
        self._seed, self._numpy_random = seed, None

    @property
    def stream(self) -> random.Random:
        """Random stream that replaces the global `random` for this game."""
        if self._stream is None:
            self._stream = random.Random(0)
            self._stream.seed(*self._seeding)
        return self._stream

    @property
    def numpy_random(self) -> np.random.RandomState:
        if self._numpy_random is None:
            self._numpy_random = np.random.RandomState(self._seed)
        return self._numpy_random

    def observe(self) -> tuple[int, str]:
        """Return the current player and its observation. Drains the env's queue: call once per turn."""
        return self._checked_turn(self._call(self._env.get_observation))

    def step(self, action: str) -> bool:
        done, _ = self._call(self._env.step, action)
        return bool(done)

    def play(self, action: str) -> tuple[int, str] | None:
        """Call `step`, and `observe` unless the game is over; set `was_invalid` for this action. Raises EnvRaised."""
        state = self._unwrapped.state
        errors_before = getattr(state, "error_count", 0)
        turn = self._call(self._step_and_observe, action)
        # TextArena counts the errors of the current player's turn, and sets the count to 0 after a valid move.
        self.was_invalid = getattr(state, "error_count", 0) > errors_before
        # TextArena never clears a player's flag, but the player may continue: clear it to notice the next invalid move.
        for pid, remarks in state.game_info.items():
            if remarks.get("invalid_move"):
                remarks["invalid_move"] = False
                self.was_invalid = True
                self._offenders.add(int(pid))
        return None if turn is None else self._checked_turn(turn)

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        """Return every player's reward and `game_info`.

        Raises EnvError if a reward is missing or not a finite number.
        """
        rewards, game_info = self._call(self._env.close)
        remarks = {int(pid): about for pid, about in game_info.items()}
        for pid in self._offenders:
            remarks[pid]["invalid_move"] = True
        return _checked_rewards(self.env_id, self.num_players, rewards), remarks

    def rewards_so_far(self) -> dict[int, float]:
        """Return every player's reward if the game ends now: 0, or in a single-player game the env's progress measure.

        TextArena's envs pay the same at their own turn limit. Raises EnvError if a reward is not a finite number.
        """
        measure = getattr(self._unwrapped, "_get_percentage_completion", None) if self.num_players == 1 else None
        rewards = dict.fromkeys(range(self.num_players), 0.0) if measure is None else {0: self._call(measure)}
        return _checked_rewards(self.env_id, self.num_players, rewards)

    def _start(self, env_id: str, observation: Observation, env_kwargs: dict[str, Any]) -> Any:
        if observation == "env":
            env = ta.make(env_id, **env_kwargs)
        else:
            bare = ta.make(bare_id(env_id), **env_kwargs)
            env = _OBSERVED_BY[observation](ta.wrappers.ActionFormattingWrapper(bare))
        env.reset(num_players=self.num_players, seed=self._seed)
        return env

    def _step_and_observe(self, action: str) -> Any:
        with STEP_ERRORS:
            result = self._env.step(action)
        done, _ = result
        return None if done else self._env.get_observation()

    def _checked_turn(self, turn: Any) -> tuple[int, str]:
        if not isinstance(turn, tuple | list) or len(turn) != 2:
            raise EnvError(f"{self.env_id}: get_observation returned {turn!r:.200}, not a player and an observation")
        pid, observation = turn
        if not isinstance(pid, int | np.integer) or not 0 <= pid < self.num_players:
            raise EnvError(
                f"{self.env_id}: player {pid!r:.200} is to move, but players are 0 to {self.num_players - 1}"
            )
        if not isinstance(observation, str):
            raise EnvError(f"{self.env_id}: observation is {type(observation).__name__}, not text; register a wrapper")
        return int(pid), observation

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call `function` with the streams of this game, under the guard of this thread if it has one."""
        _thread.game = self
        try:
            return guarded_call(function, *arguments)
        except Overdue as overdue:
            problem = f"{self.env_id}: a call did not return within run.env_timeout_s = {overdue.limit_s:g}"
            raise EnvError(problem, reason="env_timeout") from overdue
        finally:
            _thread.game = None


def _with_lists(value: Any) -> Any:
    """Return an argument with its arrays as lists, as an env's author expects them."""
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def bare_id(env_id: str) -> str:
    """Return TextArena's id of the env without wrappers."""
    return env_id.removesuffix("-train") + "-raw"


def _checked_rewards(env_id: str, num_players: int, rewards: Any) -> dict[int, float]:
    if not isinstance(rewards, dict) or set(rewards) != set(range(num_players)):
        raise EnvError(f"{env_id}: rewards {rewards!r} must have exactly one entry for each of {num_players} players")
    for pid, reward in rewards.items():
        is_number = isinstance(reward, (int, float, np.number)) and not isinstance(reward, bool)
        if not is_number or not math.isfinite(reward):
            raise EnvError(f"{env_id}: reward {reward!r} of player {pid} is not a finite number")
    return {pid: float(rewards[pid]) for pid in range(num_players)}


def outcomes_from_rewards(rewards: dict[int, float], has_teams: bool = False) -> dict[int, Outcome]:
    """Return win, draw or loss by rank: alone at the top, tied at the top, below it. A team is at the top together."""
    if len(rewards) == 1:
        return dict.fromkeys(rewards, "na")
    best = max(rewards.values())
    num_best = sum(reward == best for reward in rewards.values())
    has_winner = num_best < len(rewards) if has_teams else num_best == 1
    at_top: Outcome = "win" if has_winner else "draw"
    return {pid: at_top if reward == best else "loss" for pid, reward in rewards.items()}


@cache
def _prepare(env_id: str) -> str:
    """Import the env's modules, give them the games' streams, and return the env's id in TextArena.

    For `module:id`, a user's env, import the module first: it registers the id.
    """
    module, _, registered_id = env_id.rpartition(":")
    if module:
        plugins.import_module(module)
    home = _home_module(registered_id)
    plugins.import_module(home)
    for name, module_of_env in list(sys.modules.items()):
        if f"{name}.".startswith(("textarena.", f"{home}.")):
            # Not `vars`, which would load a lazy module.
            for attribute, value in list(object.__getattribute__(module_of_env, "__dict__").items()):
                if isinstance(value, types.ModuleType) and id(value) in _STAND_INS:
                    setattr(module_of_env, attribute, _STAND_INS[id(value)])
    return registered_id


def _home_module(registered_id: str) -> str:
    """Return the module of the env's class."""
    entry_point = ta.envs.registration.ENV_REGISTRY[registered_id].entry_point
    return entry_point.partition(":")[0] if isinstance(entry_point, str) else str(entry_point.__module__)


def env_arguments(env_id: str) -> list[str] | None:
    """Return the keyword arguments that the env's class accepts; None if it accepts any."""
    entry = ta.envs.registration.ENV_REGISTRY[_prepare(env_id)].entry_point
    if isinstance(entry, str):
        home, _, name = entry.partition(":")
        entry = getattr(plugins.import_module(home), name)
    parameters = inspect.signature(entry).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


@cache
def kuhn_pays_bets() -> bool:
    """Return whether a bet costs chips in this version of TextArena's KuhnPoker; False if its game cannot be played.

    Two rounds of checks, of which each player wins one, are a draw. If a bet was called in one of them, its winner wins
    the game, unless bets move no chips.
    """
    try:
        drawn = next(seed for seed in range(64) if _is_draw_in_kuhn(seed, "[check]", "[check]"))
        return not _is_draw_in_kuhn(drawn, "[bet]", "[call]")
    except (UnstableError, StopIteration, KeyError, TypeError):  # a later version has other moves, or options
        return False


def _is_draw_in_kuhn(seed: int, *first_round: str) -> bool:
    """Play two rounds, the second one of checks; return whether both players have as many chips."""
    game = Environment("KuhnPoker-v0-train", 2, seed, env_kwargs=(("max_rounds", 2),))
    for action in (*first_round, "[check]", "[check]"):
        game.play(action)
    return not any(game.close()[0].values())


def env_ids() -> list[str]:
    return list(ta.envs.registration.ENV_REGISTRY)


def source_text(env_id: str) -> str | None:
    """Return the source of the env's module; None if the module is not part of TextArena."""
    relative = _home_module(env_id).removeprefix("textarena.").replace(".", "/") + ".py"
    path = Path(ta.__file__).parent / relative
    return path.read_text(encoding="utf-8") if path.is_file() else None
