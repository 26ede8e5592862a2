"""Turns per second through the whole orchestrator, against the bare env loop, and the cost of its parts.

The engine is the scripted one: a real process over real ZeroMQ that answers at once, so that the orchestrator's cost
remains: scheduling, prompts, messages, records, ratings, reward transforms, buffer, transcripts. The other side is
`ta.make / reset / get_observation / step` in a loop, one env at a time, with random answers from the same list. Peers
play against the same engine: other ways to keep games in flight (`bench/peers`). Processor time is that of the measured
process alone: the engine's is extra, and may use another core.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import io
import math
import pstats
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import (
    Measure,
    Options,
    Questioner,
    Report,
    Subject,
    Subjects,
    Target,
    alternate,
    cpu_seconds,
    memory_mb,
    started_engine,
)
from bench.parts import PARTS, Parts
from bench.peers import collecting
from bench.playing import add_checkpoint
from unstable_lite.adapters.store import AdapterStore
from unstable_lite.adapters.table import AdapterTable
from unstable_lite.config import Config
from unstable_lite.engines.client import EnginePool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import EXTRACTIONS
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.reward_transformations import build_reward_transformations
from unstable_lite.rollout.collector import Collector
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.tracking.jsonl import JsonlSink
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import GameRecord, GameSpec

MODULE = "bench.orchestrator"
ENV_ID = "TicTacToe-v0-train"
REPLIES = tuple(f"\\boxed{{[{cell}]}}" for cell in range(9))
GAMES = 384
BATCH_SIZE = 384
MANY = 1000
"""Number of turns whose tokens are counted."""
WHOLE = {"games": GAMES, "keep_games": "all", "rated": True}
"""Everything on: every game is rated and written to games.jsonl; an older adapter plays the second seat."""


def run(options: Options) -> Report:
    report = Report(bench="orchestrator", question="Turns a second through the orchestrator", options=options)
    report.sizes = {"env": ENV_ID, "games": GAMES, "batch_size": BATCH_SIZE, "replies": len(REPLIES)}
    whole = f"{GAMES} games"
    variants: dict[str, dict[str, Any]] = {
        whole: {},
        f"{GAMES} games, no games.jsonl": {"keep_games": "none"},
        f"{GAMES} games, none rated": {"rated": False},
        "8 games": {"games": 8},
        "4096 games": {"games": 4096},
    }
    targets = {whole: 0.4, "4096 games": 0.25}
    if options.small:
        del variants["4096 games"]
    cpu_us: dict[str, list[float]] = defaultdict(list)

    def measured(name: str, subject: Subject) -> Measure:
        def measure() -> float:
            answer = subject.measure(seconds=options.seconds)
            cpu_us[name].append(answer.get("cpu_us", math.nan))
            return float(answer["turns_per_s"])

        return measure

    with Subjects() as subjects:
        bare = subjects.start(MODULE, kind="bare", seed=options.seed)
        sides = {"bare env loop": bare}
        for name, changes in variants.items():
            sides[name] = subjects.start(MODULE, kind="orchestrator", seed=options.seed, **(WHOLE | changes))
        peers = collecting.idle_engine(options.small)
        installed = collecting.start(subjects, peers, seed=options.seed)
        measures = {name: measured(name, subject) for name, subject in (sides | installed).items()}
        samples = alternate(measures, options)
        rows = {name: report.add(name, "turns/s", values) for name, values in samples.items()}
        cpu = {name: report.add(f"processor time, {name}", "µs/turn", cpu_us[name][1:]) for name in sides}
        for part, values in _parts(sides[whole], options).items():
            report.add(f"  of these: {part}", "µs/turn", values)
        for name in variants:
            target = Target(bound="≥", value=targets[name]) if name in targets else None
            report.add_ratio(f"{name} ÷ bare", rows[name], rows["bare env loop"], target)
        collecting.add_missing(report, peers, installed, "turns/s")
        collecting.add_ratios(report, rows[f"{GAMES} games"], peers, rows)
        collecting.add_memory(report, installed)
        for name in variants:
            report.add_ratio(f"processor time, bare ÷ {name}", cpu["bare env loop"], cpu[name])
            answer = sides[name].measure(seconds=0.0)
            report.notes.append(f"{name}: {answer['turns_per_game']:.1f} turns a game, {answer['void']} void")
        if options.profile:
            answer = sides[whole].measure(seconds=max(options.seconds, 0.2), profile=True)
            report.notes.append(answer["profile"])
    return report


def _parts(subject: Subject, options: Options) -> dict[str, list[float]]:
    """Return µs per turn, the most expensive part first."""
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        answer = subject.measure(seconds=options.seconds, parts=True)["parts_us"]
        for part in PARTS:
            samples[part].append(answer.get(part, 0.0))
    return dict(sorted(samples.items(), key=lambda item: -median(item[1])))


# ------------------------------------------------------------------------------- the bare env loop


def measure_bare(questioner: Questioner) -> None:
    import textarena as ta  # plain, without our deferred imports

    rng = random.Random(questioner.arguments["seed"])
    actions = [EXTRACTIONS["default"](reply)[0] for reply in REPLIES]
    questioner.answer({"import_mb": memory_mb("now")})
    seed = 0
    for request in questioner.requests():
        turns, started, cpu_s = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - started < request["seconds"]:
            env = ta.make(ENV_ID)
            env.reset(num_players=2, seed=seed)
            env.state.error_allowance = 0  # as our games are played
            seed, is_done = seed + 1, False
            while not is_done:
                env.get_observation()
                is_done, _ = env.step(rng.choice(actions))
                turns += 1
            env.close()
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
        questioner.answer({"turns_per_s": turns / seconds, "cpu_us": 1e6 * cpu_s / max(turns, 1)})


# ------------------------------------------------------------------------------ the orchestrator


class Counted:
    """Turns, games and voids of finished games."""

    def __init__(self, tracker: Tracker) -> None:
        self.turns = self.games = self.void = 0
        self._tokens = self._turns_with_tokens_counted = 0
        self._tracker = tracker

    @property
    def tokens_a_turn(self) -> float:
        """Mean over the first finished games. Turns follow from it and the engine's tokens, which come steadily."""
        return self._tokens / self._turns_with_tokens_counted

    def begin_game(self, spec: GameSpec) -> None:
        self._tracker.begin_game(spec)

    def add_record(self, record: GameRecord) -> None:
        if self._turns_with_tokens_counted < MANY:
            self._tokens += sum(len(turn.generation.completion_ids) for turn in record.turns if turn.generation)
            self._turns_with_tokens_counted += len(record.turns)
        self.turns += len(record.turns)
        self.games += 1
        self.void += record.end == "void"
        self._tracker.add_record(record)


