"""Choices of models whose answers cannot be listed, such as those that reason: counted in sampled answers.

The entropy of `samples` answers is at most ln(samples), and on average below the policy's, so compare only results with
the same number of samples. State dependence is not reported, because sampling noise would count as dependence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.evaluation.cells import Cell, as_trained, game_spec, seat_of
from unstable_lite.evaluation.evaluator import for_each, with_engines
from unstable_lite.evaluation.loaded_adapters import AdapterSlots
from unstable_lite.evaluation.models import check_served
from unstable_lite.evaluation.plan import EvaluationPlan
from unstable_lite.evaluation.probing import (
    ActionDistribution,
    Position,
    Probe,
    probe,
    random_positions,
    with_positions,
)
from unstable_lite.games.openspiel.prompts import read_action
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.player import Player
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.orchestrator.event_loop import first_reason


async def probe_by_samples(
    evaluation: EvaluationPlan, games: int, samples: int, logs: Path, say: Callable[[str], None]
) -> list[Probe]:
    """Probe the base and the adapters of the plan in each of its envs, with `samples` answers at each position.

    Raises ConfigError for a model that no engine serves, UnsupportedEnvError for an env family whose legal moves cannot
    be read, RequestError for a position that cannot be answered, and the errors of `evaluate`.
    """
    check_served(cell.model for cell in evaluation.cells)
    evaluation = replace(evaluation, cells=tuple(as_trained(with_positions(evaluation.cells, say))))
    positions = {cell.env: random_positions(cell.env, games) for cell in evaluation.cells}
    try:
        return await with_engines(evaluation, logs, say, partial(_probe_all, evaluation, positions, samples))
    except BaseExceptionGroup as group:
        raise first_reason(group) from group


async def _probe_all(
    evaluation: EvaluationPlan,
    positions: dict[EvalEnvSpec, list[Position]],
    samples: int,
    seats: PlayerFactory,
    slots: AdapterSlots,
) -> list[Probe]:
    probes: list[Probe] = []
    async for round_ in slots.rounds(evaluation.cells):
        for cell in round_:
            player = seats.players(game_spec(cell, 0, 0, slots.ref))[seat_of(cell, 0)]
            observations = list(dict.fromkeys(position.observation for position in positions[cell.env]))
            found = await _distributions(cell, player, observations, samples, evaluation.concurrency)
            probes.append(probe(cell.model.name, cell.env, positions[cell.env], found, is_sampled=True))
    return probes


async def _distributions(
    cell: Cell, player: Player, observations: Sequence[str], samples: int, concurrency: int
) -> dict[str, ActionDistribution]:
    chosen: dict[str, Counter[str | None]] = {observation: Counter() for observation in observations}
    legal = {observation: legal_actions(cell.env.env_id, observation) for observation in observations}

    async def ask(observation: str) -> None:
        reply = await player.act(observation)
        chosen[observation][_meant(cell.env.env_id, reply.action, legal[observation])] += 1

    await for_each((observation for observation in observations for _ in range(samples)), ask, concurrency)
    return {
        observation: ActionDistribution(
            actions=tuple(actions),
            probabilities=np.array([chosen[observation][action] / samples for action in actions]),
        )
        for observation, actions in legal.items()
    }


def _meant(env_id: str, action: str, legal: Sequence[str]) -> str | None:
    """Return the legal action that an answer means, or None. Envs of TextArena differ in their notations."""
    if is_openspiel(env_id):
        names = {name[1:-1]: name for name in legal}
        found = read_action(action, names)
        return None if found is None else names[found]
    return next((name for name in legal if _spelled(name) == _spelled(action)), None)


def _spelled(action: str) -> str:
    return "".join(action.casefold().split())
