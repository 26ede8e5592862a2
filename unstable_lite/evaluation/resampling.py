"""Diversity of a model's choices: several actions for each of the same observations.

The diversity of played games mixes that of the games with that of the model. Here every model answers the same
observations from a run's games `samples` times each. The entropy of that many samples is at most ln(samples), and on
average below the policy's entropy, so compare only results with the same number of samples.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from rich.table import Table

from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.cells import Cell, game_spec, seat_of
from unstable_lite.evaluation.evaluator import for_each, with_engines
from unstable_lite.evaluation.loaded_adapters import AdapterSlots
from unstable_lite.evaluation.plan import EvaluationPlan
from unstable_lite.evaluation.results import write_csv
from unstable_lite.files import read_records
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.player import Player
from unstable_lite.orchestrator.event_loop import first_reason
from unstable_lite.tracking.diversity import entropy
from unstable_lite.tracking.intervals import Z_95
from unstable_lite.types import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Resampled:
    """Results of one model in one env; means over the observations."""

    model: str
    env_id: str
    n: int
    """Number of observations."""
    samples: int
    """Number of answers to each."""
    action_entropy: float
    """Mean entropy of the actions, in nats."""
    low: float
    high: float
    """95 % interval of the mean entropy, by the normal approximation."""
    distinct_actions: float
    correct_answer_format: float


def kept_observations(run: Path, env_id: str, most: int) -> list[str]:
    """Return distinct observations of `env_id` that models on engines saw in the games of `run`.

    They are a random sample with a fixed seed. Raises ConfigError if there are none.
    """
    seen: set[str] = set()
    for game in read_records(run / "games.jsonl"):
        if game["env_id"] == env_id and game["end"] != "void":
            served = {agent["pid"] for agent in game["agents"] if not agent["model"].startswith("fixed-")}
            seen.update(observation for pid, observation, *_ in game["turns"] if pid in served)
    if not seen:
        raise ConfigError(f"{run / 'games.jsonl'} holds no observation of {env_id}")
    return random.Random(0).sample(sorted(seen), min(most, len(seen)))


async def resample(
    evaluation: EvaluationPlan, run: Path, observations: int, samples: int, say: Callable[[str], None]
) -> list[Resampled]:
    """Return the results of all models of the plan in all its envs; write the table of finished ones to its output.

    Raises ConfigError for a model that no engine serves and for an output that cannot be written, RequestError for an
    observation that cannot be answered, and the errors of `evaluate`.
    """
    if fixed := sorted({cell.model.name for cell in evaluation.cells if cell.model.is_fixed}):
        raise ConfigError(f"{', '.join(fixed)}: only the base and adapters can be sampled again")
    envs = dict.fromkeys(cell.env.env_id for cell in evaluation.cells)
    kept = {env_id: kept_observations(run, env_id, observations) for env_id in envs}
    try:
        evaluation.output.open("a").close()
    except OSError as error:
        raise ConfigError(f"--output {evaluation.output}: {error.strerror}") from error
    logs = run / "logs" / "resample"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        return await with_engines(evaluation, logs, say, partial(_resample_all, evaluation, kept, samples))
    except BaseExceptionGroup as group:
        raise first_reason(group) from group


async def _resample_all(
    evaluation: EvaluationPlan, kept: dict[str, list[str]], samples: int, seats: PlayerFactory, slots: AdapterSlots
) -> list[Resampled]:
    rows: list[Resampled] = []
    async for round_ in slots.rounds(evaluation.cells):
        for cell in round_:
            player = seats.players(game_spec(cell, 0, 0, slots.ref))[seat_of(cell, 0)]
            observations = kept[cell.env.env_id]
            rows.append(_summarise(cell, await _ask(player, observations, samples, evaluation.concurrency)))
            write_csv(evaluation.output, [field.name for field in fields(Resampled)], map(asdict, rows))
    return rows


async def _ask(player: Player, observations: Sequence[str], samples: int, concurrency: int) -> list[list[Reply]]:
    """Return `samples` answers to each observation."""
    answers: list[list[Reply]] = [[] for _ in observations]

    async def ask(index: int) -> None:
        answers[index].append(await player.act(observations[index]))

    questions = (index for index in range(len(observations)) for _ in range(samples))
    await for_each(questions, ask, concurrency)
    return answers


def _summarise(cell: Cell, answers: Sequence[Sequence[Reply]]) -> Resampled:
    counts = [Counter(reply.action for reply in replies) for replies in answers]
    entropies = [entropy(count.values(), count.total()) for count in counts]
    mean = fmean(entropies)
    half = Z_95 * stdev(entropies) / math.sqrt(len(entropies)) if len(entropies) > 1 else math.nan
    return Resampled(
        model=cell.model.name,
        env_id=cell.env.env_id,
        n=len(answers),
        samples=len(answers[0]),
        action_entropy=mean,
        low=mean - half,
        high=mean + half,
        distinct_actions=fmean(map(len, counts)),
        correct_answer_format=fmean(reply.format_ok for replies in answers for reply in replies),
    )


def resampled_table(rows: Sequence[Resampled]) -> Table:
    """Return the table for a terminal."""
    table = Table("env", "model")
    for name in ("observations", "action entropy", "95 % interval", "distinct", "format ok"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (f"{row.action_entropy:.3f}", f"{row.low:.3f} – {row.high:.3f}", f"{row.distinct_actions:.2f}")
        table.add_row(row.env_id, row.model, str(row.n), *numbers, f"{row.correct_answer_format:.1%}")
    return table
