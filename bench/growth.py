"""Cost of a turn and of an update as something grows: games, prompts, adapters, waiting steps, length of the run.

Measures processor time of the orchestrator's process, because a busy machine affects it least. Games, prompts and
adapters are measured on the whole orchestrator, with a scripted engine in a separate process; the buffer and the length
of a run on the parts that keep history, driven with made-up games: registry, scheduler, tracker, league log, the
checkpoint's league state. A part that grows with the run makes long runs slow.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Grid, Options, Questioner, Report, Subjects, Target, bench_config, memory_mb, started_engine
from bench.playing import playing
from bench.plot import Chart, to_svg
from unstable_lite.config import Config
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.rollout.step_buffer import StepBuffer
from unstable_lite.tracking.jsonl import JsonlSink
from unstable_lite.tracking.tracker import Tracker
from unstable_lite.types import GameRecord, GameSpec, Generation, PlayerTrajectory, Step, Turn

MODULE = "bench.growth"
REPLIES = tuple(f"\\boxed{{[{cell}]}}" for cell in range(9))
GAMES = (8, 64, 384, 1024, 4096, 8192)
PROMPTS = (0, 1_000, 4_000, 16_000)
"""Characters before every prompt."""
ADAPTERS = (1, 2, 4, 8, 16, 32)
WAITING = (384, 1_536, 6_144, 24_576, 98_304)
UPDATES = (10, 100, 1_000, 10_000)
AT = 384
"""Games at once while something else grows."""
ACTIVE = 8
GAMES_AN_UPDATE = 4
WINDOW = 50
"""Updates over which a cost is averaged."""
ADDED_AT_ONCE = 24
"""Steps that are added right after they were made, as a game's steps are."""
LAST = 16
"""Number of last measurements of which the median is taken."""


def run(options: Options) -> Report:
    report = Report(bench="growth", question="Cost of a turn and of an update as something grows", options=options)
    sizes: dict[str, tuple[int, ...]] = {
        "games": GAMES,
        "characters before each prompt": PROMPTS,
        "adapters alive": ADAPTERS,
        "steps that wait": WAITING,
        "updates": UPDATES,
    }
    if options.small:
        sizes = {what: numbers[:2] for what, numbers in sizes.items()}
    report.sizes = sizes | {"games_otherwise": AT, "games_an_update": GAMES_AN_UPDATE}
    charts = []
    for what in ("games", "characters before each prompt", "adapters alive"):
        changes: Callable[[int], dict[str, int]] = {
            "games": lambda n: {"games": n},
            "characters before each prompt": lambda n: {"padding": n},
            "adapters alive": lambda n: {"adapters": n},
        }[what]
        costs = {number: _play(options, **changes(number)) for number in sizes[what]}
        grid = [(float(number), statistics.median(us), mb) for number, (us, mb) in costs.items()]
        report.tables.append(Grid(title=f"a turn, by {what}", columns=(what, "µs a turn", "MB"), rows=[*grid]))
        for number, (us, _) in costs.items():
            report.add(f"{number:,} {what}", "µs a turn", us)
        first, last = costs[sizes[what][0 if what != "games" else min(2, len(sizes[what]) - 1)]], costs[sizes[what][-1]]
        report.add_figure(
            f"{what}: most ÷ {'384' if what == 'games' and not options.small else 'fewest'}, processor time of a turn",
            "×",
            [statistics.median(last[0]) / statistics.median(first[0])],
            Target(bound="≤", value=1.5),
        )
        line = [(max(number, 100.0 if what.startswith("char") else 1.0), us) for number, us, _ in grid]
        charts.append(Chart(title=f"A turn, by {what}", x_label=what, y_label="µs", lines={"processor time": line}))
    with Subjects() as subjects:
        subject = subjects.start(MODULE, kind="parts", seed=options.seed)
        charts.append(_add_waiting(report, [subject.measure(waiting=n) for n in sizes["steps that wait"]]))
        charts += _add_updates(report, subject.measure(updates=sizes["updates"])["windows"])
    report.figure = to_svg(charts)
    return report


