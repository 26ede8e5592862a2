"""Steps of `unstable-lite sft`: the checks before anything starts, games until there are enough pairs, and training.

Training begins when no game is left to keep going, so it needs no process of its own: `_train` loads torch in this one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from unstable_lite.config import Config
from unstable_lite.config.games import parse_player
from unstable_lite.dashboards.terminal import TerminalInterface
from unstable_lite.errors import MISTAKES, EnvError, UnstableError
from unstable_lite.evaluation.evaluator import LoadedAdapters, with_engines
from unstable_lite.evaluation.models import opponent
from unstable_lite.files import to_line
from unstable_lite.games.env_pool import EnvPool, opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.orchestrator.event_loop import cancelled_by_signals, log_file, unless_set
from unstable_lite.orchestrator.workers import environment
from unstable_lite.planning.placement import place
from unstable_lite.planning.plan import Plan, checked_config, plan_workers
from unstable_lite.planning.rules import training_rules
from unstable_lite.planning.validation import find_worker_problems, frozen_problems, why_not_seated
from unstable_lite.plugins import environment_without_keys
from unstable_lite.rng import derive_seed, game_seed
from unstable_lite.rollout.collector import play_all
from unstable_lite.rollout.run_game import MAX_VOID_GAMES, GameRunner
from unstable_lite.sft.pairs import PAIRS, Pair, pairs_of_game, read_pairs
from unstable_lite.tracking.versions import versions
from unstable_lite.transport.worker_main import last_words
from unstable_lite.types import ENV_LOST, GameRecord, GameSpec, ModelRef

log = logging.getLogger(__name__)

HOW = "sft.json"
MAX_GAMES = 10_000
"""Most games to play if the filter leaves too few turns."""


def load_sft_plan(path: Path, overrides: tuple[str, ...] = ()) -> Plan:
    """Read, validate and plan a config for `sft`. Raises ConfigError with every problem at once."""
    config = _before_its_own_output(checked_config(path, overrides, find_sft_problems))
    # If memory runs out, nothing halves the batches.
    is_checkpointed = config.learner.activation_checkpointing in ("auto", True)
    learner = {"activation_checkpointing": is_checkpointed}
    config = config.changed(engine={"thinking_tokens": None}, learner=learner)
    return plan_workers(place(config, _has_engines(config)))


def _has_engines(config: Config) -> bool:
    return config.sft.data is None and any(parse_player(name).is_frozen for name in config.sft.players)


def _before_its_own_output(config: Config) -> Config:
    """Return the config without the run's initial adapter, if `sft` is to make it."""
    start = config.lora.initial_lora_path
    if start is None or start.resolve() != config.sft.output.resolve():
        return config
    return config.changed(lora={"initial_lora_path": None})


def find_sft_problems(config: Config) -> list[str]:
    """Return every reason why `sft` cannot make an adapter with this config, or would replace other pairs."""
    sft, pairs_file = config.sft, config.sft.output / PAIRS
    problems = find_worker_problems(_before_its_own_output(config), _has_engines(config))
    problems += training_rules(config)
    if sft.data is None:
        problems += _player_problems(config)
    elif not sft.data.is_file():
        problems.append(f"sft.data: there is no file {sft.data}")
    has_pairs = pairs_file.is_file() and pairs_file.stat().st_size > 0
    if has_pairs and (sft.data is None or sft.data.resolve() != pairs_file.resolve()):
        advice = f"train on them with sft.data={pairs_file}, or choose another output"
        problems.append(f"sft.output = {sft.output} has pairs already: {advice}")
    if (sft.output / "adapter_config.json").exists():
        problems.append(f"sft.output = {sft.output} contains an adapter already: choose another, or remove it")
    return problems


