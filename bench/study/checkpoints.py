"""Exact values of a run's checkpoints, which are scored after the run: of their average, and of an exploiter."""

from __future__ import annotations

import tomllib
from pathlib import Path
from statistics import fmean

from bench.study.reading import EXPLOITER
from unstable_lite.adapters.frozen import COPIES
from unstable_lite.config import Config
from unstable_lite.evaluation.models import find_models, opponent
from unstable_lite.evaluation.scoring import AnswerScorer
from unstable_lite.games.openspiel.game_tree import flatten, uniform
from unstable_lite.planning.envs import exact_envs
from unstable_lite.planning.trust import CONFIG
from unstable_lite.types import BASE

EQUILIBRIUM = 1e-6
"""Exploitability below which no share of it can be computed."""


def average_exploitability(directory: Path, config: Config, env_id: str) -> float:
    """Return the exploitability of the policy that plays as one of the kept checkpoints, drawn before each game.

    Raises UnstableError if a checkpoint cannot be read, ConfigError for a game in which histories share positions.
    """
    (env,) = (env for env in exact_envs(config)[0] if env.env_id == env_id)
    tree, scorer = flatten(env_id), AnswerScorer(config, config.eval_envs)
    models = [model for model in find_models([str(directory)]) if model.path is not None]
    policies = [scorer.policy(env, tree, model) for model in models]
    return tree.exploitability(tree.average(policies, [1.0] * len(policies)))


def exploiter_curves(directory: Path, config: Config) -> dict[str, list[tuple[int, float]]]:
    """Return the values of a run's checkpoints against its one opponent by update, in the game's utility.

    `learned` is the policy's expected utility, the mean over both seats; `exact` that of a best response, which is the
    opponent's exploitability; `missed` the share 1 - learned / exact; `untrained` that of the policy before training.

    Raises UnstableError if an adapter cannot be read, ConfigError for a game whose tree is not known.
    """
    stored = tomllib.loads((directory / CONFIG).read_text(encoding="utf-8"))
    (env,), (played,) = config.train_envs, stored["league"]["fixed_opponents"]
    tree, scorer = flatten(env.env_id), AnswerScorer(config, config.eval_envs)
    is_uniform = played == "scripted:random"
    target = uniform(tree) if is_uniform else scorer.policy(env, tree, opponent(played, directory / COPIES))
    exact = tree.exploitability(target)
    start = stored["lora"].get("initial_lora_path")
    models = {0: opponent(BASE if start is None else f"adapter:{start}")}
    models |= {int(model.name.rpartition("-")[2]): model for model in find_models([str(directory)])}
    policies = {update: scorer.policy(env, tree, model) for update, model in models.items()}
    learned = {
        update: fmean(tree.outcomes(target, seat, own).utility for seat in (0, 1)) for update, own in policies.items()
    }
    is_beatable = exact > EQUILIBRIUM
    missed = {update: 1 - value / exact for update, value in learned.items()} if is_beatable else {}
    last = max(learned)
    curves = {
        "learned": learned,
        "missed": missed,
        "exact": {last: exact},
        "untrained": {last: missed[0]} if missed else {},
    }
    return {f"{EXPLOITER}/{value}": sorted(curve.items()) for value, curve in curves.items()}
