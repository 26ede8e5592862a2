"""A game as one line of games.jsonl."""

from __future__ import annotations

from typing import Any

from unstable_lite.types import GameRecord, Turn


def record_to_json(record: GameRecord, keep_tokens: bool) -> dict[str, Any]:
    """Return a GameRecord as one line of games.jsonl, which a person can read and which replays the game.

    A turn is `[pid, observation, text, action, format_ok, seconds]`. With `keep_tokens` it has a seventh entry: the
    sampled tokens for players that the engines serve, null for others. If a player changed its adapter during the game
    (`league.adapter_policy` "turn"), `model` is its first one, and `adapter_versions` has that of each turn. The turns
    before `branch_turn` are those of an earlier game, repeated.
    """
    spec = record.spec
    return {
        "game_idx": spec.game_idx,
        "kind": spec.kind,
        "env_id": spec.env_id,
        "seed": spec.seed,
        "eval_label": spec.eval_label,
        **({} if spec.sampling is None else {"sampling": str(spec.sampling)}),
        **({"branch_turn": len(spec.start.turns)} if spec.start is not None else {}),
        "agents": [
            {"pid": agent.pid, "model": agent.model.uid, "collect_data": agent.collect_data}
            | ({"opponent": agent.model.name} if agent.model.name else {})
            for agent in spec.agent_specs
        ],
        "turns": [
            [turn.pid, turn.observation, turn.text, turn.action, turn.format_ok, round(turn.seconds, 4)]
            + ([_sampled(turn)] if keep_tokens else [])
            for turn in record.turns
        ],
        **({"adapter_versions": record.adapter_versions} if record.changes_adapter else {}),
        "rewards": record.rewards,
        "outcomes": record.outcomes,
        "end": record.end,
        "invalid_pids": record.invalid_pids,
        "invalid_turns": [index for index, turn in enumerate(record.turns) if turn.is_invalid],
        "error": record.error,
        "seconds": round(record.seconds, 4),
    }


def _sampled(turn: Turn) -> dict[str, Any] | None:
    generation = turn.generation
    if generation is None:
        return None
    forced = generation.forced
    return {
        "completion_ids": generation.completion_ids.tolist(),
        "logprobs": [round(logprob, 4) for logprob in generation.logprobs.tolist()],
        "adapter_version": generation.adapter_version,
        "finish_reason": generation.finish_reason,
    } | ({} if forced is None else {"forced": {"at": forced.at, "ids": forced.ids.tolist()}})
