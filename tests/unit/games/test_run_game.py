import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import textarena as ta
from msgspec import structs
from textarena.wrappers import LLMObservationWrapper

from fakes.game_records import RANDOM, make_generation, make_spec
from unstable_lite.config.training import RunConfig
from unstable_lite.errors import ConfigError, RequestError
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.environments import Environment, outcomes_from_rewards
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.policy import Generates
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.games.templates import format_prompt
from unstable_lite.learner.critic import _is_capped
from unstable_lite.rollout.run_game import GameRunner, new_record, run_game
from unstable_lite.types import FinishReason, GameRecord, GameSpec, Generation, ModelRef

POLICY = ModelRef(uid="ckpt-3", kind="checkpoint", adapter_version=3)


def generation(text: str, prompt: str = "", version: int = 3) -> Generation:
    ids = list(text.encode())
    return make_generation(ids, prompt_ids=list(prompt.encode()), text=text, adapter_version=version)


def saying(answer: Callable[[str, int], str], finish_reason: FinishReason = "stop") -> Generates:
    """Return a function that generates `answer(prompt, number of the request)`."""
    requests = itertools.count()

    async def generate(prompt: str, version: int, *_: object) -> Generation:
        return replace(generation(answer(prompt, next(requests)), prompt, version), finish_reason=finish_reason)

    return generate


def first_cell(prompt: str, _turn: int = 0) -> str:
    """Play TicTacToe by taking the first free cell, in a box."""
    board = prompt.rsplit("Current Board", 1)[-1]
    cell = next(iter(re.findall(r"\[(\d)\]|\b(\d)\b", board)))
    return f"I take it: \\boxed{{{cell[0] or cell[1]}}}"


first_legal_cell = saying(first_cell)


def seat(*models: ModelRef, **spec: Any) -> GameSpec:
    return make_spec(*models, trained=[pid for pid, of in enumerate(models) if of.kind == "checkpoint"], **spec)


def tictactoe(*models: ModelRef, max_turns: int = 50, seed: int = 4) -> GameSpec:
    return seat(*models, env_id="TicTacToe-v0-train", game_idx=1, max_turns=max_turns, seed=seed)


def several(env_id: str, num_players: int, seed: int = 4, max_turns: int = 60) -> GameSpec:
    return seat(*[POLICY] * num_players, env_id=env_id, seed=seed, max_turns=max_turns)


async def played(spec: GameSpec, generate: Generates = first_legal_cell) -> GameRecord:
    record = new_record(spec)
    await run_game(record, make_in_process(spec), PlayerFactory(generate).players(spec))
    return record


class Answers:
    def __init__(self, env_id: str, seed: int) -> None:
        pass

    async def act(self, observation: str) -> str:
        return "[4]"


async def test_opponent_without_a_reply_ends_the_run_and_not_the_env():
    answers = ModelRef(uid="fixed-answers", kind="fixed", name=f"{__name__}:Answers")
    runner = GameRunner(PlayerFactory(first_legal_cell), RunConfig())
    with pytest.raises(ConfigError, match=r"Answers\.act .*Reply.*'\[4\]'"):
        await runner.play(tictactoe(answers, POLICY))


async def test_every_turn_is_kept_and_those_of_collected_seats_are_steps_with_their_context():
    past = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)
    kinds = {}
    for opponent in (RANDOM, past, POLICY):
        models = (POLICY, opponent)
        record = await played(tictactoe(*models))
        assert [turn.pid for turn in record.turns] == [index % 2 for index in range(len(record.turns))]
        collected = [0] if opponent is RANDOM else [0, 1]
        assert ([trajectory.pid for trajectory in record.trajectories], record.end) == (collected, "natural")
        kinds[opponent.uid] = record.trajectories[0].steps[0].context.opponent_kinds
        for trajectory in record.trajectories:
            pid = trajectory.pid
            assert trajectory.final_reward == record.rewards[pid]
            assert trajectory.num_turns == len(record.turns)
            own_turns = [turn for turn in record.turns if turn.pid == pid]
            for index, (step, turn) in enumerate(zip(trajectory.steps, own_turns, strict=True)):
                assert step.obs == format_prompt("tiny", turn.observation, 2)
                assert bytes(step.generation.prompt_ids.astype(np.uint8)).decode() == step.obs
                assert bytes(step.generation.completion_ids.astype(np.uint8)).decode() == step.act
                assert len(step.generation.logprobs) == len(step.generation.completion_ids)
                assert step.generation.adapter_version == models[pid].adapter_version
                context = step.context
                assert (context.env_id, context.game_idx, context.pid) == (record.spec.env_id, 1, pid)
                assert context.group_idx is None
                assert (context.turn, context.player_turn) == (2 * index + pid, index)
                assert (context.num_turns, context.num_player_turns) == (len(record.turns), len(own_turns))
                assert (context.outcome, context.end) == (record.outcomes[pid], "natural")
                assert context.final_reward == record.rewards[pid]
                assert (context.is_invalid, context.is_cut_off, context.format_ok) == (False, False, True)
                assert [(one.pid, one.uid) for one in context.opponents] == [(1 - pid, models[1 - pid].uid)]
    assert kinds == {"fixed-scripted:random": "scripted", "ckpt-1": "checkpoint", "ckpt-3": "mirror"}


