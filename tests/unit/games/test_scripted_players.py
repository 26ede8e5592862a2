"""Scripted players keep the rules of TextArena, read every legal action, and play as their names say."""

import copy
import itertools
import random
import re
from collections.abc import Iterator
from functools import cache
from statistics import fmean
from typing import Any

import pytest
from textarena.envs.KuhnPoker.env import KuhnPokerEnv

from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.env_catalogue import describe_envs, remark_on
from unstable_lite.games.environments import Environment, kuhn_pays_bets
from unstable_lite.games.players import blind
from unstable_lite.games.players.blind import BlindPlayer, _Games, best_preferences
from unstable_lite.games.players.factory import SCRIPTED_PLAYERS
from unstable_lite.games.players.lookahead import (
    GREEDY_GAMES,
    OPTIMAL_ACTIONS,
    GreedyPlayer,
    OptimalPlayer,
    greedy_actions,
    is_optimal,
    optimal_actions,
)
from unstable_lite.games.players.scripted import (
    LEGAL_ACTIONS,
    RandomLegalPlayer,
    ScriptedPlayer,
    legal_actions,
    random_legal_action,
)

NIM = "Nim-v0-train"
GAMES = 200

VARIANTS = (
    "TicTacToe-v0", "ConnectFour-v0", "ConnectFour-v0-blind", "ConnectFour-v0-large", "SimpleTak-v0",
    "SimpleTak-v0-large", "Nim-v0", "Nim-v0-large", "KuhnPoker-v0", "KuhnPoker-v0-long", "LiarsDice-v0-small",
    "LiarsDice-v0", "LiarsDice-v0-large", "IteratedRockPaperScissors-v0", "PigDice-v0", "PigDice-v0-short",
)  # fmt: skip
LONG = ("SimpleTak-v0-large", "LiarsDice-v0", "LiarsDice-v0-large", "PigDice-v0")
"""Variants of which a quarter of the games is played."""


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
    family, num_players = env_id.partition("-v0")[0], 4 if env_id == "LiarsDice-v0" else 2
    listed, chosen = set[str](), set[str]()
    for seed in range(GAMES // 8 if not suffix else GAMES // 4 if env_id in LONG else GAMES):
        env, rng, is_over = Environment(env_id + suffix, num_players, seed), random.Random(seed), False
        while not is_over:
            _, observation = env.observe()
            actions = legal_actions(env_id, observation)
            truth = true_actions(family, env._unwrapped.state.game_state)
            assert len(actions) == len(set(actions)) > 0
            assert truth is None or set(actions) == truth
            action = random_legal_action(env_id, observation, rng)
            listed.update(actions)
            chosen.add(action)
            is_over = env.step(action)
            assert not env.was_invalid
    assert chosen <= listed
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


@pytest.mark.parametrize(
    ("player", "families", "other"),
    [
        (RandomLegalPlayer, LEGAL_ACTIONS, "Chess-v0-train"),
        (GreedyPlayer, GREEDY_GAMES, "Nim-v0-train"),
        (OptimalPlayer, OPTIMAL_ACTIONS, "SimpleTak-v0-train"),
    ],
)
def test_other_envs_are_refused_with_the_supported_ones_and_text_of_another_env_is_not_guessed(player, families, other):
    with pytest.raises(UnsupportedEnvError, match=f"{other}.*{', '.join(families)}"):
        player(other, 0).action("a board")
    for family in families:
        if family != "IteratedRockPaperScissors":  # its actions are the same for every text
            with pytest.raises(EnvError):
                player(f"{family}-v0-train", 0).action("Once upon a time")


# greedy and optimal play


CHECKED = {
    "TicTacToe-v0-train": 15,
    "TicTacToe-v0": 5,
    "ConnectFour-v0-train": 6,
    "ConnectFour-v0": 3,
    "ConnectFour-v0-blind-train": 5,
    "ConnectFour-v0-large-train": 1,
    "SimpleTak-v0-train": 10,
    "SimpleTak-v0": 3,
    "SimpleTak-v0-large-train": 1,
}
"""Number of games by env id in which every position is checked."""


def winning_actions(env: Environment, mover: int, actions: list[str]) -> list[str]:
    """Return the actions that win for `mover`, tried in copies of the game under the env's own rules."""
    winning = []
    for action in actions:
        trial: Any = copy.deepcopy(env._unwrapped)
        trial.state.current_player_id = mover
        done, _ = trial.step(action)
        if done and trial.state.rewards is not None and trial.state.rewards[mover] == 1:
            winning.append(action)
    return winning


@pytest.mark.parametrize("env_id", CHECKED)
def test_greedy_takes_every_win_or_else_every_block(env_id):
    rng, seen = random.Random(1), {"win": 0, "block": 0, "neither": 0}
    for seed in range(CHECKED[env_id]):
        env = Environment(env_id, 2, seed)
        while True:
            pid, observation = env.observe()
            actions = legal_actions(env_id, observation)
            wins, blocks = winning_actions(env, pid, actions), winning_actions(env, 1 - pid, actions)
            assert greedy_actions(env_id, observation) == (wins or blocks or actions), observation
            assert GreedyPlayer(env_id, seed).action(observation) in (wins or blocks or actions)
            seen["win" if wins else "block" if blocks else "neither"] += 1
            if env.step(rng.choice(actions)):
                break
    assert min(seen.values()) > 0, seen


def nim(*piles: int) -> str:
    return "Current Pile:\n" + "".join(f"  pile {pile}: {size}\n" for pile, size in enumerate(piles))


@pytest.mark.parametrize(
    ("env_id", "observation", "action", "expected"),
    [
        ("Nim-v0-train", nim(3, 4, 5), "[0 2]", True),
        ("Nim-v0-train", nim(3, 4, 5), " [0 2] ", True),
        ("Nim-v0-train", nim(3, 4, 5), "I take [ 00  2 ].", True),
        ("Nim-v0-train", nim(3, 4, 5), "[9 9] or [0 2]", False),
        ("KuhnPoker-v0-train", "Your card is: 'K'\n\nYour available actions are: '[check]', '[bet]'", "[Bet]", True),
        ("Nim-v0-train", nim(3, 4, 5), "[0 1]", False),
        ("Nim-v0-train", nim(3, 4, 5), "[9 9]", False),
        ("Nim-v0-train", nim(3, 4, 5), "I resign", False),
        ("Nim-v0-train", nim(1, 1, 0), "[0 1]", None),  # every move loses
        ("Nim-v0-train", nim(1, 0, 0), "[0 1]", None),  # the only move
        ("Nim-v0-train", "another game with this name", "[0 1]", None),
        ("ConnectFour-v0-train", "no solver", "[col 3]", None),
    ],
)
def test_move_is_judged_only_if_some_legal_move_is_worse(env_id, observation, action, expected):
    assert is_optimal(env_id, observation, action) is expected


def drawn(board: str) -> str:
    rows = [
        " | ".join(mark if mark != " " else str(3 * r + c) for c, mark in enumerate(board[3 * r : 3 * r + 3]))
        for r in range(3)
    ]
    return "Current Board:\n\n" + "\n---+---+---\n".join(rows) + "\n\nAvailable Moves: some"


def has_line(board: str) -> bool:
    lines = [board[0:3], board[3:6], board[6:9], board[0::3], board[1::3], board[2::3], board[0::4], board[2:7:2]]
    return "OOO" in lines or "XXX" in lines


@pytest.mark.parametrize("is_first", [True, False])
def test_no_line_of_play_beats_optimal_tictactoe(is_first):
    @cache
    def worst(board: str, is_its_turn: bool) -> int:
        """Return the worst result for it of all continuations: 1 it wins, 0 a draw, -1 it loses."""
        if has_line(board):
            return -1 if is_its_turn else 1
        if " " not in board:
            return 0
        mark = "O" if board.count("O") == board.count("X") else "X"
        cells = [index for index in range(9) if board[index] == " "]
        if is_its_turn:
            cells = [int(action[1]) for action in optimal_actions("TicTacToe-v0-train", drawn(board))]
        return min(worst(board[:cell] + mark + board[cell + 1 :], not is_its_turn) for cell in cells)

    assert worst(" " * 9, is_first) == 0


def test_tictactoe_and_nim_take_a_win_or_leave_a_lost_position():
    assert optimal_actions("TicTacToe-v0", drawn("OO XX    ")) == ["[2]"]
    assert optimal_actions("TicTacToe-v0", drawn("OO XX   O")) == ["[5]"]
    for piles in itertools.product(range(6), repeat=3):
        if not any(piles):
            continue
        actions = optimal_actions("Nim-v0", nim(*piles))
        assert actions
        for action in actions:
            pile, taken = map(int, action.strip("[]").split())
            left = [*piles[:pile], piles[pile] - taken, *piles[pile + 1 :]]
            assert 0 < taken <= piles[pile]
            # Bouton: the player to move wins unless the sizes add up to 0 without carrying.
            assert (piles[0] ^ piles[1] ^ piles[2] != 0) == (left[0] ^ left[1] ^ left[2] == 0)


def test_optimal_kuhn_poker_never_folds_because_a_call_costs_nothing():
    """A hand is worth one point, however it was bet (see test_openspiel_games.py): only a fold loses a better card."""
    seen = "Your card is: '{}'\n\nYour available actions are: {}"
    for card in "JQK":
        assert optimal_actions("KuhnPoker-v0-train", seen.format(card, "'[fold]', '[call]'")) == ["[call]"]
        assert optimal_actions("KuhnPoker-v0-train", seen.format(card, "'[check]', '[bet]'"))


@pytest.fixture
def seen_again() -> Iterator[None]:
    """Forget before and after the test whether Kuhn poker pays bets."""
    kuhn_pays_bets.cache_clear()
    yield
    kuhn_pays_bets.cache_clear()


@pytest.fixture
def paid_bets(monkeypatch, seen_again) -> None:
    """Let bets and calls move a chip into the pot, as in Kuhn's game and in TextArena's pull request 189."""
    make_unpaid = KuhnPokerEnv.step

    def step(self, action):
        if re.search(r"\[(bet|call)\]", action):
            self.state.game_state["player_chips"][self.state.current_player_id] -= 1
            self.state.game_state["pot"] += 1
        return make_unpaid(self, action)

    monkeypatch.setattr(KuhnPokerEnv, "step", step)


@pytest.mark.parametrize("is_playable", [True, False])
def test_kuhn_poker_is_remarked_because_it_pays_no_bets_or_cannot_be_played(is_playable, monkeypatch, seen_again):
    if not is_playable:
        monkeypatch.setattr(KuhnPokerEnv, "step", None)
    assert not kuhn_pays_bets()
    assert "its bets move no chips" in remark_on("KuhnPoker")


def test_kuhn_poker_that_pays_bets_has_no_remark_and_no_optimal_player(paid_bets):
    seen = "Your card is: 'J'\n\nYour available actions are: '[fold]', '[call]'"
    assert kuhn_pays_bets()
    assert remark_on("KuhnPoker") == ""
    assert {env_id: remark for env_id, _, remark in describe_envs()}["KuhnPoker-v0-train"] == ""
    assert is_optimal("KuhnPoker-v0-train", seen, "[call]") is None
    with pytest.raises(UnsupportedEnvError, match="bets cost chips in this version of TextArena: use openspiel:kuhn"):
        OptimalPlayer("KuhnPoker-v0-train", 0).action(seen)
    assert optimal_actions("Nim-v0", nim(3, 4, 5))


def test_same_seed_makes_the_same_moves_and_uses_all_best_actions():
    empty, before = drawn(" " * 9), random.getstate()
    draws = [[player.action(empty) for _ in range(60)] for player in (OptimalPlayer("TicTacToe-v0", 5) for _ in "ab")]
    assert draws[0] == draws[1]
    assert set(draws[0]) == {f"[{cell}]" for cell in range(9)}
    assert random.getstate() == before


# play without a look at the board


def points(env_id: str, player: type[ScriptedPlayer], opponent: type[ScriptedPlayer], games: int) -> float:
    earned = []
    for game in range(games):
        env, seat = Environment(env_id, 2, game), game % 2
        players = {seat: player(env_id, game), 1 - seat: opponent(env_id, 10_000 + game)}
        while True:
            pid, observation = env.observe()
            if env.step(players[pid].action(observation)):
                break
        rewards, _ = env.close()
        earned.append((rewards[seat] > rewards[1 - seat]) + (rewards[seat] == rewards[1 - seat]) / 2)
    return fmean(earned)


@pytest.mark.nightly
def test_blind_play_of_nim_is_between_random_and_perfect():
    assert 0.63 < points(NIM, SCRIPTED_PLAYERS["scripted:blind-random"], RandomLegalPlayer, 200) < 0.76
    assert points(NIM, OptimalPlayer, RandomLegalPlayer, 40) > 0.97


def test_searched_points_match_play_and_no_single_move_improves_them():
    games = _Games(NIM, RandomLegalPlayer, 1)
    best = best_preferences(NIM, RandomLegalPlayer, 1)
    assert sorted(best) == games.legal_actions() and len(best) == 12
    exact = games.exact_points(best)
    assert games.sampled_points(best) == pytest.approx(exact, abs=0.16), "mean of 100 games"
    one_moved = [
        [*rest[:place], action, *rest[place:]]
        for action in best
        for rest in [[other for other in best if other != action]]
        for place in range(len(best))
    ]
    assert max(map(games.exact_points, one_moved)) <= exact + 0.01
    shuffled = [random.Random(k).sample(best, len(best)) for k in range(200)]
    assert max(map(games.exact_points, shuffled)) < exact


def test_game_without_a_board_is_searched_by_sampled_play(monkeypatch):
    monkeypatch.setattr(blind, "SAMPLED_CLIMBS", 1)
    best = best_preferences.__wrapped__("KuhnPoker-v0-short-train", RandomLegalPlayer, 1)
    assert sorted(best) == ["[bet]", "[call]", "[check]", "[fold]"]
    assert best.index("[call]") < best.index("[fold]")
    assert best.index("[bet]") < best.index("[check]")


def test_same_seed_finds_same_list_and_another_opponent_another(monkeypatch):
    monkeypatch.setattr(blind, "EXACT_CLIMBS", 5)
    search = best_preferences.__wrapped__
    found = search(NIM, RandomLegalPlayer, 0)
    assert found == search(NIM, RandomLegalPlayer, 0) != search(NIM, OptimalPlayer, 0)


@pytest.mark.parametrize("family", LEGAL_ACTIONS)
def test_every_family_names_the_seat_of_the_player_first(family):
    env, rng = Environment(f"{family}-v0-train", 2, 1), random.Random(0)
    for _ in range(6):
        pid, observation = env.observe()
        assert BlindPlayer(env.env_id, 0)._seat(observation) == pid
        if env.step(rng.choice(legal_actions(env.env_id, observation))):
            break


def test_blind_player_refuses_another_env_and_text_without_its_seat():
    with pytest.raises(UnsupportedEnvError):
        BlindPlayer("Chopsticks-v0-train", 0).action("Player 0")
    with pytest.raises(EnvError, match="Player N"):
        BlindPlayer(NIM, 0).action("Current Pile:\n  pile 0: 3")
