"""The resolution of a fixed opponent's name, and the reasons why it cannot play."""

import re
from statistics import fmean

import pytest

from fakes.game_records import make_spec
from unstable_lite.config.env_ids import is_openspiel
from unstable_lite.config.games import EnvSpec, OpponentsConfig
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.openspiel.game import load_game
from unstable_lite.games.players.factory import BLIND, SCRIPTED_PLAYERS, PlayerFactory, is_remote, opponent_problem
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameSpec, ModelRef, Reply

LOOKING_PLAYERS = [name for name in SCRIPTED_PLAYERS if not name.startswith(BLIND) and name != "scripted:cfr"]
TICTACTOE, NIM, OTHER = "TicTacToe-v0-train", "Nim-v0-train", "SimpleNegotiation-v0-train"
KUHN = "openspiel:kuhn_poker"
SPIEL_NIM = "openspiel:nim(is_misere=False,pile_sizes=3;4;5)"
GOOFSPIEL = "openspiel:goofspiel(imp_info=True,num_cards=4,points_order=descending)"
SIGNATURE = "__init__(self, env_id: str, seed: int)"


class FirstCell:
    """A user's own opponent."""

    def __init__(self, env_id: str, seed: int) -> None:
        self.env_id, self.seed = env_id, seed

    async def act(self, observation: str) -> Reply:
        action = observation.rpartition("Available Moves: '")[2].partition("'")[0]
        return Reply(action=action, text=f"{self.env_id} {self.seed}: {action}", prompt=observation)


class NotAsync(FirstCell):
    def act(self, observation: str) -> Reply:  # type: ignore[override]
        raise NotImplementedError


class WantsMore(FirstCell):
    def __init__(self, env_id: str, seed: int, more: int) -> None: ...


def MakesNothing(env_id: str, seed: int) -> None: ...


def fixed(name: str) -> ModelRef:
    return ModelRef(uid=f"fixed-{name}", kind="fixed", name=name)


def game_between(*names: str, env_id: str, seed: int) -> GameSpec:
    return make_spec(*map(fixed, names), env_id=env_id, seed=seed, max_turns=99)


async def no_engine(*_: object) -> None:
    raise AssertionError


async def test_custom_opponent_class_plays_a_game():
    name = f"{__name__}:FirstCell"
    spec = game_between(name, "scripted:optimal", env_id=TICTACTOE, seed=8)
    record = new_record(spec)
    async with PlayerFactory(no_engine) as seats:  # type: ignore[arg-type]
        assert seats.can_play(fixed(name))
        await run_game(record, make_in_process(spec), seats.players(spec))
    assert record.end == "natural"
    assert record.outcomes[0] != "win"
    env_id, seed, action = record.turns[0].text.split()
    assert (env_id, action) == (TICTACTOE, "[0]")
    assert seed != "8:"


@pytest.mark.parametrize("seat", [0, 1])
async def test_random_players_actions_are_independent_of_the_dealt_card(seat):
    bets: dict[str, list[bool]] = {"J": [], "Q": [], "K": []}
    async with PlayerFactory(no_engine) as seats:  # type: ignore[arg-type]
        for seed in range(0, 1200, 2):
            spec = game_between("scripted:random", "scripted:random", env_id="KuhnPoker-v0-train", seed=seed)
            environment = make_in_process(spec)
            pid, observation = environment.observe()
            if pid != seat:
                turn = await environment.advance("[check]")
                assert turn is not None and turn[0] == seat
                observation = turn[1]
            card = re.findall(r"Your card is: '(.)'", observation)[-1]
            reply = await seats.players(spec)[seat].act(observation)
            bets[card].append(reply.action == "[bet]")
    for of_card in bets.values():
        assert len(of_card) > 150
        assert 0.4 < fmean(of_card) < 0.6


def first_observation(env_id: str) -> str:
    num_players = load_game(env_id).num_players() if is_openspiel(env_id) else 2
    return environment_of(EnvSpec(env_id=env_id, num_players=num_players), 0).observe()[1]


