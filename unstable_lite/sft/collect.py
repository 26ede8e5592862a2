"""Play games with the players of `sft` until there are enough pairs.

Knows no engine, no template and no file.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from unstable_lite.adapters.frozen import is_adapter
from unstable_lite.config import Config
from unstable_lite.errors import EnvError, WorkerDied
from unstable_lite.games.env_pool import EnvPool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.rng import derive_seed, game_seed
from unstable_lite.rollout.run_game import MAX_VOID_GAMES, GameRunner
from unstable_lite.sft.pairs import Pair, pairs_of_game
from unstable_lite.types import BASE, ENV_LOST, GameRecord, GameSpec, ModelRef

MAX_GAMES = 10_000
"""Most games to play if the filter leaves too few turns."""


@dataclass(kw_only=True)
class Collected:
    """Results of the games so far."""

    pairs: int = 0
    games: int = 0
    void_games: int = 0
    voids_in_a_row: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of turns that were left out, by reason."""


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
    collected = Collected()
    finished: dict[int, GameRecord] = {}
    numbers = iter(range(MAX_GAMES))
    runner = GameRunner(seats, config.run, environments)

    async def play() -> None:
        for number in numbers:  # shared by all workers
            finished[number] = await runner.play(_game(config, number))
            while collected.pairs < config.sft.pairs and (record := finished.pop(collected.games, None)) is not None:
                for pair in _take(record, collected, config, is_spent=bool(seats.spent)):
                    keep(pair)
                show(collected)
            if collected.pairs >= config.sft.pairs or seats.spent:
                return

    try:
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(play()) for _ in range(config.run.num_collection_workers)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            if collected.pairs >= config.sft.pairs:
                for worker in workers:
                    worker.cancel()  # their games are not needed any more
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
