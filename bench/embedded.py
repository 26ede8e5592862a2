"""Tokens per second of the embedded engine, against the alternatives on the same cores.

The embedded engine runs as in a run: in its worker process, text in and Generations out. vLLM's CPU build is driven
directly, at its best (`LLM`, one batch, token ids in, no detokenization, prefix cache on, compiled).

Cores are used in two ways: by one worker with all threads, and by two workers with half of them each
(`engine.devices = ["cpu", "cpu"]`), among which the pool divides the requests as in a run. Most operations of a model
this small are too small to be split among threads, so two workers are what a user with two cores should run
(docs/gpus.md) and what the targets judge; one worker is reported beside them. vLLM is one process with all threads.

64 requests at once: prompts of 100 tokens, all different, with answers of 32 tokens and of 8 (as in games of this size:
most of the work is prompts); and prompts of 400 tokens with answers of 8, all different or with 360 tokens in common.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from bench.engine import ABSENT, MODULE, RANK, side_name, told_by
from bench.harness import Options, Report, Row, Subjects, Target, alternate, cores
from bench.peers import HAS_VLLM

PEER = "bench.peers.offline_llm"
EMBEDDED, ONE_THREAD, TWO_WORKERS, VLLM, VLLM_LORA = (
    "embedded",
    "embedded with one thread",
    "embedded, two workers",
    "vLLM without LoRA",
    "vLLM with LoRA",
)
SIDES = (
    *((EMBEDDED, adapters) for adapters in (0, 1, 3)),
    (ONE_THREAD, 1),
    *((TWO_WORKERS, adapters) for adapters in (1, 3)),
    (VLLM, 0),
    (VLLM_LORA, 1),
    (VLLM_LORA, 3),
)
WORK: dict[str, dict[str, int]] = {
    "100 + 32": {"requests": 64, "prompt": 100, "new": 32},
    "100 + 8": {"requests": 64, "prompt": 100, "new": 8},
    "400 + 8": {"requests": 64, "prompt": 400, "new": 8},
    "400, 360 shared + 8": {"requests": 64, "prompt": 400, "new": 8, "shared": 360},
}
FIRST, _, LONG, SHARED = WORK
SMALL = {
    name: {"requests": 8, "prompt": WORK[name]["prompt"] // 10, "new": 4, "shared": WORK[name].get("shared", 0) // 10}
    for name in (FIRST, LONG, SHARED)
}


def run(options: Options) -> Report:
    report = Report(bench="embedded", question="Tokens a second of the embedded engine", options=options)
    works = SMALL if options.small else WORK
    threads = 1 if options.small else cores()
    report.sizes = {**works, "model": "shape of builtin:tiny, random weights", "lora_rank": RANK, "threads": threads}
    with tempfile.TemporaryDirectory() as directory, Subjects() as subjects:
        arguments: dict[str, Any] = {"directory": directory, "seed": options.seed, "threads": threads, "device": "cpu"}
        arguments["eager"] = options.small
        subjects.start(MODULE, kind="make", **arguments).close()
        embedded = subjects.start(MODULE, kind="transformers", **arguments)
        report.sizes["dtype"] = arguments["dtype"] = embedded.info["dtype"]
        started = {
            EMBEDDED: embedded,
            ONE_THREAD: subjects.start(MODULE, kind="transformers", **{**arguments, "threads": 1}),
            TWO_WORKERS: subjects.start(
                MODULE, kind="transformers", workers=2, **{**arguments, "threads": max(1, threads // 2)}
            ),
        }
        if HAS_VLLM:
            binding = "nobind" if options.small else "auto"
            of_cores = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": binding}
            sampling = {"ignore_eos": True, "detokenize": False}
            for side in (VLLM, VLLM_LORA):
                started[side] = subjects.start_in(
                    of_cores, PEER, has_lora=side == VLLM_LORA, sampling=sampling, **arguments
                )
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            f"{name}: {side_name(side, adapters)}": told_by(started[side], options.seconds, adapters=adapters, **work)
            for name, work in works.items()
            for side, adapters in SIDES
            if side in started
        }
        samples = alternate(measures, options)
    for name in works:
        keys = {"tokens/s": "tokens_per_s"} | ({"tokens/CPU s": "tokens_per_cpu_s"} if name == FIRST else {})
        for unit, key in keys.items():
            rows: dict[tuple[str, int], Row] = {}
            for side, adapters in SIDES:
                full = f"{name}: {side_name(side, adapters)}"
                values = [answer[key] for answer in samples.get(full, [])]
                # With one name for both, --compare would find only one of them.
                title = full if unit == "tokens/s" else f"{full}, of processor time"
                rows[side, adapters] = report.add(title, unit, values, "" if values else ABSENT)
            _add_ratios(report, name, unit, rows)
    long, shared = (_row(report, f"{name}: {side_name(EMBEDDED, 1)}") for name in (LONG, SHARED))
    report.add_ratio("embedded, 1 adapter: 360 of 400 prompt tokens shared ÷ none", shared, long)
    return report


def _add_ratios(report: Report, name: str, unit: str, rows: dict[tuple[str, int], Row]) -> None:
    """Add the ratios. Targets apply only to the first kind of work, in wall-clock time."""
    has_target = name == FIRST and unit == "tokens/s"
    of = "" if unit == "tokens/s" else ", of processor time"
    for what, a, b, least in (
        ("embedded, two workers ÷ vLLM with LoRA, 3 adapters", (TWO_WORKERS, 3), (VLLM_LORA, 3), 5),
        ("embedded, two workers with 1 adapter ÷ vLLM without LoRA", (TWO_WORKERS, 1), (VLLM, 0), 1),
        ("embedded ÷ vLLM with LoRA, 3 adapters", (EMBEDDED, 3), (VLLM_LORA, 3), None),
        ("embedded with 1 adapter ÷ vLLM without LoRA", (EMBEDDED, 1), (VLLM, 0), None),
        ("embedded ÷ vLLM without LoRA, base only", (EMBEDDED, 0), (VLLM, 0), None),
        ("embedded, 3 adapters ÷ base only", (EMBEDDED, 3), (EMBEDDED, 0), None),
        ("embedded with 1 adapter, all threads ÷ one", (EMBEDDED, 1), (ONE_THREAD, 1), None),
        ("embedded with 1 adapter, two workers ÷ one", (TWO_WORKERS, 1), (EMBEDDED, 1), None),
    ):
        target = Target(bound="≥", value=least) if has_target and least else None
        report.add_ratio(f"{name}: {what}{of}", rows[a], rows[b], target)


def _row(report: Report, name: str) -> Row:
    return next(row for row in report.rows if row.name == name)
