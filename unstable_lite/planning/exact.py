"""Exact evaluations of a run (`run.exact_every`): their envs, their problems, and the time that they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.games.answers import allowance_problem, check_read
from unstable_lite.games.game_tree import GameTree, uniform
from unstable_lite.games.openspiel import trial
from unstable_lite.games.openspiel.flatten import flatten
from unstable_lite.games.templates import written_answer
from unstable_lite.planning.memory import shape_of

OPERATIONS_PER_S = {True: 3e13, False: 1e10}
"""Arithmetic operations a second that a forward pass is assumed to make, on a GPU or not."""
CHARS_PER_TOKEN = 3


def exact_envs(config: Config) -> tuple[list[EnvSpec], list[str]]:
    """Return the envs that `run.exact_every` computes, each id once, and the reasons why it computes no others."""
    if config.run.exact_every is None:
        return [], []
    specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
    envs, reasons = [], []
    for spec in {spec.env_id: spec for spec in reversed(specs)}.values():
        reason = allowance_problem(spec) or _game_problem(spec.env_id, spec.num_players)
        if reason is None:
            try:
                check_read(spec, "[x]", written_answer("", "[x]"))
            except ConfigError as error:
                reason = f"{spec.env_id}: {error}"
        if reason is None:
            envs.append(spec)
        else:
            reasons.append(reason)
    return envs[::-1], reasons[::-1]


def exact_problems(config: Config) -> Iterator[str]:
    """Yield each reason why `run.exact_every` cannot compute anything, or not the policy that plays."""
    if config.run.exact_every is None:
        return
    envs, reasons = exact_envs(config)
    if not envs:
        yield f"run.exact_every: no env can be computed exactly: {'; '.join(reasons)}"
    if config.engine.top_p < 1:
        yield (
            f"run.exact_every: probabilities are computed from the whole distribution, not with engine.top_p = "
            f"{config.engine.top_p:g}; set it to 1"
        )


def describe_exact(config: Config, is_on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Yield a row with size, time and number of the exact evaluations of each env, and a row for each one without."""
    run, shape = config.run, shape_of(config.model_name)
    envs, reasons = exact_envs(config)
    for env in envs:
        tree, count = flatten(env.env_id), 1 + run.learning_steps // (run.exact_every or 1)
        seconds = solver_seconds(env.env_id)
        if shape is not None:
            tokens = sum(len(state.observation) for state in tree.states) / CHARS_PER_TOKEN
            seconds += 2 * shape.base_parameters * tokens / OPERATIONS_PER_S[is_on_gpu]
        size = f"{len(tree.states):,} decision states, {tree.num_answers:,} answers"
        yield "exact evaluation", f"{env.env_id}: {size}; about {seconds:.2g} s × {count} (estimated)"
    for reason in reasons:
        yield "not exact", reason


@cache
def _game_problem(env_id: str, num_players: int) -> str | None:
    """Return the reason why a game cannot be computed; None if it can. It may take seconds to count a large game."""
    # A trial first, because OpenSpiel may crash the process.
    if is_openspiel(env_id) and (reason := trial.problem(env_id, num_players)) is not None:
        return f"{env_id}: {reason}"
    try:
        flatten(env_id)
    except ConfigError as error:
        return str(error)
    return None


@cache
def solver_seconds(env_id: str) -> float:
    """Return the measured time of both best responses, twice: with other answers, and renormalised."""
    tree: GameTree = flatten(env_id)
    started = time.monotonic()
    tree.exploitability(uniform(tree))
    return 2 * (time.monotonic() - started)
