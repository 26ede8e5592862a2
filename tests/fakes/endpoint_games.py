"""Games of a model behind an OpenAI-compatible endpoint against random play."""

from __future__ import annotations

from collections.abc import Mapping

from fakes.game_records import make_spec
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameRecord, ModelRef


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
            await run_game(record, make_in_process(record.spec), seats.players(record.spec), max_action_chars=100)
            assert record.end in ("natural", "invalid")
            records.append(record)
        return records, seats.metrics()