def _play(options: Options, **arguments: int) -> tuple[list[float], float]:
    with Subjects() as subjects:
        subject = subjects.start(MODULE, kind="play", seed=options.seed, **({"games": AT} | arguments))
        subject.measure(seconds=options.seconds / 2)
        answers = [subject.measure(seconds=options.seconds) for _ in range(options.rounds)]
    return [answer["cpu_us"] for answer in answers], answers[-1]["memory_mb"]


def _add_waiting(report: Report, answers: list[dict[str, Any]]) -> Chart:
    columns = ("steps that wait", "µs to add a step", "µs a step of a batch", "µs to add one to a batch that lacks it")
    keys = ("waiting", "add_us", "take_us", "lacking_us")
    report.tables.append(
        Grid(title="buffer", columns=columns, rows=[tuple(float(answer[key]) for key in keys) for answer in answers])
    )
    for key, name in zip(keys[1:], columns[1:], strict=True):
        report.add_figure(
            f"buffer, {name}: most ÷ fewest", "×", [answers[-1][key] / answers[0][key]], Target(bound="≤", value=2)
        )
    lines = {
        name: [(answer["waiting"], answer[key]) for answer in answers]
        for key, name in zip(keys[1:], columns[1:], strict=True)
    }
    return Chart(title="Buffer", x_label="steps that wait", y_label="µs a step", lines=lines, log_y=True)


def _add_updates(report: Report, windows: list[dict[str, Any]]) -> list[Chart]:
    names = {
        "schedule_us": "µs to draw a game",
        "record_us": "µs to count and rate it",
        "metrics_us": "µs to log an update",
        "state_us": "µs to take the state of a checkpoint",
    }
    columns = ("updates", *names.values(), "kB of the state", "MB")
    rows = [tuple(float(window[key]) for key in ("updates", *names, "state_kb", "memory_mb")) for window in windows]
    report.tables.append(Grid(title="a run of many updates", columns=columns, rows=[*rows]))
    for key in ("schedule_us", "record_us", "metrics_us"):
        ratio = windows[-1][key] / windows[-2][key]  # before that the tracker's windows are not full
        report.add_figure(
            f"run length, {names[key]}: at its end ÷ at a tenth of it", "×", [ratio], Target(bound="≤", value=1.5)
        )
    lines = {name: [(window["updates"], window[key]) for window in windows] for key, name in names.items()}
    size = {"league.json": [(window["updates"], window["state_kb"]) for window in windows]}
    return [
        Chart(title="An update, by length of the run", x_label="updates", y_label="µs", lines=lines, log_y=True),
        Chart(title="A checkpoint's league state", x_label="updates", y_label="kB", lines=size, log_y=True),
    ]


# ------------------------------------------------------------------------------------ subjects


def config_of(arguments: dict[str, Any]) -> Config:
    adapters = arguments.get("adapters", 0)
    return bench_config(
        run={"seed": arguments["seed"]},
        engine={"kind": "scripted", "replies": REPLIES, "max_model_len": 1 << 16, "max_loras": max(adapters, 1)},
        learner={"batch_size": 384},
        tracker={"keep_games": "none"},
        league={"opponent_sampling_strategy": "uniform" if adapters else "none"},
        train_envs=[
            {
                "env_id": "TicTacToe-v0-train",
                "num_players": 2,
                "num_actors": 1 if adapters else 2,
                "prompt_template": "tiny",
            }
        ],
    )


