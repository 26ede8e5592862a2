"""The random-legal player never breaks a rule and can play every legal action."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import textarena as ta

from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.players.scripted import LEGAL_ACTIONS, legal_actions, random_legal_action

GAMES = 200

VARIANTS = (
    "TicTacToe-v0", "ConnectFour-v0", "ConnectFour-v0-blind", "ConnectFour-v0-large", "SimpleTak-v0",
    "SimpleTak-v0-large", "Nim-v0", "Nim-v0-large", "KuhnPoker-v0", "KuhnPoker-v0-long", "LiarsDice-v0-small",
    "LiarsDice-v0", "LiarsDice-v0-large", "IteratedRockPaperScissors-v0", "PigDice-v0", "PigDice-v0-short",
)  # fmt: skip
LONG = ("SimpleTak-v0-large", "LiarsDice-v0", "LiarsDice-v0-large", "PigDice-v0")
"""Variants of which a quarter of the games is played."""


Look = Callable[[Any, list[str], str], None]
"""Callback with (game state, legal actions, chosen action) of every turn."""


def play(env_id: str, num_players: int, seed: int, look: Look) -> Any:
    """Play a random game and return the result of `env.close()`."""
    rng = random.Random(seed)
    outer = random.getstate()  # TextArena seeds and draws from the global stream
    try:
        env = ta.make(env_id)
        env.reset(num_players=num_players, seed=seed)
        env.state.error_allowance = 0
        for _ in range(2000):
            _, observation = env.get_observation()
            actions = legal_actions(env_id, observation)
            action = random_legal_action(env_id, observation, rng)
            assert action in actions
            look(env.state.game_state, actions, action)
            done, _ = env.step(action)
            if done:
                return env.close()
        raise AssertionError(f"{env_id}: game {seed} did not end")
    finally:
        random.setstate(outer)


def true_actions(family: str, state: Any) -> set[str] | None:
    """Return the legal set from the env's own state, or None if the env has none."""
    match family:
        case "TicTacToe" | "SimpleTak":
            cells = [cell for row in state["board"] for cell in row]
            return {f"[{index}]" for index, cell in enumerate(cells) if cell == ""}
        case "ConnectFour":
            return {f"[col {col}]" for col, cell in enumerate(state["board"][0]) if cell == "."}
        case "Nim":
            piles = enumerate(state["piles"])
            return {f"[{pile} {n + 1}]" for pile, size in piles for n in range(size)}
        case "KuhnPoker":
            return {f"[{name}]" for name in state["current_legal_action_tree"]}
        case "LiarsDice":
            bid, dice = state["current_bid"], sum(state["remaining_dice"].values())
            q_low, f_low = bid["quantity"], bid["face_value"]
            higher = {
                f"[Bid: {q}, {f}]"
                for q, f in itertools.product(range(1, dice + 1), range(1, 7))
                if q >= q_low and f >= f_low and (q, f) != (q_low, f_low)
            }
            return higher | ({"[Call]"} if state["last_bidder_id"] is not None else set())
    return None


@pytest.mark.parametrize("suffix", ["-train", ""])
@pytest.mark.parametrize("env_id", VARIANTS)
def test_no_random_game_ends_by_an_invalid_move(env_id, suffix):
    family = env_id.partition("-v0")[0]
    listed: set[str] = set()
    chosen: set[str] = set()

    def look(state: Any, actions: list[str], action: str) -> None:
        assert len(actions) == len(set(actions)) > 0
        truth = true_actions(family, state)
        assert truth is None or set(actions) == truth
        listed.update(actions)
        chosen.add(action)

    for seed in range(GAMES // 8 if not suffix else GAMES // 4 if env_id in LONG else GAMES):
        _, game_info = play(env_id + suffix, 4 if env_id == "LiarsDice-v0" else 2, seed, look)
        assert not any(info["invalid_move"] for info in game_info.values()), game_info
    if suffix and len(listed) <= 70:
        assert chosen == listed


def test_every_family_has_a_variant_under_test():
    assert {env_id.partition("-v0")[0] for env_id in VARIANTS} == set(LEGAL_ACTIONS)


def test_all_legal_actions_are_equally_likely():
    observation = "Current Pile:\n  pile 0: 0\n  pile 1: 2\n  pile 2: 2"
    rng = random.Random(0)
    drawn = [random_legal_action("Nim-v0-train", observation, rng) for _ in range(4000)]
    counts = {action: drawn.count(action) for action in ("[1 1]", "[1 2]", "[2 1]", "[2 2]")}
    assert sum(counts.values()) == 4000
    assert all(900 < count < 1100 for count in counts.values()), counts


def test_bid_of_all_dice_leaves_only_a_higher_face_or_the_call():
    observation = (
        "\nNew round - Remaining dice: \tPlayer 0: 1; \tPlayer 1: 2"
        "\nYour current Dice are: 3, 4\n Player 0 bids 3 of face 5."
    )
    assert legal_actions("LiarsDice-v0-small-train", observation) == ["[Call]", "[Bid: 3, 6]"]
    assert legal_actions("LiarsDice-v0", f"{observation}\n Player 1 bids 9 of face 6.") == ["[Call]"]


def test_unknown_env_is_named_with_the_supported_ones():
    with pytest.raises(UnsupportedEnvError, match=rf"Chess-v0-train.*{', '.join(LEGAL_ACTIONS)}"):
        legal_actions("Chess-v0-train", "a board")


@pytest.mark.parametrize("family", sorted(LEGAL_ACTIONS.keys() - {"IteratedRockPaperScissors"}))
def test_text_of_another_env_is_an_error_not_a_guess(family):
    with pytest.raises(EnvError):
        random_legal_action(f"{family}-v0-train", "Once upon a time", random.Random(0))
