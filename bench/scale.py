"""Scaling from one engine to eight, and the limit of one orchestrator.

Real engine processes behind the whole orchestrator, at a real engine's pace (`latency.py`): a step of 10 ms and more,
so that even two cores are not the limit, as the processor times show. Measures the orchestrator's effect on them: which
engine gets which request, and how soon. Choice by outstanding tokens is compared with taking turns and with chance, in
the same run.

`--simulate` computes what no machine here can show: 1 to 1,024 engines, with one learner or a learner that grows.
Its inputs are measured first (an orchestrator's time for a turn, the embedded engine's steps) or stated as assumed, and
its results are compared with the real engines of this bench at 1, 2, 4 and 8.
"""

from __future__ import annotations

import asyncio
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import (
    Grid,
    Options,
    Questioner,
    Report,
    Row,
    Subject,
    Subjects,
    Target,
    alternate,
    bench_config,
    cores,
    cpu_seconds,
    letters,
    started_engine,
    started_engines,
)
from bench.latency import Latency
from bench.playing import playing
from bench.plot import Chart, to_svg
from bench.simulation import LearnerCosts, Outcome, Setup, Simulation
from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.orchestrator.canary_checks import CANARY_TOKENS, SCORED
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.transport.codec import encode
from unstable_lite.transport.messages import Generate, Generated
from unstable_lite.types import Generation

MODULE = "bench.scale"
ENGINES = (1, 2, 4, 8)
PACE = Latency(step_s=0.010, row_s=0.0001, prompt_token_s=0.00002, slots=16)
"""Pace of this bench's engines. A token is a byte."""
GAMES_PER_ENGINE = 16
NO_TIME = Latency(step_s=0.0, row_s=0.0, prompt_token_s=0.0, slots=1024)
REPLIES = tuple("." * length + f"\\boxed{{[{cell}]}}" for cell in range(9) for length in (0, 10, 25, 60, 120))
LEAST, IN_TURN, BY_CHANCE = "fewest outstanding tokens", "in turn", "by chance"
WARM_UP_S = 1.5
"""Time of some answers, after a subject was frozen."""


def run(options: Options) -> Report:
    report = Report(
        bench="scale-simulated" if options.simulate else "scale",
        question="Tokens a second of many engines behind one orchestrator",
        options=options,
    )
    numbers = ENGINES[:2] if options.small else ENGINES
    report.sizes = {
        "engines": numbers,
        "games_per_engine": GAMES_PER_ENGINE,
        "pace": {name: getattr(PACE, name) for name in ("step_s", "row_s", "prompt_token_s", "slots")},
        "mean_reply": sum(map(len, REPLIES)) / len(REPLIES) + 1,
    }
    with Subjects() as subjects:
        of_number = {
            number: subjects.start(MODULE, kind="play", engines=number, seed=options.seed) for number in numbers
        }
        rows = _measure_scaling(report, of_number, options)
        if options.simulate:
            saturated = subjects.start(MODULE, kind="play", engines=1, seed=options.seed, no_time=True)
            _simulate(report, subjects, of_number, rows, saturated, options)
    return report


def _measure_scaling(report: Report, of_number: dict[int, Subject], options: Options) -> dict[int, Row]:
    most, answers = max(of_number), dict[str, dict[str, float]]()

    def measure(name: str, subject: Subject, choice: str) -> Callable[[], float]:
        def sample() -> float:
            answers[name] = subject.measure(seconds=options.seconds, choice=choice)
            return answers[name]["tokens_per_s"]

        return sample

    cases = {_name(number): measure(_name(number), subject, LEAST) for number, subject in of_number.items()}
    if not options.simulate:
        for choice in (IN_TURN, BY_CHANCE):
            cases[f"{_name(most)}, {choice}"] = measure(f"{_name(most)}, {choice}", of_number[most], choice)
    samples = alternate(cases, options)
    rows = {name: report.add(name, "tokens/s", samples[name]) for name in cases}
    for number in sorted(of_number)[1:]:
        alone = replace(rows[_name(1)], samples=tuple(number * sample for sample in rows[_name(1)].samples))
        target = Target(bound="≥", value=0.95) if number == most else None
        report.add_ratio(f"{_name(number)} ÷ {number} × 1 engine", rows[_name(number)], alone, target)
    for name in cases:
        if name.startswith(f"{_name(most)},"):
            report.add_ratio(f"{_name(most)}: {LEAST} ÷{name.partition(',')[2]}", rows[_name(most)], rows[name])
    for name, last in answers.items():
        report.notes.append(
            f"{name}: {last['turns_per_s']:.0f} turns/s, {last['cpu_us']:.0f} µs of the orchestrator's processor time "
            f"a turn, {last['engines_busy']:.0%} of a core for all engines, {last['orchestrator_busy']:.0%} for the "
            f"orchestrator, of {cores()} cores; {last['void']:.0f} void"
        )
    return {number: rows[_name(number)] for number in of_number}


