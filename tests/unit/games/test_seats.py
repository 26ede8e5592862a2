"""The resolution of a fixed opponent's name, and the reasons why it cannot play."""

import re
from statistics import fmean

import pytest

from fakes.game_records import make_spec
from unstable_lite.config.games import OpponentsConfig
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.environments import Environment
from unstable_lite.games.players.factory import BLIND, SCRIPTED_PLAYERS, PlayerFactory, is_remote, opponent_problem
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import GameSpec, ModelRef, Reply

LOOKING_PLAYERS = [name for name in SCRIPTED_PLAYERS if not name.startswith(BLIND) and name != "scripted:cfr"]
OBSERVATION = Environment("TicTacToe-v0-train", 2, 0).observe()[1]


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


def problem(name: str, env_id: str = "TicTacToe-v0-train") -> str | None:
    return opponent_problem(name, env_id, OBSERVATION)


def game_between(*names: str, env_id: str, seed: int) -> GameSpec:
    return make_spec(*map(fixed, names), env_id=env_id, seed=seed, max_turns=99)


async def no_engine(*_: object) -> None:
    raise AssertionError


async def test_custom_opponent_class_plays_a_game():
    name = f"{__name__}:FirstCell"
    spec = game_between(name, "scripted:optimal", env_id="TicTacToe-v0-train", seed=8)
    record = new_record(spec)
    async with PlayerFactory(no_engine) as seats:  # type: ignore[arg-type]
        assert seats.can_play(fixed(name))
        await run_game(record, make_in_process(spec), seats.players(spec))
    assert record.end == "natural"
    assert record.outcomes[0] != "win"
    env_id, seed, action = record.turns[0].text.split()
    assert (env_id, action) == ("TicTacToe-v0-train", "[0]")
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


@pytest.mark.parametrize("name", [*LOOKING_PLAYERS, f"{__name__}:FirstCell"])
def test_playable_opponent_has_no_problem(name):
    assert problem(name) is None
    assert not is_remote(fixed(name))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("scripted:optimum", "scripted:random, scripted:greedy"),
        ("scripted:Best", "scripted:Best"),
        ("no_such_module:Player", "'no_such_module'"),
        (f"{__name__}:NoSuchPlayer", "'NoSuchPlayer'"),
        (f"{__name__}:NotAsync", "__init__(self, env_id: str, seed: int)"),
        (f"{__name__}:WantsMore", "__init__(self, env_id: str, seed: int)"),
        (f"{__name__}:MakesNothing", "__init__(self, env_id: str, seed: int)"),
    ],
)
def test_opponent_that_cannot_be_made_says_why(name, says):
    assert says in str(problem(name))


@pytest.mark.parametrize("name", LOOKING_PLAYERS)
def test_scripted_opponent_in_an_unreadable_env_says_so(name):
    assert "'SimpleNegotiation-v0-train'" in str(problem(name, "SimpleNegotiation-v0-train"))
    says = "'Nim-v0-train'" if name == "scripted:greedy" else "Current Pile"
    assert says in str(problem(name, "Nim-v0-train")), "a variant with another text"


@pytest.mark.parametrize("name", ["vendor/model", "vendor/model:free", "gpt-4o", "llama3:8b", "qwen3:latest"])
def test_other_names_are_endpoint_models_and_need_a_key(name, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "for others")
    for variable in ("OPENROUTER_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)
    assert is_remote(fixed(name))
    assert "OPENROUTER_API_KEY" in str(problem(name))
    elsewhere = OpponentsConfig(base_url="https://api.example.com/v1")
    assert opponent_problem(name, "TicTacToe-v0-train", OBSERVATION, elsewhere) is None
