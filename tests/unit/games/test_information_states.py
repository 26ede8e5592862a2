"""Prompts of OpenSpiel's games: a seat is shown what it saw and did, and nothing else."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pytest

from unstable_lite.config import Config
from unstable_lite.config.env_ids import PREFIX
from unstable_lite.errors import ConfigError
from unstable_lite.games.env_catalogue import describe_envs
from unstable_lite.games.openspiel.game import (
    INFORMATION_FAULTS,
    OpenSpielGame,
    information_fault,
    load_game,
    pyspiel,
    why_unplayable,
)
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.games.openspiel.prompts import action_names, prompt
from unstable_lite.planning.envs import describe_envs as plan_rows

VARIANTS = [
    "dark_hex(num_rows=2,num_cols=2)",
    "dark_hex(num_rows=2,num_cols=2,obstype=reveal-numturns)",
    "dark_hex(num_rows=2,num_cols=2,gameversion=adh)",
    "goofspiel(imp_info=True,num_cards=4)",
    "kuhn_poker(players=3)",
    "phantom_ttt(obstype=reveal-numturns)",
]
SLOW = ("battleship", "bridge", "colored_trails")
RARE = {"go_fish": 2000, "liars_dice_ir": 2000}
"""Number of playouts after which a fault is found that few games show."""
PUBLIC = {
    "kriegspiel": "the umpire announces failed attempts to both players, and an observation has only the last message",
    "universal_poker": "an observation lacks the public cards",
}
"""Games whose prompts show more than their observations, as their rules say; each was compared by hand."""


def hidden_games() -> list[str]:
    kinds = [kind for kind in pyspiel().registered_games() if why_unplayable(kind) is None]
    is_hidden = [
        kind.information.name != "PERFECT_INFORMATION" or kind.dynamics.name == "SIMULTANEOUS" for kind in kinds
    ]
    return [*(kind.short_name for kind, hidden in zip(kinds, is_hidden, strict=True) if hidden), *VARIANTS]


def faults_of(name: str, playouts: int, most_moves: int = 30) -> set[str]:
    """Return "forgets" if one prompt stands for different own actions, "leaks" if one history has several prompts.

    A game of perfect information, whose moves are simultaneous, may forget how its board came about.
    """
    rng, num_players = random.Random(name), load_game(PREFIX + name).num_players()
    kind = load_game(PREFIX + name).get_type()
    shows_board, has_observations = kind.information.name == "PERFECT_INFORMATION", kind.provides_observation_string
    acted, shown = defaultdict[Any, set[Any]](set), defaultdict[Any, set[str]](set)
    for seed in range(playouts):
        game = OpenSpielGame(PREFIX + name, num_players, seed)
        own, seen = ([[] for _ in range(num_players)] for _ in range(2))
        for _ in range(most_moves):
            state, pid = game.position
            if has_observations:
                for player, history in enumerate(seen):
                    if not history or history[-1] != state.observation_string(player):
                        history.append(state.observation_string(player))
            text, action = prompt(state, pid), rng.choice(list(action_names(state, pid)))
            acted[pid, text].add(tuple(own[pid]))
            shown[pid, tuple(seen[pid])].add(text)
            own[pid].append(action)
            seen[pid].append(action)
            if game.step(f"[{action}]"):
                break
    forgets = not shows_board and any(len(histories) > 1 for histories in acted.values())
    leaks = has_observations and any(len(texts) > 1 for texts in shown.values())
    return {fault for fault, is_found in (("forgets", forgets), ("leaks", leaks)) if is_found}


@pytest.mark.parametrize("playouts", [60, pytest.param(800, marks=pytest.mark.nightly)])
def test_prompts_hold_what_their_seat_saw_and_did(playouts: int) -> None:
    found = {name: faults_of(name, playouts // 10 if name in SLOW else playouts) for name in hidden_games()}
    faulty = {name for name, faults in found.items() if faults - ({"leaks"} if name in PUBLIC else set())}
    known = {name for name in found if information_fault(PREFIX + name) is not None}
    assert known - set(RARE) <= faulty <= known


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) for name in RARE])
def test_rare_fault_of_a_prompt_is_still_there(name: str) -> None:
    assert faults_of(name, RARE[name]) == {"forgets"}


def test_game_with_a_faulty_prompt_is_remarked_and_has_no_exact_value() -> None:
    env_id = "openspiel:dark_hex(num_rows=2,num_cols=2)"
    remarks = {name: remark for name, _, remark in describe_envs()}
    assert all(text in remarks[PREFIX + name] for name, text in INFORMATION_FAULTS.items())
    env = {"env_id": env_id, "num_players": 2, "num_actors": 2}
    name, text = next(iter(plan_rows(Config.model_validate({"train_envs": [env]}))))
    assert name == "warning" and "dark_hex" in text and "failed attempts" in text
    with pytest.raises(ConfigError, match="failed attempts"):
        flatten(env_id, is_forced=True)
    flatten("openspiel:dark_hex(num_rows=2,num_cols=2,gameversion=adh)")
