"""TextArena, and only here: one fresh env per game, each with random streams of its own.

TextArena's envs draw from the global `random` (a few from `numpy.random`), and every reset re-seeds it. So its modules
get stand-ins for both, which delegate to the streams of the game whose env is being called; nothing else in the process
sees them. Calls into an env are synchronous, and short where the env is well.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import math
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.errors import EnvError
from unstable_lite.types import Observation, Outcome

WORD_LISTS = "textarena.envs.utils.word_lists"


class _LoadsLate(importlib.abc.MetaPathFinder):
    """TextArena's word lists load nltk, which takes 17 MB and a second: only for the envs that ask for words."""

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

SLOW_RESET_S = 0.02
"""An env whose reset takes longer would hold up every other game."""
PROBE_TIMEOUT_S = 20.0

DENIED = {
    "MarketEntryGame": "games run past 300 turns, and loop for ever once all players are eliminated",
    "Poker": "its rewards go up to 9, and games run past 300 turns",
    "Bandit": "it never pays its reward of 1",
    "Countdown": "its reward is a string after an invalid move",
    "Cryptarithm": "its reward is a string after an invalid move",
    "Slitherlink": "its reward is a string after an invalid move",
    "ThreeCardMonte": "its reward is a string after an invalid move",
    "LightsOut": "it raises at the first observation",
    "CharacterConclave": "it raises in the first step",
    "SantoriniBaseFixed": "games run past 300 turns",
    "Stratego": "games run past 300 turns",
    "Tak": "it raises at the end of a game (TextArena 0.7.4)",
    "Checkers": "it raises at the end of a game (TextArena 0.7.4)",
}
"""Env families that are broken in TextArena 0.7.4, and how."""
NEEDS_NEWER_PYTHON = f"TextArena's code for it needs Python 3.12 (this is {sys.version.split()[0]})"
LOOPS = {"PublicGoodsGame": "some games loop for ever when all players are eliminated; isolated, those are void"}
"""Env families that are well but for a loop."""
BOARD_GAMES = ("TicTacToe", "WildTicTacToe", "ThreePlayerTicTacToe", "ConnectFour", "SimpleTak", "Nim")
"""TextArena's env families in which the rules and the newest board tell everything that the next move depends on. In
others the newest "board" is only a part of it: KuhnPoker's lacks the card, LiarsDice's the bids, UltimateTicTacToe's
which small board must be played in."""
_OBSERVED_BY = {"first-last": FirstLastObservationWrapper, "board": GameBoardObservationWrapper}


class _Thread(threading.local):
    """Of this thread: the game whose env is being called, for its streams, and who breaks the call off."""

    game: Environment | None = None
    guard: _Guard | None = None


_thread = _Thread()


class _GameRandom(types.ModuleType):
    """Stands in for the module `random` inside TextArena."""

    def seed(self, a: Any = None, version: int = 2) -> None:
        game = _thread.game
        if game is None:
            random.seed(a, version)
        else:
            game.seed(a, version)

    def __getattr__(self, name: str) -> Any:
        game = _thread.game
        source = random if game is None or not hasattr(random.Random, name) else game.stream
        return getattr(source, name)


class _GameNumpyRandom(types.ModuleType):
    """Stands in for the module `numpy.random` inside TextArena."""

    def __getattr__(self, name: str) -> Any:
        game = _thread.game
        source = np.random if game is None or not hasattr(np.random.RandomState, name) else game.numpy_random
        return getattr(source, name)


class _GameNumpy(types.ModuleType):
    """Stands in for the module `numpy` inside TextArena."""

    random = _GameNumpyRandom("numpy.random")

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_STAND_INS = {id(random): _GameRandom("random"), id(np): _GameNumpy("numpy")}


