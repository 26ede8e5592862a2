"""Share of an engine's throughput that a training run gets.

One engine process, driven in turns by a whole training run (games, ratings, records, a learner that learns, adapters
handed over, checkpoints written) and by that run's requests alone: in the same order, with as many at once and a new
adapter wherever the run had one, because an engine's cache for one adapter does not help the next. Measured with the
embedded engine and the small model, and with an engine at a GPU's pace. With two cores or more the engine has one and
the learner another, with the orchestrator beside it; a third side then has the engine alone while the other core
multiplies matrices, because cores share caches, memory and power. On GPUs the engine has the first and the learner the
second. If there is only one they share it, and the ratio, which then has no target, is the engine's share of that GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine import MODELS, RANKS
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
    unlimit_games_in_flight,
)
from unstable_lite.config import Config
from unstable_lite.config.tracking import AlarmsConfig
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.engines.devices import count_gpus
from unstable_lite.orchestrator import workers
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.orchestrator.run import Run
from unstable_lite.orchestrator.train_loop import TrainLoop
from unstable_lite.planning.plan import make_plan
from unstable_lite.types import Generation

MODULE = "bench.sustained"
SLOTS = 32
PACE = Latency(step_s=0.010, row_s=0.0001, prompt_token_s=0.00001, slots=SLOTS)
KINDS = {"embedded": "bench.forgetful_engine:ForgetfulEngine", "paced": "bench.engines:BatchingEngine", "vllm": "vllm"}
ON = {"cpu": ("embedded", "paced"), "cuda": ("embedded", "vllm")}
IN_RUN, ALONE, BESIDE = "in a run", "alone", "alone, other core busy"
WARM_UP_S = 2.0
QUIET_S = 0.3
KEPT_REQUESTS = 4096
BUSY = "import torch; torch.set_num_threads(1); a = torch.rand(1024, 1024)\nwhile True: a @ a"
STAND_INS = 1_000_000
"""First version that stands in for one of the run."""


def run(options: Options) -> Report:
    report = Report(bench="sustained", question="Tokens a second of an engine in a run and alone", options=options)
    games = 8 if options.small else 2 * SLOTS
    device = options.device
    model = "builtin:tiny" if device == "cpu" else MODELS[device]
    report.sizes = {
        "games": games,
        "slots": SLOTS,
        "cores": cores(),
        "pinned": is_pinned(device),
        "model": model,
        "device": device,
    }
    for kind in ON[device]:
        if kind == "vllm" and importlib.util.find_spec("vllm") is None:
            report.add(f"{kind}, {IN_RUN}", "tokens/s", [], "not installed")
            continue
        with Subjects() as subjects:
            arguments = {"kind": kind, "games": games, "seed": options.seed, "small": options.small, "device": device}
            subject = subjects.start_in(PACE.environment(), MODULE, **arguments)
            sides = (IN_RUN, ALONE, BESIDE) if is_pinned(device) else (IN_RUN, ALONE)
            measures = {side: partial(subject.measure, side=side, seconds=options.seconds) for side in sides}
            answers = alternate(measures, options)
        rows = {
            side: report.add(f"{kind}, {side}", "tokens/s", [one["tokens_per_s"] for one in answers[side]])
            for side in sides
        }
        target = None if is_shared(device) else Target(bound="≥", value=0.95)
        report.add_ratio(f"{kind}: {IN_RUN} ÷ {ALONE}", rows[IN_RUN], rows[ALONE], target)
        if BESIDE in rows:
            report.add_ratio(f"{kind}: {IN_RUN} ÷ {BESIDE}", rows[IN_RUN], rows[BESIDE])
        busy = {
            side: report.add(
                f"{kind}, {side}: engine's processor time a token", "µs", [one["cpu_us"] for one in answers[side]]
            )
            for side in sides
        }
        report.add_ratio(f"{kind}: {ALONE} ÷ {IN_RUN}, engine's processor time a token", busy[ALONE], busy[IN_RUN])
        last = answers[IN_RUN][-1]
        report.notes.append(
            f"{kind}, {IN_RUN}: {last['updates']} updates, {last['checkpoints']} checkpoints and {last['games']} games "
            f"in the last sample; mean prompt {last['prompt']:.0f} tokens, mean reply {last['reply']:.1f}; alone "
            f"{answers[ALONE][-1]['prompt']:.0f} and {answers[ALONE][-1]['reply']:.1f}"
        )
    if is_shared(device):
        report.notes.append(
            f"engine and learner share the only GPU: {IN_RUN} ÷ {ALONE} is the engine's share of it beside a learner, "
            "and does not show what the rest of a run costs"
        )
    return report


# ------------------------------------------------------------------------------------- subject


class RecordingPool(EnginePool):
    """Engine pool that keeps the newest requests and counts tokens."""

    def __init__(self, engines: Sequence[EngineClient]) -> None:
        super().__init__(engines)
        self.requests: deque[tuple[str, int]] = deque(maxlen=KEPT_REQUESTS)
        """Prompt and adapter version."""
        self.prompt_tokens = self.completion_tokens = self.replies = 0

    async def generate(
        self,
        prompt: str,
        version: int,
        stop: tuple[str, ...] = (),
        seed: int | None = None,
        **options: Any,
    ) -> Generation:
        self.requests.append((prompt, version))
        generation = await super().generate(prompt, version, stop, seed, **options)
        self.count(generation)
        return generation

    def count(self, generation: Generation) -> None:
        self.prompt_tokens += len(generation.prompt_ids)
        self.completion_tokens += len(generation.completion_ids)
        self.replies += 1


def is_pinned(device: str) -> bool:
    """Return whether processes are pinned to cores. A GPU's machine has enough cores without it."""
    return device == "cpu" and cores() > 1


