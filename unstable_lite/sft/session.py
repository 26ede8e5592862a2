"""Steps of `unstable-lite sft`: play until there are enough pairs, train, save; and the checks before them.

Training begins when no game is left to keep going, so it needs no process of its own: `_train` loads torch in this one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unstable_lite.adapters.frozen import find_adapter, is_adapter, is_frozen
from unstable_lite.config import Config
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import MISTAKES, EnvError, UnstableError
from unstable_lite.games.env_pool import EnvPool, opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.templates import templates_for
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.orchestrator.event_loop import cancelled_by_signals, log_file, unless_set
from unstable_lite.orchestrator.workers import environment, started_engines, while_alive
from unstable_lite.planning.placement import place
from unstable_lite.planning.plan import Plan, checked_config, plan_workers
from unstable_lite.planning.rules import training_rules
from unstable_lite.planning.validation import find_worker_problems, frozen_problems, why_not_seated
from unstable_lite.plugins import environment_without_keys
from unstable_lite.rng import derive_seed, game_seed
from unstable_lite.rollout.collector import play_all
from unstable_lite.rollout.run_game import MAX_VOID_GAMES, GameRunner
from unstable_lite.sft.pairs import PAIRS, Pair, pairs_of_game, read_pairs, write_line
from unstable_lite.tracking.versions import versions
from unstable_lite.transport.worker_main import last_words
from unstable_lite.types import BASE, ENV_LOST, GameRecord, GameSpec, ModelRef

log = logging.getLogger(__name__)
HOW = "sft.json"
MAX_GAMES = 10_000
"""Most games to play if the filter leaves too few turns."""


def load_sft_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read, validate and plan a config for `sft`. Raises ConfigError with every problem at once."""
    config = _before_its_own_output(checked_config(path, overrides, find_sft_problems))
    learner = config.learner
    if learner.activation_checkpointing == "auto":  # if memory runs out, training ends: nothing halves its batches
        learner = learner.model_copy(update={"activation_checkpointing": True})
    placed = place(config.model_copy(update={"learner": learner}))
    return plan_workers(placed if _has_engines(config) else replace(placed, engine_devices=()))


def _has_engines(config: Config) -> bool:
    return config.sft.data is None and any(map(is_frozen, config.sft.players))


def _before_its_own_output(config: Config) -> Config:
    """Return the config without the run's initial adapter, if `sft` is to make it."""
    start = config.lora.initial_lora_path
    if start is None or start.resolve() != config.sft.output.resolve():
        return config
    return config.model_copy(update={"lora": config.lora.model_copy(update={"initial_lora_path": None})})


def find_sft_problems(config: Config) -> list[str]:
    """Return every reason why `sft` cannot make an adapter with this config."""
    worker_problems = find_worker_problems(_before_its_own_output(config), _has_engines(config))
    return [*worker_problems, *training_rules(config), *_pairs_problems(config)]


def _pairs_problems(config: Config) -> Iterator[str]:
    """Yield each reason why there would be no pairs, or why they would replace others."""
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
    players, adapters = dict.fromkeys(config.sft.players), adapter_versions(config.sft.players)
    if not players:
        yield "sft.players: name the players, or give pairs as sft.data"
    for name in config.sft.imitate or ():
        if name not in players:
            yield f"sft.imitate: {name!r} is not one of sft.players = {list(config.sft.players)}"
    yield from (f"sft.players: {problem}" for problem in frozen_problems(adapters, config))
    for name in itertools.filterfalse(is_frozen, players):
        problems = (why_not_seated(name, env, config.opponents) for env in config.train_envs)
        for problem in dict.fromkeys(filter(None, problems)):
            yield f"sft.players: {problem} (players are named as in league.fixed_opponents)"
    if len(adapters) > config.engine.max_loras:
        yield f"sft.players: {len(adapters)} adapters are more than engine.max_loras = {config.engine.max_loras}"


def run_sft(plan: Plan, terminal: TerminalInterface, collect_only: bool = False) -> dict[str, Any]:
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
    collected, metrics, left_out = None, None, Counter[str]()
    with log_file(logs / "orchestrator.log"):
        if given is None or sft.data is None:
            collected = asyncio.run(_collect(plan, pairs_file, terminal))
            left_out, given = collected.left_out, read_pairs(pairs_file)
        else:
            terminal.say(f"{len(given)} pairs in {sft.data}")
            if sft.data.resolve() != pairs_file.resolve():
                pairs_file.write_text("".join(map(write_line, given)), encoding="utf-8")
        if not collect_only:
            metrics, not_trained = _train(plan, given, terminal)
            left_out += not_trained
    table = config.model_dump(mode="json")
    record = {
        "model_name": config.model_name,
        "seed": config.run.seed,
        **{section: table[section] for section in ("sft", "lora", "train_envs")},
        "num_pairs": len(given),
        "games": collected and collected.games,
        "void_games": collected and collected.void_games,
        "left_out": dict(left_out),
        "metrics": metrics,
        "seconds": round(time.monotonic() - started, 1),
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions(),
    }
    if metrics is not None:
        (sft.output / HOW).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


