"""Envs in processes that can be killed play the same games; the death of a process makes its games void."""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from unstable_lite.config import Config
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.errors import EnvError
from unstable_lite.games import env_pool
from unstable_lite.games.env_catalogue import is_isolated
from unstable_lite.games.env_pool import EnvPool, GameEnvironment, make_in_process, opened_env_pool
from unstable_lite.planning.plan import make_plan
from unstable_lite.types import GameSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMIT_S = 4.0
SET_ORDER_ENV = "fakes.set_order_env:WordNim-v0"
NUMPY_ENV = "fakes.numpy_env:NumpyNim-v0"
DRAWING = [
    ("openspiel:leduc_poker", 2), ("KuhnPoker-v0-train", 2), ("LiarsDice-v0-small-train", 3),
    ("2048-v0-ultra-easy-train", 1), ("Taboo-v0-animals-train", 4),
]  # fmt: skip


def game(env_id: str, num_players: int, seed: int, isolated: bool | None = True) -> GameSpec:
    spec = GameSpec(
        game_idx=seed, kind="train", env_id=env_id, num_players=num_players, seed=seed, agent_specs=(), max_turns=200
    )
    return msgspec.structs.replace(spec, isolated=isolated)


async def play(environment: GameEnvironment, seed: int) -> list[object]:
    """Play a game with noise and return everything that a player could see of it."""
    noise, seen = random.Random(seed), list[object]()
    turn: tuple[int, str] | None = environment.observe()
    for _ in range(40):
        seen.append(turn)
        words = ["[check]", "[bet]", "[call]", "[up]", "[left]", "[Bid: 1, 3]", f"[{noise.randrange(4)} 1]"]
        turn = await environment.advance(noise.choice(words))
        seen.append((environment.was_invalid, environment.teams, environment.eliminated))
        if turn is None:
            seen.append(environment.close())
            break
        seen.append(environment.rewards_so_far())
    environment.drop()
    return seen


def reasons(turns: list[Any]) -> list[str]:
    """Return the reason of each EnvError, and "" for a turn."""
    return ["" if isinstance(turn, tuple) else turn.reason for turn in turns]


def own_children() -> list[psutil.Process]:
    """Return the processes of envs; other tests' servers may also be children of this process."""
    return [child for child in psutil.Process().children() if child.pid not in _others]


_others: set[int] = set()


@contextlib.asynccontextmanager
async def opened_pool(logs: Path) -> AsyncIterator[EnvPool]:
    """Open a pool of two processes, in which Nim reacts to six odd moves."""
    others = {child.pid for child in psutil.Process().children()} - _others
    _others.update(others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_pool, "MODULE", "fakes.odd_env_process")
        patch.setattr(env_pool, "MOST_PROCESSES", 2)
        async with opened_env_pool(logs, LIMIT_S) as opened:
            yield opened
    assert not own_children()
    _others.difference_update(others)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(logs: Path) -> AsyncIterator[EnvPool]:
    """Yield one pool for most tests, because a start of its processes takes two seconds."""
    async with opened_pool(logs) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def environments(shared: EnvPool) -> AsyncIterator[EnvPool]:
    """Yield the shared pool, whose processes have equally many games."""
    yield shared
    for host in shared._hosts:  # a test may leave games open
        host.num_games = 0


@pytest_asyncio.fixture(loop_scope="module")
async def unstarted(tmp_path: Path) -> AsyncIterator[EnvPool]:
    async with opened_pool(tmp_path) as opened:
        yield opened


@pytest.mark.nightly
async def test_env_that_depends_on_the_hash_seed_is_isolated_with_a_fixed_one(environments: EnvPool) -> None:
    envs = ("WordChains-v0", "fakes.numpy_env:NumpyNim-v0")
    assert [is_isolated(EvalEnvSpec(env_id=env_id, num_players=2)) for env_id in envs] == [True, False]
    seen = [(await environments.make(game(SET_ORDER_ENV, 2, seed, isolated=None))).observe() for seed in range(4)]
    code = "from fakes.set_order_env import *; from unstable_lite.games.environments import Environment\n"
    code += f"print([Environment({SET_ORDER_ENV!r}, 2, seed).observe() for seed in range(4)])"
    given = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
    assert str(seen) == subprocess.check_output([sys.executable, "-c", code], env=given, text=True).strip()
    env = {"env_id": SET_ORDER_ENV, "num_players": 2, "num_actors": 2}
    for keys, title, words in (({}, "hash seed", "55 MB"), ({"isolated": False}, "warning", "remove isolated = false")):
        rows = make_plan(Config.model_validate({"train_envs": [env | keys]})).describe()
        assert [words in text for name, text in rows if name == title and SET_ORDER_ENV in text] == [True]


async def test_game_is_the_same_in_a_separate_process(environments: EnvPool) -> None:
    for env_id, num_players in DRAWING:
        here = [await play(make_in_process(game(env_id, num_players, seed)), seed) for seed in range(6)]
        made = await asyncio.gather(*(environments.make(game(env_id, num_players, seed)) for seed in range(6)))
        assert await asyncio.gather(*(play(env, seed) for seed, env in enumerate(made))) == here


async def test_env_with_numpy_numbers_is_the_same_in_a_separate_process(environments: EnvPool) -> None:
    for moves in (["[0 3]", "[1 4]", "[2 5]"], ["[0 3]", "[7 7]"]):
        played = []
        for env in (make_in_process(game(NUMPY_ENV, 2, 0)), await environments.make(game(NUMPY_ENV, 2, 0))):
            turns = [env.observe(), *[await env.advance(move) for move in moves]]
            assert [type(turn[0]) for turn in turns if turn] == [int] * len(moves)
            played.append((turns, env.close()))
            env.drop()
        assert played[0] == played[1]
        assert played[1][1][1][1]["invalid_move"] == (moves[-1] == "[7 7]")