def _give_own_streams(package: str) -> None:
    """Replace `random` and `numpy` in every loaded module of `package`."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            # Not `vars`, which would load what loads late.
            for attribute, value in list(object.__getattribute__(module, "__dict__").items()):
                if isinstance(value, types.ModuleType) and id(value) in _STAND_INS:
                    setattr(module, attribute, _STAND_INS[id(value)])


class Environment:
    """One game of one env."""

    def __init__(self, env_id: str, num_players: int, seed: int, observation: Observation = "env") -> None:
        """Make and reset. Whatever TextArena raises comes through."""
        self.env_id = env_id
        self.num_players = num_players
        self._seed = seed
        self._seeding = seed, 2
        self._stream: random.Random | None = None
        self._numpy_random: np.random.RandomState | None = None
        self.was_invalid = False
        """Whether the rules do not allow what was just played."""
        self._offenders: set[int] = set()
        self._registered_id = _prepare(env_id)
        self._env = self._call(self._start, observation)
        self._unwrapped = self._env  # wrappers look up `state` slowly
        while isinstance(self._unwrapped, ta.Wrapper):
            self._unwrapped = self._unwrapped.env

    @property
    def has_teams(self) -> bool:
        """Whether its players win and lose together, in teams."""
        return isinstance(self._unwrapped.state, ta.TeamMultiPlayerState)

    def seed(self, a: Any, version: int) -> None:
        """Of `random`, at its next draw: every env seeds, most never draw, and it takes half as long as a turn."""
        self._seeding, self._stream = (a, version), None

    @property
    def stream(self) -> random.Random:
        """What `random` is to this game."""
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
        """Whose turn it is and what that player sees. Drains the env's queue: call once a turn."""
        return self._checked_turn(*self._call(self._env.get_observation))

    def step(self, action: str) -> bool:
        """Play `action` for the player whose turn it is; whether the game is over."""
        done, _ = self._call(self._env.step, action)
        return bool(done)

    def play(self, action: str) -> tuple[int, str] | None:
        """`step`, and `observe` unless the game is over; then `was_invalid` tells of this move."""
        turn = self._call(self._step_and_observe, action)
        self.was_invalid = False
        # TextArena raises a player's flag for good, and the player may play on: it is put down until the next time.
        for pid, remarks in self._unwrapped.state.game_info.items():
            if remarks.get("invalid_move"):
                remarks["invalid_move"] = False
                self.was_invalid = True
                self._offenders.add(int(pid))
        return None if turn is None else self._checked_turn(*turn)

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        """Rewards and the env's own remarks, for every player.

        Raises EnvError if a reward is missing or not a finite number.
        """
        rewards, game_info = self._call(self._env.close)
        remarks = {int(pid): about for pid, about in game_info.items()}
        for pid in self._offenders:
            remarks[pid]["invalid_move"] = True
        return _checked_rewards(self.env_id, self.num_players, rewards), remarks

    def rewards_so_far(self) -> dict[int, float]:
        """Return what every player gets if the game ends here: nothing, or for one alone the env's measure of progress.

        It is what TextArena's envs pay at their own turn limit. Raises EnvError if it is not a finite number.
        """
        measure = getattr(self._unwrapped, "_get_percentage_completion", None) if self.num_players == 1 else None
        rewards = dict.fromkeys(range(self.num_players), 0.0) if measure is None else {0: self._call(measure)}
        return _checked_rewards(self.env_id, self.num_players, rewards)

    def _start(self, observation: Observation) -> Any:
        env_id = self._registered_id
        env = ta.make(env_id) if observation == "env" else _make_observed_by(_OBSERVED_BY[observation], env_id)
        env.reset(num_players=self.num_players, seed=self._seed)
        env.state.error_allowance = 0
        return env

    def _step_and_observe(self, action: str) -> Any:
        done, _ = self._env.step(action)
        return None if done else self._env.get_observation()

    def _checked_turn(self, pid: int, observation: Any) -> tuple[int, str]:
        if not isinstance(observation, str):
            raise EnvError(f"{self.env_id}: observation is {type(observation).__name__}, not text")
        return int(pid), observation

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """With the streams of this game, and under the guard of this thread, if it has one."""
        guard = _thread.guard or _NO_GUARD
        _thread.game = self
        try:
            try:
                guard.call = next(guard.numbers)
                return function(*arguments)
            finally:
                guard.call = 0
                if guard.is_aiming:
                    guard.wait_for_aim()
        except _BrokenOff as broken:
            guard.call = 0
            raise EnvError(
                f"{self.env_id}: a call did not return within run.env_timeout_s = {guard.limit_s:g}"
            ) from broken
        finally:
            _thread.game = None


class _BrokenOff(BaseException):
    """Falls into the middle of a call that takes too long; no `except Exception` of an env's stops it."""


class _Guard:
    """Breaks off calls of one thread into envs, once each, and nothing else of that thread.

    The main thread is interrupted by a signal, which reaches it in a `sleep`, too. Any other thread is looked at by one
    of its own, and struck by an asynchronous exception; a call that ends just then waits until it knows whether it is.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.call = 0
        """Number of the one under way; 0: none."""
        self.numbers = itertools.count(1)
        """Of the calls to come."""
        self.is_aiming = False
        self._seen = 0
        self._since = 0.0
        self._thread = threading.get_ident()

    def wait_for_aim(self) -> None:
        """After a call, where it may be struck at the last moment."""
        while self.is_aiming:
            time.sleep(0.001)
        for _ in range(10):
            pass  # an exception that is on its way falls at the next jump

    def is_overdue(self) -> bool:
        """To be asked again and again; true once for a call."""
        call, now = self.call, time.monotonic()
        if call != self._seen:
            self._seen, self._since = call, now
        elif call and now - self._since > self.limit_s:
            self._since = math.inf
            return True
        return False

    def interrupt(self, signum: int, frame: object) -> None:  # noqa: ARG002
        """A signal's handler: in the very thread, between two of its instructions."""
        if self.is_overdue():
            raise _BrokenOff

    def watch(self, is_over: threading.Event) -> None:
        while not is_over.wait(self.limit_s / 4):
            if self.is_overdue():
                self.is_aiming = True
                if self.call == self._seen:
                    thread, struck_by = ctypes.c_ulong(self._thread), ctypes.py_object(_BrokenOff)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, struck_by)
                self.is_aiming = False


