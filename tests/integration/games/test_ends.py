"""Ends of games that break or outgrow the context are the same in this process and in another one."""

import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec import structs

from fakes.raising_env import RAISED
from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.config.training import RunConfig
from unstable_lite.engines.base import check_length
from unstable_lite.errors import EnvError, OpponentError, RequestError
from unstable_lite.games import env_pool
from unstable_lite.games.env_pool import EnvPool, opened_env_pool
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.league.game_scheduler import new_game
from unstable_lite.rollout import run_game
from unstable_lite.rollout.run_game import GameRunner
from unstable_lite.types import BASE, REASONS, GameRecord, GameSpec, ModelRef, Reply

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENV = "fakes.raising_env:Raising-v0"
MODEL = ModelRef(uid=BASE, kind="checkpoint", adapter_version=0)
VOID = {
    **dict.fromkeys(("[api]", "[client]", "[chained]", "[group]"), "network"), "[file]": "os_error",
    "[memory]": "out_of_memory", "[timeout]": "timeout", "[process]": "process_died", "[blank]": "failed",
    "[no rewards]": "env_failed",
}  # fmt: skip
"""Reasons of void games, by the move. After the last two the env cannot show the board, and gives no rewards."""


class Says:
    """Player that says its words in order, the last one for ever, and whose context has a number of characters."""

    def __init__(self, words: Sequence[str], context: int = 10_000, kind: type[RequestError] = RequestError) -> None:
        self._words, self._context, self._kind = iter(words), context, kind
        self._last = ""

    async def act(self, observation: str) -> Reply:
        try:
            check_length(len(observation), 1, self._context)
        except RequestError as error:
            raise self._kind(str(error), reason=error.reason) from None
        self._last = next(self._words, self._last)
        return Reply(action=self._last, text=self._last, prompt=observation)


class Broken:
    """Player with a mistake in its code."""

    async def act(self, observation: str) -> Reply:
        raise KeyError("table")


class Kills:
    """Player that kills the processes of the envs before it acts."""

    def __init__(self, environments: EnvPool) -> None:
        self._environments = environments

    async def act(self, observation: str) -> Reply:
        for host in self._environments._hosts:
            os.kill(host._process.pid, signal.SIGKILL)
        return Reply(action="[a]", text="[a]", prompt=observation)


class Seats(PlayerFactory):
    def __init__(self, players: dict[int, Any]) -> None:
        self._says = players

    def players(self, spec: GameSpec) -> dict[int, Any]:
        return self._says

    async def wait_for_opponents(self, spec: GameSpec) -> None:
        pass


def spec_of(num_players: int = 2, allowance: int = 0, env_id: str = ENV, max_turns: int = 30) -> GameSpec:
    env = EvalEnvSpec(
        env_id=env_id, num_players=num_players, error_allowance=allowance, isolated=True, max_turns=max_turns
    )
    return new_game(env, [MODEL] * num_players, 0, "train", 2)


async def played(spec: GameSpec, environments: EnvPool | None, *players: Says) -> GameRecord:
    return await GameRunner(Seats(dict(enumerate(players))), RunConfig(), environments).play(spec)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["in this process", "isolated"])
async def environments(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EnvPool | None]:
    """Yield None, or a pool of one process for all tests, because its start takes two seconds."""
    if request.param == "in this process":
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_pool, "MOST_PROCESSES", 1)
        async with opened_env_pool(tmp_path_factory.mktemp("logs"), 20.0) as opened:
            yield opened


async def test_action_at_which_step_raises_is_an_invalid_move(environments: EnvPool | None) -> None:
    for move in ("[value]", "[recursion]", "[graph]", "[own package]", "[exit]"):
        for allowance in (0, 3):
            record = await played(spec_of(2, allowance), environments, Says(["[a]"]), Says([move]))
            assert (record.end, record.reason, record.invalid_pids) == ("invalid", "env_raised", (1,))
            assert (record.rewards, record.outcomes) == ({0: 1.0, 1: -1.0}, {0: "win", 1: "loss"})
            assert type(RAISED[move]).__name__ in str(record.error) and record.turns[-1].is_invalid
    alone = await played(spec_of(1), environments, Says(["[value]"]))
    assert (alone.rewards, alone.outcomes) == ({0: -1.0}, {0: "na"})
    three = await played(spec_of(3), environments, Says(["[a]"]), Says(["[value]"]), Says(["[a]"]))
    assert three.rewards == {0: 0.0, 1: -1.0, 2: 0.0}
    assert three.outcomes == {0: "draw", 1: "loss", 2: "draw"}
    partners = structs.replace(spec_of(), env_kwargs=(("has_teams", True),))
    assert (await played(partners, environments, Says(["[value]"]))).rewards == {0: -1.0, 1: 0.0}
    teams = await played(spec_of(4), environments, Says(["[value]"]))
    assert teams.rewards == {0: -1.0, 1: 0.0, 2: 0.0, 3: 0.0}
    assert teams.outcomes == {0: "loss", 1: "draw", 2: "draw", 3: "draw"}


