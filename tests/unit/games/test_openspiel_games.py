"""Games of OpenSpiel run like TextArena's, and their scripted players are strong, repeatable and blind to secrets."""

import random
import sys
from collections import Counter

import numpy as np
import pytest

from unstable_lite.errors import ConfigError
from unstable_lite.games.env_catalogue import describe_envs, probe
from unstable_lite.games.environments import source_text
from unstable_lite.games.openspiel.game import OpenSpielGame, load_game
from unstable_lite.games.openspiel.game_tree import flatten
from unstable_lite.games.openspiel.players import solved
from unstable_lite.games.players.factory import _player_class
from unstable_lite.games.players.scripted import ScriptedPlayer, random_legal_action
from unstable_lite.types import UTILITY

KUHN, LEDUC, LIARS_DICE = "openspiel:kuhn_poker", "openspiel:leduc_poker", "openspiel:liars_dice(dice_sides=3)"
NIM = "openspiel:nim(is_misere=False,pile_sizes=3;4;5)"
GOOFSPIEL = "openspiel:goofspiel(imp_info=True,num_cards=4,points_order=descending)"


def cards(env_id: str, seed: int, actions: random.Random) -> set[str]:
    """Play a game and return each line about a card that a seat saw."""
    game, seen = OpenSpielGame(env_id, 2, seed), set[str]()
    turn: tuple[int, str] | None = game.observe()
    while turn is not None:
        pid, observation = turn
        seen |= {f"{pid} {line}" for line in observation.splitlines() if " card: " in line}
        turn = game.play(random_legal_action(env_id, observation, actions))
    return seen


def test_chance_follows_from_the_seed_for_all_actions_and_not_from_the_global_stream():
    for seed in range(20):
        dealt = [cards(LEDUC, seed, random.Random(player)) for player in range(10)]
        longest = max(dealt, key=len)
        assert all(seen <= longest for seen in dealt), "no game saw a card that another one did not have"
    assert len({frozenset(cards(LEDUC, seed, random.Random(0))) for seed in range(30)}) > 10
    random.seed(1)
    before, first = random.getstate(), cards(LEDUC, 7, random.Random(0))
    assert random.getstate() == before
    random.seed(2)
    assert cards(LEDUC, 7, random.Random(0)) == first


def test_deals_are_uniform():
    counts = Counter(tuple(OpenSpielGame(KUHN, 2, seed).position[0].history()) for seed in range(3000))
    assert len(counts) == 6
    assert all(400 < count < 600 for count in counts.values())


def test_rewards_are_utilities_times_the_scale():
    for scale, expected in ((None, 1.0), (0.25, 0.5), (3.0, 6.0)):
        game = OpenSpielGame(KUHN, 2, 0, scale)
        assert game.play("[bet]") is not None
        assert game.play("[call]") is None
        rewards, remarks = game.close()
        assert sorted(rewards.values()) == [-expected, expected]
        assert sorted(remark[UTILITY] for remark in remarks.values()) == [-2.0, 2.0], "no less than a forfeit"


@pytest.mark.parametrize(
    ("env_id", "num_players", "legal", "utilities"),
    [
        (KUHN, 2, [], [-2, 2]),
        (KUHN, 2, ["[check]"], [2, -2]),
        ("openspiel:kuhn_poker(players=3)", 3, ["[bet]"], [0, -2, 0]),
        (LEDUC, 2, [], [-13, 13]),
        ("openspiel:matrix_brps", 2, ["[rock]"], [50, -50]),
        ("openspiel:first_sealed_auction", 2, [], [0, 0]),
    ],
)
def test_illegal_answer_ends_the_game_at_the_lowest_utility(env_id, num_players, legal, utilities):
    game = OpenSpielGame(env_id, num_players, 0)
    for action in legal:
        assert game.play(action) is not None
        assert not game.was_invalid
    assert game.play("[all in]") is None
    assert game.was_invalid
    rewards, remarks = game.close()
    assert [remarks[pid][UTILITY] for pid in range(num_players)] == utilities
    offender = len(legal)
    assert [pid for pid, about in remarks.items() if "invalid_move" in about] == [offender]
    assert "'[all in]'" in remarks[offender]["reason"]
    assert all(abs(reward) <= 1 for reward in rewards.values())


def test_simultaneous_choices_are_asked_for_seat_by_seat_and_not_shown():
    shown = set()
    for bid in "1234":
        game = OpenSpielGame(GOOFSPIEL, 2, 0)
        assert game.observe()[0] == 0
        turn = game.play(f"[{bid}]")
        assert turn is not None and turn[0] == 1
        shown.add(turn[1])
        after = game.play("[2]")
        assert after is not None and after[0] == 0
        assert f"Your earlier bids: {bid}\n" in after[1]
    assert len(shown) == 1


def test_partners_are_a_team():
    assert OpenSpielGame("openspiel:euchre", 4, 0).teams == {0: "0", 1: "1", 2: "0", 3: "1"}
    assert OpenSpielGame("openspiel:tiny_hanabi", 2, 0).teams == {0: "all", 1: "all"}
    assert OpenSpielGame(KUHN, 2, 0).teams is None


