"""Play with engines and without a learner: the games of an evaluation, or one game that a person watches or plays in.

The games of an evaluation are stored. Every turn of the one game is shown when it is made, and nothing is stored.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from unstable_lite.adapters.peft_files import adapter_digest
from unstable_lite.config.games import parse_player
from unstable_lite.dashboards.terminal import print_lines
from unstable_lite.engines.client import EnginePool
from unstable_lite.errors import AdapterError, ConfigError, RequestError, UnstableError
from unstable_lite.evaluation.ladder import Place, RatedGame, rate, write_places
from unstable_lite.evaluation.models import EvaluatedModel, find_models, find_run
from unstable_lite.evaluation.plan import Cell, EvaluationPlan, game_spec, in_rounds, plan_evaluation
from unstable_lite.evaluation.results import CellEvaluation, Results, write_tables
from unstable_lite.games.env_pool import opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.human import news
from unstable_lite.games.players.policy import Player, thinking_budget
from unstable_lite.games.run_prompts import recorded_prompts
from unstable_lite.games.templates import templates_for
from unstable_lite.orchestrator.event_loop import cancelled_by_signals, log_file
from unstable_lite.orchestrator.workers import started_engines, while_alive
from unstable_lite.planning.plan import Plan
from unstable_lite.planning.trust import run_config
from unstable_lite.rollout.collector import play_all
from unstable_lite.rollout.run_game import GameRunner, new_record, run_game
from unstable_lite.types import BASE, GameRecord, ModelRef, Reply

T = TypeVar("T")

UNLOAD_ATTEMPTS = 60
"""Attempts, one a second, to unload an adapter whose requests have not ended."""
HUMAN = "unstable_lite.games.players.human:HumanPlayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Results of an evaluation."""

    evaluations: tuple[CellEvaluation, ...]
    """Results of the cells of this call."""
    places: tuple[Place, ...]
    """Ratings of `--ladder`."""
    played: int
    """Number of games that this call played; the others existed already."""


async def evaluate(evaluation: EvaluationPlan, output: Path, games: int, say: Callable[[str], None]) -> Evaluated:
    """Play the missing ones of `games` games of each cell, and write every table into the directory `output`.

    Raises AdapterError for an adapter that does not fit or does not seem to be in use, EnvError for an env that keeps
    failing, and WorkerDied. Finished games are kept.
    """
    results = Results(output, evaluation.settings)
    try:
        todo = {cell.key: results.missing(cell, games) for cell in evaluation.cells}
        num_missing = sum(map(len, todo.values()))
        there = games * len(evaluation.cells) - num_missing
        say(f"{len(evaluation.cells)} cells of {games} games; {there} games exist, {num_missing} to play")
        if num_missing:
            (logs := output / "logs").mkdir(exist_ok=True)
            with log_file(logs / "evaluation.log"), cancelled_by_signals():
                await _play_all(evaluation, todo, results, logs, say, is_restart=there > 0)
        evaluations = write_tables(results, evaluation.cells, games)
        places: list[Place] = []
        if evaluation.is_ladder:
            rated = [
                RatedGame(cell.env.env_id, cell.model.name, cell.opponent.name, row["outcome"])
                for cell in evaluation.cells
                for row in results.rows(cell, games)
                if row["end"] != "void"
            ]
            places = rate(rated)
        if places:
            write_places(output, places)
    except OSError as error:
        raise UnstableError(f"{output}: {error.strerror}; finished games are in results.jsonl") from error
    finally:
        results.close()
    return Evaluated(evaluations=tuple(evaluations), places=tuple(places), played=num_missing)


