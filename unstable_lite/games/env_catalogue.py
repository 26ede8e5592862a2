"""Check of envs: whether they work, with which players and observation, and whether they need isolation."""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

from unstable_lite.config.env_ids import QUESTIONS, SUFFIX, is_openspiel, is_questions
from unstable_lite.errors import ConfigError
from unstable_lite.games.environments import Environment, bare_id, env_arguments, env_ids, source_text
from unstable_lite.games.hang_guard import hang_guard
from unstable_lite.games.openspiel import trial
from unstable_lite.games.openspiel.catalogue import describe_games
from unstable_lite.games.questions.reader import read_questions
from unstable_lite.types import Observation

SLOW_RESET_S = 0.02
"""Longest reset in seconds of an env that is not isolated; a longer one would delay every other game."""
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
    "Klondike": "its module has a syntax error in every version of Python",
}
"""Env families that are broken in TextArena 0.7.4, with the reason."""
NEEDS_NEWER_PYTHON = f"TextArena's code for it needs Python 3.12 (this is {sys.version.split()[0]})"
LOOPS = {"PublicGoodsGame": "some games loop for ever when all players are eliminated; isolated, those are void"}
"""Env families that work, except for an endless loop."""
REMARKS = {
    "KuhnPoker": "its bets move no chips (textarena/envs/KuhnPoker/env.py, line 34: the pot is the two antes), so it "
    "is best never to fold; openspiel:kuhn_poker pays them"
}
"""Env families that work, but differ from the game of their name."""
BOARD_GAMES = ("TicTacToe", "WildTicTacToe", "ThreePlayerTicTacToe", "ConnectFour", "SimpleTak", "Nim")
"""TextArena's env families whose newest board contains the whole state. In others the newest "board" is incomplete:
KuhnPoker's lacks the card, LiarsDice's the bids, UltimateTicTacToe's the small board to play in."""


def env_family(env_id: str) -> str:
    """Return the env's family, such as `KuhnPoker` for `KuhnPoker-v0-short-train`; others have none."""
    return env_id if is_openspiel(env_id) or is_questions(env_id) else env_id.partition("-v")[0]


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """Result of a trial reset of an env."""

    problem: str | None
    has_slow_reset: bool = False


def is_isolated(
    env_id: str,
    num_players: int,
    observation: Observation = "env",
    wanted: bool | None = None,
    env_kwargs: tuple[tuple[str, Any], ...] = (),
) -> bool:
    """Return whether the env's games run in separate processes: as `wanted`; if None, whether the env needs it."""
    if wanted is not None:
        return wanted
    return env_family(env_id) in LOOPS or probe(env_id, num_players, observation, env_kwargs).has_slow_reset


@cache
def probe(
    env_id: str, num_players: int, observation: Observation = "env", env_kwargs: tuple[tuple[str, Any], ...] = ()
) -> EnvFacts:
    """Make, reset and observe the env once; report whether this number of players and this observation work.

    Runs in a thread with a time limit, because an env's start may run any code (downloads, endless loops).
    """
    if is_questions(env_id):
        return EnvFacts(_questions_problem(env_id, num_players, observation, env_kwargs))
    if is_openspiel(env_id):
        if env_kwargs:
            parameters = ",".join(f"{name}={value}" for name, value in env_kwargs)
            return EnvFacts(
                f"env_kwargs is for TextArena's envs; write env_id = '{env_id.partition('(')[0]}({parameters})'"
            )
        return EnvFacts(_openspiel_problem(env_id, num_players, observation))
    if (problem := _problem_by_name(env_id, observation)) is not None:
        return EnvFacts(problem)
    if env_kwargs and (problem := _argument_problem(env_id, [name for name, _ in env_kwargs])) is not None:
        return EnvFacts(problem)
    future: Future[float] = Future()

    def attempt() -> None:
        try:
            with hang_guard(PROBE_TIMEOUT_S):
                Environment(env_id, num_players, 0, observation, env_kwargs).observe()  # also does the imports
                started = time.thread_time()  # CPU time of this thread, independent of the machine's load
                Environment(env_id, num_players, 0, observation, env_kwargs)
                future.set_result(time.thread_time() - started)
        except BaseException as error:  # any exception of foreign code is the result
            future.set_exception(error)

    threading.Thread(target=attempt, daemon=True).start()
    try:
        error = future.exception(PROBE_TIMEOUT_S)
    except TimeoutError:
        return EnvFacts(f"its reset did not end within {PROBE_TIMEOUT_S:g} s")
    if error is None:
        return EnvFacts(None, has_slow_reset=future.result() > SLOW_RESET_S)
    if isinstance(error, SyntaxError):
        return EnvFacts(NEEDS_NEWER_PYTHON)
    if observation == "board" and isinstance(error, IndexError):  # TextArena's wrapper found no board to show
        return EnvFacts("observation = 'board': the env sends no observation of the type GAME_BOARD at its start")
    summary = " ".join(str(error).split())[:300]
    given = f" and env_kwargs = {dict(env_kwargs)}" * bool(env_kwargs)
    return EnvFacts(f"does not start with num_players = {num_players}{given}: {type(error).__name__}: {summary}")


def _argument_problem(env_id: str, names: list[str]) -> str | None:
    """Return the reason why the env's class does not accept keyword arguments of these names, or None."""
    if "error_allowance" in names:
        return "env_kwargs.error_allowance: set error_allowance of the env instead"
    try:
        accepted = env_arguments(env_id)
    except (SyntaxError, ImportError):
        return None  # the trial start reports it
    unknown = [name for name in names if accepted is not None and name not in accepted]
    if not unknown:
        return None
    known = ", ".join(name for name in accepted or () if name != "error_allowance") or "none"
    return f"env_kwargs: the env has no argument {', '.join(unknown)}; it accepts {known}"


def _questions_problem(
    env_id: str, num_players: int, observation: Observation, env_kwargs: tuple[tuple[str, Any], ...]
) -> str | None:
    if num_players != 1:
        return f"questions have one player: set num_players = 1 (it is {num_players}); in training num_actors = 1, too"
    if observation != "env" or env_kwargs:
        return "observation and env_kwargs are for TextArena's envs; leave them out"
    try:
        read_questions(env_id)
    except ConfigError as error:
        return "; ".join(error.problems)
    return None


def _openspiel_problem(env_id: str, num_players: int, observation: Observation) -> str | None:
    if observation != "env":
        return f"observation = {observation!r} is for TextArena's envs: OpenSpiel's games have one text; leave it out"
    return trial.problem(env_id, num_players)


def _problem_by_name(env_id: str, observation: Observation) -> str | None:
    """Import the module of a custom env; return a reason why the env cannot be used that shows before its start."""
    module, _, registered_id = env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
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
        return (
            "observation = 'board' needs a game whose newest board shows its whole state "
            f"({', '.join(BOARD_GAMES)}); use observation = 'env'"
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
            family = env_family(env_id)
            remark = f"broken: {DENIED[family]}" if family in DENIED else LOOPS.get(family, REMARKS.get(family, ""))
            source = source_text(env_id)
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
    remark = 'a file of {"question": …, "answer": …} lines, which are asked one by one'
    return [*rows, (f"{QUESTIONS}PATH{SUFFIX}", "1", remark), *describe_games()]


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