async def test_games_of_a_dead_process_are_void_and_the_next_ones_are_played(environments: EnvPool) -> None:
    env_id, num_players = DRAWING[1]
    here = [await play(make_in_process(game(env_id, num_players, seed)), seed) for seed in range(8)]
    made = await asyncio.gather(*(environments.make(game(env_id, num_players, seed)) for seed in range(8)))
    os.kill(own_children()[0].pid, signal.SIGKILL)
    ended = await asyncio.gather(*(play(env, seed) for seed, env in enumerate(made)), return_exceptions=True)
    lost = [one for one in ended if isinstance(one, EnvError)]
    assert [error.reason for error in lost] == ["env_lost"] * 4
    assert all(str(error).startswith("KuhnPoker-v0-train: its process died") for error in lost)
    assert all(one == same for one, same in zip(ended, here, strict=True) if one not in lost)
    for _ in range(2):  # until the new process has games, too
        made = await asyncio.gather(*(environments.make(game(env_id, num_players, seed)) for seed in range(8)))
        assert await asyncio.gather(*(play(env, seed) for seed, env in enumerate(made))) == here


@pytest.mark.parametrize(
    ("move", "says", "reason"),
    [
        ("[9 1]", r"run\.env_timeout_s = 4\b.*killed", "env_timeout"),
        ("[9 2]", r"Nim-v0-train: .*ValueError: nine piles", "env_raised"),
        ("[9 3]", r"Nim-v0-train: .*was killed by SIGKILL", "env_died"),
        pytest.param("[9 4]", r"Nim-v0-train: .*ProtocolError", "env_died", marks=pytest.mark.nightly),
    ],
)
async def test_failing_call_says_why_and_a_death_loses_the_other_games_of_its_process(
    environments: EnvPool, move: str, says: str, reason: str, logs: Path
) -> None:
    earlier = {log: log.stat().st_size for log in logs.iterdir()}
    specs = [game("Nim-v0-train", 2, seed) for seed in range(6)]
    made = await asyncio.gather(*(environments.make(spec) for spec in specs))
    later = "" if reason == "env_raised" else "env_lost"
    # Games 0, 2 and 4 share a process: the first one has its answer before the process dies.
    ended: list[Any] = [await made[0].advance("[0 1]")]
    steps = [made[index].advance(move if index == 2 else "[0 1]") for index in range(1, 6)]
    async with asyncio.timeout(30):
        ended += await asyncio.gather(*steps, return_exceptions=True)
    assert reasons(ended) == ["", "", reason, "", later, ""]
    assert re.search(says, str(ended[2]))
    stacks = "".join(log.read_bytes()[earlier.get(log, 0) :].decode() for log in logs.glob("env-*.log"))
    assert "in odd_step" in stacks or move in ("[9 3]", "[9 4]")
    steps = [made[index].advance("[0 9]") for index in ((0, 1, 3, 5) if later else (0, 1, 3, 5, 4))]
    ended = await asyncio.gather(*steps, return_exceptions=True)
    assert [getattr(one, "reason", one) for one in ended] == [later or None, *[None] * (len(steps) - 1)]


@pytest.mark.nightly
async def test_abandoned_call_is_the_one_blamed(environments: EnvPool) -> None:
    made = await asyncio.gather(*(environments.make(game("Nim-v0-train", 2, seed)) for seed in range(4)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await made[0].advance("[9 1]")
    made[0].drop()
    ended = await asyncio.gather(*(environment.advance("[0 1]") for environment in made[1:]), return_exceptions=True)
    assert reasons(ended) == ["", "env_lost", ""]


@pytest.mark.nightly
async def test_processes_start_late_get_one_key_and_blame_no_game_if_they_die_between_calls(
    unstarted: EnvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = {"PublicGoodsGame-v0-train": 3, "LiarsDice-v0-train": 3, "Sokoban-v0-train": 1}
    assert [is_isolated(EvalEnvSpec(env_id=env_id, num_players=n)) for env_id, n in envs.items()] == [True, False, True]
    for name in ("OPENROUTER_API_KEY", "OPENAI_API_KEY", "WANDB_API_KEY"):
        monkeypatch.setenv(name, f"the {name}")
    await unstarted.make(game("Nim-v0-train", 2, 0, isolated=None))
    assert not own_children()
    await unstarted.make(game("PublicGoodsGame-v0-train", 3, 0, isolated=None))
    assert len(own_children()) == 2
    for child in own_children():
        given = {name: value for name, value in child.environ().items() if name.endswith("_API_KEY")}
        assert given == {"OPENROUTER_API_KEY": "the OPENROUTER_API_KEY"}
    # A process that dies after its answer: it takes a second to record that the call has ended.
    here, there = make_in_process(game("Nim-v0-train", 2, 0)), await unstarted.make(game("Nim-v0-train", 2, 0))
    assert await there.advance("[9 6]") == await here.advance("[0 1]")
    for child in own_children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EnvError) as caught:
        await there.advance("[1 1]")
    assert caught.value.reason == "env_lost"


async def test_isolated_env_gets_arguments_and_allowance(environments: EnvPool) -> None:
    spec = msgspec.structs.replace(
        game("ConnectFour-v0-train", 2, 1), env_kwargs=(("num_cols", 5), ("num_rows", 4)), error_allowance=1
    )
    isolated = await environments.make(spec)
    assert "4 rows and 5 columns" in isolated.observe()[1]
    assert await isolated.advance("nonsense") is not None
    assert isolated.was_invalid
    isolated.drop()
