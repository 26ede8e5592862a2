import random
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.errors import EnvError
from unstable_lite.games.env_catalogue import DENIED, describe_envs, env_family, probe
from unstable_lite.games.environments import Environment, _checked_rewards, env_ids
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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Beyond", "player 2 is to move, but players are 0 to 1"),
        ("Negative", "player -1 is to move"),
        ("Fraction", "player 0.7 is to move"),
        ("Named", "player 'zero' is to move"),
        ("Nothing", "get_observation returned None, not a player and an observation"),
    ],
)
def test_turn_must_be_that_of_a_player(name, says):
    problem = probe(f"fakes.faulty_envs:{name}-v0", 2).problem
    assert problem is not None and says in problem


def test_env_whose_games_the_seed_does_not_determine_is_warned_of():
    env = {"env_id": "fakes.faulty_envs:Counting-v0", "num_players": 2, "num_actors": 2}
    rows = make_plan(Config.model_validate({"train_envs": [env]})).describe()
    assert [name for name, text in rows if "two games with the same seed began differently" in text] == ["warning"]


@pytest.mark.parametrize(
    "rewards", [None, {0: 1}, {0: "reason", 1: 1}, {0: float("nan"), 1: 0}, {0: True, 1: 0}, {0: 1, 1: 1, 2: 1}]
)
def test_rewards_must_be_one_finite_number_per_player(rewards):
    with pytest.raises(EnvError, match="TicTacToe"):
        _checked_rewards("TicTacToe-v0", 2, rewards)


@pytest.mark.parametrize(
    ("env_id", "num_players", "says"),
    [
        ("TicTacTo-v0-train", 2, "'TicTacToe-v0-train'"), ("TicTacToe-v0-raw", 2, "-raw"),
        ("TicTacToe-v0-train", 3, "num_players = 3"),
        ("MarketEntryGame-v0-train", 4, "loop"), ("Hangman-v0-train", 1, "LookupError"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # from nltk without a network
def test_unusable_env_says_why(env_id, num_players, says):
    assert says in str(probe(env_id, num_players).problem)


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
    assert "'custom_envs'" in str(probe("custom_envs:RaceTo20-v0-train", 2).problem)
    assert "'RaceTo21-v0'" in str(probe("custom_env:RaceTo21-v0", 2).problem)


def test_env_without_a_bare_id_refuses_first_last_observations(tmp_path, monkeypatch):
    (tmp_path / "wrapped_env.py").write_text(
        "import textarena as ta\n"
        "ta.envs.registration.register(\n"
        "    'Wrapped-v0', 'textarena.envs.Nim.env:NimEnv', [ta.wrappers.LLMObservationWrapper], piles=[3, 4]\n"
        ")\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    says = "'Wrapped-v0-raw'"
    assert probe("wrapped_env:Wrapped-v0", 2).problem is None
    assert says in str(probe("wrapped_env:Wrapped-v0", 2, "first-last").problem)
    players = {"num_players": 2, "observation": "first-last"}
    entry = {"env_id": "wrapped_env:Wrapped-v0", **players}
    evaluated = {**entry, "fixed_opponent": "scripted:random"}
    config = Config.model_validate(
        {"train_envs": [{**entry, "num_actors": 2}], "eval_envs": [evaluated], "sft": {"players": ["scripted:random"]}}
    )
    assert [says in problem for problem in find_problems(config)] == [True, True]
    assert [says in problem for problem in find_sft_problems(config)] == [True, True]  # each is reported once
    assert probe("Nim-v0-train", 2, "first-last").problem is None


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


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("KuhnPoker-v0-train", "TicTacToe, WildTicTacToe"),
        ("ConnectFour-v0-blind-train", "TicTacToe, WildTicTacToe"),
        ("IteratedRockPaperScissors-v0-train", "TicTacToe, WildTicTacToe"),
        ("board_less:Quiet-v0", "GAME_BOARD"),
    ],
)
def test_board_is_refused_if_no_board_shows_the_state(env_id, says, tmp_path, monkeypatch):
    (tmp_path / "board_less.py").write_text(
        "import textarena as ta\n"
        "entry = 'textarena.envs.IteratedRockPaperScissors.env:IteratedRockPaperScissorsEnv'\n"
        "for name in ('Quiet-v0', 'Quiet-v0-raw'):\n"
        "    if name not in ta.envs.registration.ENV_REGISTRY:\n"
        "        ta.envs.registration.register(name, entry, [], num_rounds=2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert says in str(probe(env_id, 2, "board").problem)
    entry = {"env_id": env_id, "num_players": 2, "num_actors": 2, "observation": "board"}
    assert any(says in problem for problem in find_problems(Config.model_validate({"train_envs": [entry]})))


def test_pattern_that_no_env_id_contains_is_refused_with_a_similar_one():
    refused = CliRunner().invoke(app, ["envs", "Nimm"])
    assert refused.exit_code == 1
    assert refused.output == "error: no env id contains 'Nimm'; did you mean 'Nim'?\n"
    listed = CliRunner().invoke(app, ["envs", "Nim-v0"])
    assert listed.exit_code == 0 and "scripted:optimal" in listed.output
