"""Faults that a run survives, and the time until it works again.

A whole run: 1,000 games at once over twelve envs, two scripted engines whose answers take time, and a learner that
really learns. Faults strike at random: engine, learner and env processes are killed, or stopped until they count as
dead; an env raises; an env never returns; an unknown peer sends malformed frames. Each fault is followed until its
victim works again. The games of an env process that dies are void, and count as struck. At the end the games are
counted (each started game has one record, or was in flight when the run ended), and memory, file descriptors, tasks and
shared memory are compared with the beginning. `--minutes 60` is a soak test.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import re
import signal
import socket
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import textarena.envs.Nim.env as nim
import zmq

from bench.engines import LATENCY
from bench.harness import Options, Questioner, Report, Subjects, Target, memory_mb, unlimit_games_in_flight
from unstable_lite.config import Config
from unstable_lite.config.tracking import AlarmsConfig
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.files import read_records
from unstable_lite.orchestrator import supervisor, wiring
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.orchestrator.run import Run
from unstable_lite.orchestrator.wiring import RunParts
from unstable_lite.planning.plan import make_plan
from unstable_lite.transport.codec import encode
from unstable_lite.transport.messages import Done
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.types import GameRecord

MODULE = "bench.faults"
ENVS = {
    "Nim-v0-train": 2,
    "TicTacToe-v0-train": 2,
    "ConnectFour-v0-train": 2,
    "SimpleTak-v0-train": 2,
    "KuhnPoker-v0-train": 2,
    "LiarsDice-v0-small-train": 3,
    "PigDice-v0-short-train": 2,
    "IteratedRockPaperScissors-v0-train": 2,
    "Othello-v0-tiny-train": 2,
    "IteratedPrisonersDilemma-v0-train": 2,
    "2048-v0-ultra-easy-train": 1,
    "GuessTheNumber-v0-train": 1,
}
WITH_OPPONENT = ("Nim-v0-train", "TicTacToe-v0-train", "ConnectFour-v0-train", "KuhnPoker-v0-train")
"""Envs of the evaluation games, which never wait for room in the buffer."""
ISOLATED = ("ConnectFour-v0-train", "2048-v0-ultra-easy-train")
MOVES = ("0", "1", "2", "3", "5", "0 1", "1 2", "2 1", "rock", "paper", "roll", "check", "bet", "call", "up", "left")
GAMES = 1_000
ENV_TIMEOUT_S, STALL_TIMEOUT_S, GAME_TIMEOUT_S = 1.0, 5.0, 240.0
GIVE_UP_S = 120.0
"""Recovery time after which a fault counts as not survived."""
RUN_NAME = f"faults-{os.getpid()}"
INJECTED = "a fault of the bench"
VOID_BY = {
    "env raises": INJECTED,
    "env process stopped": "its process was killed",
    "env process killed": "was killed by SIGKILL",
    "env hangs": "did not return within run.env_timeout_s",
    "death of an env process outside of the game's calls": "in no call of this game",
}
"""Fault to the words that its games' records contain."""
NUM_FRAMES = 20


def run(options: Options) -> Report:
    report = Report(bench="faults", question="Faults that a run survives, and how soon it works again", options=options)
    minutes = 0.01 if options.small else options.minutes
    games = 40 if options.small else GAMES
    report.sizes = {"envs": len(ENVS), "games": games, "engines": 2, "minutes": minutes}
    with Subjects() as subjects:
        subject = subjects.start(MODULE, games=games, seed=options.seed, small=options.small)
        result = subject.measure(minutes=minutes)
    injected = 0
    for kind, seconds in result["recovery_s"].items():
        injected += len(seconds)
        report.add(f"{kind}: seconds to recover", "s", seconds)
    survived = injected - result["not_survived"]
    report.add("faults injected", "", [injected])
    report.add("faults survived", "", [survived])
    report.add("games played", "", [result["games"]], f"{result['void']} void, {result['struck']} of them by faults")
    report.add("games at once, median", "", [result["games_in_flight"]])
    report.add("updates", "", [result["updates"]])
    report.add("memory growth", "MB/h", [result["growth_mb_h"]], result["memory"])
    nothing = Target(bound="≤", value=0)
    report.add_figure("faults not survived", "", [result["not_survived"]], nothing)
    for what in ("games lost", "games doubled", "times that games did not add up"):
        report.add_figure(what, "", [result[what]], nothing)
    for what, (before, after) in result["left"].items():
        report.add_figure(f"{what} left over", "", [after - before], nothing)
    report.notes += result["notes"]
    return report


