"""TextArena's envs: separate random streams, reasons why they cannot be used, observations, and settings of an env."""

import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from textarena.envs.Nim.env import NimEnv
from textarena.envs.registration import ENV_REGISTRY, register
from typer.testing import CliRunner

from fakes.game_records import BASE, make_generation
from unstable_lite.cli.app import app
from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec, EvalEnvSpec, TrainEnvSpec, against
from unstable_lite.config.reading import parse_config
from unstable_lite.errors import EnvError
from unstable_lite.evaluation.probing import random_positions
from unstable_lite.games import env_catalogue
from unstable_lite.games.env_catalogue import DENIED, describe_envs, env_family, is_isolated, probe, trial
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.environments import Environment, env_ids
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.policy import Player, PolicyPlayer
from unstable_lite.games.players.scripted import LEGAL_ACTIONS, legal_actions, random_legal_action
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.planning.envs import played_otherwise
from unstable_lite.planning.plan import make_engine_plan, make_plan
from unstable_lite.planning.rules import training_rules
from unstable_lite.planning.validation import find_engine_problems, find_problems
from unstable_lite.rollout.collector import LockStep
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.sft.session import find_sft_problems
from unstable_lite.tracking.evaluations import Tally
from unstable_lite.types import AgentSpec, GameRecord, Generation, Reply, Sampling

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
NIM = {"env_id": "Nim-v0-train", "num_players": 2, "fixed_opponent": "scripted:random"}


def config_of(*eval_envs: dict[str, Any], sft: dict[str, Any] | None = None, **train: Any) -> Config:
    env = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2} | train
    return Config.model_validate({"train_envs": [env], "eval_envs": eval_envs, "sft": sft or {}})


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
    alone = [play(env_id, num_players, seed) for seed in range(2)]
    assert random.getstate() == before, "the global stream stays as it is"
    interleaved: list[list[object]] = [[] for _ in range(2)]
    games = dict(enumerate(_turns(env_id, num_players, seed) for seed in range(2)))
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


def test_problem_of_an_env_is_reported_once_for_each_of_its_uses():
    entry, says = {"env_id": "fakes.faulty_envs:Wrapped-v0", "num_players": 2} | FIRST_LAST, "'Wrapped-v0-raw'"
    evaluated = entry | {"fixed_opponent": "scripted:random"}
    config = config_of(evaluated, sft={"players": ["scripted:random"]}, **entry)
    for problems in (find_problems(config), find_sft_problems(config)):
        assert [says in problem for problem in problems] == [True, True]
    (refused,) = find_problems(config_of(env_kwargs={"rows": 5}))
    assert "train_envs.0" in refused and "no argument rows" in refused
    assert probe(entry["env_id"], 2).problem is None
    assert probe("Nim-v0-train", 2, "first-last").problem is None


def test_env_whose_games_the_seed_does_not_determine_is_warned_of():
    rows = make_plan(config_of(env_id="fakes.faulty_envs:Counting-v0")).describe()
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


# settings of an env


class Says(Player):
    def __init__(self, *actions: str) -> None:
        self._actions = iter(actions)

    async def act(self, observation: str) -> Reply:
        action = next(self._actions)
        return Reply(action=action, text=action, prompt=observation)


@pytest.mark.parametrize(("env_id", "valid"), [("TicTacToe-v0-train", "[4]"), ("openspiel:tic_tac_toe", "[4]")])
def test_a_player_repeats_as_many_invalid_moves_as_allowed(env_id, valid):
    env = environment_of(EnvSpec(env_id=env_id, num_players=2, error_allowance=1), 1)
    env.observe()
    turn = env.play("nonsense")
    assert turn is not None and (turn[0], env.was_invalid) == (0, True)
    assert ("not a legal action" in turn[1]) == env_id.startswith("openspiel:")
    turn = env.play(valid)
    assert turn is not None and (turn[0], env.was_invalid) == (1, False)
    assert "not a legal action" not in turn[1]
    assert env.play("nonsense") is not None  # a valid move sets the count back
    assert env.play("nonsense") is None
    assert env.was_invalid
    rewards, remarks = env.close()
    assert rewards == {0: 1.0, 1: -1.0}
    assert [bool(remarks[pid].get("invalid_move")) for pid in (0, 1)] == [False, True]
    assert environment_of(EnvSpec(env_id=env_id, num_players=2), 1).play("nonsense") is None, "none by default"