async def test_world_outside_of_the_game_makes_it_void(environments: EnvPool | None) -> None:
    found = {}
    for move in VOID:
        record = await played(spec_of(), environments, Says(["[a]"]), Says([move]))
        assert record.end == "void" and record.rewards == {}
        found[move] = record.reason
    assert found == VOID and set(VOID.values()) < set(REASONS)


async def test_env_that_raises_at_every_action_ends_the_run(
    environments: EnvPool | None, caplog: pytest.LogCaptureFixture
) -> None:
    runner = GameRunner(Seats({0: Says(["[value]"])}), RunConfig(), environments)
    for _ in range(19):
        assert (await runner.play(spec_of())).end == "invalid"
    with pytest.raises(EnvError, match=r"20 games of .*no number in '²' \(raising_env.py, line \d+, in step\)"):
        await runner.play(spec_of())
    assert "invalid game 0 of fakes.raising_env:Raising-v0" in caplog.text and "Traceback" in caplog.text


async def test_games_lost_with_their_process_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_game, "MAX_VOID_GAMES", 2)
    async with opened_env_pool(tmp_path, 20.0) as opened:
        runner = GameRunner(Seats({0: Kills(opened)}), RunConfig(), opened)
        for _ in range(3):
            record = await runner.play(spec_of())
            assert (record.end, record.reason, record.rewards) == ("void", "env_lost", {})


async def test_error_names_the_line_of_a_custom_player_and_not_the_env(
    environments: EnvPool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_game, "MAX_VOID_GAMES", 1)
    runner = GameRunner(Seats({0: Broken()}), RunConfig(), environments)
    with pytest.raises(EnvError, match=r"'table' \(test_ends.py, line \d+, in act\) .*Correct that line, or"):
        await runner.play(spec_of())


async def test_full_context_ends_a_game_as_the_turn_cap_does(environments: EnvPool | None) -> None:
    capped = await played(spec_of(max_turns=2), environments, Says(["[a]"]), Says(["[b]"]))
    for kind in (RequestError, OpponentError):
        full = await played(spec_of(), environments, Says(["[a]"], 100, kind), Says(["[b]"]))
        assert (full.end, full.reason) == ("truncated", "context_full")
        assert "tokens; the limit is 99 (engine.max_model_len = 100" in str(full.error)
        assert (full.rewards, full.outcomes, full.invalid_pids) == (capped.rewards, capped.outcomes, ())
        assert [turn.action for turn in full.turns] == [turn.action for turn in capped.turns] == ["[a]", "[b]"]
    assert (capped.end, capped.reason) == ("truncated", "")


@pytest.mark.parametrize(("num_players", "rewards"), [(1, [-1.0]), (2, [-1.0, 1.0]), (3, [-1.0, 0.0, 0.0])])
async def test_repeated_invalid_move_that_fills_the_context_loses(
    environments: EnvPool | None, num_players: int, rewards: list[float]
) -> None:
    players = [Says(["[invalid]"], 150), *[Says(["[a]"])] * (num_players - 1)]
    record = await played(spec_of(num_players, allowance=9), environments, *players)
    assert (record.end, record.reason, record.invalid_pids) == ("invalid", "context_full", (0,))
    assert [*record.rewards.values()] == rewards and 0 < len(record.turns) < 9


async def test_illegal_answer_that_fills_the_context_costs_what_the_env_says() -> None:
    spec = structs.replace(spec_of(allowance=3, env_id="openspiel:kuhn_poker"), reward_scale=1.0)
    first_prompt = len((await played(spec, None, Says(["?"]))).turns[0].observation)
    record = await played(spec, None, Says(["?"], first_prompt + 10), Says(["[pass]"]))
    assert (record.end, record.reason, record.rewards) == ("invalid", "context_full", {0: -2.0, 1: 2.0})


@pytest.mark.parametrize("kind", [RequestError, OpponentError])
async def test_prompt_too_long_at_the_start_is_void_and_ends_the_run(
    kind: type[RequestError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_game, "MAX_VOID_GAMES", 2)
    runner = GameRunner(Seats({0: Says(["[a]"], 5, kind)}), RunConfig())
    record = await runner.play(spec_of())
    assert (record.end, record.reason) == ("void", "prompt_too_long")
    with pytest.raises(EnvError, match=r"prompt has \d+ tokens; the limit is 4 \(engine\.max_model_len = 5"):
        await runner.play(spec_of())


async def test_game_that_its_env_cannot_parse_or_grade_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = await played(spec_of(1, env_id="Set-v0-train"), None, Says(["[², ², ²²]"]))
    assert (record.end, record.reason, record.rewards) == ("invalid", "env_raised", {0: -1.0})
    (tmp_path / "q.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    monkeypatch.setattr("unstable_lite.games.questions.is_right", lambda *_: 1 / 0)
    record = await played(spec_of(1, env_id=f"questions:{tmp_path / 'q.jsonl'}"), None, Says(["2"]))
    assert (record.end, record.outcomes) == ("invalid", {0: "loss"})
