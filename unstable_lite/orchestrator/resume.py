"""Rewind a run directory to its newest intact checkpoint, from which the run resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.files import read_records
from unstable_lite.orchestrator.checkpoint import Checkpoint, lasting_changes, newest_checkpoint, read_checkpoint
from unstable_lite.orchestrator.evaluations import is_evaluated
from unstable_lite.tracking.rewind import rewind


def rewind_to_checkpoint(directory: Path, config: Config, say: Callable[[str], None]) -> Checkpoint:
    """Return the newest intact checkpoint, and remove everything that the run recorded after it.

    Raises ConfigError if the config differs from the run's in a key on which its checkpoints depend; UnstableError if
    there is no checkpoint, if the run has made all its updates, or if the directory cannot be written to.
    """
    if problems := [*lasting_changes(directory, config)]:
        raise ConfigError(*problems)
    checkpoint = read_checkpoint(newest_checkpoint(directory / "checkpoints", say))
    with checkpoint.understood():
        updates, state = int(checkpoint.state["updates"]), checkpoint.state["tracker"]
        scheduler = checkpoint.state["scheduler"]
        num_games, in_flight = sum(scheduler["games"].values()), set(scheduler["in_flight"])
        unfinished = {model for model, *_ in state["tallies"]} | {checkpoint.state["registry"]["current"]}
        evaluated = {(env_id, opponent) for env_id, opponent in checkpoint.state["evaluated"]}
    if updates > config.run.learning_steps or (
        updates == config.run.learning_steps and not _is_evaluation_left(directory, config, updates)
    ):
        raise UnstableError(f"{directory} already made its {updates} updates. To train further: run.learning_steps=N")
    # In mode `sync`, evaluations that the checkpoint does not contain are repeated: ratings and games depend on them.
    is_made_again = config.run.schedule == "sync" and is_evaluated(config.run, updates)

    def is_repeated(line: dict[str, Any]) -> bool:
        if line["label"] == "concurrent":
            return line["model"] in unfinished
        return is_made_again and line["step"] == updates and (line["env_id"], line["opponent"]) not in evaluated

    try:
        rewind(directory, updates, num_games, in_flight, is_repeated)
    except OSError as error:
        raise UnstableError(
            f"{directory}: the records after update {updates} cannot be removed: {error.strerror}. Free some space, "
            "and make the directory writable"
        ) from error
    say(f"resuming after update {updates}, from {checkpoint.directory.name}")
    return checkpoint


def _is_evaluation_left(directory: Path, config: Config, updates: int) -> bool:
    """Return whether an evaluation of the last policy is missing."""
    known = {
        (line["env_id"], line["opponent"])
        for line in read_records(directory / "eval.jsonl")
        if line["label"] != "concurrent" and line["step"] == updates
    }
    return bool(config.run.eval_games) and not known.issuperset((e.env_id, e.opponent) for e in config.eval_envs)
