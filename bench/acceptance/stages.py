"""The stages of `python -m bench acceptance`, in their order. Loads none of them, because most load torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from bench.harness import Options, Report

Run = Callable[[Options, Path], Report]
"""Function of the options and the directory of the results. The stage passes if the report meets all its targets.

With `options.small`, on the CPU, metrics that need full sizes have no target. Raises Failure if it cannot measure.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    function: str
    """Module in this folder, and the name of its `Run` there."""
    proves: str
    limit_s: float
    """Time after which it is killed: twice the time that an H100 is expected to take; no GPU has run it yet. On a GPU
    it is not started with less than half of it left."""
    needs_gpu: bool = False

    def load(self) -> Run:
        module, _, name = self.function.partition(":")
        return cast(Run, getattr(importlib.import_module(f"bench.acceptance.{module}"), name))


STAGES = {
    "facts": Stage(
        function="machine:facts",
        proves="number and memory of the GPUs are those that CUDA reports (2 %)",
        limit_s=120,
    ),
    "tests-learner": Stage(
        function="marked_tests:learner",
        proves="the learner's tests marked gpu pass (a forest's gradient is that of rows), and none is skipped",
        limit_s=300,
        needs_gpu=True,
    ),
    "tests-engine": Stage(
        function="marked_tests:engine",
        proves="the tests of engines and runs marked gpu pass, and none is skipped",
        limit_s=590,
        needs_gpu=True,
    ),
    "agree": Stage(
        function="agreement:agree",
        proves="the learner computes the engine's log-probabilities, for the base and three adapters",
        limit_s=300,
    ),
    "offline": Stage(
        function="throughput:offline",
        proves="an engine worker makes at least 0.95 of the tokens a second of vLLM's LLM.generate",
        limit_s=590,
    ),
    "learner": Stage(
        function="throughput:learner",
        proves="the learner makes at least 3 times the tokens a second of the reference's way",
        limit_s=480,
    ),
    "handoff": Stage(
        function="throughput:handoff",
        proves="a new adapter stalls the engine no longer than the longest quiet gap and its own load",
        limit_s=360,
    ),
    "learning": Stage(
        function="whole_runs:learning",
        proves="the quickstart wins at least 75 % against random play in its last evaluation",
        limit_s=540,
    ),
    "sleep": Stage(
        function="whole_runs:sleep",
        proves="engine and learner take six turns on one device, and the engine's memory is free in between",
        limit_s=300,
    ),
    "killed": Stage(
        function="whole_runs:killed",
        proves="a run survives the death of its engine and of its learner",
        limit_s=300,
    ),
}