def is_shared(device: str) -> bool:
    """Return whether engine and learner compute on the same GPU."""
    return device == "cuda" and count_gpus() < 2


def config_of(arguments: dict[str, Any], directory: Path) -> Config:
    is_on_cpu = arguments["device"] == "cpu"
    return bench_config(
        model_name="builtin:tiny" if is_on_cpu else str(directory / "model"),
        run={
            "learning_steps": 10**6,
            "num_collection_workers": arguments["games"],
            "num_eval_workers": 0,
            "eval_games": 0,
            "checkpoint_every": 5,
            "output_dir": str(directory),
            "seed": arguments["seed"],
        },
        engine={
            "kind": KINDS[arguments["kind"]],
            "devices": ["cpu" if is_on_cpu else 0],
            "threads": 1,
            "replies": tuple("." * length + f"\\boxed{{[{cell}]}}" for cell in range(9) for length in (0, 10, 30)),
            "temperature": 1.0,
            "max_generation_len": 48,
            "max_model_len": 1024,
            "max_parallel_seq": SLOTS,
            "max_loras": 8,
        },
        # A scripted engine's log-probabilities are made up: no learner would agree with them.
        learner={
            "batch_size": 16 if arguments["small"] else 128,
            "devices": ["cpu" if is_on_cpu else 0 if is_shared(arguments["device"]) else 1],
            "threads": 1,
            "canary_tolerance": 1e9 if arguments["kind"] == "paced" else 0.2,
        },
        alarms={name: {"action": "off"} for name in AlarmsConfig.model_fields},
        buffer={"buffer_size": 10**6, "max_staleness": 10**6},
        lora={"lora_rank": RANKS[arguments["device"]]},
        tracker={"keep_games": "all"},
    )


