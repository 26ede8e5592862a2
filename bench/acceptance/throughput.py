"""Stages `offline`, `learner` and `handoff`: speeds against other ways, by the benches' own subjects.

`offline` sends the same requests to an engine worker, through the client of a run, and to vLLM's `LLM.generate` with
the same model, adapters and limits and its own defaults otherwise; in turn, with the worker's core in its own process
and in one beside it, and with requests that end at a string, at a special token, or only at their length.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import handoff as handoff_bench
from bench import learner as learner_bench
from bench.engine import MODELS, RANKS, told_by
from bench.engine import MODULE as WORKER
from bench.harness import Failure, Options, Report, Subjects, Target, alternate, cores
from bench.models import END
from unstable_lite.engines.devices import vllm_usable
from unstable_lite.planning.plan import ENGINE_THREADS_ON_GPU

PEER = "bench.peers.offline_llm"
CORES = {"core within": "0", "core in its own process": "1"}
"""Value of VLLM_ENABLE_V1_MULTIPROCESSING by name. The peer's is vLLM's default."""
STOPS: dict[str, list[str]] = {"no stop": [], "a stop string": ["never sampled"], "a special token": [END]}
WORK = {"requests": 256, "prompt": 256, "new": 128, "adapters": 3}
SMALL = {"requests": 4, "prompt": 16, "new": 4, "adapters": 3}


def offline(options: Options, _out: Path) -> Report:
    options = replace(options, rounds=min(options.rounds, 3))  # nine sides take half a minute for each round
    device, work = options.device, SMALL if options.small else WORK
    is_usable, why = vllm_usable(["cpu" if device == "cpu" else 0])
    if not is_usable:
        raise Failure(why)
    report = Report(bench="offline", question="Tokens a second of a worker and of LLM.generate", options=options)
    report.sizes = {**work, "model": MODELS[device], "lora_rank": RANKS[device]}
    threads = cores() if device == "cpu" and not options.small else ENGINE_THREADS_ON_GPU
    # Otherwise vLLM's CPU build binds itself to cores.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)} if device == "cpu" else {}
    with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
        arguments: dict[str, Any] = {"directory": name, "seed": options.seed, "threads": threads, "device": device}
        subjects.start(WORKER, kind="make", **arguments).close()
        arguments["rows"] = work["requests"]
        started = {
            side: subjects.start_in(
                environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": value}, WORKER, kind="vllm", **arguments
            )
            for side, value in CORES.items()
        }
        dtype = next(iter(started.values())).info["dtype"]
        started["LLM.generate"] = subjects.start_in(
            environment, PEER, has_lora=True, eager=options.small, sampling={}, dtype=dtype, **arguments
        )
        sides = {
            f"{side}, {ending}": told_by(subject, options.seconds, stop=stop, **work)
            for ending, stop in STOPS.items()
            for side, subject in started.items()
        }
        samples = alternate(sides, options)
    rows = {
        side: report.add(side, "tokens/s", [answer["tokens_per_s"] for answer in answers])
        for side, answers in samples.items()
    }
    for ending in STOPS:
        for side in CORES:
            ours, peer = rows[f"{side}, {ending}"], rows[f"LLM.generate, {ending}"]
            report.add_ratio(f"{side} ÷ LLM.generate, {ending}", ours, peer, Target(bound="≥", value=0.95))
    return _judged(report, "÷ LLM.generate")


def learner(options: Options, _out: Path) -> Report:
    options = replace(options, rounds=min(options.rounds, 3))  # the reference's way needs seconds for an update
    report = Report(bench="learner", question="Tokens a second and memory of an update", options=options)
    cases = learner_bench.SMALL if options.small else learner_bench.ON_A_GPU
    report.sizes = {**cases, "device": options.device}
    for case, sizes in cases.items():
        with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
            arguments = {"directory": name, "seed": options.seed, "device": options.device, **sizes}
            subjects.start(learner_bench.MODULE, kind="make", **arguments).close()
            learner_bench.measure_sides(report, case, subjects, arguments)
    report.notes += learner_bench.NOTES
    return _judged(report, "tokens/s, ours ÷ reference")


def handoff(options: Options, _out: Path) -> Report:
    kind = "transformers" if options.device == "cpu" else "vllm"
    return _judged(handoff_bench.run(options, [kind]), handoff_bench.STALL_RATIO)


def _judged(report: Report, name: str) -> Report:
    """Keep the targets of the metrics whose name contains `name`. In small sizes they must only have been measured.

    Raises Failure if one was not.
    """
    judged = [row for row, _ in report.ratios if name in row.name]
    if not judged or not all(row.samples for row in judged):
        raise Failure(f"{name} was not measured")
    is_judged = not report.options.small
    report.ratios = [(row, target if is_judged and row in judged else None) for row, target in report.ratios]
    return report
