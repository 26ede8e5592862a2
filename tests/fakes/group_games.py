"""Groups of games between the policy and random play, and games of a model behind an endpoint."""

from collections.abc import Mapping
from typing import Any

from fakes.game_records import make_spec
from unstable_lite.config import Config
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.wiring import make_scheduler
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameRecord, GameSpec, ModelRef

KUHN = "openspiel:kuhn_poker"


def group_config(group_size: int, env: dict[str, Any], rewards: dict[str, Any], **sections: Any) -> Config:
    env = {"env_id": KUHN, "num_players": 2, "num_actors": 1, "prompt_template": "tiny"} | env
    league = {"opponent_sampling_strategy": "fixed", "fixed_opponents": ["scripted:random"]}
    raw = {"run": {"group_size": group_size}, "buffer": {"buffer_size": 10**6}, "league": league, "train_envs": [env]}
    rewards = {"step_reward_transformation": []} | rewards
    return resolve_defaults(Config.model_validate(raw | {"rewards": rewards} | sections))


def scheduler_of(of: Config) -> GameScheduler:
    """Return a scheduler whose policy is a checkpoint."""
    scheduler = make_scheduler(of)
    scheduler.registry.add_policy("ckpt-1", 1, 1)
    return scheduler


async def played(spec: GameSpec, factory: PlayerFactory) -> GameRecord:
    record = new_record(spec)
    await run_game(record, make_in_process(spec), factory.players(spec))
    return record


# games of a model behind an OpenAI-compatible endpoint against random play


async def endpoint_games(
    config: OpponentsConfig, model: str, prompt_template: str, num_games: int
) -> tuple[list[GameRecord], Mapping[str, float]]:
    """Play TicTacToe with the model in seat 0; return the games, all of them ended by the game, and the metrics."""

    async def no_engine(*_: object) -> None:
        raise AssertionError

    models = [ModelRef(uid=f"fixed-{name}", kind="fixed", name=name) for name in (model, "scripted:random")]
    env, records = {"env_id": "TicTacToe-v0-train", "prompt_template": prompt_template, "kind": "eval"}, []
    async with PlayerFactory(no_engine, opponents=config) as seats:  # type: ignore[arg-type]
        for seed in range(num_games):
            record = new_record(make_spec(*models, game_idx=seed, seed=seed, **env))
            await run_game(record, make_in_process(record.spec), seats.players(record.spec))
            assert record.end in ("natural", "invalid")
            records.append(record)
        return records, seats.metrics()
