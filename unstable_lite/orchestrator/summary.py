"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unstable_lite.orchestrator.train_loop import TrainLoop
from unstable_lite.tracking.evaluations import Evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Result of a run that has ended."""

    directory: Path
    updates: int
    skipped_updates: int
    games: int
    void_games: int
    dropped_stale_steps: int
    """Number of steps that became too stale to be trained on."""
    seconds: float
    training_seconds: float
    """Time from the first training game to the last update, without start-up and the evaluations around it."""
    evaluations: tuple[Evaluation, ...]
    alarms: tuple[str, ...]
    checkpoint: Path | None
    """The newest checkpoint."""
    is_resumed: bool = False
    """Whether the times count from a resume; the other numbers are those of the whole run."""
    planned_updates: int = 0
    """Updates that the config asks for; a run that was stopped has made fewer."""
    collapsed: tuple[str, ...] = ()
    """Comparisons that ended worse than they were: of evaluations, and of training games."""
    stopped_by: str | None = None
    """The alarm that ended the run, if one did."""
    played_steps: int = 0
    """Number of collected steps of games that ended."""
    most_dropped: str | None = None
    """Env and class of game length of which the largest share was dropped, if any was."""


def summarise(training: TrainLoop, seconds: float, is_resumed: bool) -> Summary:
    """Return the result of a run that took `seconds` since it was started or resumed."""
    parts = training.parts
    return Summary(
        directory=parts.directory,
        updates=training.progress.updates,
        skipped_updates=training.progress.skipped,
        games=parts.tracker.games_finished,
        void_games=parts.tracker.void_games,
        dropped_stale_steps=parts.buffer.dropped_stale,
        seconds=seconds,
        is_resumed=is_resumed,
        training_seconds=training.progress.training_seconds,
        evaluations=tuple(sorted(parts.tracker.evaluations, key=lambda evaluation: evaluation.step)),
        alarms=tuple(parts.tracker.alarms),
        checkpoint=training.saver.newest,
        planned_updates=parts.plan.config.run.learning_steps,
        collapsed=tuple(parts.health.collapsed()),
        stopped_by=parts.health.stopped_by,
        played_steps=sum(counts.played for counts in parts.buffer.counts.values()),
        most_dropped=parts.buffer.counts.most_dropped(),
    )