def test_a_move_that_does_not_raise_the_count_of_errors_is_valid():
    env = environment_of(EnvSpec(env_id="Nim-v0-train", num_players=2, error_allowance=2), 1)
    env.play("nonsense")
    env._unwrapped.state.made_invalid_move = True  # as if the env returned before `state.step`, which clears it
    env.play("[0 1]")
    assert (env._unwrapped.state.error_count, env.was_invalid) == (1, False)


async def played(env_id: str, players: dict[int, Any], num_trained: int = 0, **keys: Any) -> GameRecord:
    env = EvalEnvSpec(env_id=env_id, num_players=3 if "Dice" in env_id else 2, **keys)
    trained = tuple(range(num_trained))
    record = new_record(new_game(env, [BASE] * env.num_players, 0, "train" if trained else "eval", 2, trained=trained))
    await run_game(record, environment_of(record.spec, 1), players)
    return record


@pytest.mark.parametrize(
    ("env_id", "answers", "turns", "invalid_pids"),
    [
        ("TicTacToe-v0-train", [["nonsense", "[4]"], ["nonsense"]], [(0, True), (0, False), (1, True)], ()),
        (
            "LiarsDice-v0-small-train",
            [["nonsense", "nonsense"], ["[Bid: 1, 2]"], ["[Bid: 2, 2]"]],
            [(0, True), (0, True), (1, False), (2, False)],
            (0,),
        ),
    ],
)
async def test_invalid_moves_of_a_game_that_continues_count_only_against_a_player_whom_they_removed(
    env_id, answers, turns, invalid_pids
):
    players = {pid: Says(*actions) for pid, actions in enumerate(answers)}
    record = await played(env_id, players, error_allowance=1, max_turns=len(turns))
    assert [(turn.pid, turn.is_invalid) for turn in record.turns] == turns
    assert (record.end, record.invalid_pids) == ("truncated", invalid_pids)


@pytest.mark.parametrize(
    "keys",
    [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": 1e-4}, {"temperature": float("inf")},
     {"temperature": "greedy"}, {"top_p": 0}, {"top_p": 1.1}, {"error_allowance": -1}, {"error_allowance": 0.5},
     {"env_kwargs": {"table": {}}}, {"env_kwargs": {"list": [{}]}}, {"env_kwargs": {"number": float("nan")}},
     {"env_kwargs": {"list": [float("inf")]}}, {"env_kwargs": 3}, {"env_kwargs": [["a", 1]]}],
)  # fmt: skip
def test_bad_values_are_refused_by_name(keys):
    train = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 1}
    _, problems = parse_config({"train_envs": [train], "eval_envs": [NIM | keys]})
    assert len(problems) >= 1
    assert all(problem.startswith(f"eval_envs.0.{next(iter(keys))}") for problem in problems), problems


def test_blind_player_is_refused_in_an_env_with_arguments():
    blind = NIM | {"fixed_opponent": "scripted:blind-random"}
    assert not find_engine_problems(config_of(blind))
    (problem,) = find_engine_problems(config_of(blind, env_kwargs={"piles": [1, 2]}))
    assert problem.startswith(
        "eval_envs.0: opponent 'scripted:blind-random' searches the env with its default arguments"
    )


def test_games_trials_and_probes_see_the_env_with_its_arguments():
    def lengths(**keys: Any) -> tuple[int, ...]:
        return trial(config_of(**keys).train_envs[0]).lengths

    assert max(lengths(env_kwargs={"piles": [1, 1]})) == 2 < max(lengths())
    (env,) = config_of(NIM, env_kwargs={"piles": [1, 1]}).eval_envs
    assert all("pile 2" not in position.observation for position in random_positions(env, games=2))
    for observation in ("env", "first-last", "board"):
        game = Environment("Nim-v0-train", 2, 1, observation, env_kwargs=(("piles", (2, 3)),))
        assert "pile 1: 3" in game.observe()[1]