def _name(engines: int) -> str:
    return "1 engine" if engines == 1 else f"{engines} engines"


# --------------------------------------------------------------------------------- simulation

SIMULATED = tuple(2**power for power in range(11))
GPU = Latency(step_s=0.015, row_s=0.0001, prompt_token_s=0.00002, slots=64)
ASSUMED = (
    "assumed, not measured: engines that take 15 ms per step + 0.1 ms per running request + 0.02 ms per prompt token, "
    "64 at once; a learner of 40,000 tokens/s per rank, an adapter loaded in 50 ms, a canary in 0.3 s, all of them "
    "scored in 20 ms + 2/3 of the time that one rank needs to train their tokens; change these values in "
    "bench/scale.py (GPU, LEARNER) to yours"
)
PROMPT_TOKENS = 400
LEARNER = LearnerCosts(
    batch_size=384,
    token_s=1 / 40_000,
    load_s=0.05,
    canary_s=0.3,
    score_s=0.02,
    scored_token_s=2 / 3 / 40_000,  # two forward passes; training costs as much as three
    canaries=SCORED[0],
    canary_tokens=PROMPT_TOKENS + CANARY_TOKENS,
    buffer_size=768,
    max_staleness=8,
)
SHORT, LONG = "answers of 100 tokens", "answers of 1,000 tokens"
MEAN_NEW = {SHORT: 100, LONG: 1000}
TURNS_PER_GAME = 8
GAMES_PER_SLOT = 1.25
STEPS_PER_ENGINE = 160
"""Batch steps per engine, if that exceeds LEARNER's: a quarter of what its games hold, so that few grow stale."""
ONE, ENOUGH, NONE = "one learner rank", "a learner that keeps up", "no learner"


def _simulate(
    report: Report,
    subjects: Subjects,
    of_number: dict[int, Subject],
    rows: dict[int, Row],
    saturated: Subject,
    options: Options,
) -> None:
    saturated.measure(seconds=0.2, choice=LEAST)
    costs = [
        saturated.measure(seconds=options.seconds, choice=LEAST)["cpu_us"] for _ in range(1 if options.small else 5)
    ]
    turn_us = report.add("orchestrator, processor time of a turn", "µs", costs, "engine that answers at once")
    assert turn_us.median is not None
    report.add("turns/s of which one core is capable", "turns/s", [1e6 / turn_us.median], "computed: 1 ÷ that")
    _add_bytes(report)
    fitted = "not measured (--small)" if options.small else _fit(report, subjects, options)

    for number, subject in of_number.items():
        info = subject.measure(seconds=0.0, choice=LEAST)
        simulated = Simulation(
            Setup(
                engines=number,
                latency=PACE,
                games=GAMES_PER_ENGINE * number,
                turns=[tuple(turn) for turn in info["turns"]],
                turns_per_game=max(1, round(info["turns_per_game"])),
                turn_s=turn_us.median / 1e6,
            ),
            options.seed,
        ).run(2.0, 5.0 if options.small else 60.0)
        row = report.add(f"{_name(number)}, simulated", "tokens/s", [simulated.tokens_per_s] * options.rounds)
        target = Target(bound="≥", value=0.9) if number == max(of_number) else None
        report.add_ratio(f"{_name(number)}: real ÷ simulated", rows[number], row, target)

    sizes = SIMULATED[:3] if options.small else SIMULATED
    curves: dict[str, dict[int, Outcome]] = {}
    for answers in (LONG, SHORT):
        of_one = _outcome(1, answers, None, turn_us.median / 1e6, options)
        trained_s = of_one.turns_per_s * (PROMPT_TOKENS + MEAN_NEW[answers]) * LEARNER.token_s
        """Seconds in which one rank trains what an engine makes in a second."""
        for kind in (ONE, ENOUGH, NONE):
            name, outcomes = f"{answers}, {kind}", {}
            for number in sizes:
                ranks = {ONE: 1, ENOUGH: math.ceil(1.1 * number * trained_s), NONE: None}[kind]
                outcomes[number] = _outcome(number, answers, ranks, turn_us.median / 1e6, options)
            curves[name] = outcomes
            report.tables.append(_grid(name, outcomes))
        report.notes.append(f"{answers}: one learner rank trains the output of {1 / trained_s:.1f} engines (computed)")
    report.notes += [ASSUMED, f"fitted to the embedded engine on this machine, for comparison: {fitted}"]
    report.notes.append(
        f"simulated games: {TURNS_PER_GAME} turns of {PROMPT_TOKENS} prompt tokens, {GAMES_PER_SLOT} for each slot; a "
        f"batch has {LEARNER.batch_size} steps, or {STEPS_PER_ENGINE} for each engine if that is more, the buffer two "
        "batches; utilisation is the share of all engines' slots that are taken"
    )
    report.figure = to_svg(_charts(curves))


