import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.errors import EnvError
from unstable_lite.games.env_catalogue import DENIED, describe_envs, env_family, probe
from unstable_lite.games.environments import Environment, env_ids
from unstable_lite.games.players.scripted import LEGAL_ACTIONS, legal_actions, random_legal_action
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.validation import find_problems
from unstable_lite.sft.session import find_sft_problems

# Envs that draw random numbers in the middle of a game (REFERENCE.md 3.6), from `random` or `numpy.random`.
DRAWING = [
    ("KuhnPoker-v0-train", 2),
    ("LiarsDice-v0-small-train", 3),
    ("PigDice-v0-short-train", 2),
    ("2048-v0-ultra-easy-train", 1),
    ("Minesweeper-v0-small-train", 1),
    ("Snake-v0-train", 2),
    ("Blackjack-v0-train", 1),
    ("IndianPoker-v0-short-train", 2),
    ("Sokoban-v0-train", 1),
]

EXAMPLES = Path(__file__).parents[3] / "examples"
GAMES_PAGE = Path(__file__).parents[3] / "docs" / "games.md"


def play(env_id: str, num_players: int, seed: int, max_turns: int = 40) -> list[object]:
    """Play a game with noise and return everything that a player could see of it."""
    return list(_turns(env_id, num_players, seed, max_turns))


def _turns(env_id: str, num_players: int, seed: int, max_turns: int = 40):  # type: ignore[no-untyped-def]
    noise = random.Random(seed)
    env = Environment(env_id, num_players, seed)
    for _ in range(max_turns):
        yield env.observe()
        words = ["[roll]", "[hold]", "[check]", "[bet]", "[call]", "[up]", "[left]", "[hit]", "[stand]", "[Bid: 1, 3]"]
        if env.step(noise.choice([*words, f"[{noise.randrange(5)} {noise.randrange(5)}]"])):
            yield env.close()
            return


@pytest.mark.parametrize(("env_id", "num_players"), DRAWING)
def test_interleaved_games_equal_games_played_alone(env_id, num_players):
    random.seed(7)
    before = random.getstate()
    alone = [play(env_id, num_players, seed) for seed in range(3)]
    assert random.getstate() == before, "the global stream stays as it is"
    interleaved: list[list[object]] = [[] for _ in range(3)]
    games = dict(enumerate(_turns(env_id, num_players, seed) for seed in range(3)))
    shuffle = random.Random(1)
    while games:
        index = shuffle.choice(list(games))
        random.random()  # a draw by other code
        try:
            interleaved[index].append(next(games[index]))
        except StopIteration:
            del games[index]
    assert interleaved == alone


def test_env_that_reseeds_draws_as_the_random_module_does():
    env, standing_in = Environment("TicTacToe-v0-train", 2, 3), vars(sys.modules["textarena.core"])["random"]

    def draw() -> float:
        return env._call(lambda: standing_in.random())  # type: ignore[no-any-return]

    assert draw() == random.Random(3).random()
    for seed in ("eleven", 11, 11):
        env._call(standing_in.seed, seed)
        alone = random.Random(seed)
        assert [draw() for _ in range(3)] == [alone.random() for _ in range(3)]


def test_observation_must_be_text():
    env = Environment("TicTacToe-v0-raw", 2, 0)
    for look in (env.observe, lambda: env.play("[4]")):
        with pytest.raises(EnvError, match="list, not text; register a wrapper"):
            look()


BOARD, FIRST_LAST = {"observation": "board"}, {"observation": "first-last"}


