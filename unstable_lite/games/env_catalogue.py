"""Check of envs: whether they work, with which players and observation, and whether they need isolation.

`trial` plays a few random games before a run: how long they are, and whether they end with rewards.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from unstable_lite import plugins
from unstable_lite.config.env_ids import QUESTIONS, SUFFIX, is_built_in, is_judged, is_openspiel
from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import ConfigError, EnvError, UnstableError, UnsupportedEnvError, described
from unstable_lite.games.env_start import LocalEnvironment, environment_of
from unstable_lite.games.environments import Environment, bare_id, env_arguments, env_ids, kuhn_pays_bets, source_text
from unstable_lite.games.local_game import hang_guard, reason_of
from unstable_lite.games.openspiel.game import describe_games, trial_problem
from unstable_lite.games.players.scripted import lists_actions, random_legal_action
from unstable_lite.games.questions import QuestionGame
from unstable_lite.types import GameSpec, Observation

SLOW_RESET_S = 0.02
"""Longest reset in seconds of an env that is not isolated; a longer one would delay every other game."""
PROBE_TIMEOUT_S = 20.0
TRIAL_GAMES, TRIAL_TURNS, TRIAL_TIMEOUT_S = 12, 200, 5.0
HASH_GAMES = 8
"""Number of games whose first observations are compared under two hash seeds."""

DENIED = {
    "MarketEntryGame": "games run past 300 turns, and loop for ever once all players are eliminated",
    "Poker": "its rewards go up to 9, and games run past 300 turns",
    "Bandit": "it never pays its reward of 1",
    **dict.fromkeys(
        ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte"), "its reward is a string after an invalid move"
    ),
    "LightsOut": "it raises at the first observation",
    "CharacterConclave": "it raises in the first step",
    **dict.fromkeys(("SantoriniBaseFixed", "Stratego"), "games run past 300 turns"),
    **dict.fromkeys(("Tak", "Checkers"), "it raises at the end of a game (TextArena 0.7.4)"),
    "Klondike": "its module has a syntax error in every version of Python",
}
"""Env families that are broken in TextArena 0.7.4, with the reason."""
NEEDS_NEWER_PYTHON = f"TextArena's code for it needs Python 3.12 (this is {sys.version.split()[0]})"
ISOLATED = {
    "PublicGoodsGame": "some games loop for ever when all players are eliminated; isolated, those are void",
    "WordChains": "downloads word lists (nltk) at its first start; the hash seed of the process changes its games, so "
    "they are isolated with a fixed one",
}
"""Env families whose games always run in separate processes."""
_REMARKS = {
    "KuhnPoker": "its bets move no chips (textarena/envs/KuhnPoker/env.py: the pot is the two antes), so it is best "
    "never to fold; openspiel:kuhn_poker pays them"
}
"""Env families that work, but differ from the game of their name."""
BOARD_GAMES = ("TicTacToe", "WildTicTacToe", "ThreePlayerTicTacToe", "ConnectFour", "SimpleTak", "Nim")
"""TextArena's env families whose newest board contains the whole state. In others the newest "board" is incomplete:
KuhnPoker's lacks the card, LiarsDice's the bids, UltimateTicTacToe's the small board to play in."""


def env_family(env_id: str) -> str:
    """Return the env's family, such as `KuhnPoker` for `KuhnPoker-v0-short-train`; others have none."""
    return env_id if is_built_in(env_id) else env_id.partition("-v")[0]


def remark_on(family: str) -> str:
    """Return how the installed version of a family that works differs from the game of its name, or an empty text."""
    is_right = family == "KuhnPoker" and kuhn_pays_bets()
    return "" if is_right else _REMARKS.get(family, "")


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """Result of a trial reset of an env."""

    problem: str | None
    has_slow_reset: bool = False
    is_repeatable: bool = True
    """Whether a second game with the same seed began alike."""


def is_isolated(spec: EnvSpec | GameSpec) -> bool:
    """Return whether the env's games run in separate processes: as the spec says, else whether the env needs it."""
    facts = probe(spec.env_id, spec.num_players, spec.observation, spec.env_kwargs)
    may_depend = spec.isolated is None and facts.is_repeatable
    return _may_hang(spec) or (may_depend and depends_on_hash_seed(spec.env_id, spec.num_players, spec.env_kwargs))


def _may_hang(spec: EnvSpec | GameSpec) -> bool:
    """Return whether the env is isolated for another reason than its hash seed."""
    if spec.isolated is not None:
        return spec.isolated
    facts = probe(spec.env_id, spec.num_players, spec.observation, spec.env_kwargs)
    return env_family(spec.env_id) in ISOLATED or facts.has_slow_reset


