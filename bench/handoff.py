"""Time from a new adapter in shared memory to the first token sampled from it, and the stall that it causes.

Learner and engine run as in a run. Each sample is a real update that writes a real adapter; then, step by step: load
on the engine, canary sampled by the engine, canary scored by the learner, first token of a request for the new version.
Measured with an idle engine, and with one that serves requests without a pause. In the latter case the stall is the
longest gap between two finished requests that overlaps the load; it is compared with the longest gap of a quiet time.
This is looser than one step of the engine: requests end every few steps, and the steps are not visible from outside.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine import MODELS, RANKS
from bench.harness import Options, Questioner, Report, Subject, Subjects, Target, alternate, bench_config, letters
from unstable_lite.adapters.store import AdapterStore
from unstable_lite.config import Config
from unstable_lite.orchestrator.canary_checks import CANARY_SEED, CANARY_TOKENS, SAMPLED, SCORED
from unstable_lite.orchestrator.workers import Workers, started_workers
from unstable_lite.planning.plan import make_plan
from unstable_lite.transport.messages import AdapterDigest, LoadAdapter
from unstable_lite.types import Generation, Step

MODULE = "bench.handoff"
ENGINES = {
    "transformers": ("unstable_lite.engines.embedded.engine",),
    "vllm": ("unstable_lite.engines.vllm", "vllm"),
}
"""Engine kind to the modules that it needs."""
STEPS = {
    "own_load_s": "engine's own load",
    "load_s": "load, message included",
    "canary_s": f"{SAMPLED[0]} canaries of {CANARY_TOKENS} tokens",
    "score_s": f"{SCORED[0]} canaries scored",
    "first_token_s": "first token",
    "total_s": "publish → first token",
    "without_canary_s": "load and first token, canary apart",
}
STALL = {"stall_s": "longest gap during a load", "quiet_s": "longest gap in a quiet time"}
STALL_RATIO = "stall ÷ (quiet gap + own load)"
MS = 1000.0


def run(options: Options, kinds: Sequence[str] = tuple(ENGINES)) -> Report:
    report = Report(bench="handoff", question="From a new adapter to its first token", options=options)
    device, load = options.device, 4 if options.small else 32
    report.sizes = {"model": MODELS[device], "lora_rank": RANKS[device], "prompt": 100, "load": load, "device": device}
    with tempfile.TemporaryDirectory() as name, Subjects() as subjects:
        arguments = {"directory": name, "seed": options.seed, "load": load, "device": device}
        subjects.start(MODULE, kind="make", **arguments).close()
        for kind in kinds:
            if any(importlib.util.find_spec(module) is None for module in ENGINES[kind]):
                report.add(f"{kind}: {STEPS['total_s']}", "ms", [], "not installed")
                continue
            subject = subjects.start(MODULE, kind=kind, **arguments)
            _add(report, kind, subject, options)
            subject.close()
    report.notes.append("canary and first token are whole requests: they include the prefill of 100 prompt tokens")
    return report


def _add(report: Report, kind: str, subject: Subject, options: Options) -> None:
    states = {"idle": False, "under load": True}
    measures = {
        state: partial(subject.measure, loaded=is_loaded, seconds=options.seconds)
        for state, is_loaded in states.items()
    }
    for state, answers in alternate(measures, options).items():
        rows = {
            key: report.add(f"{kind}, {state}: {what}", "ms", [MS * answer[key] for answer in answers])
            for key, what in (STEPS if state == "idle" else STEPS | STALL).items()
        }
        report.add_ratio(
            f"{kind}, {state}: publish → first token ÷ own load",
            rows["total_s"],
            rows["own_load_s"],
            Target(bound="≤", value=2) if state == "idle" else None,
        )
        report.add_ratio(
            f"{kind}, {state}: the same, canary apart ÷ own load", rows["without_canary_s"], rows["own_load_s"]
        )
        if state == "under load":
            allowed = [MS * (answer["quiet_s"] + answer["own_load_s"]) for answer in answers]
            bound = report.add(f"{kind}: longest quiet gap + own load", "ms", allowed)
            report.add_ratio(f"{kind}: {STALL_RATIO}", rows["stall_s"], bound, Target(bound="≤", value=1))


# --------------------------------------------------------------------------------------- subjects


def config_of(directory: Path, kind: str, device: str) -> Config:
    devices = ["cpu" if device == "cpu" else 0]
    return bench_config(
        model_name=str(directory / "model"),
        engine={
            "kind": kind,
            "devices": devices,
            "temperature": 1.0,
            "max_generation_len": 32,
            "max_model_len": 512,
            "max_parallel_seq": 64,
            "max_loras": 4,
        },
        learner={"batch_size": 8, "devices": devices},
        lora={"lora_rank": RANKS[device]},
        run={"output_dir": str(directory)},
    )


class Handoff:
    """Hands one version after another from the learner to the engine, and times each step."""

    def __init__(self, workers: Workers, arena: AdapterStore, seed: int) -> None:
        self._engine = workers.engines.engines[0]
        self._learner = workers.learners[""]
        self._arena = arena
        self._rng = random.Random(seed)
        self._versions = itertools.count(1)
        self._finished: list[float] = []
        """Time at which each request of the load finished."""
        self._has_finished = asyncio.Event()

    async def hand_over(self) -> dict[str, float]:
        version = next(self._versions)
        batch = [step(await self._engine.generate(self._prompt(), 0, max_tokens=8), reward) for reward in (-1.0, 1.0)]
        updated = await self._learner.update(batch, version, self._arena)
        assert updated.skipped is None, updated.skipped

        clock = [time.perf_counter()]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._learner.save_state(version, self._arena))
            path = str(self._arena.path(version))
            loaded: AdapterDigest = await self._engine.channel.ask(LoadAdapter, 300.0, version=version, path=path)
            self._engine.adapters.add(version)
            clock.append(time.perf_counter())
            seeds, prompt = range(CANARY_SEED, CANARY_SEED + SAMPLED[0]), self._prompt()
            asked = (self._engine.generate(prompt, version, seed=s, max_tokens=CANARY_TOKENS) for s in seeds)
            canaries = await asyncio.gather(*asked)
            clock.append(time.perf_counter())
            await self._learner.score(canaries[: SCORED[0]])
            clock.append(time.perf_counter())
            await self._engine.generate(self._prompt(), version, max_tokens=1)
            clock.append(time.perf_counter())

        await self._engine.unload_adapter(version)
        self._arena.unlink(version)
        steps = [after - before for before, after in itertools.pairwise(clock)]
        return {
            "own_load_s": loaded.seconds,
            **dict(zip(("load_s", "canary_s", "score_s", "first_token_s"), steps, strict=True)),
            "total_s": clock[-1] - clock[0],
            "without_canary_s": steps[0] + steps[3],
            "load_began": clock[0],
            "load_ended": clock[1],
        }

    async def hand_over_under_load(self, num_requests: int, quiet_s: float) -> dict[str, float]:
        self._finished.clear()
        async with asyncio.TaskGroup() as tasks:
            load = [tasks.create_task(self._generate_forever()) for _ in range(num_requests)]
            await asyncio.sleep(0.2)
            quiet_from = time.perf_counter()
            await asyncio.sleep(quiet_s)
            quiet_to = time.perf_counter()
            times = await self.hand_over()
            self._has_finished.clear()
            await self._has_finished.wait()  # the gap that began with the load may end only now
            for task in load:
                task.cancel()
        times["quiet_s"] = self._longest_gap(quiet_from, quiet_to)
        times["stall_s"] = self._longest_gap(times["load_began"], times["load_ended"])
        return times

    async def _generate_forever(self) -> None:
        while True:
            await self._engine.generate(self._prompt(), 0, max_tokens=self._rng.randint(4, 32))
            self._finished.append(time.perf_counter())
            self._has_finished.set()

    def _longest_gap(self, begin: float, end: float) -> float:
        """Return the longest gap between two finished requests that overlaps `begin … end`."""
        gaps = [
            after - before for before, after in itertools.pairwise(self._finished) if after > begin and before < end
        ]
        return max(gaps, default=0.0)

    def _prompt(self) -> str:
        return letters(self._rng, 100)


def step(generation: Generation, reward: float) -> Step:
    return Step(pid=0, obs="", act=generation.text, reward=reward, env_id="", generation=generation)


async def measure(questioner: Questioner) -> None:
    arguments = questioner.arguments
    directory = Path(arguments["directory"])
    logs = directory / f"logs-{arguments['kind']}"
    logs.mkdir()
    plan = make_plan(config_of(directory, arguments["kind"], arguments["device"]))
    async with started_workers(plan, logs, say=lambda _: None) as workers:
        arena = AdapterStore(f"bench-{directory.name}-{arguments['kind']}", directory, 8 * workers.adapter_bytes)
        try:
            handoff = Handoff(workers, arena, arguments["seed"])
            questioner.answer({})
            for request in questioner.requests():
                if request["loaded"]:
                    times = await handoff.hand_over_under_load(arguments["load"], request["seconds"])
                else:
                    times = await handoff.hand_over()
                questioner.answer(times)
        finally:
            arena.close()


def make(arguments: dict[str, Any]) -> None:
    from bench import models  # imports torch, which the orchestrator's side does not need

    models.make_for(arguments["device"], Path(arguments["directory"]) / "model", arguments["seed"])


if __name__ == "__main__":
    questioner = Questioner()
    if questioner.arguments["kind"] == "make":
        make(questioner.arguments)
        questioner.answer({})
    else:
        asyncio.run(measure(questioner))
