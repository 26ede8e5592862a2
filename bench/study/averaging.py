"""Exploitability of the average of a run's checkpoints, which are scored after the run."""

from __future__ import annotations

from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.evaluation.models import find_models
from unstable_lite.evaluation.scoring import AnswerScorer
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.planning.envs import exact_envs


def average_exploitability(directory: Path, config: Config, env_id: str) -> float:
    """Return the exploitability of the policy that plays as one of the kept checkpoints, drawn before each game.

    Raises UnstableError if a checkpoint cannot be read, ConfigError for a game in which histories share positions.
    """
    (env,) = (env for env in exact_envs(config)[0] if env.env_id == env_id)
    tree, scorer = flatten(env_id), AnswerScorer(config, config.eval_envs)
    models = [model for model in find_models([str(directory)]) if model.path is not None]
    policies = [scorer.policy(env, tree, model) for model in models]
    return tree.exploitability(tree.average(policies, [1.0] * len(policies)))