_NO_GUARD = _Guard(math.inf)


@contextlib.contextmanager
def hang_guard(limit_s: float) -> Iterator[None]:
    """A call of this thread into an env that takes longer than `limit_s` is broken off by an EnvError, in its middle.

    TextArena has loops without end (its `state.py`, where all players are eliminated), and one would stop every other
    game too. Python code only: what hangs in a library's C code is to be `isolated`.
    """
    guard = _thread.guard = _Guard(limit_s)
    try:
        if threading.current_thread() is threading.main_thread():
            previous = signal.signal(signal.SIGALRM, guard.interrupt)
            signal.setitimer(signal.ITIMER_REAL, limit_s / 4, limit_s / 4)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous)
        else:
            is_over = threading.Event()
            watcher = threading.Thread(target=guard.watch, args=(is_over,), name="hang-guard", daemon=True)
            watcher.start()
            try:
                yield
            finally:
                is_over.set()
                watcher.join()
    finally:
        _thread.guard = None


def _make_observed_by(wrapper: Callable[[Any], Any], env_id: str) -> Any:
    """Make the env without its own wrappers, observed through `wrapper`."""
    return wrapper(ta.wrappers.ActionFormattingWrapper(ta.make(_bare_id(env_id))))


def _bare_id(env_id: str) -> str:
    """Under which TextArena knows the env without wrappers."""
    return env_id.removesuffix("-train") + "-raw"


def _checked_rewards(env_id: str, num_players: int, rewards: Any) -> dict[int, float]:
    if not isinstance(rewards, dict) or set(rewards) != set(range(num_players)):
        raise EnvError(f"{env_id}: rewards {rewards!r} are not one for each of {num_players} players")
    for pid, reward in rewards.items():
        is_number = isinstance(reward, (int, float, np.number)) and not isinstance(reward, bool)
        if not is_number or not math.isfinite(reward):
            raise EnvError(f"{env_id}: reward {reward!r} of player {pid} is not a finite number")
    return {pid: float(rewards[pid]) for pid in range(num_players)}


def outcomes_from_rewards(rewards: dict[int, float], has_teams: bool = False) -> dict[int, Outcome]:
    """Win, draw or loss by rank: alone at the top, tied at the top, below it. A team is at the top together."""
    if len(rewards) == 1:
        return dict.fromkeys(rewards, "na")
    best = max(rewards.values())
    num_best = sum(reward == best for reward in rewards.values())
    has_winner = num_best < len(rewards) if has_teams else num_best == 1
    at_top: Outcome = "win" if has_winner else "draw"
    return {pid: at_top if reward == best else "loss" for pid, reward in rewards.items()}


@cache
def _prepare(env_id: str) -> str:
    """Import what `ta.make` imports lazily, and give it its own streams; the id under which TextArena knows the env.

    Of `module:id`, a user's own env, the module is imported first: it registers the id.
    """
    module, _, registered_id = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    home = _home(registered_id)
    importlib.import_module(home)
    for package in ("textarena", home):
        _give_own_streams(package)
    return registered_id


def _home(registered_id: str) -> str:
    """The module with the env's class."""
    entry_point = ta.envs.registration.ENV_REGISTRY[registered_id].entry_point
    return entry_point.partition(":")[0] if isinstance(entry_point, str) else str(entry_point.__module__)


def env_ids() -> list[str]:
    return list(ta.envs.registration.ENV_REGISTRY)