async def test_steps_mark_truncated_answers_and_the_invalid_move_that_ended_the_game():
    record = await played(tictactoe(POLICY, POLICY), saying(lambda *_: "\\boxed{4}", "length"))
    (first,), (second,) = (trajectory.steps for trajectory in record.trajectories)
    assert (first.context.is_invalid, second.context.is_invalid) == (False, True)
    assert first.context.is_cut_off and second.context.is_cut_off
    assert (first.context.outcome, second.context.outcome) == ("win", "loss")
    assert first.context.end == second.context.end == "invalid"
    assert first.format_feedback == {"correct_answer_format": True, "invalid_move": False}
    record = await played(tictactoe(POLICY, RANDOM), saying(lambda *_: "no box here" * 1000))
    assert len(record.turns[0].action) == 2000 < len(record.turns[0].text), "the env gets no endless answer"
    assert (record.end, record.invalid_pids, record.outcomes) == ("invalid", (0,), {0: "loss", 1: "win"})
    (step,) = record.trajectories[0].steps
    assert step.format_feedback == {"correct_answer_format": False, "invalid_move": True}


def marked(record: GameRecord) -> list[tuple[int, int]]:
    """Return player and turn of each step that is marked as invalid."""
    steps = [(step, trajectory.pid) for trajectory in record.trajectories for step in trajectory.steps]
    return [(pid, step.step_info["turn"]) for step, pid in steps if step.format_feedback["invalid_move"]]


async def test_invalid_move_that_eliminates_one_of_three_does_not_end_the_game():
    def first_is_illegal(prompt: str, turn: int) -> str:
        return f"\\boxed{{{legal_actions('LiarsDice-v0-small-train', prompt)[-1]}}}" if turn else "garbage"

    record = await played(several("LiarsDice-v0-small-train", 3), saying(first_is_illegal))
    (offender,) = record.invalid_pids
    assert record.turns[0].pid == offender
    assert record.end == "natural"
    assert len(record.turns) > 4
    assert marked(record) == [(offender, 0)]


async def test_player_whom_the_rules_eliminated_before_the_turn_cap_is_out():
    """A player without dice is out of Liar's Dice: nothing that it could still do is cut off."""

    def calls(prompt: str, _turn: int) -> str:
        actions = legal_actions("LiarsDice-v0-small-train", prompt)
        return f"\\boxed{{{actions[0] if '[Call]' in actions else actions[-1]}}}"

    whole = await played(several("LiarsDice-v0-small-train", 3), saying(calls))
    first_out = next(pid for pid, reward in whole.rewards.items() if reward == min(whole.rewards.values()))
    last_turn = max(index for index, turn in enumerate(whole.turns) if turn.pid == first_out)
    record = await played(several("LiarsDice-v0-small-train", 3, max_turns=len(whole.turns) - 1), saying(calls))
    assert last_turn < len(record.turns) - 1 and record.end == "truncated"
    is_out = {t.pid: [step.context.is_out for step in t.steps if step.context] for t in record.trajectories}
    assert [pid for pid in is_out if is_out[pid][-1]] == [first_out]
    assert not any(out for each in is_out.values() for out in each[:-1])


@pytest.mark.parametrize("env_id", ["Snake-v0-train", "Surround-v0-train"])
def test_dead_bodies_are_eliminated(env_id):
    env = Environment(env_id, 3, 0)
    env.observe()
    bodies = env._unwrapped.state.game_state["snakes" if "Snake" in env_id else "players"]
    assert env.eliminated == ()
    bodies[1].alive = False
    assert env.eliminated == (1,)


async def test_invalid_move_is_marked_even_if_its_player_continues():
    def every_fifth_is_illegal(prompt: str, turn: int) -> str:
        legal = "\\boxed{[draw]}" if "[draw], [take]" in prompt else "\\boxed{[discard]}"
        return legal if turn % 5 else "garbage"

    record = await played(several("Golf-v0-train", 3, max_turns=18), saying(every_fifth_is_illegal))
    assert [index for index, turn in enumerate(record.turns) if turn.is_invalid] == [0, 5, 10, 15]
    assert sorted(marked(record)) == sorted((record.turns[index].pid, index) for index in (0, 5, 10, 15))
    assert record.end == "truncated"
    assert record.invalid_pids == ()


