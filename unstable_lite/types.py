"""The records that pass between the parts of a run.

Plain dataclasses with numpy token arrays; no torch, engines or sockets. Records made in every turn or game are not
frozen, because frozen ones take three times as long to make, or are a `Struct`, which C code makes and compares.
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
Weights = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length"]
UTILITY = "openspiel_utility"
"""Key of `GameRecord.game_info` for a player's reward in the units of its game, if that is not the reward."""
GameKind = Literal["train", "eval"]
Outcome = Literal["win", "draw", "loss", "na"]
"""Place among the players, from the ranks of the final rewards; "na" if there is only one player, except for
questions, where the right answer is a win."""
Observation = Literal["env", "first-last", "board"]
"""Text that a player sees: the game so far as the env id's own wrapper shows it; the first and the last message; or the
rules and the newest board."""
GameEnd = Literal["natural", "invalid", "truncated", "void"]
"""End of a game: by its rules, by an invalid move, by our turn cap, or because it failed or took too long."""

CONTEXT_FULL, ENV_RAISED, ENV_LOST = "context_full", "env_raised", "env_lost"
PROMPT_TOO_LONG, BUDGET_SPENT = "prompt_too_long", "budget_spent"
REASONS = (
    *(CONTEXT_FULL, ENV_RAISED, PROMPT_TOO_LONG, BUDGET_SPENT, "engine_failed", "opponent_failed", "game_timeout"),
    *("env_timeout", "env_died", ENV_LOST, "env_failed", "timeout", "network", "os_error", "out_of_memory"),
    *("process_died", "failed"),
)
"""Reasons of ends that a game's rules, an invalid move or the turn cap do not explain; docs/games.md explains each. All
but the first two make a game void."""

BASE = "base"
"""Uid of the model without an adapter, and its name as an opponent."""
INITIAL = "initial"
"""Uid of the policy before the first update, if training starts from an adapter."""


def policy_of(uid: str) -> str:
    """Return the name of the policy whose checkpoint has this uid."""
    return uid.rpartition("/")[0]


def uid_of(policy: str, name: str) -> str:
    """Return the uid of a policy's checkpoint, which is its name alone if the run has no other policy."""
    return f"{policy}/{name}" if policy else name