# ---------------------------------------------------------------------------------- run under faults


class WatchedRun(Run):
    """A run that exposes its parts and counts the games that faults made void."""

    def __init__(self, config: Config) -> None:
        super().__init__(make_plan(config), terminal=TerminalInterface(quiet=True))
        self.voids: Counter[str] = Counter()

    def count_voids(self, parts: RunParts) -> None:
        """Count from now on the games that the bench itself made void, by kind of fault."""
        add_record = parts.tracker.add_record

        def add(record: GameRecord) -> None:
            if (kind := of_the_bench(record.error)) is not None:
                self.voids[kind] += 1
            add_record(record)

        parts.tracker.add_record = add  # type: ignore[method-assign]


@dataclass
class Faults:
    """Injects faults, and follows each until the run has recovered from it."""

    parts: RunParts
    voids: Counter[str]
    rng: random.Random
    recovery_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    not_survived: list[str] = field(default_factory=list)
    armed: list[str] = field(default_factory=list)
    """Faults of the next steps of the struck env."""
    _struck: set[str] = field(default_factory=set)
    """Names of the workers that have not recovered yet."""

    async def strike_until(self, deadline: float, mean_pause_s: float) -> None:
        """Inject every kind of fault at least once, and continue until `deadline`."""
        kinds: dict[str, Callable[[str], contextlib.AbstractAsyncContextManager[Callable[[], bool]]]] = {
            "engine killed": lambda _kind: self._worker("engine", signal.SIGKILL),
            "engine stopped": lambda _kind: self._worker("engine", signal.SIGSTOP),
            "env process killed": lambda _kind: self._worker("env", signal.SIGKILL),
            "env process stopped": lambda _kind: self._worker("env", signal.SIGSTOP),
            "learner killed": lambda _kind: self._worker("learner", signal.SIGKILL),
            "env raises": self._env,
            "env hangs": self._env,
            "malformed frames": lambda _kind: self._frames(),
        }
        order = self.rng.sample(list(kinds), len(kinds))
        async with asyncio.TaskGroup() as tasks:
            while order or time.monotonic() < deadline:
                order = order or self.rng.sample(list(kinds), len(kinds))
                kind = order.pop()
                tasks.create_task(self._follow(kind, kinds[kind](kind)))
                await asyncio.sleep(self.rng.expovariate(1 / mean_pause_s))

    async def _follow(self, kind: str, strike: contextlib.AbstractAsyncContextManager[Callable[[], bool]]) -> None:
        async with strike as is_over:
            started = time.monotonic()
            if not await until(is_over, GIVE_UP_S):
                self.not_survived.append(kind)
            self.recovery_s[kind].append(time.monotonic() - started)

    @contextlib.asynccontextmanager
    async def _worker(self, name: str, signum: signal.Signals) -> AsyncIterator[Callable[[], bool]]:
        """Signal a worker. The fault is over when the successor is restored and has answered."""
        process = await self._target(name)
        channel, life = process.channel, process.channel.life
        with contextlib.suppress(ProcessLookupError):  # another fault has just killed it
            os.kill(process.pid, signum)
        yield lambda: channel.life > life and channel.is_up
        self._struck.discard(channel.name)

    async def _target(self, name: str) -> WorkerProcess:
        while True:
            # A stopped process without games goes unnoticed; back-pressure may leave one without games.
            hosted = [host._process for host in self.parts.environments._hosts if host.num_games]
            up = [
                process
                for process in [*self.parts.workers.processes, *hosted]
                if process.channel.name.startswith(name)
                and process.channel.is_up
                and process.channel.name not in self._struck
            ]
            if up:
                process = self.rng.choice(up)
                self._struck.add(process.channel.name)
                return process
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def _env(self, kind: str) -> AsyncIterator[Callable[[], bool]]:
        """Make an env fail. The fault is over when the game that it strikes is void."""
        await until(lambda: not self.armed)
        before = self.voids[kind]
        self.armed.append(kind)
        yield lambda: self.voids[kind] > before

    @contextlib.asynccontextmanager
    async def _frames(self) -> AsyncIterator[Callable[[], bool]]:
        """Send malformed frames. The fault is over when all of them are dropped and counted."""
        router = self.parts.workers.router
        before = router.dropped_frames
        with socket.socket(socket.AF_UNIX) as raw:  # not even ZeroMQ: nothing is counted
            raw.connect(router.endpoint.removeprefix("ipc://"))
            raw.send(self.rng.randbytes(64))
        context = zmq.Context()
        unknown = context.socket(zmq.DEALER)
        unknown.setsockopt(zmq.IDENTITY, f"unknown-{self.rng.random()}".encode())
        unknown.connect(router.endpoint)
        whole = encode([Done(request_id=1)])
        for number in range(NUM_FRAMES):
            cut = whole[: self.rng.randrange(len(whole))]
            unknown.send([self.rng.randbytes(self.rng.randrange(200)), cut, whole, b""][number % 4])
        yield lambda: router.dropped_frames >= before + NUM_FRAMES
        await asyncio.to_thread(context.destroy, 0)

    def strike_env(self) -> None:
        """Fail inside a step of the struck env, which runs in the process of this bench."""
        if self.armed:
            if self.armed.pop() == "env raises":
                raise RuntimeError(INJECTED)
            while True:
                pass


