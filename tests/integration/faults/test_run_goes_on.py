"""A whole run whose workers are killed."""

import json
from pathlib import Path

import psutil
import pytest

from fakes import runs

pytestmark = pytest.mark.nightly


def test_run_survives_worker_deaths_and_makes_every_update_once(tmp_path: Path) -> None:
    overrides = ("run.learning_steps=5", "run.num_eval_workers=0", "run.eval_games=0")
    process = runs.start_torchless("run", runs.write_small(tmp_path), *overrides)
    for num_updates, name in ((1, "engines.worker"), (2, runs.TORCHLESS)):
        runs.wait_for(lambda: runs.num_updates(tmp_path) >= num_updates)  # noqa: B023
        kill(process.pid, name)
    runs.output_of(runs.finish(process))
    directory = runs.run_directory(tmp_path)
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in metrics if "learner/loss" in line]
    assert [line["step"] for line in updates] == [line["learner/step"] for line in updates] == [1, 2, 3, 4, 5]
    assert updates[-1]["run/void_games"] == 0
    assert all(line["canary/mismatch"] < 0.1 for line in updates)
    assert updates[-1]["run/alarms"] == 2
    assert runs.arenas_named(directory.name) == []


def kill(orchestrator: int, module: str) -> None:

    def find() -> list[psutil.Process]:
        children = psutil.Process(orchestrator).children(recursive=True)
        return [child for child in children if any(module in part for part in child.cmdline())]

    runs.wait_for(find)
    find()[0].kill()
