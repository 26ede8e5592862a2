"""Play the games of an evaluation with engines and without a learner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unstable_lite.errors import UnstableError
from unstable_lite.evaluation.absolute_ladder import Place, rate, write_places
from unstable_lite.evaluation.cells import Cell, game_spec
from unstable_lite.evaluation.ladder import LadderEntry, RatedGame, make_ladder
from unstable_lite.evaluation.loaded_adapters import AdapterSlots
from unstable_lite.evaluation.plan import EvaluationPlan
from unstable_lite.evaluation.results import CellEvaluation, Results, write_ladder, write_tables
from unstable_lite.games.env_pool import opened_env_pool
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.thinking_budget import thinking_budget
from unstable_lite.games.templates import format_prompt, templates_for
from unstable_lite.orchestrator.event_loop import cancelled_by_signals, first_reason
from unstable_lite.orchestrator.logs import log_file
from unstable_lite.orchestrator.workers import started_engines, while_alive
from unstable_lite.rollout.game_runner import GameRunner

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Results of an evaluation."""

    evaluations: tuple[CellEvaluation, ...]
    """Results of the cells of this call."""
    ladder: tuple[LadderEntry, ...]
    """Ranking of a tournament."""
    places: tuple[Place, ...]
    """Ratings of `--ladder`."""
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
        places = rate(_rated_games(evaluation, results)) if evaluation.is_ladder else []
        if places:
            write_places(output, places)
    except BaseExceptionGroup as group:
        raise first_reason(group) from group
    except OSError as error:
        raise UnstableError(f"{output}: {error.strerror}; finished games are in results.jsonl") from error
    finally:
        results.close()
    return Evaluated(
        evaluations=tuple(evaluations),
        ladder=tuple(ladder),
        places=tuple(places),
        played=num_missing,
        output=output,
    )


async def with_engines(
    evaluation: EvaluationPlan,
    logs: Path,
    say: Callable[[str], None],
    work: Callable[[PlayerFactory, AdapterSlots], Awaitable[T]],
    is_restart: bool = False,
) -> T:
    """Return the result of `work` while the engines are alive.

    `is_restart`: whether an earlier call played some of the games. Raises WorkerDied, and the errors of `work`.
    """
    config = evaluation.plan.config
    async with started_engines(evaluation.plan, logs, say, is_restart) as workers:
        templates, thinking = templates_for(config, workers.prompts), thinking_budget(config.engine, workers.info)
        generate = workers.engines.generate
        async with PlayerFactory(generate, templates, config.opponents, say, thinking=thinking) as seats:
            env = evaluation.cells[0].env
            _, observation = environment_of(env, 0).observe()
            prompt = format_prompt(env.prompt_template, observation, env.num_players, templates)
            slots = AdapterSlots(workers, config.engine.max_loras, prompt)
            return await while_alive(workers.processes, work(seats, slots))


async def _play_all(
    evaluation: EvaluationPlan, todo: dict[str, list[int]], results: Results, say: Callable[[str], None]
) -> None:
    logs, config = evaluation.output / "logs", evaluation.plan.config.run

    async def play_rounds(seats: PlayerFactory, slots: AdapterSlots) -> None:
        runner = GameRunner(seats, config, environments)

        async def play(game: tuple[Cell, int]) -> None:
            cell, number = game
            results.add(cell, await runner.play(game_spec(cell, number, config.seed, slots.ref)))

        async for round_ in slots.rounds(cell for cell in evaluation.cells if todo[cell.key]):
            say(f"playing {_describe(round_)}")
            games = ((cell, number) for cell in round_ for number in todo[cell.key])
            await for_each(games, play, evaluation.concurrency)

    is_restart = sum(map(len, todo.values())) < evaluation.games * len(evaluation.cells)
    async with opened_env_pool(logs, config.env_timeout_s) as environments:
        await with_engines(evaluation, logs, say, play_rounds, is_restart)


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Do the work for each of `items`, for at most `concurrency` of them at once."""
    remaining = iter(items)

    async def process() -> None:
        for item in remaining:  # shared by all tasks
            await work(item)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(process())


def _rated_games(evaluation: EvaluationPlan, results: Results) -> list[RatedGame]:
    return [
        RatedGame(cell.env.env_id, cell.model.name, cell.opponent.name, row["outcome"])
        for cell in evaluation.cells
        for row in results.rows(cell, evaluation.games)
        if row["end"] != "void"
    ]


def _describe(cells: Sequence[Cell]) -> str:
    names = [f"{cell.title} in {cell.env.env_id}" for cell in cells]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
