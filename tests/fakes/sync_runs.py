"""Runs with a sync schedule, which repeat bit by bit: their settings, and the records that must be equal."""

import json
from pathlib import Path
from typing import Any

from fakes import run_files, runs

SYNC = (
    'run.schedule="sync"',
    "run.learning_steps=6",
    "run.checkpoint_every=3",
    "run.eval_every=2",
    "run.eval_games=8",
    "run.num_collection_workers=6",
    "engine.threads=1",
    "learner.threads=1",
    "league.opponent_sampling_strategy={ mirror = 0.4, lagged = 0.4, fixed = 0.2 }",
    "league.opponent_lag=[1, 2]",
)
BUDGET, ANSWER = 3, 12
"""Tokens of thinking and of a whole answer."""
THINKING = (
    *SYNC,
    f"engine.thinking_tokens={BUDGET}",
    f"engine.max_generation_len={ANSWER}",
    "engine.dtype=float32",
    "learner.dtype=float32",
    "learner.kl_coefficient=0.1",
    "tracker.keep_tokens=true",
)
TEMPLATE = r"""
[templates.think]
user = "<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"
assistant = "<think>"
stop = ["<|im_end|>"]
"""
CLOCK_AND_MACHINE = ("(s)", "seconds", "_per_s", "inference/", "arena_bytes")
"""Name parts of metrics that depend on the clock or the machine."""


def write_thinking(directory: Path) -> Path:
    path = runs.write_small(directory)
    path.write_text(path.read_text().replace('"tiny"', '"think"') + TEMPLATE)
    return path


def deterministic_metrics(directory: Path) -> list[dict[str, Any]]:
    lines = run_files.metrics(directory)
    return [{name: value for name, value in line.items() if not is_of_the_clock(name)} for line in lines]


def is_of_the_clock(name: str) -> bool:
    return name == "time" or name.endswith("_s") or any(mark in name for mark in CLOCK_AND_MACHINE)


def state_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((checkpoint / "league.json").read_text())
    del state["tracker"]["seconds"]
    # Some windows hold times; metrics.jsonl has the means of the others.
    for tracked in (state["tracker"], *state["tracker"].get("policies", {}).values()):
        tracked.pop("windows", None)
    return state


def assert_equal(one: Path, other: Path, checkpoints: set[str]) -> None:
    """Compare the metrics, the evaluations and these checkpoints of two runs."""
    assert deterministic_metrics(one) == deterministic_metrics(other)
    for name in checkpoints:
        ours, theirs = (directory / "checkpoints" / name for directory in (one, other))
        files = [path.relative_to(ours) for path in ours.rglob("*.safetensors")]
        assert {file.name for file in files} >= {"adapter_model.safetensors", "learner.safetensors"}
        for file in files:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (name, file)
        assert state_of(ours) == state_of(theirs)
    assert (one / "eval.jsonl").read_text() == (other / "eval.jsonl").read_text()
