"""Ids of OpenSpiel's games are tried in a process of their own, and refused before anything starts."""

from statistics import fmean

import pytest

from unstable_lite.config.games import EnvSpec, EvalEnvSpec
from unstable_lite.evaluation.probing import random_positions
from unstable_lite.games.env_catalogue import TRIAL_GAMES, env_family, is_isolated, probe, trial
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.openspiel import game
from unstable_lite.games.openspiel.game import OpenSpielGame

KUHN = "openspiel:kuhn_poker"


def test_openspiel_envs_work_where_envs_are_looked_at() -> None:
    spec = EvalEnvSpec(env_id=KUHN, num_players=2)
    assert env_family("openspiel:goofspiel(num_turns=-1)") == "openspiel:goofspiel(num_turns=-1)"
    assert isinstance(environment_of(EnvSpec(env_id=KUHN, num_players=2), 0), OpenSpielGame)
    assert probe(KUHN, 2).problem is None
    assert not is_isolated(EvalEnvSpec(env_id=KUHN, num_players=2))
    assert is_isolated(EvalEnvSpec(env_id=KUHN, num_players=2, isolated=True))
    assert len(trial(spec).lengths) == TRIAL_GAMES
    assert 2 <= fmean(trial(spec).lengths) <= 3
    assert {position.turn for position in random_positions(spec, games=20)} == {0, 1, 2}


@pytest.mark.parametrize(
    ("env_id", "num_players", "says"),
    [
        ("openspiel:kuhn", 2, "did you mean 'kuhn_poker'?"),
        ("openspiel:zzzzzzzzz", 2, "`unstable-lite envs openspiel` lists"),
        ("openspiel:kuhn_poker(chips=3)", 2, "Unknown parameter 'chips'. Available parameters are: players"),
        ("openspiel:kuhn_poker(players=99)", 99, "num_players_ = 99, kGameType.max_num_players = 10"),
        ("openspiel:kuhn_poker(players=two)", 2, "Wrong type for parameter players"),
        (KUHN, 3, "is a game of 2: set num_players = 2, or the game's own parameter: openspiel:kuhn_poker(players=…)"),
        ("openspiel:tic_tac_toe", 3, "is a game of 2: set num_players = 2"),
        ("openspiel:connect_four(rows=0)", 2, "crashes with these parameters (signal"),
        ("openspiel:goofspiel(num_cards=0)", 2, "cannot play it: "),
        ("openspiel:nim(pile_sizes=-3;4)", 2, "a player has no move"),
        ("openspiel:twixt", 2, "set ansi_color_output=False"),
        ("openspiel:gin_rummy", 2, "it hides information and has no information state string"),
        ("openspiel:negotiation", 2, "it draws its chance outcomes itself"),
        ("openspiel:mfg_garnet", 1, "it is a mean-field game"),
        ("openspiel:crossword", 1, "its moves are structures"),
    ],
)
def test_game_that_cannot_be_played_is_refused_with_the_reason(
    env_id: str, num_players: int, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    problem = probe(env_id, num_players).problem
    assert problem is not None and says in problem
    assert "\n" not in problem
    assert capfd.readouterr() == ("", ""), "OpenSpiel's own messages are not shown"


def test_slow_game_is_refused_by_its_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert game.trial_problem("openspiel:nim(pile_sizes=6;6)", 2) is None
    monkeypatch.setattr(game, "TRIAL_S", 2)
    problem = game.trial_problem("openspiel:nim(pile_sizes=600000;600000)", 2)
    assert problem == "OpenSpiel did not play 60 moves of it in 2 s of CPU time; use other parameters"