@pytest.mark.parametrize(
    ("env_id", "num_players", "keys", "says"),
    [
        ("fakes.faulty_envs:Beyond-v0", 2, {}, "player 2 is to move, but players are 0 to 1"),
        ("fakes.faulty_envs:Negative-v0", 2, {}, "player -1 is to move"),
        ("fakes.faulty_envs:Fraction-v0", 2, {}, "player 0.7 is to move"),
        ("fakes.faulty_envs:Named-v0", 2, {}, "player 'zero' is to move"),
        ("fakes.faulty_envs:Nothing-v0", 2, {}, "get_observation returned None, not a player and an observation"),
        ("TicTacTo-v0-train", 2, {}, "'TicTacToe-v0-train'"),
        ("TicTacToe-v0-raw", 2, {}, "-raw"),
        ("TicTacToe-v0-train", 3, {}, "num_players = 3"),
        ("MarketEntryGame-v0-train", 4, {}, "loop"),
        ("Hangman-v0-train", 1, {}, "LookupError"),
        ("custom_envs:RaceTo20-v0-train", 2, {}, "'custom_envs'"),
        ("custom_env:RaceTo21-v0", 2, {}, "'RaceTo21-v0'"),
        ("fakes.faulty_envs:Wrapped-v0", 2, FIRST_LAST, "'Wrapped-v0-raw'"),
        ("KuhnPoker-v0-train", 2, BOARD, "TicTacToe, WildTicTacToe"),
        ("ConnectFour-v0-blind-train", 2, BOARD, "TicTacToe, WildTicTacToe"),
        ("IteratedRockPaperScissors-v0-train", 2, BOARD, "TicTacToe, WildTicTacToe"),
        ("fakes.faulty_envs:Quiet-v0", 2, BOARD, "GAME_BOARD"),
        ("openspiel:kuhn_poker", 2, BOARD, "OpenSpiel has one text; leave it out"),
        ("openspiel:nim", 2, {"a": 5}, "write env_id = 'openspiel:nim(a=5)'"),
        ("ConnectFour-v0-train", 2, {"rows": 5}, "no argument rows; it accepts is_open, num_rows, num_cols"),
        ("ConnectFour-v0-train", 2, {"num_rows": "many"}, "does not start"),
        ("Nim-v0-train", 2, {"error_allowance": 5}, "set error_allowance of the env"),
        ("BabyAiText-v0", 2, {"a": 1}, "does not start"),  # its module cannot be imported
    ],
)
@pytest.mark.filterwarnings("ignore")  # from nltk without a network
def test_unusable_env_says_why(monkeypatch, env_id, num_players, keys, says):
    monkeypatch.syspath_prepend(EXAMPLES)
    observation = keys.get("observation", "env")
    arguments = tuple((name, value) for name, value in keys.items() if name != "observation")
    assert says in str(probe(env_id, num_players, observation, arguments).problem)


