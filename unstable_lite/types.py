"""The records that pass between the parts of a run.

Plain dataclasses; numpy for token arrays; nothing of torch, engines or sockets. What is made anew in every turn or game
is not frozen, which would take three times as long to make, or a `Struct`, whose making and comparing is C.
Shape suffixes: `P` prompt tokens, `C` completion tokens, `T` their concatenation, `B` rows, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length"]
GameKind = Literal["train", "eval"]
Outcome = Literal["win", "draw", "loss", "na"]
"""Place among the players, from the ranks of the final rewards; "na" where there is one player."""
Observation = Literal["env", "first-last", "board"]
"""What a player sees: the game so far as the env id's own wrapper shows it; the first and the last message; or the
rules and the newest board."""
GameEnd = Literal["natural", "invalid", "truncated", "void"]
"""How a game ended: by its rules, by an invalid move, by our turn cap, or because something broke or took too
long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEnvSpec:
    """An env to collect training games from (reference: `_types.py`)."""

    env_id: str
    """One of TextArena's, or `module:id`: one that a module of your own registers with TextArena."""
    num_players: int
    """Seats of a game."""
    num_actors: int
    """Seats of the current policy. Equal to `num_players`: mirror self-play, no opponent is sampled."""
    prompt_template: str = "default"
    """How an observation becomes a prompt: one that ships, `chat`, or a name from `[templates]`."""
    action_extraction_fn: str = "default"
    """How an answer becomes an action: the last `\\boxed{}`, or `module:function`."""
    max_turns: int = 200
    """Turn cap over all players; a game that reaches it is truncated."""
    observation: Observation = "env"
    """What a player sees: `env`, the game so far as the env id's own wrapper shows it; `first-last`, the first and the
    last message; `board`, the rules and the newest board, for board games alone (docs/games.md)."""
    isolated: bool | None = None
    """Whether its games live in processes that can be killed, whatever they hang in; default: those of envs that are
    known to loop, and of envs whose reset is slow. A turn then costs a round trip, 0.1 ms and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEnvSpec:
    """An env to evaluate on: one seat of the current policy, the rest `fixed_opponent`.

    In a config, a key of `INHERITED` that is left out is that of the training env of the same id, if there is one.
    """

    env_id: str
    num_players: int
    prompt_template: str = "default"
    """As in `train_envs`. Left out: as the training env of the same id has it."""
    action_extraction_fn: str = "default"
    """As in `train_envs`. Left out: as the training env of the same id has it."""
    fixed_opponent: str = "google/gemini-2.0-flash-lite-001"
    """Named as `league.fixed_opponents` names them; also `base`, the model without an adapter."""
    max_turns: int = 200
    """As in `train_envs`. Left out: as the training env of the same id has it."""
    observation: Observation = "env"
    """As in `train_envs`. Left out: as the training env of the same id has it."""
    isolated: bool | None = None

    @property
    def opponent(self) -> str:
        """As results name it."""
        return self.fixed_opponent if self.num_players > 1 else "none"


BASE = "base"
"""Uid of the model without an adapter, and its name as an opponent."""
INHERITED = ("prompt_template", "action_extraction_fn", "max_turns", "observation")
"""What an eval env takes over from the training env of the same id: a curve is of what is trained."""


class ModelRef(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can sit at a seat."""

    uid: str
    """`base`, `ckpt-12`, `fixed-scripted:random`: the key of ratings and metrics."""
    kind: Literal["checkpoint", "fixed"]
    adapter_version: int | None = None
    """For kind "checkpoint": 0 is the base without adapter, n the n-th published adapter."""
    name: str | None = None
    """As a config names an opponent: `scripted:random`, a model at an OpenAI-compatible endpoint, `base`."""


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Who sits at seat `pid` and whether its steps are trained on."""

    pid: int
    model: ModelRef
    collect_data: bool
    prompt_template: str
    action_extraction_fn: str


class GameSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One game to play; everything that decides it except the sampled actions."""

    game_idx: int
    """Unique over train and eval games of a run."""
    kind: GameKind
    env_id: str
    num_players: int
    seed: int
    """Env seed; train seeds are even, eval seeds odd."""
    agent_specs: tuple[AgentSpec, ...]
    max_turns: int
    observation: Observation = "env"
    isolated: bool | None = None
    eval_label: str | None = None
    """For evaluations with a quota: which evaluation this game belongs to."""
    group_idx: int | None = None
    """Games of one group share env, seed, seats and models; their players' rewards are compared seat by seat."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """One completion, exactly as the engine sampled it."""

    prompt_ids: TokenIds
    completion_ids: TokenIds
    """Sampled ids; the stop token is the last one if `finish_reason` is "stop"."""
    logprobs: Logprobs
    """Of `completion_ids` under the processed distribution (temperature applied), same length."""
    text: str
    """Detokenised completion without special tokens."""
    finish_reason: FinishReason
    adapter_version: int
    """The version that the engine really used."""


class Reply(msgspec.Struct, kw_only=True):
    """What a player answers to an observation."""

    action: str
    """What goes to the env."""
    text: str
    """The whole answer, reasoning included."""
    prompt: str
    """What the player was shown, after the template."""
    format_ok: bool = True
    """Whether the answer was where the template asks it to be."""
    is_cut_off: bool = False
    """Whether the answer was ended from outside, by a limit on its tokens or a filter."""
    generation: Generation | None = None
    """Present for models that the engines serve."""


OpponentKind = Literal["mirror", "checkpoint", "scripted", "fixed"]
"""The current policy itself, another checkpoint, a `scripted:` player, or any other fixed opponent."""


class Opponent(msgspec.Struct, frozen=True, kw_only=True):
    """A player at another seat, as seen by one trained player."""

    pid: int
    uid: str
    """Key of the model in ratings and metrics."""
    kind: OpponentKind


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one trained turn, known once its game is over. Later versions only add fields.

    A Struct because one is made for every trained turn: a frozen dataclass takes ten times as long to make.
    """

    env_id: str
    game_idx: int
    group_idx: int | None
    """Number of the group that the game was played in; None without groups."""
    pid: int
    """Seat of the player."""
    opponents: tuple[Opponent, ...]
    """Players at the other seats, by seat; empty in a game for one."""
    turn: int
    """Number of the turn, from 0, over all players of the game."""
    player_turn: int
    """Number of the turn, from 0, over this player's own."""
    num_turns: int
    """Turns of all players in the whole game."""
    num_player_turns: int
    """Turns of this player in the whole game."""
    final_reward: float
    """Reward of this player at the end of the game, as the env gave it."""
    outcome: Outcome
    """Place of this player at the end of the game."""
    end: GameEnd
    """How the game ended."""
    is_invalid: bool
    """Whether the rules did not allow this turn's action."""
    is_cut_off: bool
    """Whether a limit on tokens ended this turn's answer."""
    format_ok: bool
    """Whether this turn's answer was where the template asks it to be."""

    @property
    def opponent_kinds(self) -> str:
        """Kinds of the opponents, sorted and joined: "mirror", "checkpoint+scripted"; "" in a game for one."""
        if len(self.opponents) == 1:
            return self.opponents[0].kind
        return "+".join(sorted({opponent.kind for opponent in self.opponents}))


