"""Cost of three policies on one base, beside one policy with as many updates.

Every policy plays itself, so that the games, the batches and the requests are the same; only the adapters, their
moments and the engine's adapter slots are three times as many. Both sides train in turn, round by round, with the
settings of examples/main_and_exploiter.toml. The first updates do not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil

from bench.harness import REPOSITORY, Options, Report, Target
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.orchestrator.run import Run
from unstable_lite.planning.plan import make_plan

EXAMPLE = REPOSITORY / "examples" / "main_and_exploiter.toml"
NUM_POLICIES = 3
WARM, UPDATES = 15, 60
"""Updates before the measurement, and in it."""


def run(options: Options) -> Report:
    report = Report(bench="policies", question="Cost of three policies on one base", options=options)
    warm, updates = (3, 3) if options.small else (WARM, UPDATES)
    report.sizes = {"policies": NUM_POLICIES, "updates": updates}
    rates, tokens, memory = ({n: list[float]() for n in (1, NUM_POLICIES)} for _ in range(3))
    for number in range(options.rounds):
        for n in (1, NUM_POLICIES) if number % 2 else (NUM_POLICIES, 1):
            with tempfile.TemporaryDirectory() as place:
                measured = run_in_loop(_measured(_config(n, warm + updates, options.seed + number, Path(place)), warm))
            for values, value in zip((rates, tokens, memory), measured, strict=True):
                values[n].append(value)
    for n in (1, NUM_POLICIES):
        report.add(f"{n} policies", "updates/s", rates[n])
        report.add(f"{n} policies", "tokens/s", tokens[n])
        report.add(f"learner of {n} policies", "MB", memory[n])
    for unit, values in (("updates/s", rates), ("tokens/s", tokens)):
        ratios = [many / one for one, many in zip(values[1], values[NUM_POLICIES], strict=True)]
        report.add_figure(f"{NUM_POLICIES} policies ÷ 1, {unit}", "×", ratios, Target(bound="≥", value=0.9))
    further = (median(memory[NUM_POLICIES]) - median(memory[1])) / (NUM_POLICIES - 1)
    report.add("learner, each further policy", "MB", [further])
    return report


def _config(num_policies: int, updates: int, seed: int, place: Path) -> Config:
    raw = tomllib.loads(EXAMPLE.read_text())
    raw["run"] |= {"learning_steps": updates, "eval_games": 0, "seed": seed, "output_dir": place}
    del raw["run"]["eval_every"], raw["eval_envs"]
    raw["engine"]["max_loras"] = 8 * num_policies
    raw["league"] |= {"opponent_sampling_strategy": "mirror"}
    raw["policies"] = {f"policy{n}": {} for n in range(num_policies)}
    return Config.model_validate(raw)


async def _measured(config: Config, warm: int) -> tuple[float, float, float]:
    """Return updates and generated tokens for each second after `warm` updates, and the learner's memory in MB."""
    run = Run(make_plan(config), terminal=TerminalInterface(quiet=True))
    training = asyncio.create_task(run.execute())
    marks, resident = list[tuple[float, int, int]](), 0.0
    while not training.done():
        await asyncio.sleep(0.02)
        if (loop := run.training) is not None and loop.progress.updates >= warm:
            generated = loop.parts.workers.engines.generated_tokens
            marks.append((time.monotonic(), loop.progress.updates, generated))
            with contextlib.suppress(psutil.Error):
                resident = max(resident, max(psutil.Process(pid).memory_info().rss for pid in _learners(run)) / 1e6)
    await training
    (began, before, tokens_before), *_ = marks
    ended, after, tokens_after = next(mark for mark in marks if mark[1] == marks[-1][1])
    seconds = ended - began
    return (after - before) / seconds, (tokens_after - tokens_before) / seconds, resident


def _learners(run: Run) -> Iterator[int]:
    assert run.training is not None
    for process in run.training.parts.workers.processes:
        if process.channel.name == "learner" and process.pid is not None:
            yield process.pid
