"""Exact evaluation: utility and results of a best response to each model, computed instead of sampled.

Owns the table of `eval --exact`. Loads no model: `evaluation.scoring` has the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.table import Table

from unstable_lite.evaluation.results import write_csv
from unstable_lite.games.game_tree import GameTree, Policy, renormalised


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """Exact metrics of one model in one env, in the game's units. Wins are the model's, not the response's."""

    model: str
    env_id: str
    states: int
    """Number of decision states of both seats."""
    rest: float
    """Mean probability, over the decision states, of an answer that is not a legal action as it is listed."""
    exploitability: float
    """Mean utility of a best response over both seats; an answer that is not listed forfeits."""
    exploitability_legal: float
    """The same for the policy given that it gives a listed answer."""
    win_0: float
    """Probability of a win at seat 0 against the best response; so on for draw, loss and seat 1."""
    draw_0: float
    loss_0: float
    win_1: float
    draw_1: float
    loss_1: float


def exact_result(model: str, env_id: str, tree: GameTree, policy: Policy) -> ExactResult:
    """Return the metrics of a policy. `policy`: probabilities of the listed answers in each decision state."""
    results: dict[str, float] = {}
    lost = 0.0
    for seat in (0, 1):
        of_response = tree.outcomes(policy, 1 - seat, tree.best_response(policy, 1 - seat))
        lost += of_response.utility
        results |= {f"win_{seat}": of_response.loss, f"draw_{seat}": of_response.draw, f"loss_{seat}": of_response.win}
    return ExactResult(
        model=model,
        env_id=env_id,
        states=len(tree.states),
        rest=sum(max(0.0, 1.0 - float(p.sum())) for p in policy) / len(policy),
        exploitability=lost / 2,
        exploitability_legal=tree.exploitability(renormalised(policy)),
        **results,
    )


def write_exact(path: Path, results: Sequence[ExactResult]) -> None:
    write_csv(path, [field.name for field in fields(ExactResult)], map(asdict, results))


def exact_tables(results: Sequence[ExactResult]) -> list[Table]:
    """Return one table for each env."""
    tables: dict[str, Table] = {}
    for of in results:
        if of.env_id not in tables:
            title = f"{of.env_id}: exact, against a best response in {of.states:,} decision states"
            tables[of.env_id] = Table(title=title, title_justify="left")
            tables[of.env_id].add_column("model", overflow="fold")
            for name in ("exploitability", "legal only", "other answers", "points at seat 0, 1"):
                tables[of.env_id].add_column(name, justify="right", min_width=min(14, len(name)))
        points = f"{of.win_0 + of.draw_0 / 2:.1%}, {of.win_1 + of.draw_1 / 2:.1%}"
        metrics = f"{of.exploitability:.4f}", f"{of.exploitability_legal:.4f}", f"{of.rest:.2%}"
        tables[of.env_id].add_row(of.model, *metrics, points)
    return list(tables.values())