class Measured:
    def __init__(self, training: TrainLoop, pool: RecordingPool, arguments: dict[str, Any]) -> None:
        self._training = training
        self._pool = pool
        self._num_games = arguments["games"]
        self._warm_up_s = WARM_UP_S / 2 if arguments["small"] else WARM_UP_S
        self._stand_ins = itertools.count(STAND_INS)
        self._unanswered: Counter[int] = Counter()
        """Requests of this round without an answer yet, by stand-in."""
        processes = {process.channel.name: process for process in training.parts.workers.processes}
        self._engine_pid, self._learner = processes["engine-0"].pid, processes["learner"]
        if is_pinned(arguments["device"]):
            first, second, *_ = sorted(os.sched_getaffinity(0))
            _pin(self._engine_pid, first)
            _pin(self._learner.pid, second)
            _pin(os.getpid(), second)
            self._other_core = second

    async def sample(self, side: str, seconds: float) -> dict[str, Any]:
        unpaused = self._training.parts.collector.unpaused
        if side == IN_RUN:
            unpaused.set()
            return await self._watch(seconds)
        unpaused.clear()
        quiet_since = time.monotonic()
        while time.monotonic() < quiet_since + QUIET_S:  # there may be no request between two turns of a game
            await asyncio.sleep(0.01)
            if self._pool.engines[0].channel.num_pending or self._learner.channel.num_pending:
                quiet_since = time.monotonic()
        self._is_over = False
        requests = self._repeated(list(self._pool.requests))
        asking = [asyncio.create_task(self._ask(requests)) for _ in range(self._num_games)]
        with _busy(self._other_core) if side == BESIDE else contextlib.nullcontext():
            result = await self._watch(seconds)
        self._is_over = True
        await asyncio.gather(*asking)
        for version in set(self._unanswered):
            await self._pool.engines[0].unload_adapter(version)
        self._unanswered.clear()
        return result

    def _repeated(self, requests: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
        """Repeat the requests forever, each time with new versions, all of them the run's newest adapter."""
        versions = sorted({version for _, version in requests})
        while True:
            stand_ins = dict(zip(versions, self._stand_ins, strict=False))
            again = [(prompt, stand_ins[version]) for prompt, version in requests]
            self._unanswered.update(version for _, version in again)
            yield from again

    async def _ask(self, requests: Iterator[tuple[str, int]]) -> None:
        engine, path = self._pool.engines[0], self._training.parts.store.path(self._training.parts.policies[""].version)
        while not self._is_over:
            prompt, version = next(requests)
            if version not in engine.adapters:  # else the engine would have to confirm it
                await engine.load_adapter(version, path)
            self._pool.count(await engine.generate(prompt, version))
            self._unanswered[version] -= 1
            if not self._unanswered[version]:
                del self._unanswered[version]
                await engine.unload_adapter(version)

    async def _watch(self, seconds: float) -> dict[str, Any]:
        await asyncio.sleep(self._warm_up_s)
        training, pool, started = self._training, self._pool, time.perf_counter()
        cpu_s, tokens, prompts, replies = self._cpu_s(), pool.completion_tokens, pool.prompt_tokens, pool.replies
        progress, tracker, saver = training.progress, training.parts.tracker, training.saver
        updates, games, saved = progress.updates, tracker.games_finished, saver.saved_update
        await asyncio.sleep(seconds)
        took_s, tokens = time.perf_counter() - started, pool.completion_tokens - tokens
        replies = max(pool.replies - replies, 1)
        return {
            "tokens_per_s": tokens / took_s,
            "cpu_us": 1e6 * (self._cpu_s() - cpu_s) / max(tokens, 1),
            "prompt": (pool.prompt_tokens - prompts) / replies,
            "reply": tokens / replies,
            "updates": progress.updates - updates,
            "games": tracker.games_finished - games,
            "checkpoints": (saver.saved_update - saved) // training.parts.plan.config.run.checkpoint_every,
        }

    def _cpu_s(self) -> float:
        return cpu_seconds(self._engine_pid)


@contextlib.contextmanager
def _busy(core: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        process.kill()
        process.wait()


def _pin(pid: int, core: int) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), {core})


async def measure(questioner: Questioner) -> None:
    arguments = questioner.arguments
    vars(workers)["EnginePool"] = RecordingPool  # the class of a run's engine pool
    unlimit_games_in_flight()  # two cores' learner is slower than the engine and would hold games back
    with tempfile.TemporaryDirectory() as name:
        if arguments["device"] != "cpu":
            from bench import models  # imports torch, which a run's own process does not need

            models.make_for(arguments["device"], Path(name) / "model", arguments["seed"])
        run = Run(make_plan(config_of(arguments, Path(name))), terminal=TerminalInterface(quiet=True))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(run.execute())
            while run.training is None or run.training.progress.updates < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            pool = run.training.parts.workers.engines
            assert isinstance(pool, RecordingPool)
            measured = Measured(run.training, pool, arguments)
            questioner.answer({})
            for request in questioner.requests():
                questioner.answer(await measured.sample(request["side"], request["seconds"]))
            run.training.parts.collector.unpaused.set()
            run.stop()
            await running


if __name__ == "__main__":
    run_in_loop(measure(Questioner()))
