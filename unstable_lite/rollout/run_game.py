"""Play one game to its end.

Knows the env and its players; knows nothing of engines, sockets, rewards after the game, or ratings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from unstable_lite.config.env_ids import is_questions
from unstable_lite.errors import ConfigError
from unstable_lite.games.env_pool import GameEnvironment
from unstable_lite.games.environments import outcomes_from_rewards
from unstable_lite.games.players.player import Player
from unstable_lite.rollout.replay import first_turn
from unstable_lite.types import (
    GameRecord,
    GameSpec,
    ModelRef,
    Opponent,
    OpponentKind,
    PlayerTrajectory,
    Reply,
    Step,
    StepContext,
    Turn,
)


def new_record(spec: GameSpec) -> GameRecord:
    """Return the record of an unplayed game: void until `run_game` completes it."""
    trajectories = [
        PlayerTrajectory(pid=agent.pid, env_id=spec.env_id, game_idx=spec.game_idx, model=agent.model)
        for agent in spec.agent_specs
        if agent.collect_data
    ]
    return GameRecord(spec=spec, turns=[], trajectories=trajectories, rewards={}, outcomes={}, end="void")


async def run_game(
    record: GameRecord, environment: GameEnvironment, players: Mapping[int, Player], max_action_chars: int
) -> None:
    """Play `record.spec` and fill in `record`; if this raises, the record keeps the turns so far and stays void."""
    spec = record.spec
    started = time.monotonic()
    trajectories = {trajectory.pid: trajectory for trajectory in record.trajectories}
    turn: tuple[int, str] | None = await first_turn(record, environment, players, max_action_chars)
    while turn is not None and len(record.turns) < spec.max_turns:
        pid, observation = turn
        asked = time.monotonic()
        reply = await players[pid].act(observation)
        if not isinstance(reply, Reply) or not isinstance(reply.action, str):
            raise ConfigError(f"{type(players[pid]).__name__}.act must return a Reply; it returned {reply!r:.200}")
        action = reply.action[:max_action_chars]
        record.turns.append(
            Turn(
                pid=pid,
                observation=observation,
                text=reply.text,
                action=action,
                format_ok=reply.format_ok,
                is_cut_off=reply.is_cut_off,
                seconds=time.monotonic() - asked,
                generation=reply.generation,
            )
        )
        if pid in trajectories:
            trajectories[pid].steps.append(_new_step(record, reply))
        turn = await environment.advance(action)
        if environment.was_invalid:
            record.turns[-1].is_invalid = True
            if pid in trajectories:
                trajectories[pid].steps[-1].format_feedback["invalid_move"] = True

    _complete(record, environment, turn)
    record.seconds = time.monotonic() - started


def _new_step(record: GameRecord, reply: Reply) -> Step:
    """Return the step of the newest turn, which a collected player took."""
    assert reply.generation is not None, "only seats that the engines serve are collected"
    turn = record.turns[-1]
    return Step(
        pid=turn.pid,
        obs=reply.prompt,
        act=reply.text,
        reward=0.0,
        env_id=record.spec.env_id,
        generation=reply.generation,
        format_feedback={"correct_answer_format": reply.format_ok, "invalid_move": False},
        step_info={"game_idx": record.spec.game_idx, "turn": len(record.turns) - 1, "action": turn.action},
    )


def _complete(record: GameRecord, environment: GameEnvironment, turn: tuple[int, str] | None) -> None:
    """Fill in the results. `turn`: the one that the turn limit cut off; None: the env ended the game."""
    if turn is None:
        record.rewards, record.game_info = environment.close()
        record.end = "invalid" if record.turns[-1].is_invalid else "natural"
    else:
        record.rewards = environment.rewards_so_far()
        record.end = "truncated"
    last_turns = {turn.pid: turn for turn in record.turns}
    record.invalid_pids = tuple(
        pid for pid, last in last_turns.items() if last.is_invalid and (turn is None or pid != turn[0])
    )
    if is_questions(record.spec.env_id):
        record.outcomes = {pid: "win" if reward else "loss" for pid, reward in record.rewards.items()}
    else:
        record.outcomes = outcomes_from_rewards(record.rewards, environment.has_teams)
    for trajectory in record.trajectories:
        trajectory.final_reward = record.rewards[trajectory.pid]
        trajectory.num_turns = len(record.turns)
        trajectory.game_info = record.game_info.get(trajectory.pid, {})
        _set_contexts(trajectory, record)


def _set_contexts(trajectory: PlayerTrajectory, record: GameRecord) -> None:
    """Give each step of `trajectory` its context, from a complete record."""
    spec, pid, steps = record.spec, trajectory.pid, trajectory.steps
    opponents = tuple(
        Opponent(pid=agent.pid, uid=agent.model.uid, kind=_kind(agent.model, trajectory.model))
        for agent in spec.agent_specs
        if agent.pid != pid
    )
    repeated = () if spec.start is None else spec.start.turns
    num_before = sum(past.pid == pid for past in repeated)
    for player_turn, step in enumerate(steps, start=num_before):
        turn: int = step.step_info["turn"]
        step.context = StepContext(
            env_id=spec.env_id,
            game_idx=spec.game_idx,
            group_idx=spec.group_idx,
            pid=pid,
            opponents=opponents,
            turn=turn,
            player_turn=player_turn,
            num_turns=len(record.turns),
            num_player_turns=num_before + len(steps),
            final_reward=trajectory.final_reward,
            outcome=record.outcomes[pid],
            end=record.end,
            is_invalid=record.turns[turn].is_invalid,
            is_cut_off=record.turns[turn].is_cut_off,
            format_ok=record.turns[turn].format_ok,
            is_out=step is steps[-1] and pid in record.invalid_pids,
            branch_turn=None if spec.start is None else len(repeated),
        )


def _kind(model: ModelRef, own: ModelRef) -> OpponentKind:
    """Return the kind of opponent that `model` is for a player whose model is `own`."""
    if model.kind == "checkpoint":
        return "mirror" if model == own else "checkpoint"
    return "scripted" if (model.name or "").startswith("scripted:") else "fixed"
