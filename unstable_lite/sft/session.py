"""Steps of `unstable-lite sft`: play until there are enough pairs, train, save; and the checks before them.

Loads neither torch nor transformers; the worker trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unstable_lite.adapters.frozen import find_adapter, is_adapter
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import EnvError, UnstableError, WorkerDied
from unstable_lite.games.env_pool import EnvPool, opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import templates_for
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.orchestrator.event_loop import cancelled_by_signals, log_file
from unstable_lite.orchestrator.workers import started_engines, started_fine_tuner, while_alive
from unstable_lite.planning.placement import place
from unstable_lite.planning.plan import Plan, checked_config, plan_workers
from unstable_lite.planning.rules import training_rules
from unstable_lite.planning.validation import find_worker_problems, frozen_problems, why_not_seated
from unstable_lite.rng import derive_seed, game_seed
from unstable_lite.rollout.collector import play_all
from unstable_lite.rollout.run_game import MAX_VOID_GAMES, GameRunner
from unstable_lite.sft.pairs import PAIRS, Pair, pairs_of_game, read_pairs, write_line
from unstable_lite.tracking.versions import versions
from unstable_lite.transport.messages import FineTuned, FineTuning, Message
from unstable_lite.transport.processes import WorkerProcess
from unstable_lite.types import BASE, ENV_LOST, GameRecord, GameSpec, Generation, ModelRef

HOW = "sft.json"
MAX_GAMES = 10_000
"""Most games to play if the filter leaves too few turns."""


def load_sft_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read, validate and plan a config for `sft`. Raises ConfigError with every problem at once."""

    def find(config: Config) -> list[str]:
        return [
            *find_worker_problems(_before_its_own_output(config), _has_engines(config)),
            *find_sft_problems(config),
        ]

    config = _before_its_own_output(checked_config(path, overrides, find))
    learner = config.learner
    if learner.activation_checkpointing == "auto":  # if memory runs out, training ends: nothing halves its batches
        learner = learner.model_copy(update={"activation_checkpointing": True})
    placed = place(config.model_copy(update={"learner": learner}))
    return plan_workers(placed if _has_engines(config) else replace(placed, engine_devices=()))


def _has_engines(config: Config) -> bool:
    return config.sft.data is None and bool(adapter_versions(config.sft.players))


def _before_its_own_output(config: Config) -> Config:
    """Return the config without the run's initial adapter, if `sft` is to make it."""
    start = config.lora.initial_lora_path
    if start is None or start.resolve() != config.sft.output.resolve():
        return config
    return config.model_copy(update={"lora": config.lora.model_copy(update={"initial_lora_path": None})})


def find_sft_problems(config: Config) -> Iterator[str]:
    """Yield every problem of section `sft`; `find_worker_problems` checks the other sections."""
    yield from training_rules(config)
    sft, pairs_file = config.sft, config.sft.output / PAIRS
    if sft.data is None:
        yield from _player_problems(config)
    elif not sft.data.is_file():
        yield f"sft.data: there is no file {sft.data}"
    has_pairs = pairs_file.is_file() and pairs_file.stat().st_size > 0
    if has_pairs and (sft.data is None or sft.data.resolve() != pairs_file.resolve()):
        yield (
            f"sft.output = {sft.output} has pairs already: train on them with sft.data={pairs_file}, or choose another "
            "output"
        )
    if (sft.output / "adapter_config.json").exists():
        yield f"sft.output = {sft.output} contains an adapter already: choose another, or remove it"


def _player_problems(config: Config) -> Iterator[str]:
    sft = config.sft
    if not sft.players:
        yield "sft.players: name the players, or give pairs as sft.data"
    for name in sft.imitate or ():
        if name not in sft.players:
            yield f"sft.imitate: {name!r} is not one of sft.players = {list(sft.players)}"
    adapters = list(dict.fromkeys(filter(is_adapter, sft.players)))
    yield from (f"sft.players: {problem}" for problem in frozen_problems(adapters, config))
    for name in dict.fromkeys(sft.players):
        if not is_adapter(name) and name != BASE:
            for problem in dict.fromkeys(why_not_seated(name, env, config.opponents) for env in config.train_envs):
                if problem is not None:
                    yield f"sft.players: {problem} (players are named as in league.fixed_opponents)"
    if len(adapters) > config.engine.max_loras:
        yield f"sft.players: {len(adapters)} adapters are more than engine.max_loras = {config.engine.max_loras}"


