"""Play games for their turns: who sits where, until there are enough pairs.

Knows no engine, no template and no file.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from unstable_lite.config import Config
from unstable_lite.errors import EnvError, WorkerDied
from unstable_lite.games.game_runner import GameRunner
from unstable_lite.games.isolation import Environments
from unstable_lite.games.seats import Seats
from unstable_lite.rng import derive_seed, game_seed
from unstable_lite.sft.pairs import Pair, pairs_of_game
from unstable_lite.types import BASE, AgentSpec, GameRecord, GameSpec, ModelRef

ADAPTER = "adapter:"


@dataclass(kw_only=True)
class Collected:
    """What the games have given so far."""

    pairs: int = 0
    games: int = 0
    void_games: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Turns, by the reason against them."""


def adapter_versions(players: tuple[str, ...]) -> dict[str, int]:
    """What the engines call the players that they serve: 0 is the base, 1, 2, … the adapters in order."""
    adapters = dict.fromkeys(name for name in players if name.startswith(ADAPTER))
    versions = {name: number for number, name in enumerate(adapters, start=1)}
    return versions | ({BASE: 0} if BASE in players else {})


async def collect_pairs(
    config: Config,
    seats: Seats,
    keep: Callable[[Pair], None],
    show: Callable[[Collected], None],
    environments: Environments | None = None,
) -> Collected:
    """Play until `sft.pairs` are kept, `sft.max_games` are played, or the budget for opponents is spent.

    Games are taken in the order of their numbers, whichever ends first: where the players' own choices can be
    reproduced, so can the pairs. Raises EnvError if game after game breaks, WorkerDied if an engine does.
    """
    collected = Collected()
    finished: dict[int, GameRecord] = {}
    numbers = iter(range(config.sft.max_games))
    runner = GameRunner(seats, config.run, environments)
    voids_in_a_row = 0

    def take(record: GameRecord) -> None:
        nonlocal voids_in_a_row
        collected.games += 1
        if record.end == "void":
            collected.void_games += 1
            voids_in_a_row += 1
            if voids_in_a_row == config.run.max_void_games and not seats.spent:
                raise EnvError(f"{voids_in_a_row} games in a row broke; the last one: {record.error}")
            return
        voids_in_a_row = 0
        pairs, left_out = pairs_of_game(record, config.sft)
        collected.left_out += left_out
        for pair in itertools.islice(pairs, config.sft.pairs - collected.pairs):
            keep(pair)
            collected.pairs += 1
        show(collected)

    async def play() -> None:
        for number in numbers:  # shared by all workers
            finished[number] = await runner.play(_game(config, number))
            await asyncio.sleep(0)  # scripted players answer at once: let others, and a Ctrl-C, have their turn
            while collected.pairs < config.sft.pairs and collected.games in finished:
                take(finished.pop(collected.games))
            if collected.pairs >= config.sft.pairs or seats.spent:
                return

    try:
        async with asyncio.TaskGroup() as tasks:
            workers = [tasks.create_task(play()) for _ in range(config.run.num_collection_workers)]
            await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            if collected.pairs >= config.sft.pairs:
                for worker in workers:
                    worker.cancel()  # nobody waits for their games any more
    except* (EnvError, WorkerDied) as group:
        raise group.exceptions[0] from None
    return collected


def _game(config: Config, number: int) -> GameSpec:
    """Envs take turns; within an env, players take turns at the seats."""
    env = config.train_envs[number % len(config.train_envs)]
    first = number // len(config.train_envs)
    players, versions = config.sft.players, adapter_versions(config.sft.players)
    agents = []
    for pid in range(env.num_players):
        name = players[(first + pid) % len(players)]
        if name in versions:
            model = ModelRef(uid=name, kind="checkpoint", adapter_version=versions[name])
        else:
            model = ModelRef(uid=name, kind="fixed", name=name)
        agents.append(
            AgentSpec(
                pid=pid,
                model=model,
                collect_data=name in versions,
                prompt_template=env.prompt_template,
                action_extraction_fn=env.action_extraction_fn,
            )
        )
    return GameSpec(
        game_idx=number,
        kind="train",
        env_id=env.env_id,
        num_players=env.num_players,
        seed=game_seed(derive_seed(config.run.seed, "sft"), "train", number),
        agent_specs=tuple(agents),
        max_turns=env.max_turns,
        observation=env.observation,
        isolated=env.isolated,
    )
