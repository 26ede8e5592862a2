"""Training time until the model reaches a win rate, with this project and with the reference's way.

Both train the game of examples/connect_four.toml from the same model, on the same cores, with the same batch,
algorithm, optimiser, league and number of games in flight. `bench/peers/reference_run.py` describes the reference's
way, and which of its flaws are corrected there. Every few updates training pauses, its clock too, while a third process
evaluates the adapter against `scripted:random`: the same games, seats and random streams for both. The first adapter
that reaches the win rate ends the run. A run that exceeds the time limit counts with its time so far, and is reported.

Time counts from the first training game; start-up is reported separately. `--rounds` is the number of seeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from bench.harness import (
    REPOSITORY,
    Options,
    Questioner,
    Report,
    Row,
    Subject,
    Subjects,
    Target,
    cores,
    started_engines,
)
from bench.peers.stop_watch import Over, StopWatch
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.league.samplers import build_env_sampler, build_model_sampler
from unstable_lite.orchestrator.event_loop import run_in_loop
from unstable_lite.orchestrator.run import Run
from unstable_lite.planning.plan import make_plan
from unstable_lite.rollout.run_game import GameRunner
from unstable_lite.types import ModelRef

MODULE = "bench.end_to_end"
OURS, REFERENCE = "this project", "the reference's way"
EXAMPLE = REPOSITORY / "examples" / "connect_four.toml"
POLL_S = 0.01
EVALUATION_SEED = 1_000_003
"""Seed that no training uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    win_rate: float
    """Share of games to win."""
    every: int
    """Updates between two evaluations."""
    eval_games: int
    limit_s: float
    """Limit of training time per run."""


