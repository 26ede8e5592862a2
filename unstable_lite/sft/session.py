"""Steps of `unstable-lite sft`: play, filter pairs, train, save; and the checks before them.

Loads neither torch nor transformers; the worker trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.adapters.frozen import find_adapter, is_adapter
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import UnstableError
from unstable_lite.games.env_pool import opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import templates_for
from unstable_lite.orchestrator.event_loop import cancelled_by_signals
from unstable_lite.orchestrator.logs import log_file
from unstable_lite.orchestrator.workers import started_engines, started_fine_tuner, while_alive
from unstable_lite.planning.frozen_players import frozen_problems
from unstable_lite.planning.placement import devices_of
from unstable_lite.planning.plan import Plan, checked_config, plan_workers
from unstable_lite.planning.validation import find_worker_problems, learning_problems, why_not_seated
from unstable_lite.sft.collect import Collected, adapter_versions, collect_pairs
from unstable_lite.sft.pairs import PAIRS, Pair, read_pairs, write_line
from unstable_lite.tracking.versions import versions
from unstable_lite.transport.messages import FineTuned, FineTuning, Message
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.types import BASE, Generation

HOW = "sft.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSummary:
    """Results of `sft`."""

    directory: Path
    num_pairs: int
    collected: Collected | None
    """Result of the games; None if the pairs were given."""
    metrics: dict[str, float] | None
    """Metrics of the training; None with `collect_only`."""
    left_out: Counter[str]
    """Numbers of turns and pairs that were left out, by reason."""
    seconds: float


def load_sft_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read, validate and plan a config for `sft`. Raises ConfigError with every problem at once."""

    def find(config: Config) -> list[str]:
        problems = find_worker_problems(_before_its_own_output(config), _has_engines(config))
        return [*problems, *find_sft_problems(config)]

    config = _before_its_own_output(checked_config(path, overrides, find))
    learner = config.learner
    if learner.activation_checkpointing == "auto":  # if memory runs out, training ends: nothing halves its batches
        learner = learner.model_copy(update={"activation_checkpointing": True})
    engine_devices, learner_devices = devices_of(config)
    config = config.model_copy(update={"learner": learner})
    return plan_workers(config, engine_devices if _has_engines(config) else (), learner_devices)


def _has_engines(config: Config) -> bool:
    return config.sft.data is None and bool(adapter_versions(config.sft.players))


def find_sft_problems(config: Config) -> list[str]:
    """Return every problem of section `sft`; `find_worker_problems` checks the other sections."""
    sft, problems = config.sft, [*learning_problems(config)]
    pairs_file = sft.output / PAIRS
    if sft.data is None:
        problems += _player_problems(config)
    elif not sft.data.is_file():
        problems.append(f"sft.data: there is no file {sft.data}")
    has_pairs = pairs_file.is_file() and pairs_file.stat().st_size > 0
    if has_pairs and (sft.data is None or sft.data.resolve() != pairs_file.resolve()):
        problems.append(
            f"sft.output = {sft.output} has pairs already: train on them with sft.data={pairs_file}, or choose another "
            "output"
        )
    if (sft.output / "adapter_config.json").exists():
        problems.append(f"sft.output = {sft.output} contains an adapter already: choose another, or remove it")
    return problems


async def run_sft(plan: Plan, terminal: TerminalInterface, collect_only: bool = False) -> SftSummary:
    """Collect (or read) the pairs and train on them; leave no process behind.

    Raises ConfigError for pairs that cannot be used, UnstableError if none is left or a worker fails.
    """
    started, config, directory = time.monotonic(), plan.config, plan.config.sft.output
    pairs_file = directory / PAIRS
    given = None if config.sft.data is None else read_pairs(config.sft.data)
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnstableError(f"sft.output = {directory}: {error.strerror}; choose another") from error
    with log_file(directory / "logs" / "orchestrator.log"), cancelled_by_signals():
        if given is not None:
            collected, num_pairs = None, len(given)
            terminal.say(f"{num_pairs} pairs in {config.sft.data}")
            if config.sft.data.resolve() != pairs_file.resolve():  # type: ignore[union-attr]
                pairs_file.write_text("".join(map(write_line, given)), encoding="utf-8")
        else:
            collected = await _collect(plan, pairs_file, terminal)
            num_pairs = collected.pairs
        left_out = Counter(collected.left_out if collected else {})
        metrics = None
        if not collect_only:
            trained = await _train(plan, directory / "logs", terminal)
            metrics, left_out = trained.metrics, left_out + Counter(trained.left_out)
    summary = SftSummary(
        directory=directory,
        num_pairs=num_pairs,
        collected=collected,
        metrics=metrics,
        left_out=left_out,
        seconds=time.monotonic() - started,
    )
    if metrics is not None:
        (directory / HOW).write_text(json.dumps(_how(config, summary), indent=2) + "\n", encoding="utf-8")
    return summary


