"""Records of games made by hand, listeners that keep them, contexts of turns, and adapter tables."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unstable_lite.adapters.table import AdapterTable, Origin
from unstable_lite.games.environments import outcomes_from_rewards
from unstable_lite.types import (
    AgentSpec,
    GameKind,
    GameRecord,
    GameSpec,
    Generation,
    ModelRef,
    Opponent,
    PlayerTrajectory,
    Step,
    StepContext,
    TrainItem,
)

BASE = ModelRef(uid="base", kind="checkpoint", adapter_version=0)


RANDOM = ModelRef(uid="fixed-scripted:random", kind="fixed", name="scripted:random")


def make_generation(ids: Sequence[int], logprobs: Sequence[float] | None = None, **changes: Any) -> Generation:
    """Return a completion of these tokens, with log-probabilities of 0 by default."""
    given = {"text": "", "finish_reason": "stop", "adapter_version": 1} | changes
    return Generation(
        prompt_ids=np.array(given.pop("prompt_ids", [1]), np.int32),
        completion_ids=np.array(ids, np.int32),
        logprobs=np.array(np.zeros(len(ids)) if logprobs is None else logprobs, np.float32),
        **given,
    )


def make_spec(*models: ModelRef, kind: GameKind = "train", trained: Sequence[int] = (), **changes: Any) -> GameSpec:
    """Return a game with these models at its seats, of which those at the seats `trained` are trained on."""
    asked = {"prompt_template": changes.pop("prompt_template", "tiny"), "action_extraction_fn": "default"}
    agents = [AgentSpec(pid=pid, model=of, collect_data=pid in trained, **asked) for pid, of in enumerate(models)]
    given = {"game_idx": 0, "env_id": "E", "num_players": len(models), "seed": 2, "max_turns": 9} | changes
    return GameSpec(kind=kind, agent_specs=tuple(agents), **given)


def make_record(spec: GameSpec, *rewards: float, **changes: Any) -> GameRecord:
    """Return a finished game with these rewards by seat, without turns by default."""
    by_pid = dict(enumerate(rewards))
    results = {"rewards": by_pid, "outcomes": outcomes_from_rewards(by_pid) if by_pid else {}, "end": "natural"}
    return GameRecord(spec=spec, **{"turns": [], "trajectories": []} | results | changes)


def make_step(
    ids: Sequence[int] = (2,), version: int = 1, is_right: bool = True, is_invalid: bool = False, **changes: Any
) -> Step:
    """Return a step of player 0 with these sampled tokens."""
    feedback = {"correct_answer_format": is_right, "invalid_move": is_invalid}
    given = {"generation": make_generation(ids, adapter_version=version), "format_feedback": feedback}
    return Step(**{"pid": 0, "obs": "o", "act": "a", "reward": 0.0, "env_id": "E"} | given | changes)


def make_trajectory(*steps: Step, **changes: Any) -> PlayerTrajectory:
    """Return the turns of player 0, which is the base and wins."""
    given: dict[str, Any] = {"pid": 0, "env_id": "E", "game_idx": 0, "model": BASE, "final_reward": 1.0}
    return PlayerTrajectory(steps=list(steps), **given | changes)


def make_item(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], logprobs: Sequence[float] | None = None, **changes: Any
) -> TrainItem:
    """Return a step as the learner gets it, sampled by the base, with log-probabilities of 0 by default."""
    return TrainItem(
        prompt_ids=np.array(prompt_ids, np.int32),
        completion_ids=np.array(completion_ids, np.int32),
        logprobs=np.array(np.zeros(len(completion_ids)) if logprobs is None else logprobs, np.float32),
        **{"reward": 0.0, "adapter_version": 0, "trajectory": 0} | changes,
    )


class Records(list[GameRecord]):
    """Listener: finished games in the order in which they were counted."""

    def begin_game(self, spec: GameSpec) -> None:
        pass

    def add_record(self, record: GameRecord) -> None:
        self.append(record)


class Observer(Records):
    """Listener that calls a function for every finished game."""

    def __init__(self, observe: Callable[[GameRecord], None]) -> None:
        self.add_record = observe  # type: ignore[method-assign]


# context of a turn, for tests that replace the fields they are about

CONTEXT = StepContext(
    env_id="E",
    game_idx=0,
    group_idx=None,
    pid=0,
    opponents=(Opponent(pid=1, uid="base", kind="checkpoint"),),
    turn=0,
    player_turn=0,
    num_turns=6,
    num_player_turns=3,
    final_reward=1.0,
    outcome="win",
    end="natural",
    is_invalid=False,
    is_cut_off=False,
    format_ok=True,
)
"""First turn of the first player in a game of six turns, which it wins."""


# adapter tables as games see them


def offer(table: AdapterTable, id: int) -> None:
    """Take an adapter through its states until games may use it."""
    table.add(id, Origin("update", str(id)), f"digest of {id}")
    table.load(id)
    table.check(id)
    table.offer(id)
