"""Groups of games between the policy and random play, without a collector."""

from __future__ import annotations

from typing import Any

from unstable_lite.config import Config
from unstable_lite.games.env_start import start_environment
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import GameScheduler
from unstable_lite.orchestrator.wiring import make_scheduler
from unstable_lite.planning.defaults import resolve_defaults
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameRecord, GameSpec

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
    environment = start_environment(spec.env_id, 2, spec.seed, reward_scale=spec.reward_scale)
    await run_game(record, environment, factory.players(spec), 100)
    return record