def _outcome(number: int, answers: str, ranks: int | None, turn_s: float, options: Options) -> Outcome:
    """Simulate one size. ranks: of the learner; None: no learner, and taking a batch takes no time."""
    rng = random.Random(options.seed)
    mean = MEAN_NEW[answers]
    turns = [(PROMPT_TOKENS, rng.randint(mean // 4, 2 * mean - mean // 4)) for _ in range(500)]
    game_s = TURNS_PER_GAME * mean * GPU.step_seconds(GPU.slots, 0) * GAMES_PER_SLOT
    warm_up_s, seconds = game_s / 2, game_s / 2
    learner: LearnerCosts | None = None
    if ranks is not None:
        batch_size = max(LEARNER.batch_size, STEPS_PER_ENGINE * number)
        learner = replace(LEARNER, batch_size=batch_size, token_s=LEARNER.token_s / ranks, buffer_size=2 * batch_size)
        cycle_s = batch_size * (PROMPT_TOKENS + mean) * learner.token_s + learner.sync_seconds(number)
        warm_up_s, seconds = max(game_s, 3 * cycle_s), max(game_s, 6 * cycle_s)
    if options.small:
        warm_up_s, seconds = 1.0, game_s / 2  # some turns of the longest answers
    setup = Setup(
        engines=number,
        latency=GPU,
        games=math.ceil(GAMES_PER_SLOT * GPU.slots * number),
        turns=turns,
        turns_per_game=TURNS_PER_GAME,
        turn_s=turn_s,
        learner=learner,
    )
    return Simulation(setup, options.seed).run(warm_up_s, seconds)


def _grid(title: str, outcomes: dict[int, Outcome]) -> Grid:
    columns = (
        "engines", "utilisation", "turns/s", "tokens/s", "orchestrator's core", "learner busy", "weight sync",
        "staleness, mean", "most", "dropped as stale",
    )  # fmt: skip
    rows: list[tuple[float | str | None, ...]] = [
        (
            float(number),
            outcome.occupied_slots,
            outcome.turns_per_s,
            outcome.tokens_per_s,
            outcome.orchestrator_busy,
            outcome.learner_busy,
            outcome.weight_sync,
            outcome.staleness_mean if math.isfinite(outcome.staleness_mean) else None,
            float(outcome.staleness_max),
            outcome.dropped / outcome.produced if outcome.produced else None,
        )
        for number, outcome in outcomes.items()
    ]
    return Grid(title=f"simulated: {title}", columns=columns, rows=rows)


def _charts(curves: dict[str, dict[int, Outcome]]) -> list[Chart]:
    def lines(value: Callable[[Outcome], float]) -> dict[str, list[tuple[float, float]]]:
        return {name: [(number, value(outcome)) for number, outcome in curve.items()] for name, curve in curves.items()}

    return [
        Chart(
            title="Utilisation", x_label="engines", y_label="share of slots", lines=lines(lambda o: o.occupied_slots)
        ),
        Chart(
            title="Turns a second",
            x_label="engines",
            y_label="turns/s",
            lines=lines(lambda o: o.turns_per_s),
            log_y=True,
        ),
        Chart(
            title="Staleness of trained steps",
            x_label="engines",
            y_label="updates, mean",
            lines=lines(lambda o: o.staleness_mean),
        ),
        Chart(
            title="The orchestrator's core",
            x_label="engines",
            y_label="share of the time",
            lines=lines(lambda o: o.orchestrator_busy),
        ),
    ]


def _add_bytes(report: Report) -> None:
    """Add the bytes of a turn on the wire, from real messages."""
    for prompt, new in ((PROMPT_TOKENS, MEAN_NEW[SHORT]), (PROMPT_TOKENS, MEAN_NEW[LONG])):
        request = Generate(
            request_id=1, prompt="x" * 4 * prompt, adapter_version=1, max_tokens=new, temperature=1.0, top_p=1.0,
            stop=(), seed=None,
        )  # fmt: skip
        generation = Generation(
            prompt_ids=np.zeros(prompt, np.int32), completion_ids=np.zeros(new, np.int32),
            logprobs=np.zeros(new, np.float32), text="x" * 4 * new, finish_reason="stop", adapter_version=1,
        )  # fmt: skip
        reply = Generated(request_id=1, generation=generation)
        size = len(encode([request])) + len(encode([reply]))
        report.add(f"bytes of a turn of {prompt} + {new} tokens", "B", [size], "4 characters a token")


def _fit(report: Report, subjects: Subjects, options: Options) -> str:
    """Fit Latency to the embedded engine's steps, by least squares over batches of many shapes."""
    with tempfile.TemporaryDirectory() as name:
        subjects.start("bench.engine", kind="make", directory=name, seed=options.seed).close()
        subject = subjects.start(MODULE, kind="fit", directory=name, seed=options.seed)
        shapes = [(rows, prompt, new) for rows in (1, 8, 32, 64) for prompt in (64, 256) for new in (8, 32)]
        seconds = [subject.measure(rows=rows, prompt=prompt, new=new)["seconds"] for rows, prompt, new in shapes]
        subject.close()
    terms = np.array([[new, rows * new, rows * prompt] for rows, prompt, new in shapes], float)
    weights = 1 / np.array(seconds)  # minimizes relative errors
    (step_s, row_s, prompt_token_s), *_ = np.linalg.lstsq(terms * weights[:, None], np.ones(len(shapes)), rcond=None)
    predicted = terms @ (step_s, row_s, prompt_token_s)
    off = [float(abs(p / s - 1)) for p, s in zip(predicted, seconds, strict=True)]
    report.add("embedded engine, fitted: a step", "ms", [1e3 * step_s], "time on the clock, least squares")
    report.add("embedded engine, fitted: a row of it", "ms", [1e3 * row_s])
    report.add("embedded engine, fitted: a prompt token", "ms", [1e3 * prompt_token_s])
    report.add("embedded engine, how far the fit is off", "", off, f"of {len(shapes)} batches, relative")
    return f"{1e3 * step_s:.2f} ms a step + {1e3 * row_s:.3f} ms a row + {1e3 * prompt_token_s:.4f} ms a prompt token"


# ------------------------------------------------------------------------------------ subjects


class ChoosingPool(EnginePool):
    """Pool of a run, which can also choose engines in turn or by chance."""

    choice = LEAST

    def __init__(self, engines: Sequence[EngineClient], seed: int) -> None:
        super().__init__(engines)
        self._rng = random.Random(seed)
        self._next = 0

    def choose(self, up: Sequence[EngineClient]) -> EngineClient:
        if self.choice == IN_TURN:
            self._next += 1
            return up[self._next % len(up)]
        if self.choice == BY_CHANCE:
            return self._rng.choice(up)
        return super().choose(up)


def config_of(arguments: dict[str, Any]) -> Config:
    return bench_config(
        run={"seed": arguments["seed"]},
        engine={
            "kind": "bench.latency:BatchingEngine",
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
    pace, games = (NO_TIME, 384) if arguments.get("no_time") else (PACE, GAMES_PER_ENGINE * number)
    async with started_engines(config, number, 1, pace.environment()) as (engines, processes):
        pool = ChoosingPool(engines.engines, arguments["seed"])
        async with playing(config, pool, games) as played:
            questioner.answer({})
            for request in questioner.requests():
                pool.choice = request["choice"]
                if request["seconds"]:
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
                        "turns_per_game": played.turns / max(played.games, 1),
                        "turns": played.lengths,
                    }
                )


async def measure_embedded(questioner: Questioner) -> None:
    from bench import engine

    arguments = questioner.arguments
    rng = random.Random(arguments["seed"])
    async with started_engine(engine.config_of(Path(arguments["directory"])), threads=1) as (pool, _):
        questioner.answer({})
        for request in questioner.requests():
            times = []
            for _ in range(3):
                texts = [letters(rng, request["prompt"]) for _ in range(request["rows"])]
                started = time.perf_counter()
                asked = (pool.engines[0].generate(text, 0, max_tokens=request["new"]) for text in texts)
                await asyncio.gather(*asked)
                times.append(time.perf_counter() - started)
            questioner.answer({"seconds": min(times)})


if __name__ == "__main__":
    questioner = Questioner()
    run_in_loop((measure_embedded if questioner.arguments["kind"] == "fit" else measure)(questioner))
