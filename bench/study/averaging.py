"""Exploitability of the average of a run's checkpoints, which are scored after the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from unstable_lite.config import Config
from unstable_lite.evaluation.models import find_models
from unstable_lite.evaluation.scoring import AnswerScorer
from unstable_lite.games.openspiel.game_tree import Decision, End, GameTree, Policy, flatten
from unstable_lite.planning.envs import exact_envs


def average_exploitability(directory: Path, config: Config, env_id: str) -> float:
    """Return the exploitability of the policy that plays as one of the kept checkpoints, drawn before each game.

    Raises UnstableError if a checkpoint cannot be read, ValueError for a game in which histories share positions.
    """
    (env,) = (env for env in exact_envs(config)[0] if env.env_id == env_id)
    tree, scorer, policies = flatten(env_id), AnswerScorer(config, config.eval_envs), []
    for model in find_models([str(directory)]):
        if model.path is not None:
            found = scorer.distributions(env, [state.observation for state in tree.states], model)
            policies.append([distribution.probabilities for distribution in found])
    return tree.exploitability(average(tree, policies))


def average(tree: GameTree, policies: Sequence[Policy]) -> Policy:
    """Return the policy of a seat that draws one of `policies` before each game and plays as it does.

    In a decision state each one counts by the probability that its own actions lead there; a state that none of
    them reaches is uniform. Raises ValueError if positions are shared: then that probability is not one number.
    Source: Kuhn 1953, "Extensive games and the problem of information".
    """
    if tree.shares_positions:
        raise ValueError("several histories share a position")
    played_S = [np.zeros(len(state.actions)) for state in tree.states]
    reached_S = np.zeros(len(tree.states))
    for policy in policies:
        own_S = _own_reach(tree, policy)
        reached_S += own_S
        for played, own, of_policy in zip(played_S, own_S, policy, strict=True):
            played += own * of_policy
    pairs = zip(played_S, reached_S, strict=True)
    return [played / reached if reached else np.full(len(played), 1 / len(played)) for played, reached in pairs]


def _own_reach(tree: GameTree, policy: Policy) -> npt.NDArray[np.float64]:
    """Return the probability that a seat's own actions lead to each of its decision states."""
    own_N2, own_S = np.ones((len(tree.positions), 2)), np.zeros(len(tree.states))
    for number in range(len(tree.positions) - 1, -1, -1):
        position = tree.positions[number]
        if isinstance(position, End):
            continue
        own_N2[list(position.successors)] = own_N2[number]
        if isinstance(position, Decision):
            seat = tree.states[position.state].seat
            own_S[position.state] = own_N2[number, seat]
            own_N2[list(position.successors), seat] *= policy[position.state]
    return own_S