SIZES = Sizes(win_rate=0.75, every=2, eval_games=300, limit_s=240.0)
SMALL = Sizes(win_rate=0.0, every=1, eval_games=4, limit_s=120.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One run, until it was stopped."""

    start_s: float
    seconds: float
    updates: int
    curve: tuple[tuple[int, float], ...]
    """(update, share of games won)."""
    is_there: bool

    def describe(self) -> str:
        evaluations = ", ".join(f"{rate:.0%} after {update}" for update, rate in self.curve)
        end = "" if self.is_there else f"; win rate not reached after {self.seconds:.0f} s"
        return f"{self.seconds:.0f} s, {self.updates} updates: {evaluations}{end}"


def run(options: Options) -> Report:
    sizes = SMALL if options.small else SIZES
    question = f"Seconds of training until {sizes.win_rate:.0%} of games against scripted:random are won"
    report = Report(bench="end_to_end", question=question, options=options)
    config = game_config(options.small)
    batch_size = config.learner.batch_size
    report.sizes = {
        "env": config.eval_envs[0].env_id,
        "model": config.model_name,
        "batch_size": batch_size,
        "games": config.run.num_collection_workers,
        "evaluated_every": sizes.every,
        "eval_games": sizes.eval_games,
        "limit_s": sizes.limit_s,
        "cores": cores(),
    }
    runs: dict[str, list[Trained]] = {OURS: [], REFERENCE: []}
    with Subjects() as subjects:
        evaluator = subjects.start(
            MODULE,
            kind="evaluate",
            config=config.model_dump_json(),
            games=sizes.eval_games,
            # Two threads of one engine hang if tests run beside them.
            threads=1 if options.small else cores(),
        )
        base_rate = evaluator.measure(adapter=None)["win_rate"]
        report.notes.append(f"before training {base_rate:.1%} of {sizes.eval_games} games are won")
        for number in range(options.rounds):
            for side in list(runs) if number % 2 == 0 else reversed(runs):
                trained = _train(side, config, options.seed + number, sizes, evaluator)
                runs[side].append(trained)
                report.notes.append(f"{side}, seed {options.seed + number}: {trained.describe()}")
    rows: dict[str, Row] = {}
    for side, done in runs.items():
        there = sum(one.is_there for one in done)
        late = f"{len(done) - there} of {len(done)} hit the time limit; counted as they were" * (there < len(done))
        rows[side] = report.add(f"{side}: time", "s", [one.seconds for one in done], late)
        report.add(f"{side}: samples", "steps", [float(one.updates * batch_size) for one in done], late)
        report.add(f"{side}: time an update", "s", [one.seconds / max(one.updates, 1) for one in done])
        report.add(f"{side}: start-up, not counted above", "s", [one.start_s for one in done])
    # No target was given for this; 3 is that of the learner alone.
    target = Target(bound="≥", value=3)
    report.add_ratio(f"time, {REFERENCE} ÷ {OURS}", rows[REFERENCE], rows[OURS], target)
    report.notes.append("the reference's way collects with a thread per game in place of a Ray task")
    return report


def game_config(is_small: bool) -> Config:
    """Return examples/connect_four.toml without its own evaluations."""
    raw: dict[str, Any] = tomllib.loads(EXAMPLE.read_text())
    raw["run"] |= {
        "learning_steps": 1_000_000,  # the win rate or the time limit ends it
        "eval_games": 0,
        "eval_every": None,
        # An evaluation blocks its event loop, at most for twice this long.
        "env_timeout_s": 1800.0,
    }
    # The reference's way is slow enough for a game to outlive many checkpoints.
    raw["engine"] |= {"devices": ["cpu"], "kind": "transformers", "max_loras": 32}
    raw["learner"] |= {"devices": ["cpu"]}
    if is_small:
        raw["learner"] |= {"batch_size": 16}
        raw["run"] |= {"num_collection_workers": 4}
    return Config.model_validate(raw)


def _train(side: str, config: Config, seed: int, sizes: Sizes, evaluator: Subject) -> Trained:
    with tempfile.TemporaryDirectory() as output, Subjects() as subjects:
        changes = {"seed": seed, "output_dir": Path(output)}
        own = config.changed(run=changes, league={"keep_every": sizes.every})
        module = MODULE if side == OURS else "bench.peers.reference_run"
        started = time.perf_counter()
        subject = subjects.start(
            module, kind="train", config=own.model_dump_json(), every=sizes.every, limit_s=sizes.limit_s
        )
        start_s = time.perf_counter() - started
        curve: list[tuple[int, float]] = []
        while True:
            answer = subject.measure()
            if answer["update"] is None:
                break
            curve.append((answer["update"], evaluator.measure(adapter=answer["adapter"])["win_rate"]))
            if curve[-1][1] >= sizes.win_rate or answer["seconds"] > sizes.limit_s:
                break
    return Trained(
        start_s=start_s,
        seconds=answer["seconds"],
        updates=curve[-1][0] if curve else 0,
        curve=tuple(curve),
        is_there=bool(curve) and curve[-1][1] >= sizes.win_rate,
    )


# ----------------------------------------------------------------------------------- this project


class Announced(TerminalInterface):
    """Announces that training is about to begin, and waits for permission."""

    def __init__(self, clock: StopWatch) -> None:
        super().__init__(quiet=True)
        self.has_begun = asyncio.Event()
        self._clock = clock

    def start(self, *arguments: Any, **keywords: Any) -> None:
        super().start(*arguments, **keywords)
        self._clock.start()
        self.has_begun.set()


async def train(questioner: Questioner) -> None:
    """Train as a user would. An evaluation blocks the event loop: workers finish their current work and wait."""
    arguments = questioner.arguments
    config = Config.model_validate_json(arguments["config"])
    clock = StopWatch(questioner, arguments["limit_s"])
    terminal = Announced(clock)
    training = asyncio.create_task(Run(make_plan(config), terminal=terminal).execute())
    reporting = asyncio.create_task(_report_adapters(clock, terminal, config.run.output_dir, arguments["every"]))
    await asyncio.wait({training, reporting}, return_when=asyncio.FIRST_COMPLETED)
    if training.done():
        training.result()
    training.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await training
    reporting.cancel()


async def _report_adapters(clock: StopWatch, terminal: Announced, output: Path, every: int) -> None:
    """Report every adapter that the run keeps, until the bench asks for no more."""
    await terminal.has_begun.wait()
    with contextlib.suppress(Over):
        for update in count(every, every):
            while (kept := _kept(output, update)) is None:
                if clock.is_late:
                    clock.tell(None, None)
                await asyncio.sleep(POLL_S)
            clock.tell(update, kept)


def _kept(output: Path, update: int) -> Path | None:
    """Return the adapter of an update once the run has kept it (`league.keep_every`), else None."""
    return next(output.glob(f"*/*/adapters/ckpt-{update}"), None)


# ---------------------------------------------------------------------------------- the evaluations


async def evaluate(questioner: Questioner) -> None:
    """Play each adapter against the fixed opponent: always the same games, sampled from the same random streams."""
    config = Config.model_validate_json(questioner.arguments["config"])
    async with started_engines(config, 1, questioner.arguments["threads"]) as (pool, _):
        runner = GameRunner(PlayerFactory(pool.generate, sampling_seed=EVALUATION_SEED), config.run)
        questioner.answer({})
        for version, request in enumerate(questioner.requests(), 1):
            model = ModelRef(uid="base", kind="checkpoint", adapter_version=0)
            if request["adapter"] is not None:
                await pool.load_adapter(version, Path(request["adapter"]))
                model = ModelRef(uid="trained", kind="checkpoint", adapter_version=version)
            won = await _share_won(config, runner, model, questioner.arguments["games"])
            if request["adapter"] is not None:
                await pool.unload_adapter(version)
            questioner.answer({"win_rate": won})


async def _share_won(config: Config, runner: GameRunner, model: ModelRef, num_games: int) -> float:
    registry = ModelRegistry()
    scheduler = GameScheduler(
        build_model_sampler(config, registry, random.Random(0)), build_env_sampler(config), EVALUATION_SEED
    )
    specs = [scheduler.next_eval_job(config.eval_envs[0], model) for _ in range(num_games)]
    slots = asyncio.Semaphore(config.run.num_collection_workers)

    async def is_won(index: int) -> bool:
        async with slots:
            record = await runner.play(specs[index])
        (seat,) = (agent.pid for agent in specs[index].agent_specs if agent.model == model)
        return record.outcomes.get(seat) == "win"

    won: Sequence[bool] = await asyncio.gather(*map(is_won, range(num_games)))
    return sum(won) / num_games


if __name__ == "__main__":
    questioner = Questioner()
    measure = {"train": train, "evaluate": evaluate}[questioner.arguments["kind"]]
    run_in_loop(measure(questioner))
