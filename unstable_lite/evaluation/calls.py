"""The command `eval` as calls for scripts and notebooks: `unstable_lite.evaluate`, `unstable_lite.exploitability`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from concurrent import futures
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.evaluation.evaluator import evaluate as play_evaluation
from unstable_lite.evaluation.exact import ExactResult, evaluate_by_samples
from unstable_lite.evaluation.plan import EvaluationPlan, plan_evaluation
from unstable_lite.evaluation.results import table_rows
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.plugins import check_not_imported

T = TypeVar("T")

Words = str | Path | Sequence[str | Path]


def evaluate(
    models: Words,
    *,
    output: str | Path | None = None,
    games: int = 200,
    envs: Words = (),
    opponents: Words = (),
    temperature: float | None = None,
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    trust_config: bool = False,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Play `games` games of each model, opponent and env, and return a row for each: those of table.csv.

    The arguments are those of `unstable-lite eval`. output: directory of the games and tables, which the same call
    continues; by default nothing is kept. A value that does not exist, such as the win rate of an env of one player, is
    None. Raises UnstableError for anything that the command reports.
    """
    check_not_imported()
    with tempfile.TemporaryDirectory() as unkept:
        options = {"temperature": temperature, "overrides": overrides, "trusts_config": trust_config}
        plan = _plan(models, envs, opponents, config, **options)
        say = TerminalInterface(quiet=quiet).say
        evaluated = _in_a_loop(play_evaluation(plan, Path(output or unkept), games, say))
    rows = table_rows(evaluated.evaluations)
    return [{name: None if isinstance(x, float) and math.isnan(x) else x for name, x in row.items()} for row in rows]


def exploitability(
    models: Words,
    *,
    envs: Words = (),
    config: str | Path | None = None,
    overrides: Sequence[str] = (),
    samples: int | None = None,
    force: bool = False,
    trust_config: bool = False,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Return a row for each model and env: those of exact.csv, after one for random legal play.

    The arguments are those of `unstable-lite eval --exact`. Raises UnstableError for anything that the command reports.
    """
    plan = _plan(models, envs, "base", config, overrides=overrides, trusts_config=trust_config)
    results: list[ExactResult] = []
    add_exact_results(results, plan, samples, force, TerminalInterface(quiet=quiet).say)
    return list(map(asdict, results))


def add_exact_results(
    results: list[ExactResult], plan: EvaluationPlan, samples: int | None, is_forced: bool, say: Callable[[str], None]
) -> None:
    """Add the results of `eval --exact`, each when it is there: computed, or estimated from `samples` answers a state.

    If it raises, the models before have their results.
    """
    if samples is None:
        from unstable_lite.evaluation.scoring import evaluate_exactly  # loads torch

        evaluate_exactly(results, plan, is_forced, say)
        return
    with tempfile.TemporaryDirectory() as logs:
        _in_a_loop(evaluate_by_samples(results, plan, samples, is_forced, Path(logs), say))


def _plan(models: Words, envs: Words, opponents: Words, config: str | Path | None, **options: Any) -> EvaluationPlan:
    words = ([given] if isinstance(given, str | Path) else given for given in (models, envs, opponents))
    ours, played, theirs = (list(map(str, given)) for given in words)
    return plan_evaluation(ours, envs=played, opponents=theirs, config=Path(config) if config else None, **options)


def _in_a_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, within an event loop (a notebook has one) in a thread that Ctrl-C cancels."""
    if asyncio._get_running_loop() is None:
        return run_in_loop(coroutine)
    cancel = futures.Future[Callable[[], object]]()

    async def cancellable() -> T:
        task = asyncio.ensure_future(coroutine)
        cancel.set_result(partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel))
        return await task

    with futures.ThreadPoolExecutor(1) as thread:
        try:
            outcome = thread.submit(run_in_loop, cancellable())
            while not outcome.done():
                futures.wait([outcome], timeout=1)  # a signal that came to another thread does not end a wait
            return outcome.result()
        except KeyboardInterrupt:
            thread.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(TimeoutError):  # of an interrupt before the thread has begun
                cancel.result(timeout=5)()
            raise