def test_truncated_games_pay_nothing_except_alone():
    assert OpenSpielGame(KUHN, 2, 0).rewards_so_far() == {0: 0.0, 1: 0.0}
    alone, rng = OpenSpielGame("openspiel:2048", 1, 0, reward_scale=1.0), random.Random(0)
    for _ in range(50):
        alone.step(random_legal_action("openspiel:2048", alone.observe()[1], rng))
    assert alone.rewards_so_far()[0] > 0


def test_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    load_game.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'unstable-lite\[openspiel\]'"):
        load_game(KUHN)
    assert "pip install" in describe_envs()[-1][2]
    assert "pip install" in str(probe("openspiel:kuhn_poker(players=5)", 5).problem)


def test_envs_are_listed_with_players_and_remark():
    assert "leave it out" in str(probe(KUHN, 2, "board").problem), "OpenSpiel has one text"
    rows = {env_id: (players, remark) for env_id, players, remark in describe_envs()}
    assert rows[KUHN] == ("2-10, by its parameter", "hidden information, chance, with rules text")
    assert rows["openspiel:connect_four"] == ("2", "perfect information, with rules text")
    assert rows["openspiel:matrix_rps"] == ("2", "one move, simultaneous moves, with rules text")
    assert "openspiel:gin_rummy" not in rows
    assert "textarena/envs/KuhnPoker/env.py" in rows["KuhnPoker-v0-train"][1]


def test_line_of_textarena_that_the_page_of_games_cites_sets_the_whole_pot():
    source = source_text("KuhnPoker-v0-train")
    assert source.splitlines()[33].strip() == 'self.state.game_state["pot"] = self.ante * 2'
    assert source.count('["pot"] =') == 1
    assert source.count('["pot"] +=') == 0


# scripted players


def player(name: str, env_id: str, seed: int) -> ScriptedPlayer:
    made = _player_class(name)(env_id=env_id, seed=seed)
    assert isinstance(made, ScriptedPlayer)
    return made


def rewards(env_id: str, names: tuple[str, str], games: int) -> list[float]:
    """Return the reward of the first player of each game; the seats alternate."""
    found = []
    for number in range(games):
        seat = number % 2
        seated = names if seat == 0 else names[::-1]
        game = OpenSpielGame(env_id, 2, number)
        players = [player(name, env_id, 100 * number + pid) for pid, name in enumerate(seated)]
        turn: tuple[int, str] | None = game.observe()
        while turn is not None:
            turn = game.play(players[turn[0]].action(turn[1]))
            assert not game.was_invalid
        found.append(game.close()[0][seat])
    return found


@pytest.mark.parametrize(
    ("env_id", "playouts", "opponent", "games", "least"),
    [
        ("openspiel:tic_tac_toe", 100, "random", 30, 24), ("openspiel:connect_four", 50, "random", 30, 24),
        (NIM, 200, "random", 30, 24), ("openspiel:breakthrough(columns=4,rows=5)", 50, "random", 30, 24),
        ("openspiel:pig(winscore=30)", 100, "random", 20, 8),  # the opponent may roll often before its turn ends
        ("openspiel:connect_four", 200, "mcts:10", 20, 8),
    ],
)  # fmt: skip
def test_tree_search_beats_random_play_and_fewer_playouts(env_id, playouts, opponent, games, least):
    assert sum(rewards(env_id, (f"scripted:mcts:{playouts}", f"scripted:{opponent}"), games)) >= least


def test_tree_search_with_the_same_seed_makes_the_same_moves():
    games = [rewards("openspiel:connect_four", ("scripted:mcts:20", "scripted:mcts:20"), games=4) for _ in range(2)]
    assert games[0] == games[1]
    observation = OpenSpielGame("openspiel:connect_four", 2, 0).observe()[1]
    first = {player("scripted:mcts:1", "openspiel:connect_four", seed).action(observation) for seed in range(40)}
    assert len(first) > 1


def test_tree_search_finds_a_state_that_it_did_not_play_itself():
    game = OpenSpielGame("openspiel:tic_tac_toe", 2, 0)
    for action in ("[0]", "[4]", "[1]", "[3]"):
        game.step(action)
    assert player("scripted:mcts:500", "openspiel:tic_tac_toe", 0).action(game.observe()[1]) == "[2]"


@pytest.mark.parametrize("env_id", [KUHN, NIM, GOOFSPIEL, "openspiel:matrix_brps", LIARS_DICE])
def test_best_response_to_the_equilibrium_player_gains_next_to_nothing(env_id):
    tree, choices = flatten(env_id), {text: dict(choice) for text, choice in solved(env_id).items()}
    policy = [np.array([choices[s.observation].get(f"[{a}]", 0.0) for a in s.actions]) for s in tree.states]
    assert tree.exploitability(policy) < 0.01 * load_game(env_id).max_utility()