def config_of(arguments: dict[str, Any]) -> Config:
    is_rated = arguments["rated"]
    env = {"env_id": ENV_ID, "num_players": 2, "num_actors": 1 if is_rated else 2, "prompt_template": "tiny"}
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": arguments["seed"]},
        "engine": {"kind": "scripted", "replies": REPLIES},
        "learner": {"batch_size": BATCH_SIZE},
        "league": {"opponent_sampling_strategy": "lagged" if is_rated else "none", "opponent_lag": (1, 1)},
        "tracker": {"keep_games": arguments["keep_games"]},
    }
    env |= arguments.get("env", {})
    sections["engine"] |= arguments.get("engine", {})
    return Config.model_validate({**sections, "train_envs": [env]})


async def measure_orchestrator(questioner: Questioner) -> None:
    import_mb = memory_mb("now")
    arguments = questioner.arguments
    config = config_of(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        store = AdapterStore(f"bench-{directory.name}", directory, bytes_needed=0)
        table = AdapterTable(config.engine.max_loras)
        tracker = Tracker(directory, [JsonlSink(directory / "metrics.jsonl")], config.tracker)
        try:
            async with started_engine(config, threads=arguments.get("threads", 1)) as (pool, worker):
                registry = ModelRegistry(beta=config.league.trueskill_beta)
                if arguments["rated"]:
                    for version in (1, 2):  # so that the current one always meets another model
                        await add_checkpoint(version, store, table, pool, registry)
                await _play(
                    questioner, config, arguments["games"], registry, pool, worker.pid, table, tracker, import_mb
                )
        finally:
            tracker.close()
            store.close()


async def _play(
    questioner: Questioner,
    config: Config,
    num_games: int,
    registry: ModelRegistry,
    pool: EnginePool,
    engine_pid: int,
    table: AdapterTable,
    tracker: Tracker,
    import_mb: float,
) -> None:
    opponents = build_model_sampler(config, registry, random.Random(config.run.seed))
    scheduler = GameScheduler(opponents, build_env_sampler(config), config.run.seed)
    final, step, sampling = build_reward_transformations(config.rewards)
    buffer = StepBuffer(config.buffer_size, final, step, sampling, config.buffer.max_staleness, config.run.seed)
    version = registry.current.adapter_version or 0
    counted = Counted(tracker)
    collector = Collector(scheduler, buffer, PlayerFactory(pool.generate), table, config.run, (counted,))

    async def learn() -> None:
        while True:
            await buffer.get_batch(config.learner.batch_size, version)

    async def report() -> None:
        while True:
            await asyncio.sleep(1.0)
            tracker.log_update(0, {})

    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(collector.run(num_games, 0)),
            tasks.create_task(learn()),
            tasks.create_task(report()),
        ]
        questioner.answer({"import_mb": import_mb})
        for request in questioner.requests():
            # Answers that arrived while the loop was frozen come in a burst, which is not counted.
            await asyncio.sleep(0.1 + 0.2 * request["seconds"])
            while not counted.games:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            profiler = cProfile.Profile() if request.get("profile") else None
            tokens, started = pool.generated_tokens, time.perf_counter()
            parts = Parts()
            cpu_s, engine_cpu_s = time.process_time(), cpu_seconds(engine_pid)
            if profiler is not None:
                profiler.enable()
            with parts.sampled() if request.get("parts") else contextlib.nullcontext():
                await asyncio.sleep(request["seconds"])
            if profiler is not None:
                profiler.disable()
            seconds = time.perf_counter() - started
            tokens = pool.generated_tokens - tokens
            turns = tokens / counted.tokens_a_turn
            played = max(turns, 1.0)
            answer: dict[str, Any] = {
                "turns_per_s": turns / seconds,
                "tokens_per_s": tokens / seconds,
                "cpu_us": 1e6 * (time.process_time() - cpu_s) / played,
                "engine_cpu_us": 1e6 * (cpu_seconds(engine_pid) - engine_cpu_s) / played,
                "memory_mb": memory_mb("now"),
                "peak_mb": memory_mb("peak"),
                "turns_per_game": counted.turns / max(counted.games, 1),
                "games": counted.games,
                "void": counted.void,
                "parts_us": {part: 1e6 * part_s / played for part, part_s in parts.seconds.items()},
            }
            if profiler is not None:
                answer["profile"] = _costliest(profiler, turns)
            questioner.answer(answer)
        for task in background:
            task.cancel()


def _costliest(profiler: cProfile.Profile, turns: float) -> str:
    """Return the 25 functions with the most time excluding callees. Profiling doubles the cost of a call."""
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text)
    stats.strip_dirs().sort_stats("tottime").print_stats(25)
    lines = [line for line in text.getvalue().splitlines() if line.strip()]
    return f"profile of {turns:,.0f} turns:\n" + "\n".join(lines)


if __name__ == "__main__":
    questioner = Questioner()
    if questioner.arguments["kind"] == "bare":
        measure_bare(questioner)
    else:
        run_in_loop(measure_orchestrator(questioner))