class OddNim(NimEnv):  # type: ignore[misc]
    """Nim whose fault begins at the second move, or at the end."""

    fault = ""

    def step(self, action: str) -> Any:
        if self.fault == "raises" and self.state.turn:
            raise KeyError("no such pile")
        if self.fault == "endless":
            self.state.game_state["piles"] = [3, 4, 5]
        if self.fault == "slow":
            time.sleep(0.2)
        return super().step(action)

    def close(self) -> Any:
        if self.fault == "asks a judge":
            raise ConnectionError("no network here")
        rewards, remarks = super().close()
        odd = {
            "pays none": None, "pays one": {0: 1}, "pays a third": {0: 1, 1: 1, 2: 1}, "pays text": {0: "1", 1: 0},
            "pays nan": {0: float("nan"), 1: 0}, "pays true": {0: True, 1: 0},
        }  # fmt: skip
        return odd.get(self.fault, rewards), remarks


def register_odd(family: str, fault: str) -> str:
    """Register Nim with this fault under a name of this family, and return its id."""
    env_id, nim = f"{family}-v0-{fault.replace(' ', '')}odd", ENV_REGISTRY["Nim-v0-train"]
    env_class = type("Odd", (OddNim,), {"fault": fault})
    register(id=env_id, entry_point=env_class, default_wrappers=nim.default_wrappers, **nim.kwargs)
    return env_id


PAYMENTS = ["pays none", "pays one", "pays a third", "pays text", "pays nan", "pays true"]


@pytest.mark.parametrize("fault", [*PAYMENTS, "raises", "asks a judge", ""])
@pytest.mark.parametrize("family", ["Nim", "Unknown"])
def test_trial_game_finds_what_is_wrong_with_an_env(fault, family):
    env_id = register_odd(family, fault)
    config = config_of(NIM | {"env_id": env_id, "fixed_opponent": "base"})
    problems = find_engine_problems(config)
    # Without legal moves, the game ends at its first one, and only the rewards of that end are seen.
    is_found = fault not in ("", "asks a judge") and (family == "Nim" or fault != "raises")
    assert [env_id in problem and "a trial game failed" in problem for problem in problems] == [True] * is_found
    if not is_found:
        rows = [text for name, text in make_engine_plan(config).describe() if name == "rewards not seen"]
        unseen = "no network here" if fault == "asks a judge" else "knows no legal moves" * (family != "Nim")
        assert [unseen in row for row in rows] == [True] * bool(unseen)


@pytest.mark.parametrize(("fault", "seconds"), [("endless", 60.0), ("slow", 0.5)])
def test_trial_game_has_an_end_by_turns_and_by_time(fault, seconds, monkeypatch):
    monkeypatch.setattr(env_catalogue, "TRIAL_TIMEOUT_S", seconds)
    tried = trial(config_of(env_id=register_odd("Nim", fault), max_turns=999).train_envs[0])
    assert tried.unseen == "no trial game came to its end"
    assert max(tried.lengths) == 200 if fault == "endless" else max(tried.lengths) < 5


@pytest.mark.parametrize(("allowance", "is_out"), [(1, False), (0, True)])
async def test_invalid_move_that_may_be_repeated_is_not_the_player_s_end(allowance, is_out):
    """The critic judges a player's last step, unless the turn cap cut off a player who could still move."""
    agent = AgentSpec(pid=0, model=BASE, collect_data=True, prompt_template="tiny", action_extraction_fn="default")
    player = PolicyPlayer(_nonsense, TEMPLATES["tiny"], agent, 2)
    record = await played("TicTacToe-v0-train", {0: player}, num_trained=1, error_allowance=allowance, max_turns=1)
    (step,) = record.trajectories[0].steps
    assert (step.context.is_invalid, step.context.is_out) == (True, is_out)


