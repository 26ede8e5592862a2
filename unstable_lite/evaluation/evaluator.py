"""Play the games of an evaluation with engines and without a learner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unstable_lite.errors import UnstableError
from unstable_lite.evaluation.cells import Cell, game_spec, in_rounds
from unstable_lite.evaluation.ladder import LadderEntry, RatedGame, make_ladder
from unstable_lite.evaluation.loaded_adapters import AdapterSlots
from unstable_lite.evaluation.plan import EvaluationPlan, adapters_of
from unstable_lite.evaluation.results import CellEvaluation, Results, write_ladder, write_tables
from unstable_lite.games.env_pool import opened_env_pool
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import format_prompt, templates_for
from unstable_lite.orchestrator.event_loop import cancelled_by_signals, first_reason
from unstable_lite.orchestrator.logs import log_file
from unstable_lite.orchestrator.workers import EngineWorkers, started_engines, while_alive
from unstable_lite.rollout.game_runner import GameRunner
from unstable_lite.types import GameSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Results of an evaluation."""

    evaluations: tuple[CellEvaluation, ...]
    """Results of the cells of this call."""
    ladder: tuple[LadderEntry, ...]
    """Ranking of a tournament."""
    played: int
    """Number of games that this call played; the others existed already."""
    output: Path


async def evaluate(evaluation: EvaluationPlan, say: Callable[[str], None]) -> Evaluated:
    """Play the missing games, and write every table.

    Raises AdapterError for an adapter that does not fit or does not seem to be in use, EnvError for an env that keeps
    failing, and WorkerDied. Finished games are kept.
    """
    output = evaluation.output
    results = Results(output, evaluation.settings)
    try:
        todo = {cell.key: results.missing(cell, evaluation.games) for cell in evaluation.cells}
        num_missing = sum(map(len, todo.values()))
        there = evaluation.games * len(evaluation.cells) - num_missing
        say(f"{len(evaluation.cells)} cells of {evaluation.games} games; {there} games exist, {num_missing} to play")
        if num_missing:
            (output / "logs").mkdir(exist_ok=True)
            with log_file(output / "logs" / "evaluation.log"), cancelled_by_signals():
                await _play_all(evaluation, todo, results, say)
        evaluations = write_tables(results, evaluation.cells, evaluation.games)
        ladder: list[LadderEntry] = []
        if evaluation.is_tournament:
            ladder = make_ladder(_rated_games(evaluation, results), evaluation.plan.config.league.trueskill_beta)
            write_ladder(output, ladder, evaluations)
    except BaseExceptionGroup as group:
        raise first_reason(group) from group
    except OSError as error:
        raise UnstableError(f"{output}: {error.strerror}; finished games are in results.jsonl") from error
    finally:
        results.close()
    return Evaluated(evaluations=tuple(evaluations), ladder=tuple(ladder), played=num_missing, output=output)


@contextlib.asynccontextmanager
async def opened(
    evaluation: EvaluationPlan, logs: Path, say: Callable[[str], None], is_restart: bool = False
) -> AsyncIterator[tuple[EngineWorkers, PlayerFactory, AdapterSlots]]:
    """Yield engines, players and adapter slots. `is_restart`: whether an earlier call played some of the games."""
    plan = evaluation.plan
    async with started_engines(plan, logs, say, is_restart) as workers:
        templates = templates_for(plan.config, workers.prompts)
        async with PlayerFactory(workers.engines.generate, templates, plan.config.opponents, say) as seats:
            env = evaluation.cells[0].env
            _, observation = Environment(env.env_id, env.num_players, seed=0).observe()
            prompt = format_prompt(env.prompt_template, observation, env.num_players, templates)
            yield workers, seats, AdapterSlots(workers, plan.config.engine.max_loras, prompt)


async def _play_all(
    evaluation: EvaluationPlan, todo: dict[str, list[int]], results: Results, say: Callable[[str], None]
) -> None:
    logs, config = evaluation.output / "logs", evaluation.plan.config.run
    is_restart = sum(map(len, todo.values())) < evaluation.games * len(evaluation.cells)
    async with (
        opened_env_pool(logs, config.env_timeout_s) as environments,
        opened(evaluation, logs, say, is_restart) as (workers, seats, slots),
    ):
        runner = GameRunner(seats, config, environments)
        await while_alive(workers.processes, _play_rounds(evaluation, todo, slots, runner, results, say))


async def _play_rounds(
    evaluation: EvaluationPlan,
    todo: dict[str, list[int]],
    slots: AdapterSlots,
    runner: GameRunner,
    results: Results,
    say: Callable[[str], None],
) -> None:
    config = evaluation.plan.config
    cells = [cell for cell in evaluation.cells if todo[cell.key]]
    for round_ in in_rounds(cells, config.engine.max_loras):
        await slots.hold({model.key: model for cell in round_ for model in adapters_of(cell)})
        say(f"playing {_describe(round_)}")
        games = (
            (cell, game_spec(cell, number, config.run.seed, slots.ref)) for cell in round_ for number in todo[cell.key]
        )
        await _play(games, runner, results, evaluation.concurrency)


async def _play(games: Iterator[tuple[Cell, GameSpec]], runner: GameRunner, results: Results, concurrency: int) -> None:
    async def play() -> None:
        for cell, spec in games:  # shared by all
            results.add(cell, await runner.play(spec))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(play())


def _rated_games(evaluation: EvaluationPlan, results: Results) -> list[RatedGame]:
    return [
        RatedGame(cell.env.env_id, cell.model.name, cell.opponent_name, row["outcome"])
        for cell in evaluation.cells
        for row in results.rows(cell, evaluation.games)
        if row["end"] != "void"
    ]


def _describe(cells: Sequence[Cell]) -> str:
    names = [f"{cell.model.name} against {cell.opponent_name} in {cell.env.env_id}" for cell in cells]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
