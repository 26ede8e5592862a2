"""Records that a run left in its directory."""

from pathlib import Path
from typing import Any

from unstable_lite.files import read_records


def metrics(directory: Path) -> list[dict[str, Any]]:
    return list(read_records(directory / "metrics.jsonl"))


def updates(directory: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that updates wrote."""
    return [line for line in metrics(directory) if any(name.endswith("learner/loss") for name in line)]


def games(directory: Path) -> list[dict[str, Any]]:
    return list(read_records(directory / "games.jsonl"))


def evaluations(directory: Path) -> list[dict[str, Any]]:
    return list(read_records(directory / "eval.jsonl"))