class LoadedAdapters:
    """Adapters of an evaluation that the engines hold. An adapter that returns gets a new id.

    A wrong adapter must be an error, and must never silently be the base. A run's canary compares engine and learner;
    without a learner there is the identity: every engine reports the digest of the files that it read, and every answer
    names its adapter.
    """

    def __init__(self, engines: EnginePool) -> None:
        self._engines = engines
        self._ids = {BASE: 0}
        """Ids of the loaded adapters by the model's key."""
        self._last_id = 0

    def ref(self, model: EvaluatedModel) -> ModelRef:
        if model.is_fixed:
            return ModelRef(uid=f"fixed-{model.name}", kind="fixed", name=model.name)
        return ModelRef(uid=model.name, kind="checkpoint", adapter_version=self._ids[model.key])

    async def hold(self, models: Mapping[str, EvaluatedModel]) -> None:
        """Load these adapters, given by key; unload the others.

        Raises AdapterError if an engine cannot load an adapter or read other files, and if requests use one that is no
        longer needed for a minute.
        """
        for key in [key for key in self._ids if key != BASE and key not in models]:
            await self._unload(self._ids.pop(key))
        for key, model in models.items():
            if key not in self._ids:
                self._last_id += 1
                await self._load(self._last_id, model)
                self._ids[key] = self._last_id

    async def _load(self, id: int, model: EvaluatedModel) -> None:
        path = model.path
        assert path is not None
        expected, shown = adapter_digest(path), f"{model.name} ({path})"
        try:
            digests = await self._engines.each(lambda engine: engine.load_adapter(id, path))
        except RequestError as error:
            raise AdapterError(f"{shown}: {error}") from error
        if wrong := {*digests} - {None, expected}:
            raise AdapterError(
                f"an engine holds another adapter than {shown}: the digest of the files that it read is {wrong.pop()}, "
                f"expected is {expected}"
            )

    async def _unload(self, id: int) -> None:
        for attempt in range(UNLOAD_ATTEMPTS):
            try:
                await self._engines.unload_adapter(id)
                return
            except RequestError as error:
                # An abandoned game may still have a request in an engine.
                if attempt + 1 == UNLOAD_ATTEMPTS:
                    raise AdapterError(f"adapter {id} cannot be unloaded: {error}") from error
            await asyncio.sleep(1)


async def with_engines(
    plan: Plan,
    run: Path | None,
    logs: Path,
    say: Callable[[str], None],
    work: Callable[[PlayerFactory, LoadedAdapters], Awaitable[T]],
    is_restart: bool = False,
) -> T:
    """Return the result of `work` while the engines are alive; without engines, only other players can play.

    run: directory of the run that prompts are as in. is_restart: whether an earlier call played some of the games.
    Raises WorkerDied, and the errors of `work`.
    """
    config = plan.config
    async with started_engines(plan, logs, say, is_restart) as workers:
        templates = templates_for(config, recorded_prompts(config, workers.prompts, run)) if plan.engine_devices else {}
        thinking = thinking_budget(config.engine, workers.info)
        generate = workers.engines.generate
        async with PlayerFactory(generate, templates, config.opponents, say, thinking=thinking) as seats:
            return await while_alive(workers.processes, work(seats, LoadedAdapters(workers.engines)))


async def _play_all(
    evaluation: EvaluationPlan,
    todo: dict[str, list[int]],
    results: Results,
    logs: Path,
    say: Callable[[str], None],
    is_restart: bool,
) -> None:
    config, slots = evaluation.plan.config.run, evaluation.plan.config.engine.max_loras

    async def play_rounds(seats: PlayerFactory, adapters: LoadedAdapters) -> None:
        runner = GameRunner(seats, config, environments)

        async def play(game: tuple[Cell, int]) -> None:
            cell, number = game
            results.add(cell, await runner.play(game_spec(cell, number, config.seed, adapters.ref)))

        for round_ in in_rounds((cell for cell in evaluation.cells if todo[cell.key]), slots):
            await adapters.hold({key: model for cell in round_ for key, model in cell.adapters.items()})
            names = [f"{cell.title} in {cell.env.env_id}" for cell in round_]
            say(f"playing {', '.join(names[:3])}" + f" and {len(names) - 3} more" * (len(names) > 3))
            games = ((cell, number) for cell in round_ for number in todo[cell.key])
            await play_all(games, play, config.num_collection_workers)

    async with opened_env_pool(logs, config.env_timeout_s) as environments:
        await with_engines(evaluation.plan, evaluation.run, logs, say, play_rounds, is_restart)