async def run_sft(plan: Plan, terminal: TerminalInterface, collect_only: bool = False) -> dict[str, Any]:
    """Collect (or read) the pairs and train on them; leave no process behind.

    Return the settings with which it can be repeated, and its results; with a training sft.json has them. Raises
    ConfigError for pairs that cannot be used, UnstableError if none is left or a worker fails.
    """
    started, config, sft = time.monotonic(), plan.config, plan.config.sft
    logs, pairs_file = sft.output / "logs", sft.output / PAIRS
    given = None if sft.data is None else read_pairs(sft.data, {env.env_id for env in config.train_envs})
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnstableError(f"sft.output = {sft.output}: {error.strerror}; choose another") from error
    with log_file(logs / "orchestrator.log"), cancelled_by_signals():
        collected = await _collect(plan, pairs_file, terminal) if given is None else None
        if given is not None and sft.data is not None:
            terminal.say(f"{len(given)} pairs in {sft.data}")
            if sft.data.resolve() != pairs_file.resolve():
                pairs_file.write_text("".join(map(write_line, given)), encoding="utf-8")
        trained = None if collect_only else await _train(plan, logs, terminal)
    left_out = sum((Counter(part.left_out) for part in (collected, trained) if part is not None), Counter[str]())
    table = config.model_dump(mode="json")
    record = {
        "model_name": config.model_name,
        "seed": config.run.seed,
        **{section: table[section] for section in ("sft", "lora", "train_envs")},
        "num_pairs": collected.pairs if collected is not None else len(given or ()),
        "games": collected and collected.games,
        "void_games": collected and collected.void_games,
        "left_out": dict(left_out),
        "metrics": trained and trained.metrics,
        "seconds": round(time.monotonic() - started, 1),
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
    }
    if trained is not None:
        (sft.output / HOW).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


async def _collect(plan: Plan, pairs_file: Path, terminal: TerminalInterface) -> Collected:
    config, progress, logs = plan.config, terminal.of("pair"), pairs_file.parent / "logs"
    wanted, versions_of = config.sft.pairs, adapter_versions(config.sft.players)
    with pairs_file.open("w", encoding="utf-8") as file:

        def show(collected: Collected) -> None:
            file.flush()
            progress.show_update(
                collected.pairs, wanted, f"games {collected.games}  left out {collected.left_out.total()}"
            )

        progress.start(wanted)
        try:
            async with contextlib.AsyncExitStack() as opened:
                environments = await opened.enter_async_context(opened_env_pool(logs, config.run.env_timeout_s))
                processes: list[WorkerProcess] = []
                seats = PlayerFactory(_no_engine, opponents=config.opponents, say=terminal.say)
                if versions_of:
                    workers = await opened.enter_async_context(started_engines(plan, logs, terminal.say))
                    processes, templates = workers.processes, templates_for(config, workers.prompts)
                    seats = PlayerFactory(workers.engines.generate, templates, config.opponents, terminal.say)
                    for name, version in versions_of.items():
                        if version:
                            loading = workers.engines.load_adapter(version, find_adapter(name).path)
                            await while_alive(processes, loading)
                await opened.enter_async_context(seats)
                collecting = collect_pairs(config, seats, lambda pair: file.write(write_line(pair)), show, environments)
                collected = await while_alive(processes, collecting)
        finally:
            progress.stop()
    if not collected.pairs:
        reasons = ", ".join(f"{count} turns {reason}" for reason, count in collected.left_out.most_common())
        raise UnstableError(
            f"the filter leaves no pair of {collected.games} games ({collected.void_games} of them void): "
            f"{reasons or 'no turn was played'}; loosen sft.filter, or use other sft.players"
        )
    if collected.pairs < wanted:
        terminal.say(
            f"only {collected.pairs} of {wanted} pairs after {collected.games} games: {MAX_GAMES:,} games or "
            "a limit of section opponents is reached"
        )
    return collected