async def measure_turns(questioner: Questioner) -> None:
    arguments = questioner.arguments
    config = config_of(arguments)
    padding, adapters = "x" * arguments.get("padding", 0), arguments.get("adapters", 0)
    async with (
        started_engine(config, threads=1) as (pool, _),
        playing(config, pool, arguments["games"], padding, adapters) as played,
    ):
        questioner.answer({})
        for request in questioner.requests():
            await asyncio.sleep(0.1 + 0.2 * request["seconds"])
            while not played.lengths:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            tokens, cpu_s = pool.generated_tokens, time.process_time()
            await asyncio.sleep(request["seconds"])
            while pool.generated_tokens == tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            # With thousands of games many end at once, so turns are counted by the engine's tokens.
            turns = (pool.generated_tokens - tokens) / statistics.fmean(new for _, new in played.lengths)
            cpu_us = 1e6 * (time.process_time() - cpu_s) / turns
            questioner.answer({"cpu_us": cpu_us, "memory_mb": memory_mb("now")})


class Clock:
    """Processor time between two readings, in microseconds."""

    def __init__(self) -> None:
        self._at = time.process_time()

    def us(self) -> float:
        before, self._at = self._at, time.process_time()
        return 1e6 * (self._at - before)


def measure_waiting(waiting: int) -> dict[str, float]:
    """Measure a buffer with `waiting` steps, and a batch of that size that lacks its last steps."""
    rng = random.Random(0)
    spec = _spec()
    full = StepBuffer(2 * waiting, max_staleness=8)
    trajectories: list[PlayerTrajectory] = []
    added_us: list[float] = []
    for _ in range(waiting // ADDED_AT_ONCE):
        fresh = [_trajectory(spec, len(trajectories) + n, 0, rng) for n in range(ADDED_AT_ONCE // 4)]
        clock = Clock()
        for trajectory in fresh:
            full.add_player_trajectory(trajectory)
        added_us.append(clock.us() / ADDED_AT_ONCE)
        trajectories += fresh

    async def take() -> int:
        taken = 0
        for _ in range(8):
            taken += len(await full.get_batch(waiting // 8, 0))
        return taken

    clock = Clock()
    taken = asyncio.run(take())
    take_us = clock.us() / taken

    lacking = StepBuffer(2 * waiting, max_staleness=8)
    for trajectory in trajectories:
        lacking.add_player_trajectory(trajectory)
    more = [_trajectory(spec, index, 0, rng) for index in range(16)]

    async def wait_and_add() -> float:
        waits = asyncio.create_task(lacking.get_batch(waiting + 4 * len(more), 0))
        await asyncio.sleep(0)
        clock = Clock()
        for trajectory in more:
            lacking.add_player_trajectory(trajectory)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if trajectory is more[-2]:
                spent = clock.us()
        await waits
        return spent / (4 * (len(more) - 1))

    return {
        "waiting": waiting,
        "add_us": statistics.median(added_us[-LAST:]),
        "take_us": take_us,
        "lacking_us": asyncio.run(wait_and_add()),
    }


def measure_updates(sizes: list[int], seed: int) -> Iterator[dict[str, float]]:
    """Yield the costs of the updates just before each of `sizes`, in one run."""
    config = bench_config(
        league={"opponent_sampling_strategy": {"mirror": 0.2, "lagged": 0.4, "pfsp": 0.4}, "opponent_lag": (1, 7)},
        train_envs=[{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 1, "prompt_template": "tiny"}],
    )
    rng = random.Random(seed)
    registry = ModelRegistry()
    scheduler = GameScheduler(build_model_sampler(config, registry, rng), build_env_sampler(config), seed)
    buffer = StepBuffer(1024, max_staleness=8)
    with tempfile.TemporaryDirectory() as name:
        tracker = Tracker(Path(name), [JsonlSink(Path(name) / "metrics.jsonl")], TrackerConfig(keep_games="none"))
        tracker.registry = registry
        spent = dict.fromkeys(("schedule_us", "record_us", "metrics_us"), 0.0)
        for update in range(1, max(sizes) + 1):
            clock = Clock()
            specs = [scheduler.next_train_job() for _ in range(GAMES_AN_UPDATE)]
            schedule_us = clock.us()
            records = [_record(spec, rng) for spec in specs]
            clock.us()
            for record in records:
                scheduler.update(record)
                tracker.add_record(record)
                buffer.add_game(record)
            record_us = clock.us()
            buffer.drain()
            registry.add_policy(f"ckpt-{update}", adapter_version=update, iteration=update)
            active = registry.checkpoints()
            if len(active) > ACTIVE:
                registry.set_active(active[0].uid, False)
            clock.us()
            tracker.log_update(update, {f"learner/metric {n}": float(n) for n in range(40)})
            metrics_us = clock.us()
            of_window = (("schedule_us", schedule_us), ("record_us", record_us), ("metrics_us", metrics_us))
            for key, us in of_window:
                spent[key] += us
            if update in sizes:
                clock.us()
                state = {
                    "registry": registry.state_dict(), "scheduler": scheduler.state_dict(),
                    "buffer": buffer.state_dict(), "tracker": tracker.state_dict(),
                }  # fmt: skip
                text = json.dumps(state, separators=(",", ":"))
                window = min(WINDOW, update)
                yield {
                    "updates": update,
                    "schedule_us": spent["schedule_us"] / (window * GAMES_AN_UPDATE),
                    "record_us": spent["record_us"] / (window * GAMES_AN_UPDATE),
                    "metrics_us": spent["metrics_us"] / window,
                    "state_us": clock.us(),
                    "state_kb": len(text) / 1e3,
                    "memory_mb": memory_mb("now"),
                }
            if any(update == size - WINDOW for size in sizes) or update in sizes:
                spent = dict.fromkeys(spent, 0.0)
        tracker.close()


def _spec() -> GameSpec:
    config = bench_config()
    registry = ModelRegistry()
    sampler = build_model_sampler(config, registry, random.Random(0))
    return GameScheduler(sampler, build_env_sampler(config), 0).next_train_job()


def _trajectory(spec: GameSpec, game_idx: int, pid: int, rng: random.Random) -> PlayerTrajectory:
    model = spec.agent_specs[pid].model
    steps = [
        Step(pid=pid, obs="state " * 40, act="\\boxed{[4]}", reward=0.0, env_id=spec.env_id, generation=_sampled())
        for _ in range(4)
    ]
    return PlayerTrajectory(
        pid=pid, env_id=spec.env_id, game_idx=game_idx, model=model, steps=steps, final_reward=rng.choice((-1.0, 1.0)),
        num_turns=8,
    )  # fmt: skip


def _sampled() -> Generation:
    ids = np.zeros(8, np.int32)
    return Generation(
        prompt_ids=ids, completion_ids=ids, logprobs=np.zeros(8, np.float32), text="\\boxed{[4]}",
        finish_reason="stop", adapter_version=0,
    )  # fmt: skip


def _record(spec: GameSpec, rng: random.Random) -> GameRecord:
    """Return a made-up game of eight turns with a winner."""
    winner = rng.randrange(2)
    turns = [
        Turn(pid=n % 2, observation=f"turn {n}: {rng.randrange(99)}", text="\\boxed{[4]}", action="[4]", format_ok=True)
        for n in range(8)
    ]
    trajectories = [
        _trajectory(spec, spec.game_idx, agent.pid, rng) for agent in spec.agent_specs if agent.collect_data
    ]
    return GameRecord(
        spec=spec,
        turns=turns,
        trajectories=trajectories,
        rewards={pid: 1.0 if pid == winner else -1.0 for pid in range(2)},
        outcomes={pid: "win" if pid == winner else "loss" for pid in range(2)},
        end="natural",
    )


def measure_parts(questioner: Questioner) -> None:
    questioner.answer({})
    for request in questioner.requests():
        if "waiting" in request:
            questioner.answer(measure_waiting(request["waiting"]))
        else:
            questioner.answer({"windows": list(measure_updates(request["updates"], questioner.arguments["seed"]))})


if __name__ == "__main__":
    questioner = Questioner()
    if questioner.arguments["kind"] == "parts":
        measure_parts(questioner)
    else:
        run_in_loop(measure_turns(questioner))