@dataclass(slots=True, kw_only=True)
class Step:
    """One trained turn of one player."""

    pid: int
    obs: str
    """The formatted prompt, not the raw observation."""
    act: str
    """The whole completion text."""
    reward: float
    """Set by the buffer: final reward after the final and the step transformations."""
    env_id: str
    generation: Generation
    format_feedback: dict[str, bool] = field(default_factory=dict)
    """`correct_answer_format`, `invalid_move`."""
    step_info: dict[str, Any] = field(default_factory=dict)
    """`raw_reward`, `env_reward`, `baseline` (taken off by the final transforms), `step_reward`, `game_idx`, `turn`,
    `action`."""
    context: StepContext | None = None
    """Set by `run_game` when the game is over; None for a step made by hand."""


@dataclass(slots=True, kw_only=True)
class PlayerTrajectory:
    """One player's steps in one game."""

    pid: int
    env_id: str
    game_idx: int
    model: ModelRef
    steps: list[Step] = field(default_factory=list)
    final_reward: float = 0.0
    num_turns: int = 0
    """Turns of all players in this game."""
    game_info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn of a game, as a person would read it afterwards."""

    pid: int
    observation: str
    text: str
    action: str
    format_ok: bool
    is_invalid: bool = False
    """The rules do not allow `action`."""
    is_cut_off: bool = False
    """The player had not come to the end of `text`."""
    seconds: float = field(default=0.0, compare=False)
    """How long the player took to answer."""
    generation: Generation | None = field(default=None, compare=False)
    """Present for models that the engines serve."""


@dataclass(slots=True, kw_only=True)
class GameRecord:
    """What became of one GameSpec. Every launched game yields exactly one."""

    spec: GameSpec
    turns: list[Turn]
    trajectories: list[PlayerTrajectory]
    """Of the seats with `collect_data`; empty if the game is void."""
    rewards: dict[int, float]
    outcomes: dict[int, Outcome]
    end: GameEnd
    invalid_pids: tuple[int, ...] = ()
    """Players whose last turn was an invalid move. With `end` "invalid" it ended the game; else it ended their part."""
    game_info: dict[int, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


Batch = list[Step] | list[list[Step]]
"""Single steps, or whole trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many values lie between each edge and the next."""

    name: str
    edges: tuple[float, ...]
    """One more than counts."""
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainItem:
    """One step as the learner sees it: ids, never text."""

    prompt_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs
    reward: float
    """What the buffer made of the game's reward; for an algorithm without a critic it is the advantage."""
    adapter_version: int
    trajectory: int
    """Steps of one player's game share it and stand next to each other, in turn order."""
    context: StepContext | None = None
    """Facts about the turn and its game; None for an item that is only scored or imitated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLogprobs:
    """What the learner makes of one completion's tokens, at the run's temperature; both of the same length."""

    adapter: Logprobs
    base: Logprobs
    """Without the adapter."""
