"""Results against best responses, from a model's probabilities or estimated from its answers; and their tables.

Owns the games that can be evaluated so. Loads no model: probabilities come from `evaluation.scoring`, answers from the
engines, endpoints and scripted players that play games, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.dashboards.terminal import plain_table
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.evaluator import LoadedAdapters, with_engines
from unstable_lite.evaluation.models import EvaluatedModel
from unstable_lite.evaluation.plan import Cell, EvaluationPlan
from unstable_lite.games.openspiel.game_tree import GameTree, Policy, flatten, renormalised, uniform
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import allowance_problem
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.orchestrator.event_loop import cancelled_by_signals
from unstable_lite.rollout.sampled_policy import SampledPolicy, sample_policy
from unstable_lite.tracking.intervals import percent


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """Metrics of one model in one env, in the game's units. Wins are the model's, not the response's."""

    model: str
    env_id: str
    states: int
    """Number of decision states of both seats."""
    rest: float
    """Mean probability, over the decision states, of an answer that is not a legal action as it is listed."""
    exploitability: float
    """Mean utility of a best response over both seats; an answer that is not listed forfeits."""
    exploitability_legal: float | None = None
    """The same for the policy given that it gives a listed answer; None if half of the answers in a state have none."""
    win_0: float
    """Probability of a win at seat 0 against the best response; so on for draw, loss and seat 1."""
    draw_0: float
    loss_0: float
    win_1: float
    draw_1: float
    loss_1: float
    answers: int | None = None
    """Number of answers that the result is estimated from; None, as of the intervals, if it is computed."""
    exploitability_low: float | None = None
    """Lower end of the 95 % interval."""
    exploitability_high: float | None = None
    exploitability_legal_low: float | None = None
    exploitability_legal_high: float | None = None


def exact_result(model: str, env_id: str, tree: GameTree, policy: Policy | SampledPolicy) -> ExactResult:
    """Return the metrics of a policy: probabilities of the listed answers in each decision state, or answers.

    Best responses to one half of the answers play against the other half.
    """
    if isinstance(policy, SampledPolicy):
        first, second = policy.halves()
        pairs = [(first, second), (second, first)]
        metrics: dict[str, Any] = policy.metrics() | {"answers": policy.num_answers}
    else:
        pairs, rest = [(policy, policy)], fmean(max(0.0, 1.0 - float(p.sum())) for p in policy)
        metrics = {"rest": rest, "exploitability_legal": tree.exploitability(renormalised(policy))}
    outcomes = [tree.best_outcomes(fitted, played) for fitted, played in pairs]
    for seat in (0, 1):
        for name, of_response in (("win", "loss"), ("draw", "draw"), ("loss", "win")):
            metrics[f"{name}_{seat}"] = fmean(getattr(of_seats[1 - seat], of_response) for of_seats in outcomes)
    metrics["exploitability"] = fmean(of.utility for of_seats in outcomes for of in of_seats)
    return ExactResult(model=model, env_id=env_id, states=len(tree.states), **metrics)


def exact_games(
    evaluation: EvaluationPlan, is_forced: bool, say: Callable[[str], None]
) -> dict[EvalEnvSpec, tuple[GameTree, list[EvaluatedModel]]]:
    """Return game and models of each env that can be evaluated against a best response; report the others by `say`.

    Raises ConfigError if there is none.
    """
    games, reasons = {}, []
    for env, models in models_by_env(evaluation.cells).items():
        try:
            if (reason := allowance_problem(env)) is not None:
                raise ConfigError(reason)
            games[env] = flatten(env.env_id, is_forced), models
        except ConfigError as error:
            reasons.append(str(error))
    if not games:
        raise ConfigError(*reasons)
    for reason in reasons:
        say(f"left out: {reason}")
    return games


def models_by_env(cells: Iterable[Cell]) -> dict[EvalEnvSpec, list[EvaluatedModel]]:
    """Return the models that are asked in each env, each once, with any opponents and the sampling of training."""
    asked: dict[EvalEnvSpec, dict[EvaluatedModel, None]] = {}
    for cell in cells:
        as_trained = cell.env.changed(fixed_opponent="", temperature=None, top_p=None)
        asked.setdefault(as_trained, {})[cell.model] = None
    return {env: list(models) for env, models in asked.items()}


async def evaluate_by_samples(
    results: list[ExactResult],
    evaluation: EvaluationPlan,
    samples: int,
    is_forced: bool,
    logs: Path,
    say: Callable[[str], None],
) -> None:
    """Add results of the models in each env, estimated from `samples` answers in each decision state.

    Raises ConfigError for a game that cannot be evaluated exactly, RequestError if an answer does not come, and the
    errors of `evaluate`.
    """
    if samples < 2:
        raise ConfigError(f"samples = {samples}: an estimate needs at least two answers in each decision state")
    games = exact_games(evaluation, is_forced, say)
    if averages := sorted({cell.model.name for cell in evaluation.cells if cell.model.members}):
        raise ConfigError(f"{', '.join(averages)}: an average draws a checkpoint for a whole game, not for each answer")
    config = evaluation.plan.config.run

    async def ask_all(seats: PlayerFactory, adapters: LoadedAdapters) -> None:
        for env, (tree, models) in games.items():
            results.append(exact_result("random legal", env.env_id, tree, uniform(tree)))
            for model in models:
                await adapters.hold({model.key: model} if model.path else {})
                game = new_game(env, [adapters.ref(model)] * 2, -1, "eval", config.seed)
                answers = await sample_policy(seats, game, tree, samples, config.num_collection_workers)
                results.append(exact_result(model.name, env.env_id, tree, answers))
                say(f"{model.name} in {env.env_id}: exploitability {_interval(results[-1])} (95 %)")

    with cancelled_by_signals():
        await with_engines(evaluation.plan, evaluation.run, logs, say, ask_all)


def exact_tables(results: Sequence[ExactResult]) -> list[Table]:
    """Return one table for each env."""
    tables: dict[str, Table] = {}
    are_sampled = any(of.answers is not None for of in results)
    for of in results:
        title = f"{of.env_id}: {'estimated' if are_sampled else 'exact'}, against a best response in {of.states:,} "
        columns = ("exploitability", *["95 %"] * are_sampled, "legal only", "other answers", "points at seat 0, 1")
        points = f"{percent(of.win_0 + of.draw_0 / 2)}, {percent(of.win_1 + of.draw_1 / 2)}"
        rest = percent(of.rest, 2) + (f" (n={of.answers})" if of.answers is not None else "")
        legal = "–" if of.exploitability_legal is None else f"{of.exploitability_legal:.4f}"
        metrics = f"{of.exploitability:.4f}", *[_interval(of)] * are_sampled, legal, rest
        table = tables.setdefault(of.env_id, plain_table(f"{title}decision states", ["model"], columns))
        table.add_row(of.model, *metrics, points)
    return list(tables.values())


def _interval(of: ExactResult) -> str:
    return "" if of.answers is None else f"{of.exploitability_low:.4f} – {of.exploitability_high:.4f}"