def config_of(entry: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate({"train_envs": [{"num_players": 2, "num_actors": 2} | entry], **sections})


def test_problem_of_an_env_is_reported_once_for_each_of_its_uses():
    entry, says = {"env_id": "fakes.faulty_envs:Wrapped-v0", "num_players": 2} | FIRST_LAST, "'Wrapped-v0-raw'"
    evaluated = [entry | {"fixed_opponent": "scripted:random"}]
    config = config_of(entry, eval_envs=evaluated, sft={"players": ["scripted:random"]})
    for problems in (find_problems(config), find_sft_problems(config)):
        assert [says in problem for problem in problems] == [True, True]
    (refused,) = find_problems(config_of({"env_id": "Nim-v0-train", "env_kwargs": {"rows": 5}}))
    assert "train_envs.0" in refused and "no argument rows" in refused
    assert probe(entry["env_id"], 2).problem is None
    assert probe("Nim-v0-train", 2, "first-last").problem is None


def test_env_whose_games_the_seed_does_not_determine_is_warned_of():
    rows = make_plan(config_of({"env_id": "fakes.faulty_envs:Counting-v0"})).describe()
    assert [name for name, text in rows if "two games with the same seed began differently" in text] == ["warning"]


def test_custom_env_is_found_by_module_and_draws_from_its_own_stream(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    env_id = "custom_env:RaceTo20-v0-train"
    assert probe(env_id, 2).problem is None
    before = random.getstate()
    starts = [Environment(env_id, 2, seed).observe()[1] for seed in (*range(12), *range(12))]
    assert random.getstate() == before
    assert starts[:12] == starts[12:]
    assert len(set(starts)) > 3
    assert Environment(env_id, 2, 0, observation="first-last").observe()[1]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the env's code is valid from Python 3.12 on")
def test_env_in_newer_syntax_names_the_python_it_needs():
    assert "Python 3.12" in str(probe("Chess-v0-train", 2).problem)
    remarks = {env_id: remark for env_id, _, remark in describe_envs()}
    assert "Python 3.12" in remarks["Chess-v0-train"]
    needing = {env_family(env_id) for env_id, remark in remarks.items() if "Python 3.12" in remark}
    (named,) = re.findall(r"The code of (.*) has f-strings", " ".join(GAMES_PAGE.read_text().split()))
    assert needing == set(re.split(r", | and ", named))


def test_list_of_envs_names_players_and_problems():
    assert set(DENIED) <= {env_id.partition("-v")[0] for env_id in env_ids()}
    rows = {env_id: (players, remark) for env_id, players, remark in describe_envs()}
    assert rows["TicTacToe-v0-train"] == ("2", "")
    assert rows["2048-v0-train"][0] == "1"
    assert rows["SecretMafia-v0-train"][0] != "1"
    assert "broken" in rows["Bandit-v0-train"][1]
    assert "isolated" in rows["PublicGoodsGame-v0-train"][1]
    assert "nltk" in rows["Hangman-v0-train"][1]


@pytest.mark.parametrize("env_id", ["Nim-v0-train", "Nim-v0"])
def test_first_last_shows_only_the_first_and_the_last_message(env_id):
    env = Environment(env_id, 2, 3, observation="first-last")
    shown = []
    for action in ("[0 1]", "1 4", "[0 1]", "[2 1]"):  # an action without brackets gets them
        pid, observation = env.observe()
        shown.append(observation)
        assert not env.step(action)
        assert f"Welcome to Nim, Player {pid}" in observation
        assert observation.count("Current Pile:") == 1
        assert "removes" not in observation
    assert "pile 0: 1\n  pile 1: 0\n  pile 2: 5" in shown[3]
    assert random_legal_action(env_id, shown[3], random.Random(0)) in ("[0 1]", *(f"[2 {n}]" for n in range(1, 6)))


BOARD_GAMES_IN_PLAY = (
    "TicTacToe-v0-train",
    "ConnectFour-v0-train",
    "SimpleTak-v0-train",
    "Nim-v0-train",
    "Nim-v0",
    "WildTicTacToe-v0-train",
    "ThreePlayerTicTacToe-v0-train",
)


def listed_moves(env_id: str, observation: str) -> list[str]:
    if env_family(env_id) in LEGAL_ACTIONS:
        return legal_actions(env_id, observation)
    line = observation.rpartition("Available Moves:")[2].partition("\n")[0]
    return re.findall(r"\[[^\[\]]+\]", line)


@pytest.mark.parametrize("env_id", BOARD_GAMES_IN_PLAY)
def test_board_shows_the_whole_state_and_the_same_moves_as_env(env_id):
    state_of: dict[str, str] = {}
    longest = 0
    num_players = 3 if env_id.startswith("ThreePlayer") else 2
    for seed in range(60):
        rng = random.Random(seed)
        shown, full = (Environment(env_id, num_players, seed, observation=how) for how in ("board", "env"))
        is_over, first = False, True
        while not is_over:
            pid, observation = shown.observe()
            state = f"{pid} {shown._unwrapped.state.game_state}"
            assert state_of.setdefault(observation, state) == state, "two states have the same prompt"
            other_pid, everything = full.observe()
            moves = listed_moves(env_id, observation)
            assert pid == other_pid and moves == listed_moves(env_id, everything)
            if not first:
                longest = max(longest, len(everything) - len(observation))
            action, first = rng.choice(moves), False
            is_over = shown.step(action)
            assert full.step(action) == is_over
    assert len(set(state_of.values())) == len(state_of), "one state has two prompts"
    assert longest > 80, "the list of past moves is left out"


def test_pattern_that_no_env_id_contains_is_refused_with_a_similar_one():
    refused = CliRunner().invoke(app, ["envs", "Nimm"])
    assert refused.exit_code == 1
    assert refused.output == "error: no env id contains 'Nimm'; did you mean 'Nim'?\n"
    listed = CliRunner().invoke(app, ["envs", "Nim-v0"])
    assert listed.exit_code == 0 and "scripted:optimal" in listed.output