async def _collect(plan: Plan, pairs_file: Path, terminal: TerminalInterface) -> Collected:
    config, progress, logs = plan.config, terminal.of("pair"), pairs_file.parent / "logs"
    wanted, has_engines = config.sft.pairs, bool(plan.engine_devices)
    with pairs_file.open("w", encoding="utf-8") as file, cancelled_by_signals():

        def keep(pairs: Sequence[Pair], so_far: Collected) -> None:
            file.writelines(map(write_line, pairs))
            file.flush()
            status = f"games {so_far.games}  left out {so_far.left_out.total()}"
            progress.show_update(so_far.pairs, wanted, status)

        async def play() -> Collected:
            templates = templates_for(config, workers.prompts) if has_engines else {}
            for name, version in adapter_versions(config.sft.players).items():
                await workers.load_adapter(version, name, find_adapter(name).path)
            async with PlayerFactory(workers.engines.generate, templates, config.opponents, terminal.say) as seats:
                return await collect_pairs(config, seats, keep, environments)

        progress.start(wanted)
        try:
            async with (
                opened_env_pool(logs, config.run.env_timeout_s) as environments,
                started_engines(plan, logs, terminal.say) as workers,
            ):
                collected = await while_alive(workers.processes, play())
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


def _train(plan: Plan, pairs: Sequence[Pair], terminal: TerminalInterface) -> tuple[dict[str, float], Counter[str]]:
    """Train in this process, on the learner's first device; a signal raises KeyboardInterrupt."""
    device, progress = plan.learner_devices[0], terminal.of("update")
    os.environ.update(environment([device], plan.learner_threads))  # before torch is loaded
    for name in os.environ.keys() - environment_without_keys().keys():
        del os.environ[name]  # a model's own code gets no key, as in a worker
    from unstable_lite.sft.fine_tuning import FineTuner

    def show(update: int, total: int, loss: float) -> None:
        if update == 1:
            progress.start(total)
        progress.show_update(update, total, f"loss {loss:.4f}")

    terminal.say(f"training on {device}")
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of names that a user cannot change
            return FineTuner(plan.config, device if isinstance(device, str) else "cuda:0", show).fine_tune(pairs)
    except (*MISTAKES, ImportError, RuntimeError, MemoryError) as error:
        log.exception("training failed")
        raise UnstableError(last_words(error).error) from error
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


def adapter_versions(players: Sequence[str]) -> dict[str, int]:
    """Return the versions 1, 2, … of the players with adapters, in their order."""
    return {name: number for number, name in enumerate(dict.fromkeys(filter(is_adapter, players)), start=1)}


async def collect_pairs(
    config: Config,
    seats: PlayerFactory,
    keep: Callable[[Sequence[Pair], Collected], None],
    environments: EnvPool | None = None,
) -> Collected:
    """Play until `sft.pairs` are kept, `MAX_GAMES` are played, or the budget for opponents is spent.

    Games count in the order of their numbers, not of their ends, so that reproducible players give reproducible pairs.
    Raises a group with an EnvError if games keep failing, with a WorkerDied if an engine dies.
    """
    collected, finished, is_enough = Collected(), dict[int, GameRecord](), asyncio.Event()
    runner = GameRunner(seats, config.run, environments)

    async def play(number: int) -> None:
        finished[number] = await runner.play(_game(config, number))
        while not is_enough.is_set() and (record := finished.pop(collected.games, None)) is not None:
            keep(_take(record, collected, config, is_spent=bool(seats.spent)), collected)
            if collected.pairs == config.sft.pairs:
                is_enough.set()

    numbers = itertools.takewhile(lambda _: not (seats.spent or is_enough.is_set()), range(MAX_GAMES))
    await unless_set(play_all(numbers, play, config.run.num_collection_workers), is_enough)
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
    wanted = pairs[: config.sft.pairs - collected.pairs]
    collected.left_out += left_out
    collected.pairs += len(wanted)
    return wanted


def _game(config: Config, number: int) -> GameSpec:
    """Return a game: envs alternate, and within an env players alternate at the seats."""
    env = config.train_envs[number % len(config.train_envs)]
    first, players = number // len(config.train_envs), config.sft.players
    versions_of = {BASE: 0} | adapter_versions(players)
    names = [players[(first + pid) % len(players)] for pid in range(env.num_players)]
    models = [
        ModelRef(uid=name, kind="checkpoint", adapter_version=versions_of[name])
        if name in versions_of
        else ModelRef(uid=name, kind="fixed", name=name)
        for name in names
    ]
    return new_game(env, models, number, "train", game_seed(derive_seed(config.run.seed, "sft"), "train", number))
