from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from unstable_lite.config.training import RunConfig
from unstable_lite.errors import ConfigError
from unstable_lite.games.env_pool import make_in_process
from unstable_lite.games.environments import Environment, outcomes_from_rewards
from unstable_lite.games.players.factory import PlayerFactory
from unstable_lite.games.players.policy import PolicyPlayer
from unstable_lite.games.players.scripted import legal_actions
from unstable_lite.games.templates import TEMPLATES, format_prompt
from unstable_lite.rollout.game_runner import GameRunner
from unstable_lite.rollout.run_game import new_record, run_game
from unstable_lite.types import AgentSpec, GameRecord, GameSpec, Generation, ModelRef

POLICY = ModelRef(uid="ckpt-3", kind="checkpoint", adapter_version=3)
RANDOM = ModelRef(uid="fixed-scripted:random", kind="fixed", name="scripted:random")


def generation(text: str, prompt: str = "", version: int = 3) -> Generation:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Generation(
        prompt_ids=np.frombuffer(prompt.encode(), np.uint8).astype(np.int32),
        completion_ids=ids,
        logprobs=np.full(len(ids), -0.5, np.float32),
        text=text,
        finish_reason="stop",
        adapter_version=version,
    )


async def first_legal_cell(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
    """Play TicTacToe by taking the first free cell, in a box."""
    board = prompt.rsplit("Current Board", 1)[-1]
    cell = next(iter(re.findall(r"\[(\d)\]|\b(\d)\b", board)))
    return generation(f"I take it: \\boxed{{{cell[0] or cell[1]}}}", prompt, version)


def tictactoe(*models: ModelRef, max_turns: int = 50, seed: int = 4) -> GameSpec:
    return GameSpec(
        game_idx=1,
        kind="train",
        env_id="TicTacToe-v0-train",
        num_players=2,
        seed=seed,
        agent_specs=tuple(
            AgentSpec(
                pid=pid,
                model=model,
                collect_data=model.kind == "checkpoint",
                prompt_template="tiny",
                action_extraction_fn="default",
            )
            for pid, model in enumerate(models)
        ),
        max_turns=max_turns,
    )


async def played(spec: GameSpec, generate=first_legal_cell) -> GameRecord:  # type: ignore[no-untyped-def]
    record = new_record(spec)
    await run_game(record, make_in_process(spec), PlayerFactory(generate).players(spec), max_action_chars=2000)
    return record


class Answers:
    def __init__(self, env_id: str, seed: int) -> None:
        pass

    async def act(self, observation: str) -> str:
        return "[4]"


async def test_opponent_without_a_reply_ends_the_run_and_not_the_env() -> None:
    answers = ModelRef(uid="fixed-answers", kind="fixed", name=f"{__name__}:Answers")
    runner = GameRunner(PlayerFactory(first_legal_cell), RunConfig())
    with pytest.raises(ConfigError, match=r"Answers\.act .*Reply.*'\[4\]'"):
        await runner.play(tictactoe(answers, POLICY))


async def test_every_turn_is_kept_in_order_and_only_collected_seats_have_steps() -> None:
    record = await played(tictactoe(POLICY, RANDOM))
    assert [turn.pid for turn in record.turns] == [index % 2 for index in range(len(record.turns))]
    assert [trajectory.pid for trajectory in record.trajectories] == [0]
    assert len(record.trajectories[0].steps) == sum(turn.pid == 0 for turn in record.turns)
    assert record.end == "natural"
    assert record.trajectories[0].final_reward == record.rewards[0]
    assert record.trajectories[0].num_turns == len(record.turns)


async def test_step_holds_the_formatted_prompt_and_the_sampled_tokens() -> None:
    record = await played(tictactoe(POLICY, POLICY))
    for trajectory in record.trajectories:
        own_turns = [turn for turn in record.turns if turn.pid == trajectory.pid]
        for step, turn in zip(trajectory.steps, own_turns, strict=True):
            assert step.obs == format_prompt("tiny", turn.observation, 2)
            assert bytes(step.generation.prompt_ids.astype(np.uint8)).decode() == step.obs
            assert bytes(step.generation.completion_ids.astype(np.uint8)).decode() == step.act
            assert len(step.generation.logprobs) == len(step.generation.completion_ids)
            assert step.generation.adapter_version == 3


async def test_steps_know_turn_opponents_and_the_end_of_the_game() -> None:
    past = ModelRef(uid="ckpt-1", kind="checkpoint", adapter_version=1)
    kinds = {}
    for opponent in (RANDOM, past, POLICY):
        record = await played(tictactoe(POLICY, opponent))
        trajectory = record.trajectories[0]
        for index, step in enumerate(trajectory.steps):
            context = step.context
            assert context is not None
            assert (context.env_id, context.game_idx, context.pid, context.group_idx) == (
                record.spec.env_id,
                1,
                0,
                None,
            )
            assert (context.turn, context.player_turn) == (2 * index, index)
            assert (context.num_turns, context.num_player_turns) == (len(record.turns), len(trajectory.steps))
            assert (context.outcome, context.end) == (record.outcomes[0], "natural")
            assert context.final_reward == record.rewards[0]
            assert (context.is_invalid, context.is_cut_off, context.format_ok) == (False, False, True)
            assert [(one.pid, one.uid) for one in context.opponents] == [(1, opponent.uid)]
            kinds[opponent.uid] = context.opponent_kinds
    assert kinds == {"fixed-scripted:random": "scripted", "ckpt-1": "checkpoint", "ckpt-3": "mirror"}


async def test_context_marks_truncated_answers_and_invalid_moves() -> None:
    turns = iter(["\\boxed{4}", "\\boxed{4}"])

    async def cut_off(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        return replace(generation(next(turns)), finish_reason="length")

    record = await played(tictactoe(POLICY, POLICY), cut_off)
    (first,), (second,) = (trajectory.steps for trajectory in record.trajectories)
    assert first.context is not None and second.context is not None
    assert (first.context.is_invalid, second.context.is_invalid) == (False, True)
    assert first.context.is_cut_off and second.context.is_cut_off
    assert (first.context.outcome, second.context.outcome) == ("win", "loss")
    assert first.context.end == second.context.end == "invalid"


async def test_same_spec_and_actions_give_the_same_record() -> None:
    first, second = [await played(tictactoe(POLICY, RANDOM, seed=12)) for _ in range(2)]
    assert first.turns == second.turns
    assert first.rewards == second.rewards


async def test_invalid_move_is_marked_only_on_its_players_last_step() -> None:
    async def illegal(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        return generation("no box here")

    record = await played(tictactoe(POLICY, RANDOM), illegal)
    (step,) = record.trajectories[0].steps
    assert record.end == "invalid"
    assert record.invalid_pids == (0,)
    assert record.outcomes == {0: "loss", 1: "win"}
    assert step.format_feedback == {"correct_answer_format": False, "invalid_move": True}


async def test_opponents_invalid_move_is_not_ours() -> None:
    turns = iter([4, 99])

    async def second_is_illegal(
        prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None
    ) -> Generation:
        return generation(f"\\boxed{{{next(turns)}}}")

    record = await played(tictactoe(POLICY, POLICY), second_is_illegal)
    assert record.invalid_pids == (1,)
    assert not record.trajectories[0].steps[-1].format_feedback["invalid_move"]
    assert record.trajectories[1].steps[-1].format_feedback["invalid_move"]


def several(env_id: str, num_players: int, seed: int = 4, max_turns: int = 60) -> GameSpec:
    agents = tuple(
        AgentSpec(pid=pid, model=POLICY, collect_data=True, prompt_template="tiny", action_extraction_fn="default")
        for pid in range(num_players)
    )
    return GameSpec(
        game_idx=0,
        kind="train",
        env_id=env_id,
        num_players=num_players,
        seed=seed,
        agent_specs=agents,
        max_turns=max_turns,
    )


def marked(record: GameRecord) -> list[tuple[int, int]]:
    """Return player and turn of each step that is marked as invalid."""
    steps = [(step, trajectory.pid) for trajectory in record.trajectories for step in trajectory.steps]
    return [(pid, step.step_info["turn"]) for step, pid in steps if step.format_feedback["invalid_move"]]


async def test_invalid_move_that_eliminates_one_of_three_does_not_end_the_game() -> None:
    asked = itertools.count()

    async def first_is_illegal(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        if next(asked) == 0:
            return generation("garbage")
        return generation(f"\\boxed{{{legal_actions('LiarsDice-v0-small-train', prompt)[-1]}}}")

    record = await played(several("LiarsDice-v0-small-train", 3), first_is_illegal)
    (offender,) = record.invalid_pids
    assert record.turns[0].pid == offender
    assert record.end == "natural"
    assert len(record.turns) > 4
    assert marked(record) == [(offender, 0)]


async def test_invalid_move_is_marked_even_if_its_player_continues() -> None:
    asked = itertools.count()

    async def every_fifth_is_illegal(
        prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None
    ) -> Generation:
        if next(asked) % 5 == 0:
            return generation("garbage")
        return generation("\\boxed{[draw]}" if "[draw], [take]" in prompt else "\\boxed{[discard]}")

    record = await played(several("Golf-v0-train", 3, max_turns=18), every_fifth_is_illegal)
    assert [index for index, turn in enumerate(record.turns) if turn.is_invalid] == [0, 5, 10, 15]
    assert sorted(marked(record)) == sorted((record.turns[index].pid, index) for index in (0, 5, 10, 15))
    assert record.end == "truncated"
    assert record.invalid_pids == ()


@pytest.mark.parametrize(
    ("rewards", "has_teams", "outcomes"),
    [
        ((1, 1, -1), True, ["win", "win", "loss"]),
        ((1, 1, -1), False, ["draw", "draw", "loss"]),
        ((0, 0, 0), True, ["draw"] * 3),
        ((0.5, 1, -1), False, ["loss", "win", "loss"]),
        ((0.3,), False, ["na"]),
    ],
)
def test_team_wins_together_and_other_ties_are_draws(
    rewards: tuple[float, ...], has_teams: bool, outcomes: list[str]
) -> None:
    assert list(outcomes_from_rewards(dict(enumerate(rewards)), has_teams).values()) == outcomes


@pytest.mark.parametrize(
    ("env_id", "num_players", "has_teams"),
    [("SecretMafia-v0-train", 6, True), ("Nim-v0-train", 2, False), ("LiarsDice-v0-small-train", 3, False)],
)
def test_team_games_are_distinguished_from_others(env_id: str, num_players: int, has_teams: bool) -> None:
    assert Environment(env_id, num_players, 0).has_teams == has_teams


async def test_game_at_its_turn_cap_is_truncated_and_pays_no_player() -> None:
    record = await played(tictactoe(POLICY, POLICY, max_turns=3))
    assert record.end == "truncated"
    assert len(record.turns) == 3
    assert record.rewards == {0: 0.0, 1: 0.0}
    assert record.outcomes == {0: "draw", 1: "draw"}


async def test_single_player_game_at_its_turn_cap_pays_the_progress() -> None:
    async def guess_seven(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        return generation("\\boxed{[7]}")

    env_id = "GuessTheNumber-v0-train"
    spec = structs.replace(tictactoe(POLICY, max_turns=1), env_id=env_id, num_players=1)
    env = Environment(env_id, 1, spec.seed)._unwrapped
    distance = abs(env.state.game_state["game_number"] - 7)
    assert distance > 0
    record = await played(spec, guess_seven)
    assert (record.end, record.outcomes) == ("truncated", {0: "na"})
    assert record.rewards == {0: 1 - distance / (env.max_number - env.min_number)}
    assert record.trajectories[0].final_reward == record.rewards[0]


async def test_endless_answer_is_cut_before_it_reaches_the_env() -> None:
    async def endless(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        return generation("[" + "9" * 10_000 + "]")

    record = await played(tictactoe(POLICY, POLICY), endless)
    assert len(record.turns[0].action) == 2000
    assert len(record.turns[0].text) > 10_000


async def test_failed_game_stays_void_and_keeps_its_turns() -> None:
    calls = 0

    async def breaks(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("no more")
        return await first_legal_cell(prompt, version, stop)

    spec = tictactoe(POLICY, POLICY)
    record = new_record(spec)
    with pytest.raises(RuntimeError):
        await run_game(record, make_in_process(spec), PlayerFactory(breaks).players(spec), max_action_chars=2000)
    assert record.end == "void"
    assert len(record.turns) == 2


@pytest.mark.parametrize(
    ("env_id", "num_players", "text"),
    [
        ("FrozenLake-v0-random-train", 1, "\\boxed{right}"),
        ("LiarsDice-v0-small-train", 4, "\\boxed{[call]}"),
        ("ThreePlayerTicTacToe-v0-train", 3, "\\boxed{[0 1]}"),
    ],
)
async def test_games_of_one_and_of_many_players_collect_every_seat(env_id: str, num_players: int, text: str) -> None:
    async def same(prompt: str, version: int, stop: tuple[str, ...], seed: int | None = None) -> Generation:
        return generation(text)

    agents = tuple(
        AgentSpec(pid=pid, model=POLICY, collect_data=True, prompt_template="tiny", action_extraction_fn="default")
        for pid in range(num_players)
    )
    spec = GameSpec(
        game_idx=0, kind="train", env_id=env_id, num_players=num_players, seed=2, agent_specs=agents, max_turns=60
    )
    record = await played(spec, same)
    assert set(record.rewards) == set(range(num_players))
    assert sum(len(trajectory.steps) for trajectory in record.trajectories) == len(record.turns)


def test_policy_player_needs_a_model_that_the_engines_serve() -> None:
    with pytest.raises(AssertionError):
        PolicyPlayer(
            first_legal_cell,
            TEMPLATES["tiny"],
            AgentSpec(pid=0, model=RANDOM, collect_data=True, prompt_template="tiny", action_extraction_fn="default"),
            2,
        )
