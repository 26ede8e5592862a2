"""`scripted:blind-…`: preference lists found by search in play."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from unstable_lite.errors import EnvError, UnsupportedEnvError
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.blind import BlindPlayer, _Games, best_preferences, first_legal
from unstable_lite.games.players.factory import SCRIPTED_PLAYERS, opponent_problem
from unstable_lite.games.players.lookahead import OptimalPlayer
from unstable_lite.games.players.scripted import LEGAL_ACTIONS, RandomLegalPlayer, ScriptedPlayer, legal_actions

NIM = "Nim-v0-train"


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


def test_first_legal_preference_is_played() -> None:
    assert first_legal(["c", "a", "b"], ["a", "b"]) == "a"
    assert first_legal(["c"], ["b", "a"]) == "b"


def test_blind_play_of_nim_is_between_random_and_perfect() -> None:
    blind = points(NIM, SCRIPTED_PLAYERS["scripted:blind-random"], RandomLegalPlayer, 600)
    assert 0.63 < blind < 0.76
    assert points(NIM, OptimalPlayer, RandomLegalPlayer, 100) > 0.97


def test_searched_points_match_play_and_no_single_move_improves_them() -> None:
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


def test_game_without_a_board_is_searched_by_sampled_play() -> None:
    for seat in (0, 1):
        best = best_preferences("KuhnPoker-v0-short-train", RandomLegalPlayer, seat)
        assert sorted(best) == ["[bet]", "[call]", "[check]", "[fold]"]
        assert best.index("[call]") < best.index("[fold]")
        assert best.index("[bet]") < best.index("[check]")


def test_same_seed_finds_same_list_and_another_opponent_another() -> None:
    found = best_preferences.__wrapped__(NIM, RandomLegalPlayer, 0)
    assert found == best_preferences(NIM, RandomLegalPlayer, 0)
    assert found != best_preferences(NIM, OptimalPlayer, 0)


@pytest.mark.parametrize("family", LEGAL_ACTIONS)
def test_every_family_names_the_seat_of_the_player_first(family: str) -> None:
    env, rng = Environment(f"{family}-v0-train", 2, 1), random.Random(0)
    for _ in range(6):
        pid, observation = env.observe()
        assert BlindPlayer(env.env_id, 0)._seat(observation) == pid
        if env.step(rng.choice(legal_actions(env.env_id, observation))):
            break


def test_env_that_a_blind_player_cannot_play_is_refused() -> None:
    _, observation = Environment(NIM, 2, 0).observe()
    assert opponent_problem("scripted:blind-random", NIM, observation) is None
    assert "'Nim-v0-train'" in str(opponent_problem("scripted:blind-greedy", NIM, observation))
    assert "scripted" in str(opponent_problem("scripted:blind-best", NIM, observation))
    with pytest.raises(UnsupportedEnvError):
        BlindPlayer("Chopsticks-v0-train", 0).action("Player 0")
    with pytest.raises(EnvError, match="Player N"):
        BlindPlayer(NIM, 0).action("Current Pile:\n  pile 0: 3")