async def _no_engine(_prompt: str, _version: int, _stop: tuple[str, ...], _seed: int | None) -> Generation:
    raise AssertionError("no player asked for an engine")


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


@dataclass(kw_only=True)
class Collected:
    """Results of the games so far."""

    pairs: int = 0
    games: int = 0
    void_games: int = 0
    voids_in_a_row: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of turns that were left out, by reason."""


class _Enough(Exception):
    """Enough pairs are kept."""


def adapter_versions(players: tuple[str, ...]) -> dict[str, int]:
    """Return the versions of players on engines: 0 is the base, 1, 2, … are the adapters in order."""
    adapters = dict.fromkeys(filter(is_adapter, players))
    versions = {name: number for number, name in enumerate(adapters, start=1)}
    return versions | ({BASE: 0} if BASE in players else {})


async def collect_pairs(
    config: Config,
    seats: PlayerFactory,
    keep: Callable[[Pair], object],
    show: Callable[[Collected], None],
    environments: EnvPool | None = None,
) -> Collected:
    """Play until `sft.pairs` are kept, `MAX_GAMES` are played, or the budget for opponents is spent.

    Games count in the order of their numbers, not of their ends, so that reproducible players give reproducible pairs.
    Raises EnvError if games keep failing, WorkerDied if an engine dies.
    """
    collected, finished = Collected(), dict[int, GameRecord]()
    runner = GameRunner(seats, config.run, environments)

    async def play(number: int) -> None:
        finished[number] = await runner.play(_game(config, number))
        # Games of tasks that end before the pool does are no longer taken.
        while collected.pairs < config.sft.pairs and (record := finished.pop(collected.games, None)) is not None:
            for pair in _take(record, collected, config, is_spent=bool(seats.spent)):
                keep(pair)
            show(collected)
            if collected.pairs >= config.sft.pairs:
                raise _Enough

    numbers = itertools.takewhile(lambda _: not seats.spent, range(MAX_GAMES))
    try:
        await play_all(numbers, play, config.run.num_collection_workers)
    except* _Enough:
        pass  # the games that were not over are not needed
    except* (EnvError, WorkerDied) as group:
        raise group.exceptions[0] from None
    return collected


def _take(record: GameRecord, collected: Collected, config: Config, is_spent: bool) -> list[Pair]:
    """Count a game and return the pairs of it that are wanted. Raises EnvError if it and those before it failed."""
    collected.games += 1
    if record.end == "void":
        collected.void_games += 1
        collected.voids_in_a_row += record.reason != ENV_LOST
        if collected.voids_in_a_row == MAX_VOID_GAMES and not is_spent:
            raise EnvError(f"{MAX_VOID_GAMES} games in a row failed; the last one: {record.error}")
        return []
    collected.voids_in_a_row = 0
    pairs, left_out = pairs_of_game(record, config.sft)
    wanted = list(itertools.islice(pairs, config.sft.pairs - collected.pairs))
    collected.left_out += left_out
    collected.pairs += len(wanted)
    return wanted


def _game(config: Config, number: int) -> GameSpec:
    """Return a game: envs alternate, and within an env players alternate at the seats."""
    env = config.train_envs[number % len(config.train_envs)]
    first = number // len(config.train_envs)
    players, versions = config.sft.players, adapter_versions(config.sft.players)
    names = [players[(first + pid) % len(players)] for pid in range(env.num_players)]
    models = [
        ModelRef(uid=name, kind="checkpoint", adapter_version=versions[name])
        if name in versions
        else ModelRef(uid=name, kind="fixed", name=name)
        for name in names
    ]
    generating = [pid for pid, name in enumerate(names) if name in versions]
    seed = game_seed(derive_seed(config.run.seed, "sft"), "train", number)
    return new_game(env, models, number, "train", seed, trained=generating)