class ModelRef(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can take a seat."""

    uid: str
    """Key of ratings and metrics: `base`, `ckpt-12`, `fixed-scripted:random`."""
    kind: Literal["checkpoint", "fixed"]
    adapter_version: int | None = None
    """Id of the adapter with which engines answer: 0 is the base without adapter, n the n-th adapter of the run; frozen
    players and checkpoints that return have ids of their own. None: no engine answers."""
    name: str | None = None
    """Name of an opponent in a config: `scripted:random`, a model at an OpenAI-compatible endpoint, a frozen player."""

    @property
    def policy(self) -> str:
        """Name of the policy whose checkpoint it is: `exploiter` for `exploiter/ckpt-12`; "" for the only one."""
        return policy_of(self.uid) if self.kind == "checkpoint" else ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of the seats that engines serve; None: the value of the config's section `engine`."""

    temperature: float | None = None
    """Sampling temperature; 0 takes the most probable token."""
    top_p: float | None = None

    def __str__(self) -> str:
        """Return the label in results: "greedy", "T=0.3", "top_p=0.9", "T=0.3 top_p=0.9"."""
        if self.temperature == 0:
            return "greedy"
        parts = (("T", self.temperature), ("top_p", self.top_p))
        return " ".join(f"{name}={value:g}" for name, value in parts if value is not None)


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The player at seat `pid`, and whether its steps are trained on."""

    pid: int
    model: ModelRef
    collect_data: bool
    prompt_template: str
    action_extraction_fn: str


class PastTurn(msgspec.Struct, frozen=True):
    """A turn that is repeated."""

    pid: int
    digest: str
    """`digest_of` the observation that the player must be shown."""
    action: str


class BranchPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A state within an earlier game, which its seed and actions reach again."""

    turns: tuple[PastTurn, ...]
    pid: int
    """Player who acts next."""
    digest: str
    """`digest_of` this player's observation."""
    chance_seed: int | None = None
    """Seed of the env's chance, and of scripted players, from here on; None: as in the earlier game."""


class GameSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One game to play: everything that determines it except the sampled actions."""

    game_idx: int
    """Number of the game, unique over the train and eval games of a run."""
    kind: GameKind
    env_id: str
    num_players: int
    seed: int
    """Env seed; train seeds are even, eval seeds odd."""
    agent_specs: tuple[AgentSpec, ...]
    max_turns: int
    observation: Observation = "env"
    isolated: bool | None = None
    reward_scale: float | None = None
    env_kwargs: tuple[tuple[str, Any], ...] = ()
    error_allowance: int = 0
    sampling: Sampling | None = None
    """Sampling of every seat that engines serve, in an evaluation; None: as in training."""
    start: BranchPoint | None = None
    """State at which the players begin; None: the start of the game."""
    eval_label: str | None = None
    """Evaluation with a quota to which this game belongs."""
    group_idx: int | None = None
    """Games of one group share env, seed and models, and their players' rewards are compared. They share seats too,
    unless the group is one deal that the policy plays from each seat in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """Ids that stand within a completion but were not sampled: they end a thinking that spent its budget."""

    at: int
    """Number of the completion's tokens before them."""
    ids: TokenIds


@dataclass(slots=True, kw_only=True)
class Generation:
    """One completion, exactly as the engine sampled it."""

    prompt_ids: TokenIds
    completion_ids: TokenIds
    """Sampled ids; the stop token is the last one if `finish_reason` is "stop"."""
    logprobs: Logprobs
    """Log-probabilities of `completion_ids` under the processed distribution (temperature and top_p applied), same
    length. Of a greedy completion, which only evaluations have: at temperature 1."""
    text: str
    """Detokenised completion without special tokens."""
    finish_reason: FinishReason
    adapter_version: int
    """Version that the engine really used."""
    forced: Forced | None = None
    """Ids that ended the thinking (`engine.thinking_tokens`); `text` contains them, `completion_ids` does not."""


class Reply(msgspec.Struct, kw_only=True):
    """Answer of a player to an observation."""

    action: str
    """Action for the env."""
    text: str
    """Whole answer, reasoning included."""
    prompt: str
    """Prompt of the player, after the template."""
    format_ok: bool = True
    """Whether the answer was in the place that the template requests."""
    is_cut_off: bool = False
    """Whether a limit on its tokens or a filter cut off the answer."""
    generation: Generation | None = None
    """Present for models that the engines serve."""


OpponentKind = Literal["mirror", "checkpoint", "policy", "scripted", "fixed"]
"""Kind of an opponent: the current policy itself, another checkpoint of it, one of another policy that learns, a
`scripted:` player, or another fixed one."""


class Opponent(msgspec.Struct, frozen=True, kw_only=True):
    """A player at another seat, as seen by one trained player."""

    pid: int
    uid: str
    """Key of the model in ratings and metrics."""
    kind: OpponentKind


class StepContext(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one trained turn, known once its game is over. Later versions only add fields.

    It is a Struct because one is made for every trained turn: a frozen dataclass takes ten times as long to make.
    """

    env_id: str
    game_idx: int
    group_idx: int | None
    """Number of the group that the game was played in; None without groups."""
    pid: int
    """Seat of the player."""
    opponents: tuple[Opponent, ...]
    """Players at the other seats, by seat; empty in a single-player game."""
    turn: int
    """Number of the turn, from 0, over all players of the game."""
    player_turn: int
    """Number of the turn, from 0, over this player's turns."""
    num_turns: int
    """Turns of all players in the whole game."""
    num_player_turns: int
    """Turns of this player in the whole game."""
    final_reward: float
    """Reward of this player at the end of the game, as the env gave it."""
    outcome: Outcome
    """Place of this player at the end of the game."""
    end: GameEnd
    """End of the game."""
    is_invalid: bool
    """Whether the rules did not allow this turn's action."""
    is_cut_off: bool
    """Whether a limit on tokens ended this turn's answer."""
    format_ok: bool
    """Whether this turn's answer was in the place that the template requests."""
    is_out: bool = False
    """Whether the player's part in the game ended after this turn: by an invalid move, or as the rules say."""
    branch_turn: int | None = None
    """Number of the game's first turn if it began at a state within an earlier game; None: it began at its start."""
    reason: str = ""
    """Reason of the end, `GameRecord.reason`."""

    @property
    def opponent_kinds(self) -> str:
        """Kinds of the opponents, sorted and joined: "mirror", "checkpoint+scripted"; "" in a single-player game."""
        if len(self.opponents) == 1:
            return self.opponents[0].kind
        return "+".join(sorted({opponent.kind for opponent in self.opponents}))


@dataclass(slots=True, kw_only=True)
class Step:
    """One trained turn of one player."""

    pid: int
    obs: str
    """Formatted prompt, not the raw observation."""
    act: str
    """Whole completion text."""
    reward: float
    """Final reward after the final and the step transformations, set by the buffer."""
    env_id: str
    generation: Generation
    format_feedback: dict[str, bool] = field(default_factory=dict)
    """`correct_answer_format`, `invalid_move`."""
    step_info: dict[str, Any] = field(default_factory=dict)
    """`raw_reward`, `env_reward`, `baseline` (subtracted by the final transforms), `step_reward`, `game_idx`, `turn`,
    `action`, and in a group `return_std_error`, the standard error of the mean of its final rewards."""
    context: StepContext | None = None
    """Facts about the turn, set by `run_game` when the game is over; None for a step made by hand."""
    weight: float = 1.0
    """Factor of the policy's whole loss on this step, at least 0; a reward transform may set it."""
    token_weights: Weights | None = None
    """A further factor for each of the completion's tokens, at least 0; None: 1 each."""


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
    """One turn of a game, for transcripts; also one that was repeated up to a branch point."""

    pid: int
    observation: str
    text: str
    action: str
    format_ok: bool
    is_invalid: bool = False
    """Whether the rules do not allow `action`."""
    is_cut_off: bool = False
    """Whether `text` ended before the player was finished."""
    seconds: float = field(default=0.0, compare=False)
    """Time that the player took to answer."""
    generation: Generation | None = field(default=None, compare=False)
    """Present for models that the engines serve."""


@dataclass(slots=True, kw_only=True)
class GameRecord:
    """Result of one GameSpec. Every launched game yields exactly one."""

    spec: GameSpec
    turns: list[Turn]
    trajectories: list[PlayerTrajectory]
    """Trajectories of the seats with `collect_data`; empty if the game is void."""
    rewards: dict[int, float]
    outcomes: dict[int, Outcome]
    end: GameEnd
    teams: dict[int, str] | None = None
    """Label of each player's team, if players win and lose together."""
    invalid_pids: tuple[int, ...] = ()
    """Players whose last turn was an invalid move, unless they could still repeat it. If `end` is "invalid", it ended
    the game; else only their part."""
    game_info: dict[int, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    reason: str = ""
    """One of `REASONS`; empty if `end` explains the end: by the rules, an invalid move or the turn cap."""

    @property
    def adapter_versions(self) -> list[int | None]:
        """Adapter version of each turn; None if no engine answered."""
        return [turn.generation.adapter_version if turn.generation is not None else None for turn in self.turns]

    @property
    def changes_adapter(self) -> bool:
        """Whether a player had several adapter versions during the game."""
        versions = {(turn.pid, version) for turn, version in zip(self.turns, self.adapter_versions, strict=True)}
        return len(versions) > len({pid for pid, _ in versions})

    def reward_shown(self, pid: int) -> float:
        """Return a player's reward in the units of its game: OpenSpiel's utility, before `reward_scale`."""
        return float(self.game_info.get(pid, {}).get(UTILITY, self.rewards[pid]))


Batch = list[Step] | list[list[Step]]
"""Batch of single steps, or of whole trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Number of values between each edge and the next."""

    name: str
    edges: tuple[float, ...]
    """Edges, one more than there are counts."""
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainItem:
    """One step as the learner sees it: ids, never text."""

    prompt_ids: TokenIds
    completion_ids: TokenIds
    logprobs: Logprobs
    reward: float
    """Game's reward after the buffer's transforms; for an algorithm without a critic it is the advantage."""
    adapter_version: int
    trajectory: int
    """Number shared by the steps of one player's game, which are adjacent and in turn order."""
    context: StepContext | None = None
    """Facts about the turn and its game; None for an item that is only scored or imitated."""
    weight: float = 1.0
    """Factor of the policy's loss on each of its tokens, at least 0."""
    token_weights: Weights | None = None
    """A further factor for each completion token, at least 0; None: 1 each."""
    forced: Forced | None = None
    """Ids within the completion that are read and never trained; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerLogprobs:
    """The learner's log-probabilities of one completion's tokens, at the run's temperature; both of the same length."""

    adapter: Logprobs
    base: Logprobs
    """Log-probabilities without the adapter."""