async def until(condition: Callable[[], bool], timeout_s: float = math.inf) -> bool:
    """Wait for a condition; return whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def of_the_bench(error: str | None) -> str | None:
    """Return the kind of fault that made a game void; None for another error, or none."""
    return next((kind for kind, words in VOID_BY.items() if words in (error or "")), None)


@dataclass
class Samples:
    """Samples over time of quantities that must not grow."""

    rows: list[dict[str, float]] = field(default_factory=list)
    did_not_add_up: int = 0

    async def take(self, parts: RunParts, every_s: float) -> None:
        started_at = time.monotonic()
        while True:
            started, flying = parts.scheduler._games.total(), parts.collector.games_in_flight.total()
            finished, waiting = parts.tracker.games_finished, len(parts.collector._rest_of_group)
            flying += len(parts.collector._ended)
            self.did_not_add_up += started != finished + flying + waiting
            row = {"seconds": time.monotonic() - started_at, "mb": memory_mb("now"), "games": started}
            self.rows.append(row | {"flying": flying, "buffer": parts.policies[""].buffer.size()} | in_use())
            await asyncio.sleep(every_s)

    def growth_mb_h(self) -> float:
        """Return the slope of memory over the second half, by least squares."""
        half = self.rows[len(self.rows) // 2 :]
        if len(half) < 3:
            return 0.0
        seconds, mb = [row["seconds"] for row in half], [row["mb"] for row in half]
        return statistics.linear_regression(seconds, mb).slope * 3600

    def describe(self, what: str) -> str:
        """Return the medians of ten equal parts."""
        size = math.ceil(len(self.rows) / 10)
        parts = [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
        return " ".join(f"{statistics.median(row[what] for row in part):.0f}" for part in parts)


def in_use() -> dict[str, float]:
    return {
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "tasks": len(asyncio.all_tasks()),
        "segments": len(list(Path("/dev/shm").glob(f"unstable_lite-*{RUN_NAME}*"))),
        "child processes": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
    }


def open_files() -> set[str]:
    opened = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed
            opened.add(str(descriptor.readlink()))
    return opened


def config_of(arguments: dict[str, Any], directory: Path) -> Config:
    common = {"prompt_template": "tiny", "max_turns": 40}
    train = [
        {"env_id": env_id, "num_players": n, "num_actors": n, "isolated": env_id in ISOLATED, **common}
        for env_id, n in ENVS.items()
    ]
    evaluated = [
        {"env_id": env_id, "num_players": 2, "fixed_opponent": "scripted:random", **common} for env_id in WITH_OPPONENT
    ]
    games = arguments["games"]
    return Config.model_validate(
        {
            "run": {
                "name": RUN_NAME,
                "seed": arguments["seed"],
                "learning_steps": 10**6,
                "num_collection_workers": games // 2,
                "num_eval_workers": games - games // 2,
                "output_dir": directory,
                "checkpoint_every": 20,
                "env_timeout_s": ENV_TIMEOUT_S,
                "game_timeout_s": GAME_TIMEOUT_S,
                "max_restarts": 10**6,
            },
            "engine": {
                "kind": "bench.engines:DelayedEngine",
                "devices": ["cpu", "cpu"],
                "replies": [f"\\boxed{{[{move}]}}" for move in MOVES],
                "max_model_len": 4096,
                "max_generation_len": 32,
            },
            # A scripted engine's log-probabilities are made up: no learner would agree with them.
            "learner": {"batch_size": 8, "canary_tolerance": 1e9, "threads": 1},
            "alarms": {name: {"action": "off"} for name in AlarmsConfig.model_fields},
            # A full buffer would hold up the games; stale steps leave it.
            "buffer": {"buffer_size": 50_000, "max_staleness": 2},
            "lora": {"lora_rank": 4},
            "train_envs": train,
            "eval_envs": evaluated,
        }
    )


async def soak(arguments: dict[str, Any], minutes: float, directory: Path) -> dict[str, Any]:
    supervisor.BACKOFF_S = 0.0
    setattr(wiring, "ENGINE_STALL_S", STALL_TIMEOUT_S)  # noqa: B010 (it was imported there)
    os.environ[LATENCY] = "0.3" if arguments["small"] else "1" if minutes < 10 else "2"
    rng = random.Random(arguments["seed"])
    first = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.PIPE)
    await first.wait()  # uvloop keeps /dev/null open from its first child on
    samples, before, files = Samples(), in_use(), open_files()
    unlimit_games_in_flight()  # the games of this learner's few steps would hardly ever be in an env process
    run = WatchedRun(config_of(arguments, directory))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run.execute())
        await until(lambda: run.training is not None and run.training.progress.updates > 0)
        assert run.training is not None
        parts = run.training.parts
        run.count_voids(parts)
        faults = Faults(parts, run.voids, rng)
        strike_in_steps_of(nim.NimEnv, faults)
        sampling = tasks.create_task(samples.take(parts, every_s=max(0.5, minutes / 4)))
        mean_pause_s = 0.1 if arguments["small"] else 4.0 if minutes < 10 else 10.0
        await faults.strike_until(time.monotonic() + 60 * minutes, mean_pause_s)
        sampling.cancel()
        run.stop()
        summary = await running
    after = in_use()
    started = parts.scheduler._games.total()
    counted = count_games(summary.directory / "games.jsonl")
    by_now = [row["games"] for row in samples.rows if row["seconds"] < samples.rows[-1]["seconds"] - GAME_TIMEOUT_S]
    long_ago = int(max(by_now, default=0))
    missing = set(range(started)) - counted.keys()
    broken = [error for _, error in counted.values() if error is not None and of_the_bench(error) is None]
    return {
        "recovery_s": dict(sorted(faults.recovery_s.items())),
        "not_survived": len(faults.not_survived),
        "games": len(counted),
        "void": sum(error is not None for _, error in counted.values()),
        "struck": run.voids.total(),
        "games lost": len(broken) + sum(game < long_ago for game in missing),
        "games doubled": sum(n - 1 for n, _ in counted.values()),
        "times that games did not add up": samples.did_not_add_up,
        "games_in_flight": statistics.median(row["flying"] for row in samples.rows),
        "updates": summary.updates,
        "growth_mb_h": samples.growth_mb_h(),
        "memory": f"MB {samples.describe('mb')}",
        "left": {what: (before[what], after[what]) for what in before},
        "notes": [
            f"{started} games started, {len(missing)} of them in flight at the end; "
            f"{parts.workers.engines.resent} requests sent again; "
            f"{summary.skipped_updates} updates skipped; steps in the buffer {samples.describe('buffer')}",
            *(
                f"{what} during the run: {samples.rows[0][what]:.0f} first, {samples.rows[-1][what]:.0f} last, "
                f"{max(row[what] for row in samples.rows):.0f} at most"
                for what in before
            ),
            *sorted({f"void: {error[:300]}" for error in broken})[:5],
            *(f"not survived: {kind}" for kind in faults.not_survived),
            *(f"left open: {target}" for target in sorted(open_files() - files)),
        ],
    }


def strike_in_steps_of(env_class: Any, faults: Faults) -> None:
    step = env_class.step

    def struck_step(self: Any, action: str) -> Any:
        faults.strike_env()
        return step(self, action)

    env_class.step = struck_step


def count_games(path: Path) -> dict[int, tuple[int, str | None]]:
    """Return, by game number, how many records it has and why it is void."""
    counted: dict[int, tuple[int, str | None]] = {}
    for record in read_records(path):
        times, _ = counted.get(record["game_idx"], (0, None))
        error = None if record["error"] is None else re.sub(r"0x[0-9a-f]+", "", record["error"])
        counted[record["game_idx"]] = times + 1, error
    return counted


async def measure(questioner: Questioner) -> None:
    questioner.answer({})
    for request in questioner.requests():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            questioner.answer(await soak(questioner.arguments, request["minutes"], Path(directory)))


if __name__ == "__main__":
    run_in_loop(measure(Questioner()))
