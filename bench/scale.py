"""Scaling from one engine to eight, and the engines that one learner rank can feed.

Real engine processes behind the whole orchestrator, at a real engine's pace (`engines.py`): a step of 10 ms and more,
so that even two cores are not the limit, as the processor times show. Measures the orchestrator's effect on them. The
learner is not measured: `plan.py` computes its part, which is printed first.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

from bench.engines import Latency
from bench.harness import (
    Options,
    Questioner,
    Report,
    Subjects,
    Target,
    alternate,
    bench_config,
    cores,
    cpu_seconds,
    started_engines,
)
from bench.playing import playing
from unstable_lite.config import Config
from unstable_lite.orchestrator.event_loop import run_in_loop

MODULE = "bench.scale"
ENGINES = (1, 2, 4, 8)
PACE = Latency(step_s=0.010, row_s=0.0001, prompt_token_s=0.00002, slots=16)
"""Pace of this bench's engines. A token is a byte."""
GAMES_PER_ENGINE = 16
REPLIES = tuple("." * length + f"\\boxed{{[{cell}]}}" for cell in range(9) for length in (0, 10, 25, 60, 120))
WARM_UP_S = 1.5
"""Time of some answers, after a subject was frozen."""


def run(options: Options) -> Report:
    from bench import plan  # imports torch, which the measured orchestrators do without

    print("\n\n".join(plan.tables()))
    question = "Tokens a second of many engines behind one orchestrator"
    report = Report(bench="scale", question=question, options=options)
    numbers = ENGINES[:2] if options.small else ENGINES
    report.sizes = {
        "engines": numbers,
        "games_per_engine": GAMES_PER_ENGINE,
        "pace": {name: getattr(PACE, name) for name in ("step_s", "row_s", "prompt_token_s", "slots")},
        "mean_reply": sum(map(len, REPLIES)) / len(REPLIES) + 1,
    }
    with Subjects() as subjects:
        cases = {}
        for number in numbers:
            subject = subjects.start(MODULE, engines=number, seed=options.seed)
            cases[_name(number)] = partial(subject.measure, seconds=options.seconds)
        answers = alternate(cases, options)
    rows = {name: report.add(name, "tokens/s", [one["tokens_per_s"] for one in answers[name]]) for name in cases}
    for number in numbers[1:]:
        alone = replace(rows[_name(1)], samples=tuple(number * sample for sample in rows[_name(1)].samples))
        target = Target(bound="≥", value=0.95) if number == max(numbers) else None
        report.add_ratio(f"{_name(number)} ÷ {number} × 1 engine", rows[_name(number)], alone, target)
    for name in cases:
        last = answers[name][-1]
        report.notes.append(
            f"{name}: {last['turns_per_s']:.0f} turns/s, {last['cpu_us']:.0f} µs of the orchestrator's processor time "
            f"a turn, {last['engines_busy']:.0%} of a core for all engines, {last['orchestrator_busy']:.0%} for the "
            f"orchestrator, of {cores()} cores; {last['void']:.0f} void"
        )
    return report


def _name(engines: int) -> str:
    return "1 engine" if engines == 1 else f"{engines} engines"


# ------------------------------------------------------------------------------------ subjects


def config_of(arguments: dict[str, Any]) -> Config:
    return bench_config(
        run={"seed": arguments["seed"]},
        engine={
            "kind": "bench.engines:BatchingEngine",
            "replies": REPLIES,
            "max_generation_len": 256,
            "max_model_len": 8192,
        },
        learner={"batch_size": 64},
        tracker={"keep_games": "none"},
    )


async def measure(questioner: Questioner) -> None:
    arguments = questioner.arguments
    config, number = config_of(arguments), arguments["engines"]
    async with (
        started_engines(config, number, 1, PACE.environment()) as (pool, processes),
        playing(config, pool, GAMES_PER_ENGINE * number) as played,
    ):
        questioner.answer({})
        for request in questioner.requests():
            await asyncio.sleep(WARM_UP_S)
            started, cpu_s = time.perf_counter(), time.process_time()
            engines_cpu_s = sum(cpu_seconds(process.pid) for process in processes)
            tokens, turns = pool.generated_tokens, played.turns
            await asyncio.sleep(request["seconds"])
            seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
            turns = played.turns - turns
            engines_cpu_s = sum(cpu_seconds(process.pid) for process in processes) - engines_cpu_s
            questioner.answer(
                {
                    "tokens_per_s": (pool.generated_tokens - tokens) / seconds,
                    "turns_per_s": turns / seconds,
                    "cpu_us": 1e6 * cpu_s / max(turns, 1),
                    "orchestrator_busy": cpu_s / seconds,
                    "engines_busy": engines_cpu_s / seconds,
                    "void": played.void,
                }
            )


if __name__ == "__main__":
    questioner = Questioner()
    run_in_loop(measure(questioner))
