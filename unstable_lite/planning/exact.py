"""Exact evaluations of a run (`run.exact_every`): their envs, their problems, and the time that they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache

from unstable_lite.config import Config
from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.config.games import EnvSpec
from unstable_lite.errors import ConfigError
from unstable_lite.games.game_tree import GameTree, uniform
from unstable_lite.games.openspiel.flatten import flatten
from unstable_lite.planning.memory import shape_of

OPERATIONS_PER_S = {True: 3e13, False: 1e10}
"""Arithmetic operations a second that a forward pass is assumed to make, on a GPU or not."""
CHARS_PER_TOKEN = 3


def exact_envs(config: Config) -> list[EnvSpec]:
    """Return the OpenSpiel envs of a run, each once."""
    specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
    return list({spec.env_id: spec for spec in reversed(specs) if is_openspiel(spec.env_id)}.values())[::-1]


def exact_problems(config: Config) -> Iterator[str]:
    """Yield each reason why `run.exact_every` cannot be computed."""
    if config.run.exact_every is None:
        return
    envs = exact_envs(config)
    if not envs:
        yield "run.exact_every: no env is a game of OpenSpiel (env_id = 'openspiel:…'), so nothing is computed exactly"
    for env in envs:
        try:
            flatten(env.env_id)
        except ConfigError as error:
            yield f"run.exact_every: {error}"


def describe_exact(config: Config, is_on_gpu: bool) -> Iterator[tuple[str, str]]:
    """Yield a row with size, time and number of the exact evaluations of each env."""
    run, shape = config.run, shape_of(config.model_name)
    if run.exact_every is None:
        return
    count = 1 + run.learning_steps // run.exact_every
    for env in exact_envs(config):
        tree = flatten(env.env_id)
        seconds = solver_seconds(env.env_id)
        if shape is not None:
            tokens = sum(len(state.observation) for state in tree.states) / CHARS_PER_TOKEN
            seconds += 2 * shape.base_parameters * tokens / OPERATIONS_PER_S[is_on_gpu]
        size = f"{len(tree.states):,} decision states, {tree.num_answers:,} answers"
        yield "exact evaluation", f"{env.env_id}: {size}; about {seconds:.2g} s × {count} (estimated)"


@cache
def solver_seconds(env_id: str) -> float:
    """Return the measured time of both best responses, twice: with other answers, and renormalised."""
    tree: GameTree = flatten(env_id)
    started = time.monotonic()
    tree.exploitability(uniform(tree))
    return 2 * (time.monotonic() - started)
