"""One game to watch or to play in: every turn is shown when it is made, and nothing is stored."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.cells import game_spec
from unstable_lite.evaluation.evaluator import with_engines
from unstable_lite.evaluation.loaded_adapters import AdapterSlots
from unstable_lite.evaluation.models import find_models, find_run
from unstable_lite.evaluation.plan import EvaluationPlan, plan_evaluation
from unstable_lite.games.env_pool import EnvPool, opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.player import Player
from unstable_lite.orchestrator.event_loop import cancelled_by_signals
from unstable_lite.planning.trust import run_config
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameRecord, Reply

HUMAN = "unstable_lite.games.players.human:HumanPlayer"


class _Shown:
    """Player whose answers are shown, and its observations too if no person plays at the terminal."""

    def __init__(self, player: Player, name: str, console: Console, shows_observation: bool) -> None:
        self._player = player
        self._name = name
        self._console = console
        self._shows_observation = shows_observation

    async def act(self, observation: str) -> Reply:
        if self._shows_observation:
            self._console.rule(self._name)
            self._console.print(observation.strip(), style="dim")
        reply = await self._player.act(observation)
        self._console.print(f"{self._name}: ", end="", style="bold")
        self._console.print(reply.text.strip() or "(nothing)", end="")
        self._console.print(f"  →  {reply.action}" if reply.action != reply.text else "", style="cyan")
        return reply


def plan_game(
    models: Sequence[str],
    config: Path | None,
    env: str | None,
    overrides: Sequence[str],
    trusts_config: bool = False,
) -> EvaluationPlan:
    """Plan the first of `models` against the second, or against itself; the rest as in `plan_evaluation`.

    Raises ConfigError.
    """
    if len(models) > 2:
        raise ConfigError(f"a game takes at most two models, got {len(models)}: {', '.join(models)}")
    if config is None and (run := find_run(models)) is not None:
        config = run_config(run, overrides, trusts_config)
    game = plan_evaluation(
        [_newest_of(models[0])],
        output=Path(),
        config=config,
        envs=[env] if env else (),
        opponents=[_newest_of(models[-1])],
        games=1,
        overrides=overrides,
    )
    return replace(game, cells=game.cells[:1])


def _newest_of(word: str) -> str:
    """Return the path of a run's newest checkpoint; any other word unchanged."""
    return str(find_models([word])[-1].path) if (Path(word) / "checkpoints").is_dir() else word


async def play(evaluation: EvaluationPlan, seat: int | None, console: Console) -> GameRecord:
    """Play the one game of `evaluation`, with its model at `seat`.

    Raises ConfigError before anything starts if the env has no such seat, and any error that breaks a game.
    """
    (cell,) = evaluation.cells
    if seat is not None and seat >= cell.env.num_players:
        raise ConfigError(f"--seat {seat}: {cell.env.env_id} has the seats 0 to {cell.env.num_players - 1}")
    say = partial(console.print, style="dim")
    with tempfile.TemporaryDirectory() as directory, cancelled_by_signals():
        logs = Path(directory)
        async with opened_env_pool(logs, evaluation.plan.config.run.env_timeout_s) as environments:
            return await with_engines(evaluation, logs, say, partial(_play, evaluation, seat, environments, console))


async def _play(
    evaluation: EvaluationPlan,
    seat: int | None,
    environments: EnvPool,
    console: Console,
    seats: PlayerFactory,
    slots: AdapterSlots,
) -> GameRecord:
    config, (cell,) = evaluation.plan.config, evaluation.cells
    await slots.hold(cell.adapters)
    # Draw a new game each time: this game is not part of any result, so it need not be reproducible.
    number = random.randrange(1 << 20) * cell.env.num_players
    number += random.randrange(cell.env.num_players) if seat is None else seat
    spec = game_spec(cell, number, config.run.seed, slots.ref)
    record, has_person = new_record(spec), cell.model.name == HUMAN
    names = {agent.pid: "you" if agent.model.name == HUMAN else agent.model.uid for agent in spec.agent_specs}
    players: dict[int, Player] = {
        pid: _Shown(player, f"player {pid}, {names[pid]}", console, shows_observation=not has_person)
        for pid, player in seats.players(spec).items()
    }
    environment = await environments.make(spec)
    await run_game(record, environment, players, config.run.max_action_chars)
    console.rule("the end")
    for pid, outcome in record.outcomes.items():
        remark = " by an invalid move" * (pid in record.invalid_pids)
        reason = record.game_info.get(pid, {}).get("reason", "")
        console.print(f"player {pid}, {names[pid]}: {outcome}{remark} ({record.reward_shown(pid):+g}) {reason}")
    return record