async def _collect(plan: Plan, pairs_file: Path, terminal: TerminalInterface) -> Collected:
    config = plan.config
    progress, logs = terminal.of("pair"), pairs_file.parent / "logs"
    with pairs_file.open("w", encoding="utf-8") as file:

        def keep(pair: Pair) -> None:
            file.write(write_line(pair))

        def show(collected: Collected) -> None:
            file.flush()
            metrics = f"games {collected.games}  left out {collected.left_out.total()}"
            progress.show_update(collected.pairs, config.sft.pairs, metrics)

        progress.start(config.sft.pairs)
        try:
            async with (
                opened_env_pool(logs, config.run.env_timeout_s) as environments,
                _opened_seats(plan, logs, terminal) as (processes, seats),
            ):
                collected = await while_alive(processes, collect_pairs(config, seats, keep, show, environments))
        finally:
            progress.stop()
    if not collected.pairs:
        reasons = ", ".join(f"{count} turns {reason}" for reason, count in collected.left_out.most_common())
        raise UnstableError(
            f"the filter leaves no pair of {collected.games} games ({collected.void_games} of them void): "
            f"{reasons or 'no turn was played'}; loosen sft.filter, or use other sft.players"
        )
    if collected.pairs < config.sft.pairs:
        terminal.say(
            f"only {collected.pairs} of {config.sft.pairs} pairs after {collected.games} games: sft.max_games or a "
            "limit of section opponents is reached"
        )
    return collected


@contextlib.asynccontextmanager
async def _opened_seats(
    plan: Plan, logs: Path, terminal: TerminalInterface
) -> AsyncIterator[tuple[list[WorkerProcess], PlayerFactory]]:
    """Yield the engines' processes, if a player needs engines, and the players."""
    config, versions_of = plan.config, adapter_versions(plan.config.sft.players)
    if not versions_of:
        async with PlayerFactory(_no_engine, opponents=config.opponents, say=terminal.say) as seats:
            yield [], seats
        return
    async with started_engines(plan, logs, terminal.say) as workers:
        for name, version in versions_of.items():
            if version:
                loading = workers.engines.load_adapter(version, find_adapter(name).path)
                await while_alive(workers.processes, loading)
        templates = templates_for(config, workers.prompts)
        async with PlayerFactory(workers.engines.generate, templates, config.opponents, terminal.say) as seats:
            yield workers.processes, seats


async def _train(plan: Plan, logs: Path, terminal: TerminalInterface) -> FineTuned:
    progress = terminal.of("update")
    result: asyncio.Future[FineTuned] = asyncio.get_running_loop().create_future()

    def receive(message: Message) -> None:
        if isinstance(message, FineTuning):
            if message.update == 1:
                progress.start(message.total)
            progress.show_update(message.update, message.total, f"loss {message.loss:.4f}")
        elif isinstance(message, FineTuned) and not result.done():  # a signal may have cancelled it
            result.set_result(message)

    try:
        async with started_fine_tuner(plan, logs, terminal.say, receive) as process:
            return await while_alive([process], result)
    finally:
        progress.stop()


def _before_its_own_output(config: Config) -> Config:
    """Return the config without the run's initial adapter, if `sft` is to make it."""
    start = config.lora.initial_lora_path
    if start is None or start.resolve() != config.sft.output.resolve():
        return config
    return config.model_copy(update={"lora": config.lora.model_copy(update={"initial_lora_path": None})})


def _player_problems(config: Config) -> Iterator[str]:
    sft = config.sft
    if not sft.players:
        yield "sft.players: name the players, or give pairs as sft.data"
    for name in sft.imitate or ():
        if name not in sft.players:
            yield f"sft.imitate: {name!r} is not one of sft.players = {list(sft.players)}"
    versions_of = adapter_versions(sft.players)
    for name in dict.fromkeys(sft.players):
        if is_adapter(name):
            yield from (f"sft.players: {problem}" for problem in frozen_problems([name], config))
        elif name != BASE:
            for problem in dict.fromkeys(why_not_seated(name, env, config.opponents) for env in config.train_envs):
                if problem is not None:
                    yield f"sft.players: {problem} (players are named as in league.fixed_opponents)"
    if sum(map(bool, versions_of.values())) > config.engine.max_loras:
        yield f"sft.players: {len(versions_of)} need more adapters than engine.max_loras = {config.engine.max_loras}"


async def _no_engine(_prompt: str, _version: int, _stop: tuple[str, ...], _seed: int | None) -> Generation:
    raise AssertionError("no player asked for an engine")


def _how(config: Config, summary: SftSummary) -> dict[str, Any]:
    """Write the settings with which it can be repeated, and its results."""
    return {
        "model_name": config.model_name,
        "seed": config.run.seed,
        "sft": config.sft.model_dump(mode="json"),
        "lora": config.lora.model_dump(mode="json"),
        "train_envs": config.model_dump(mode="json")["train_envs"],
        "num_pairs": summary.num_pairs,
        "games": summary.collected.games if summary.collected else None,
        "void_games": summary.collected.void_games if summary.collected else None,
        "left_out": dict(summary.left_out),
        "metrics": summary.metrics,
        "seconds": round(summary.seconds, 1),
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
    }
