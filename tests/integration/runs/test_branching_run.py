"""A run whose groups start within earlier games, with isolated envs."""

import json
from collections import defaultdict
from pathlib import Path

from fakes import runs

OPTIONS = (
    *runs.PLAYS_NIM,
    "algorithm=rloo",
    "run.learning_steps=12",
    "run.num_eval_workers=0",
    "run.group_size=3",
    "run.eval_games=0",
    'league.env_sampling_strategy={ "examples.branching:Branching" = { share = 0.8, chance = "fresh" } }',
)


def test_groups_of_isolated_games_start_within_earlier_games(tmp_path: Path) -> None:
    config = runs.write_small(tmp_path)
    config.write_text(config.read_text().replace("num_actors = ", "isolated = true\nnum_actors = "))
    runs.output_of(runs.run_torchless("run", config, *OPTIONS))
    directory = runs.run_directory(tmp_path)
    games = [json.loads(line) for line in (directory / "games.jsonl").read_text().splitlines()]
    branched = [game for game in games if "branch_turn" in game]
    assert len(branched) > 10
    assert not [game["error"] for game in games if game["error"]]
    states = defaultdict(set)
    for game in branched:
        number = game["branch_turn"]
        trained = [agent["pid"] for agent in game["agents"] if agent["collect_data"]]
        assert game["turns"][number][0] in trained
        actions = tuple(turn[3] for turn in game["turns"][:number])
        states[game["seed"], actions].add(game["turns"][number][1])
    assert all(len(observations) == 1 for observations in states.values())
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("run/branched_games", 0) for line in metrics) > 0