@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        *((name, TICTACTOE) for name in (*LOOKING_PLAYERS, f"{__name__}:FirstCell")), ("scripted:blind-random", NIM),
        ("scripted:random", GOOFSPIEL), ("scripted:mcts:10", SPIEL_NIM), ("scripted:cfr", KUHN),
        ("scripted:blind-random", KUHN),
    ],
)  # fmt: skip
def test_playable_opponent_has_no_problem(name, env_id):
    assert opponent_problem(name, env_id, first_observation(env_id)) is None
    assert not is_remote(fixed(name))


@pytest.mark.parametrize(
    ("name", "env_id", "says"),
    [
        ("scripted:optimum", TICTACTOE, "scripted:random, scripted:greedy"),
        ("scripted:Best", TICTACTOE, "scripted:Best"),
        ("scripted:blind-best", NIM, "scripted"),
        ("scripted:blind-greedy", NIM, "'Nim-v0-train'"),
        ("no_such_module:Player", TICTACTOE, "'no_such_module'"),
        (f"{__name__}:NoSuchPlayer", TICTACTOE, "'NoSuchPlayer'"),
        *((f"{__name__}:{name}", TICTACTOE, SIGNATURE) for name in ("NotAsync", "WantsMore", "MakesNothing")),
        *((name, OTHER, f"'{OTHER}'") for name in LOOKING_PLAYERS),
        ("scripted:greedy", NIM, "'Nim-v0-train'"),
        *((name, NIM, "Current Pile") for name in LOOKING_PLAYERS if name != "scripted:greedy"),
        ("scripted:mcts:10", KUHN, f"{KUHN} hides information, which the search would look at"),
        ("scripted:mcts:10", GOOFSPIEL, "hides information"),
        ("scripted:mcts:10", "openspiel:goofspiel", "has simultaneous moves"),
        ("scripted:mcts:10", "openspiel:2048", "pays before its end"),
        ("scripted:mcts:10", "openspiel:maedn", "cannot follow"),
        ("scripted:mcts:10", NIM, "plays games of OpenSpiel only"),
        ("scripted:mcts:0", SPIEL_NIM, "N playouts per move, from 1 to 10000"),
        ("scripted:mcts:", SPIEL_NIM, "N playouts per move"),
        ("scripted:mcts", SPIEL_NIM, "scripted:mcts:N"),
        ("scripted:cfr", "openspiel:kuhn_poker(players=3)", "zero-sum games of two"),
        ("scripted:cfr", "openspiel:matrix_pd", "zero-sum games of two"),
        ("scripted:cfr", "openspiel:pig", "zero-sum games of two"),
        ("scripted:cfr", "openspiel:connect_four(columns=3,rows=2,x_in_row=3)", "information states have one prompt"),
        ("scripted:cfr", "openspiel:liars_dice", "more than 50000 decision histories"),
        ("scripted:cfr", "KuhnPoker-v0-train", "plays games of OpenSpiel only"),
        ("scripted:optimal", KUHN, "no optimal player"),
        ("scripted:greedy", "openspiel:tic_tac_toe", "no greedy player"),
    ],
)
def test_opponent_that_cannot_play_is_refused_by_name(name, env_id, says):
    # An env of TextArena shows the text of TicTacToe, as a variant with another text would.
    problem = opponent_problem(name, env_id, first_observation(env_id if is_openspiel(env_id) else TICTACTOE))
    named = name if name.startswith("scripted:") else name.rpartition(":")[2]
    assert problem is not None and says in problem and named in problem


@pytest.mark.parametrize("name", ["vendor/model", "vendor/model:free", "gpt-4o", "llama3:8b", "qwen3:latest"])
def test_other_names_are_endpoint_models_and_need_a_key(name, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "for others")
    for variable in ("OPENROUTER_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    assert is_remote(fixed(name))
    assert "OPENROUTER_API_KEY" in str(opponent_problem(name, TICTACTOE, ""))
    elsewhere = OpponentsConfig(base_url="https://api.example.com/v1")
    assert opponent_problem(name, TICTACTOE, "", elsewhere) is None