@pytest.mark.parametrize(
    ("rewards", "has_teams", "outcomes"),
    [
        ((-1.0, -1.0), False, ["draw", "draw"]), ((-0.2, -0.9), False, ["win", "loss"]),
        ((1, 1, -1), True, ["win", "win", "loss"]), ((1, 1, -1), False, ["draw", "draw", "loss"]),
        ((0, 0, 0), True, ["draw"] * 3), ((0.5, 1, -1), False, ["loss", "win", "loss"]), ((0.3,), False, ["na"]),
    ],
)  # fmt: skip
def test_team_wins_together_and_other_ties_are_draws(rewards, has_teams, outcomes):
    assert list(outcomes_from_rewards(dict(enumerate(rewards)), has_teams).values()) == outcomes


@pytest.mark.parametrize(
    ("env_id", "num_players", "sizes"),
    [
        ("SecretMafia-v0-train", 6, [2, 4]), ("Taboo-v0-train", 6, [3, 3]), ("Nim-v0-train", 2, None),
        ("LiarsDice-v0-small-train", 3, None),
    ],
)  # fmt: skip
def test_env_says_who_is_in_which_team(env_id, num_players, sizes):
    teams = Environment(env_id, num_players, 0).teams
    assert teams is None or set(teams) == set(range(num_players))
    assert (None if teams is None else sorted(Counter(teams.values()).values())) == sizes


@pytest.mark.parametrize("names_teams", [True, False])
async def test_record_has_the_teams_and_forfeiting_costs_partners_the_win(names_teams):
    class Pairs(ta.Env):  # type: ignore[misc]
        """Each player moves once; then player 0 is punished."""

        def reset(self, num_players: int, seed: int | None = None) -> None:
            self.state = ta.TeamMultiPlayerState(num_players=num_players, seed=seed)
            self.state.reset(player_prompt_function=lambda player_id, game_state: "Play [0].")
            if names_teams:
                self.teams = {pid: pid % 2 for pid in range(num_players)}

        def step(self, action: str) -> tuple[bool, dict[str, object]]:
            self.state.set_draw(reason="over")
            self.state.rewards[0] = -1
            return self.state.step()  # type: ignore[no-any-return]

    env_id = f"Pairs{names_teams}-v0"
    ta.envs.registration.register(id=env_id, entry_point=Pairs, default_wrappers=[LLMObservationWrapper])
    record = await played(several(env_id, 4))
    teams = {pid: str(pid % 2) for pid in range(4)} if names_teams else {0: "-1.0", 1: "0.0", 2: "0.0", 3: "0.0"}
    assert record.teams == teams
    assert list(record.outcomes.values()) == (["loss", "win"] * 2 if names_teams else ["loss", "win", "win", "win"])


async def test_game_at_its_turn_cap_is_truncated_and_pays_no_player_except_alone():
    record = await played(tictactoe(POLICY, POLICY, max_turns=3))
    assert (record.end, len(record.turns)) == ("truncated", 3)
    assert (record.rewards, record.outcomes) == ({0: 0.0, 1: 0.0}, {0: "draw", 1: "draw"})
    env_id = "GuessTheNumber-v0-train"
    spec = seat(POLICY, env_id=env_id, seed=4, max_turns=1)
    env = Environment(env_id, 1, spec.seed)._unwrapped
    distance = abs(env.state.game_state["game_number"] - 7)
    assert distance > 0
    record = await played(spec, saying(lambda *_: "\\boxed{[7]}"))
    assert (record.end, record.outcomes) == ("truncated", {0: "na"})
    assert record.rewards == {0: 1 - distance / (env.max_number - env.min_number)}
    assert record.trajectories[0].final_reward == record.rewards[0]


def failing(num_answers: int, error: Exception) -> Generates:
    """Return a function that takes the first free cell in its first answers and then raises."""

    def answer(prompt: str, turn: int) -> str:
        if turn >= num_answers:
            raise error
        return first_cell(prompt)

    return saying(answer)


async def test_full_context_is_trained_on_as_the_turn_cap_is():
    too_long = RequestError("prompt has 101 tokens; the limit is 99", reason="prompt_too_long")
    full = await played(tictactoe(POLICY, RANDOM), failing(2, too_long))
    capped = await played(tictactoe(POLICY, RANDOM, max_turns=4))
    assert (full.rewards, full.outcomes, full.turns) == (capped.rewards, capped.outcomes, capped.turns)
    for mine, its in zip(full.trajectories[0].steps, capped.trajectories[0].steps, strict=True):
        assert (mine.context.reason, its.context.reason) == ("context_full", "")
        assert structs.replace(mine.context, reason="") == its.context
        assert _is_capped(mine.context)
    nobody = await played(tictactoe(POLICY, POLICY), failing(1, too_long))
    assert (nobody.end, [len(trajectory.steps) for trajectory in nobody.trajectories]) == ("truncated", [1, 0])


async def test_failed_game_stays_void_and_keeps_its_turns():
    spec = tictactoe(POLICY, POLICY)
    record = new_record(spec)
    with pytest.raises(RuntimeError):
        await run_game(record, make_in_process(spec), PlayerFactory(failing(2, RuntimeError())).players(spec))
    assert (record.end, len(record.turns)) == ("void", 2)