async def _nonsense(prompt: str, version: int, *_: object) -> Generation:
    return make_generation([0], text="nonsense")


def test_env_is_isolated_if_its_arguments_make_its_reset_slow():
    small = (("dim_room", (5, 5)), ("num_boxes", 1))
    slow = EvalEnvSpec(env_id="Sokoban-v0-train", num_players=1)
    assert is_isolated(slow) and not is_isolated(slow.model_copy(update={"env_kwargs": small}))


@pytest.mark.parametrize(("resets_s", "is_slow"), [((0.3, 0.001), False), ((0.3, 0.3), True), ((2.0,), True)])
def test_one_reset_is_not_slow_if_a_garbage_collection_may_be_the_reason(monkeypatch, resets_s, is_slow):
    read = iter([time for reset_s in resets_s for time in (0.0, reset_s)])
    monkeypatch.setattr(time, "thread_time", lambda: next(read))
    assert probe.__wrapped__("Nim-v0-train", 2).has_slow_reset is is_slow


def test_eval_env_inherits_arguments_or_is_named_and_a_spec_is_made_of_anothers_values():
    (env,) = config_of(NIM, env_kwargs={"piles": [1, 2]}, error_allowance=2).eval_envs
    assert (env.env_kwargs, env.error_allowance) == ((("piles", (1, 2)),), 2)
    assert EvalEnvSpec.model_validate(env.model_dump(mode="json")) == env
    (spec,) = config_of(env_kwargs={"piles": [1, 1]}).train_envs
    assert TrainEnvSpec(**vars(spec)) == spec
    (said,) = played_otherwise(config_of(NIM | {"env_kwargs": {"piles": [3]}}, error_allowance=1))
    assert said.endswith("is evaluated with env_kwargs = {'piles': (3,)}, trained with {}")


def test_same_env_and_opponent_may_be_listed_once_for_each_sampling():
    greedy, cool = NIM | {"temperature": 0}, NIM | {"temperature": 0.3}
    config = config_of(NIM, greedy, cool)
    assert [env.opponent for env in config.eval_envs] == [
        "scripted:random", "scripted:random, greedy", "scripted:random, T=0.3"
    ]  # fmt: skip
    assert not [problem for problem in training_rules(config) if "listed" in problem]
    assert "listed 2 times" in "".join(training_rules(config_of(greedy, greedy)))


@pytest.mark.parametrize("in_lock_step", [False, True])
async def test_sampling_of_an_eval_env_reaches_the_engine(in_lock_step):
    asked: list[Sampling | None] = []

    async def generate(*_: Any, sampling: Sampling | None = None) -> Generation:
        asked.append(sampling)
        raise RuntimeError("asked")

    lock_step = LockStep(generate)
    factory = PlayerFactory(lock_step.generate if in_lock_step else generate, sampling_seed=0)
    for keys in ({"temperature": 0, "top_p": 0.5}, {}):
        spec = new_game(EvalEnvSpec.model_validate(NIM | keys), [BASE, BASE], 0, "eval", 1)
        turn = factory.players(spec)[0].act("observation")
        with pytest.raises((RuntimeError, ExceptionGroup)):
            await (lock_step.play([turn]) if in_lock_step else turn)
    assert asked == [Sampling(temperature=0, top_p=0.5), None]


def test_titles_name_the_sampling_and_no_opponent_if_there_is_none():
    for keys, title in (({"temperature": 0}, "TowerOfHanoi-v0-train, greedy;"), ({}, "TowerOfHanoi-v0-train;")):
        (env,) = config_of({"env_id": "TowerOfHanoi-v0-train", "num_players": 1} | keys).eval_envs
        tally = Tally()
        tally.add("na", 0.5, own_invalid=False)
        shown = tally.evaluation("before", "base", 0, env.env_id, env.opponent).describe()
        assert f"in 1 games of {title}" in shown
    opponents = ("none", "none, greedy", "scripted:random, greedy", "nonesuch/model")
    ends = ("", ", greedy", " against scripted:random, greedy", " against nonesuch/model")
    assert tuple(map(against, opponents)) == ends
