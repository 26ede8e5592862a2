"""Tokens per second of an engine alone, as a run starts it.

Each installed kind runs in its worker process, driven through `EngineClient`: text in, Generations out, 64 requests at
once, all prompts different; without adapters, with one, and with three in turn. Owns the model, the adapters and the
measured engine that the other engine benches share.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import (
    Options,
    Questioner,
    Report,
    Subject,
    Subjects,
    alternate,
    bench_config,
    cores,
    cpu_seconds,
    letters,
    started_engines,
)
from unstable_lite.config import Config
from unstable_lite.planning.plan import ENGINE_THREADS_ON_GPU
from unstable_lite.types import Generation

MODULE = "bench.engine"
RANK = 16
RANKS = {"cpu": RANK, "cuda": 32}
MODELS = {"cpu": "shape of builtin:tiny, random weights", "cuda": "shape of Qwen3-1.7B, random weights"}
MAX_LORAS = 4
KINDS = {"transformers": "transformers", "vllm": "vllm", "scripted": "json"}
"""Engine kind to the library that it needs."""


def run(options: Options) -> Report:
    report = Report(bench="engine", question="Tokens a second of an engine alone, by kind", options=options)
    work = {"requests": 8 if options.small else 64, "prompt": 100, "new": 8 if options.small else 32}
    device = options.device
    threads = cores() if device == "cpu" and not options.small else ENGINE_THREADS_ON_GPU
    report.sizes = {**work, "model": MODELS[device], "lora_rank": RANKS[device], "threads": threads, "device": device}
    with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
        arguments = {"directory": name, "seed": options.seed, "threads": threads, "device": device}
        subjects.start(MODULE, kind="make", **arguments).close()
        sides: dict[str, Callable[[], dict[str, Any]]] = {}
        for kind, library in KINDS.items():
            if importlib.util.find_spec(library) is not None:
                subject = subjects.start(MODULE, kind=kind, **arguments)
                for adapters in (0, 1, 3):
                    sides[side_name(kind, adapters)] = told_by(subject, options.seconds, adapters=adapters, **work)
        samples = alternate(sides, options)
    for kind in KINDS:
        rows = {}
        for adapters in (0, 1, 3):
            side = side_name(kind, adapters)
            answers = samples.get(side, [])
            remark = "" if answers else ABSENT
            rows[adapters] = report.add(side, "tokens/s", [a["tokens_per_s"] for a in answers], remark)
            report.add(f"{side}, of processor time", "tokens/CPU s", [a["tokens_per_cpu_s"] for a in answers], remark)
        report.add_ratio(f"{kind}, 3 adapters ÷ base only", rows[3], rows[0])
    return report


ABSENT = "not installed"


def side_name(side: str, adapters: int) -> str:
    return f"{side}, {('base only', '1 adapter', '', '3 adapters')[adapters]}"


def told_by(subject: Subject, seconds: float, **work: Any) -> Callable[[], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        answer = subject.measure(seconds=seconds, **work)
        assert answer["prompt_tokens"] == work["prompt"], answer
        return answer

    return measure


# --------------------------------------------------------------------------------------- subjects


def config_of(directory: Path, kind: str = "transformers", device: str = "cpu", rows: int = 64) -> Config:
    return bench_config(
        model_name=str(directory / "model"),
        engine={
            "kind": kind,
            "temperature": 1.0,
            "max_generation_len": 32,
            "max_model_len": 512,
            "max_parallel_seq": rows,
            "max_loras": MAX_LORAS,
            # Engines of all kinds run at the same time.
            "gpu_memory_utilization": 0.3,
        },
        lora={"lora_rank": RANKS[device]},
        learner={"batch_size": 8},
    )


def make(arguments: dict[str, Any]) -> None:
    """Write the model and three adapters to the directory that every subject reads."""
    from bench import models

    directory, device = Path(arguments["directory"]), arguments.get("device", "cpu")
    models.make_for(device, directory / "model", arguments["seed"])
    models.make_adapters(config_of(directory, device=device), directory, [1, 2, 3], arguments["seed"])


def prompts(rng: random.Random, request: dict[str, Any]) -> list[str]:
    """Return the prompts of one batch, whose first `shared` tokens are the same in this batch and in no other."""
    shared = request.get("shared", 0)
    opening = letters(rng, shared)
    return [opening + letters(rng, request["prompt"] - shared) for _ in range(request["requests"])]


def version_of(index: int, adapters: int) -> int:
    """Return the adapter of a request; requests use the adapters in turn."""
    return index % adapters + 1 if adapters else 0


class Told:
    """Counts the tokens of batches until the time is up; at least one batch."""

    def __init__(self, seconds: float, worker_pids: Sequence[int] = ()) -> None:
        self.new = self.prompt = self.requests = 0
        self._started = time.perf_counter()
        self._seconds = seconds
        self._worker_pids = worker_pids
        self._cpu_s = self._now_cpu_s()

    def _now_cpu_s(self) -> float:
        return time.process_time() + sum(map(cpu_seconds, self._worker_pids))

    @property
    def is_over(self) -> bool:
        return self.requests > 0 and time.perf_counter() - self._started >= self._seconds

    def add(self, prompt: int, new: int) -> None:
        self.requests += 1
        self.prompt += prompt
        self.new += new

    def answer(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.new / (time.perf_counter() - self._started),
            "tokens_per_cpu_s": self.new / max(self._now_cpu_s() - self._cpu_s, 1e-2),
            "prompt_tokens": self.prompt / self.requests,
        }


async def measure_worker(questioner: Questioner, kind: str) -> None:
    """Measure as many workers as requested; the one with the fewest outstanding tokens is next, as in a run."""
    arguments = questioner.arguments
    directory, device = Path(arguments["directory"]), arguments["device"]
    rng = random.Random(arguments["seed"])
    config, number = config_of(directory, kind, device, arguments.get("rows", 64)), arguments.get("workers", 1)
    async with started_engines(config, number, arguments["threads"], {}, device) as (pool, workers):
        for version in (1, 2, 3):
            await pool.load_adapter(version, directory / f"v{version}")
        questioner.answer({"dtype": pool.engines[0].channel.ready.result()["dtype"]})

        asked: set[str] = set()

        async def ask(text: str, version: int, request: dict[str, Any]) -> Generation:
            engine = pool.choose(pool.engines)
            asked.add(engine.channel.name)
            return await engine.generate(text, version, tuple(request.get("stop", ())), max_tokens=request["new"])

        for request in questioner.requests():
            counter = Told(request["seconds"], [worker.pid for worker in workers])
            while not counter.is_over:
                generations = await asyncio.gather(
                    *(
                        ask(text, version_of(index, request["adapters"]), request)
                        for index, text in enumerate(prompts(rng, request))
                    )
                )
                assert len(asked) == number, f"only {asked} got requests"
                for generation in generations:
                    counter.add(len(generation.prompt_ids), len(generation.completion_ids))
            questioner.answer(counter.answer())


if __name__ == "__main__":
    questioner = Questioner()
    if questioner.arguments["kind"] == "make":
        make(questioner.arguments)
        questioner.answer({})
    else:
        asyncio.run(measure_worker(questioner, questioner.arguments["kind"]))