@cache
def depends_on_hash_seed(env_id: str, num_players: int, env_kwargs: tuple[tuple[str, Any], ...]) -> bool:
    """Return whether a custom env's first observations differ between two processes; False if it does not start."""
    if ":" not in env_id or is_built_in(env_id):
        return False
    command = [sys.executable, "-m", __name__, json.dumps([env_id, num_players, env_kwargs])]
    shown = list[bytes]()
    for seed in ("1", "2"):
        given = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed}
        try:
            done = subprocess.run(command, env=given, capture_output=True, timeout=PROBE_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return False
        shown.append(done.stdout)
    return shown[0] != shown[1]


@cache
def probe(
    env_id: str, num_players: int, observation: Observation = "env", env_kwargs: tuple[tuple[str, Any], ...] = ()
) -> EnvFacts:
    """Make, reset and observe the env; report whether this number of players and this observation work.

    Runs in a thread with a time limit, because an env's start may run any code (downloads, endless loops).
    """
    if is_judged(env_id):
        return EnvFacts(_questions_problem(env_id, num_players, observation, env_kwargs))
    if is_openspiel(env_id):
        if env_kwargs:
            spelled = f"{env_id.partition('(')[0]}({','.join(f'{name}={value}' for name, value in env_kwargs)})"
            return EnvFacts(f"env_kwargs is for TextArena's envs; write env_id = '{spelled}'")
        if observation != "env":
            return EnvFacts(
                f"observation = {observation!r} is for TextArena's envs: OpenSpiel has one text; leave it out"
            )
        return EnvFacts(trial_problem(env_id, num_players))
    if (problem := _problem_by_name(env_id, observation)) is not None:
        return EnvFacts(problem)
    if env_kwargs and (problem := _argument_problem(env_id, [name for name, _ in env_kwargs])) is not None:
        return EnvFacts(problem)
    future: Future[EnvFacts] = Future()

    def attempt() -> None:
        try:
            with hang_guard(PROBE_TIMEOUT_S):
                first = Environment(env_id, num_players, 0, observation, env_kwargs).observe()  # also does the imports
                for _ in range(2):  # the second time only if a garbage collection may have made the first one slow
                    started = time.thread_time()  # CPU time of this thread, independent of the machine's load
                    again = Environment(env_id, num_players, 0, observation, env_kwargs)
                    if not SLOW_RESET_S < (seconds := time.thread_time() - started) < 1:
                        break
                future.set_result(EnvFacts(None, seconds > SLOW_RESET_S, is_repeatable=again.observe() == first))
        except BaseException as error:  # any exception of foreign code is the result
            future.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        error = future.exception(PROBE_TIMEOUT_S)
    except TimeoutError:
        return EnvFacts(f"its reset did not end within {PROBE_TIMEOUT_S:g} s")
    if error is None:
        return future.result()
    if isinstance(error, SyntaxError):
        return EnvFacts(NEEDS_NEWER_PYTHON)
    if observation == "board" and isinstance(error, IndexError):  # TextArena's wrapper found no board to show
        return EnvFacts("observation = 'board': the env sends no observation of the type GAME_BOARD at its start")
    summary = " ".join(described(error).split())[:400]
    given = f" and env_kwargs = {dict(env_kwargs)}" * bool(env_kwargs)
    return EnvFacts(f"does not start with num_players = {num_players}{given}: {summary}")


def _argument_problem(env_id: str, names: list[str]) -> str | None:
    """Return the reason why the env's class does not accept keyword arguments of these names, or None."""
    if "error_allowance" in names:
        return "env_kwargs.error_allowance: set error_allowance of the env instead"
    try:
        accepted = env_arguments(env_id)
    except (SyntaxError, ImportError):
        return None  # the trial start reports it
    unknown = [name for name in names if accepted is not None and name not in accepted]
    known = ", ".join(name for name in accepted or () if name != "error_allowance") or "none"
    return f"env_kwargs: the env has no argument {', '.join(unknown)}; it accepts {known}" if unknown else None


def _questions_problem(
    env_id: str, num_players: int, observation: Observation, env_kwargs: tuple[tuple[str, Any], ...]
) -> str | None:
    if observation != "env" or env_kwargs:
        return "observation and env_kwargs are for TextArena's envs; leave them out"
    try:
        QuestionGame(env_id, num_players, 0)
    except ConfigError as error:
        return "; ".join(error.problems)
    return None


def _problem_by_name(env_id: str, observation: Observation) -> str | None:
    """Import the module of a custom env; return a reason why the env cannot be used that shows before its start."""
    module, _, registered_id = env_id.rpartition(":")
    try:
        if module:
            plugins.import_module(module)
    except (ImportError, ValueError, TypeError, SyntaxError) as failure:
        return f"cannot import {module!r}: {failure}"
    known = env_ids()
    if registered_id not in known:
        if module:
            return f"{module!r} does not register an env {registered_id!r} with TextArena"
        close = difflib.get_close_matches(env_id, known, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "; see `unstable-lite envs`"
        return f"no such env id{hint}"
    if env_id.endswith("-raw"):
        return "'-raw' ids have no text observation; use the id without it, or with '-train'"
    if (reason := DENIED.get(env_family(env_id))) is not None:
        return f"broken in TextArena: {reason}"
    if observation != "env" and (bare := bare_id(registered_id)) not in known:
        return f"observation = {observation!r} needs the env without wrappers, and {bare!r} is not registered"
    is_board_game = env_family(env_id) in BOARD_GAMES and "-blind" not in env_id
    if observation == "board" and not module and not is_board_game:
        games = ", ".join(BOARD_GAMES)
        return (
            f"observation = 'board' needs a game whose board shows its whole state ({games}); use observation = 'env'"
        )
    return None


def describe_envs() -> list[tuple[str, str, str]]:
    """Return (env id, players, remark) of every env.

    TextArena's `-train` ids are described by its source text, without running it, and followed by the form of files of
    questions and by OpenSpiel's games.
    """
    rows = []
    for env_id in env_ids():
        if env_id.endswith("-train"):
            family, source = env_family(env_id), source_text(env_id)
            remark = f"broken: {DENIED[family]}" if family in DENIED else ISOLATED.get(family, remark_on(family))
            rows.append((env_id, "?" if source is None else _players(source), remark or _remark(source)))
    remark = 'a file of {"question": …, "answer": …} lines, which are asked one by one'
    return [*rows, (f"{QUESTIONS}PATH{SUFFIX}", "1", remark), *describe_games()]


def _remark(source: str | None) -> str:
    if source is None:
        return "its module is not in the package"
    if not _can_be_parsed(source):
        return NEEDS_NEWER_PYTHON
    if "nltk" in source:
        return "downloads word lists (nltk) at its first start"
    return "calls OpenRouter: needs OPENROUTER_API_KEY" * ("OpenRouter" in source)


@cache
def _can_be_parsed(source: str) -> bool:
    with warnings.catch_warnings(action="ignore"):  # invalid escape sequences, deprecated in Python
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of the trial games of an env."""

    lengths: tuple[int, ...] = ()
    """Number of turns of each game of random legal moves; empty if the package does not know the moves."""
    problem: str | None = None
    """Reason why the env cannot be used."""
    unseen: str | None = None
    """Reason why no game showed its rewards."""
    observations: tuple[str, ...] = ()
    """Observations of the longest game, in order; without known moves that of a first turn."""


@cache
def trial(spec: EnvSpec) -> Trial:
    """Play `TRIAL_GAMES` games of random legal moves, or one of a move that is probably illegal.

    Not tried: an isolated env, and one that calls a model over the network.
    """
    if is_judged(spec.env_id):
        return Trial(lengths=(1,))
    if _may_hang(spec) or (spec.env_id in env_ids() and "OpenRouter" in (source_text(spec.env_id) or "")):
        return Trial(unseen="it is isolated, or calls a model over the network")
    knows_moves, lengths, until = lists_actions(spec.env_id), list[int](), time.monotonic() + TRIAL_TIMEOUT_S
    unseen: str | None = "no trial game came to its end" if knows_moves else "the package knows no legal moves of it"
    longest: list[str] = []
    with hang_guard(TRIAL_TIMEOUT_S):
        for seed in range(TRIAL_GAMES if knows_moves else 1):
            ended = None
            try:
                seen, ended = plugins.call("env", spec.env_id, partial(_play, spec, seed, until=until), {})
                if ended is not None:
                    plugins.call("env", spec.env_id, ended.close, {})
                    unseen = None if knows_moves else unseen
            except UnstableError as error:
                is_unclear = ended is None and (not knows_moves or isinstance(error, UnsupportedEnvError))
                cause = isinstance(error, ConfigError) and error.__cause__
                if is_unclear or reason_of(cause or error) in ("network", "timeout", "env_timeout"):
                    return Trial(unseen=f"a trial game failed: {error}")
                return Trial(problem=f"a trial game failed: {error}")
            lengths.append(len(seen))
            longest = max(longest, seen if knows_moves else seen[:1], key=len)
    return Trial(lengths=tuple(lengths) if knows_moves else (), unseen=unseen, observations=tuple(longest))


def _play(spec: EnvSpec, seed: int, until: float) -> tuple[list[str], LocalEnvironment | None]:
    """Play random actions until a time; return the observation of each turn, and the env if the game is over.

    Raises UnsupportedEnvError if no legal move is found.
    """
    rng, environment, seen = random.Random(seed), environment_of(spec, seed), list[str]()
    turn: tuple[int, str] | None = environment.observe()
    while turn is not None and len(seen) < min(spec.max_turns, TRIAL_TURNS) and time.monotonic() < until:
        seen.append(turn[1])
        try:
            action = random_legal_action(spec.env_id, turn[1], rng) if lists_actions(spec.env_id) else "[0]"
        except (EnvError, ValueError) as error:
            raise UnsupportedEnvError(str(error)) from error
        turn = environment.play(action)
    return seen, environment if turn is None else None


if __name__ == "__main__":
    env_id, num_players, env_kwargs = json.loads(sys.argv[1])
    for number in range(HASH_GAMES):
        with contextlib.redirect_stdout(sys.stderr):  # an env may print the time, for one
            observed = Environment(env_id, num_players, number, env_kwargs=env_kwargs).observe()
        print(observed)  # noqa: T201