def env_family(env_id: str) -> str:
    """`KuhnPoker` for `KuhnPoker-v0-short-train`."""
    return env_id.partition("-v")[0]


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What a trial reset of an env told."""

    problem: str | None
    reset_s: float = 0.0

    @property
    def has_slow_reset(self) -> bool:
        return self.reset_s > SLOW_RESET_S


def is_isolated(env_id: str, num_players: int, observation: Observation = "env", wanted: bool | None = None) -> bool:
    """Whether its games live in other processes than the one that plays all games: as `wanted`, else if need be."""
    if wanted is not None:
        return wanted
    return env_family(env_id) in LOOPS or probe(env_id, num_players, observation).has_slow_reset


@cache
def probe(env_id: str, num_players: int, observation: Observation = "env") -> EnvFacts:
    """Make, reset and observe the env once; the reason why it cannot be used with so many players, or seen so, if any.

    Runs in a thread with a time limit, since an env's start may run any code (downloads, endless loops).
    """
    module, _, registered_id = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
    except (ImportError, ValueError, TypeError, SyntaxError) as failure:
        return EnvFacts(f"cannot import {module!r}: {failure}")
    known = env_ids()
    if registered_id not in known:
        if module:
            return EnvFacts(f"{module!r} registers no env {registered_id!r} with TextArena")
        close = difflib.get_close_matches(env_id, known, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "; see `unstable-lite envs`"
        return EnvFacts(f"no such env id{hint}")
    if env_id.endswith("-raw"):
        return EnvFacts("'-raw' ids have no text observation; use the id without it, or with '-train'")
    if (reason := DENIED.get(env_family(env_id))) is not None:
        return EnvFacts(f"broken in TextArena: {reason}")
    if observation != "env" and (bare := _bare_id(registered_id)) not in known:
        return EnvFacts(
            f"observation = {observation!r} is made from the env without wrappers, and no {bare!r} is registered"
        )
    is_board_game = env_family(env_id) in BOARD_GAMES and "-blind" not in env_id
    if observation == "board" and not module and not is_board_game:
        return EnvFacts(
            "observation = 'board' needs a game whose newest board shows its whole state, and this is none of them "
            f"({', '.join(BOARD_GAMES)}); use observation = 'env'"
        )

    def attempt() -> float:
        with hang_guard(PROBE_TIMEOUT_S):
            Environment(env_id, num_players, 0, observation).observe()  # the first one imports
            started = time.thread_time()  # of this thread alone, however busy the machine is
            Environment(env_id, num_players, 0, observation)
            return time.thread_time() - started

    future = _in_daemon_thread(attempt)
    try:
        error = future.exception(PROBE_TIMEOUT_S)
    except TimeoutError:
        return EnvFacts(f"its reset did not end within {PROBE_TIMEOUT_S:g} s")
    if error is None:
        return EnvFacts(None, future.result())
    if isinstance(error, SyntaxError):
        return EnvFacts(NEEDS_NEWER_PYTHON)
    if observation == "board" and isinstance(error, IndexError):  # TextArena's wrapper found no board to show
        return EnvFacts("observation = 'board': the env sends no observation of the type GAME_BOARD at its start")
    summary = " ".join(str(error).split())[:300]
    return EnvFacts(f"does not start with num_players = {num_players}: {type(error).__name__}: {summary}")


def _in_daemon_thread(function: Callable[[], float]) -> Future[float]:
    """Like an executor's `submit`, in a thread that does not keep the process alive if it never ends."""
    future: Future[float] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # whatever foreign code raises is the answer
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def describe_envs() -> list[tuple[str, str, str]]:
    """(env id, players, remark) of every `-train` id, from TextArena's source text; runs none of it."""
    rows = []
    for env_id in env_ids():
        if env_id.endswith("-train"):
            family = env_family(env_id)
            remark = f"broken: {DENIED[family]}" if family in DENIED else LOOPS.get(family, "")
            source = _entry_source(env_id)
            if source is None:
                rows.append((env_id, "?", remark or "its module is not in the package"))
                continue
            if not remark and not _can_be_parsed(source):
                remark = NEEDS_NEWER_PYTHON
            elif not remark and "nltk" in source:
                remark = "downloads word lists (nltk) at its first start"
            elif not remark and "OpenRouter" in source:
                remark = "calls OpenRouter: needs OPENROUTER_API_KEY"
            rows.append((env_id, _players(source), remark))
    return rows


def _entry_source(env_id: str) -> str | None:
    relative = _home(env_id).removeprefix("textarena.").replace(".", "/") + ".py"
    path = Path(ta.__file__).parent / relative
    return path.read_text(encoding="utf-8") if path.is_file() else None


@cache
def _can_be_parsed(source: str) -> bool:
    with warnings.catch_warnings(action="ignore"):  # escape sequences that Python will not know for ever
        try:
            ast.parse(source)
        except SyntaxError:
            return False
    return True


def _players(source: str) -> str:
    for state, players in (("SinglePlayerState", "1"), ("TwoPlayerState", "2"), ("TeamMultiPlayerState", "4+")):
        if state in source:
            return players
    return "2+"