class _Shown:
    """Player whose answers are shown, and the news of its observations too if no person plays at the terminal."""

    def __init__(self, player: Player, name: str, console: Console, shows_observation: bool) -> None:
        self._player = player
        self._name = name
        self._console = console
        self._shows_observation = shows_observation
        self._seen = ""

    async def act(self, observation: str) -> Reply:
        if self._shows_observation:
            self._console.rule(self._name)
            self._console.print(news(self._seen, observation), style="dim")
            self._seen = observation
        reply = await self._player.act(observation)
        self._console.print(f"{self._name}: ", end="", style="bold")
        self._console.print(reply.text.strip() or "(nothing)", end="")
        self._console.print(f"  →  {reply.action}" if reply.action != reply.text else "", style="bold")
        return reply


def plan_game(
    models: Sequence[str], config: Path | None, env: str | None, overrides: Sequence[str], trusts_config: bool = False
) -> EvaluationPlan:
    """Plan the first of `models` against the second, or against itself; the rest as in `plan_evaluation`."""
    if len(models) > 2:
        raise ConfigError(f"a game takes at most two models, got {len(models)}: {', '.join(models)}")
    if config is None and (run := find_run(models)) is not None:
        config = run_config(run, overrides, trusts_config)
    ours, theirs = _newest_of(models[0]), _newest_of(models[-1])
    game = plan_evaluation([ours], config=config, envs=[env] if env else (), opponents=[theirs], overrides=overrides)
    return replace(game, cells=game.cells[:1])


def _newest_of(word: str) -> str:
    """Return the path of a run's newest or named checkpoint, which has a short name; any other word unchanged."""
    is_run = parse_player(word).kind == "run" or (Path(word) / "checkpoints").is_dir()
    return str(find_models([f"run:{word}/newest" if Path(word).is_dir() else word])[-1].path) if is_run else word


async def play(evaluation: EvaluationPlan, seat: int | None, console: Console) -> GameRecord:
    """Play the one game of `evaluation`, with its model at `seat`.

    Raises ConfigError before anything starts if the env has no such seat, and any error that breaks a game.
    """
    (cell,) = evaluation.cells
    if seat is not None and seat >= cell.env.num_players:
        raise ConfigError(f"--seat {seat}: {cell.env.env_id} has the seats 0 to {cell.env.num_players - 1}")
    config = evaluation.plan.config.run
    # Draw a new game each time: this game is not part of any result, so it need not be reproducible.
    number = random.randrange(1 << 20) * cell.env.num_players
    number += random.randrange(cell.env.num_players) if seat is None else seat
    has_person = cell.model.name == HUMAN

    async def play_one(seats: PlayerFactory, adapters: LoadedAdapters) -> GameRecord:
        await adapters.hold(cell.adapters)
        spec = game_spec(cell, number, config.seed, adapters.ref)
        names = {agent.pid: "you" if agent.model.name == HUMAN else agent.model.uid for agent in spec.agent_specs}
        players: dict[int, Player] = {
            pid: _Shown(player, f"player {pid}, {names[pid]}", console, shows_observation=not has_person)
            for pid, player in seats.players(spec).items()
        }
        record = new_record(spec)
        await run_game(record, await environments.make(spec), players)
        _show_end(record, names, console)
        return record

    def say(text: str) -> None:
        """Print a warning; other lines are about engines."""
        if text.startswith("warning"):
            print_lines(console, text)

    with tempfile.TemporaryDirectory() as logs, cancelled_by_signals():
        async with opened_env_pool(Path(logs), config.env_timeout_s) as environments:
            console.print("loading …", style="dim")
            return await with_engines(evaluation.plan, evaluation.run, Path(logs), say, play_one)


def _show_end(record: GameRecord, names: Mapping[int, str], console: Console) -> None:
    console.rule("the end")
    for reason in dict.fromkeys(str(info["reason"]) for info in record.game_info.values() if info.get("reason")):
        console.print(reason)
    for pid, outcome in record.outcomes.items():
        remark = " by an invalid move" * (pid in record.invalid_pids)
        console.print(f"player {pid}, {names[pid]}: {outcome}{remark} ({record.reward_shown(pid):+g})")