def _player_problems(config: Config) -> Iterator[str]:
    players = dict.fromkeys(config.sft.players)
    if not players:
        yield "sft.players: name the players, or give pairs as sft.data"
    for name in config.sft.imitate or ():
        if name not in players:
            yield f"sft.imitate: {name!r} is not one of sft.players = {list(config.sft.players)}"
    adapters = [name for name in players if parse_player(name).has_adapter]
    yield from (f"sft.players: {problem}" for problem in frozen_problems(adapters, config))
    for name in (name for name in players if not parse_player(name).is_frozen):
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
    pairs_file, collected, metrics, left_out = sft.output / PAIRS, None, None, Counter[str]()
    env_ids, logs = {env.env_id for env in config.train_envs}, sft.output / "logs"
    pairs = [] if sft.data is None else read_pairs(sft.data, env_ids)
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnstableError(f"sft.output = {sft.output}: {error.strerror}; choose another") from error
    with log_file(logs / "orchestrator.log"):
        if sft.data is None:
            collected = asyncio.run(_collect(plan, pairs_file, terminal))
            left_out, pairs = collected.left_out, read_pairs(pairs_file, env_ids)
        elif sft.data.resolve() != pairs_file.resolve():
            shutil.copyfile(sft.data, pairs_file)
        if not collect_only:
            terminal.say(f"training on {len(pairs)} pairs")
            metrics, not_trained = _train(plan, pairs, terminal.of("update"))
            left_out += not_trained
    record = {
        **config.model_dump(mode="json", include={"model_name", "sft", "lora", "train_envs"}),
        "seed": config.run.seed,
        "num_pairs": len(pairs),
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
    models = [opponent(name) for name in config.sft.players]

    async def play(seats: PlayerFactory, adapters: LoadedAdapters) -> Collected:
        await adapters.hold({model.key: model for model in models if model.path is not None})
        return await collect_pairs(config, list(map(adapters.ref, models)), seats, file, progress, environments)

    progress.start(config.sft.pairs)
    try:
        with pairs_file.open("wb") as file, cancelled_by_signals():
            async with opened_env_pool(logs, config.run.env_timeout_s) as environments:
                collected = await with_engines(plan, None, logs, terminal.say, play)
    finally:
        progress.stop()
    if collected.pairs < config.sft.pairs:
        reasons = ", ".join(f"{count} turns {reason}" for reason, count in collected.left_out.most_common())
        text = (
            f"only {collected.pairs} of {config.sft.pairs} pairs after {collected.games} games ({collected.void_games} "
            f"of them void): {MAX_GAMES:,} games or a limit of section opponents is reached. Left out: "
            f"{reasons or 'no turn'}"
        )
        if not collected.pairs:
            raise UnstableError(f"{text}; loosen sft.filter, or use other sft.players")
        terminal.say(text)
    return collected


def _train(plan: Plan, pairs: Sequence[Pair], progress: TerminalInterface) -> tuple[dict[str, float], Counter[str]]:
    """Train in this process, on the learner's first device; a signal raises KeyboardInterrupt."""
    device, *_ = plan.learner_devices
    os.environ.update(environment([device], plan.learner_threads))  # before torch is loaded
    for name in os.environ.keys() - environment_without_keys().keys():
        del os.environ[name]  # a model's own code gets no key, as in a worker
    from unstable_lite.sft.fine_tuning import FineTuner

    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of names that a user cannot change
            return FineTuner(plan.config, device if isinstance(device, str) else "cuda:0").fine_tune(pairs, progress)
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
    """Number of the newest games that are void, without those whose env was lost with its process."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of turns that were left out, by reason."""


async def collect_pairs(
    config: Config,
    players: Sequence[ModelRef],
    seats: PlayerFactory,
    file: BinaryIO,
    progress: TerminalInterface,
    environments: EnvPool | None = None,
) -> Collected:
    """Play until `sft.pairs` are in `file`, `MAX_GAMES` are played, or the budget for opponents is spent.

    Games count in the order of their numbers, not of their ends, so that reproducible players give reproducible pairs.
    Raises a group with an EnvError if games keep failing, with a WorkerDied if an engine dies.
    """
    wanted, collected, is_enough = config.sft.pairs, Collected(), asyncio.Event()
    runner, ended = GameRunner(seats, config.run, environments), dict[int, GameRecord]()

    async def play(number: int) -> None:
        ended[number] = await runner.play(_game(config, players, number))
        while not is_enough.is_set() and (record := ended.pop(collected.games, None)) is not None:
            is_void = record.end == "void"
            collected.games += 1
            collected.void_games += is_void
            collected.voids_in_a_row = collected.voids_in_a_row + (record.reason != ENV_LOST) if is_void else 0
            if collected.voids_in_a_row == MAX_VOID_GAMES and not seats.spent:
                raise EnvError(f"{MAX_VOID_GAMES} games in a row failed; the last one: {record.error}")
            pairs, left_out = pairs_of_game(record, config.sft)
            pairs = pairs[: wanted - collected.pairs]
            file.writelines(map(to_line, pairs))
            file.flush()
            collected.pairs += len(pairs)
            collected.left_out += left_out
            status = f"games {collected.games}  left out {collected.left_out.total()}"
            progress.show_update(collected.pairs, wanted, status)
            if collected.pairs == wanted:
                is_enough.set()

    numbers = itertools.takewhile(lambda _: not (seats.spent or is_enough.is_set()), range(MAX_GAMES))
    await unless_set(play_all(numbers, play, config.run.num_collection_workers), is_enough)
    return collected


def _game(config: Config, players: Sequence[ModelRef], number: int) -> GameSpec:
    """Return a game: envs alternate, and within an env players alternate at the seats."""
    env = config.train_envs[number % len(config.train_envs)]
    first = number // len(config.train_envs)
    models = [players[(first + pid) % len(players)] for pid in range(env.num_players)]
    return new_game(env, models, number, "train", game_seed(derive_seed(config.run.seed, "sft"), "train", number))
