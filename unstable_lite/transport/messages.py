"""The messages between the orchestrator and its workers.

A request gets exactly one reply with the same `request_id`: of the type that its class names, or `Failed`. codec.py
turns messages into bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, Generic, TypeVar, get_args

import msgspec

from unstable_lite.types import Generation, Histogram, LearnerLogprobs, Logprobs, Observation, TokenIds, TrainItem

MAX_LEVELS = 16
"""Deepest nesting of a field that may hold any JSON value."""


class Message(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages. On the wire a message is an array of its name and its fields."""


class Notice(Message):
    """Message without a reply."""


class Reply(Message):
    request_id: int


R = TypeVar("R", bound=Reply)


class Request(Message, Generic[R]):
    request_id: int


class LearnerRequest(Request[R], Generic[R], kw_only=True):
    policy: str = ""
    """Name of the policy; "" if the run has only one."""


class Done(Reply):
    """Reply without a result."""


class Failed(Reply):
    """Reply to a request that failed; the worker itself still works."""

    error: str
    is_no_room: bool = False
    """Whether the request failed because its output did not fit in the given location; another one may have room."""
    reason: str = ""
    """Kind of the failure (`types.REASONS`), if a game's record needs it."""


class Generated(Reply):
    generation: Generation

    def __post_init__(self) -> None:
        check_lengths([self.generation])


class Generate(Request[Generated]):
    """Ask an engine for one completion."""

    prompt: str
    adapter_version: int
    """0 is the base."""
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    """Stop strings besides the model's end-of-sequence tokens."""
    seed: int | None
    """Seed of this request's random stream; None uses the engine's stream."""
    prompt_ids: TokenIds | None = None
    """Ids to complete in place of those of `prompt`: an answer that is continued, after its prompt."""


class AdapterDigest(Reply):
    """Digest of the adapter that a worker wrote, read or holds, computed by `peft_files.digest_of`."""

    seconds: float
    digest: str


class LoadAdapter(Request[AdapterDigest]):
    """Load a PEFT directory under a version that was never used before."""

    version: int
    path: str


class ConfirmAdapter(Request[AdapterDigest]):
    """Ask an engine for the digest of the adapter that it holds as `version`."""

    version: int


class UnloadAdapter(Request[Done]):
    """Forget a version; no request may use it again."""

    version: int


class Sleep(Request[Done]):
    """Answer all earlier requests, then release the device memory until `WakeUp`."""


class WakeUp(Request[Done]):
    """Allocate the device memory again; the adapters are unchanged."""


class Updated(Reply):
    metrics: dict[str, float]
    skipped: str | None
    """Reason why no adapter was made (a non-finite loss or gradient), or None."""
    logprobs: tuple[Logprobs, ...] = ()
    """Log-probabilities of each item's trained tokens before the step; only with `tracker.keep_tokens`."""
    histograms: tuple[Histogram, ...] = ()
    """Histograms of this update; empty if only its adapter had to be written again."""
    digest: str = ""
    """Digest of the adapter that was written; empty if the update was skipped."""


class Update(LearnerRequest[Updated]):
    """Make one optimiser step on a batch, then write the new adapter to `path`."""

    items: tuple[TrainItem, ...]
    version: int
    """Adapter version that this update creates."""
    path: str
    is_published: bool = False
    """Whether a worker that died made this version, which engines may hold. The learner then repeats the update for its
    optimiser state, and takes the adapter from `path`."""

    def __post_init__(self) -> None:
        check_lengths(self.items)


class WriteAdapter(LearnerRequest[AdapterDigest]):
    """Write the adapter that training starts from to `path`, as `version`."""

    version: int
    path: str
    seed: int | None = None
    """Seed of a new training that begins before, in place of the policy's; None: none begins."""
    adapter: str | None = None
    """PEFT directory of the adapter that the new training begins with; None: a fresh one, which has no effect."""


class Scored(Reply):
    logprobs: tuple[LearnerLogprobs, ...]
    """Log-probabilities in the order of the items."""

    def __post_init__(self) -> None:
        for logprobs in self.logprobs:
            if len(logprobs.adapter) != len(logprobs.base):
                raise ValueError(f"{len(logprobs.adapter)} adapter, {len(logprobs.base)} base log-probabilities")


class AnswersScored(Reply):
    logprobs: tuple[Logprobs, ...]
    """Log-probabilities of the answers to each question, in nats."""


class ScoreAnswers(LearnerRequest[AnswersScored]):
    """Compute the log-probabilities of whole answers under the learner's newest adapter, at `engine.temperature`."""

    questions: tuple[tuple[str, tuple[str, ...]], ...]
    """Prompts with their answers."""
    stop: tuple[str, ...]
    """Strings that end an answer."""


class Score(LearnerRequest[Scored]):
    """Compute the learner's log-probabilities of the items' completion tokens."""

    items: tuple[TrainItem, ...]
    adapter: str | None = None
    """PEFT directory of the adapter to compute with; None: the one that is trained."""

    def __post_init__(self) -> None:
        check_lengths(self.items)


class SaveLearner(LearnerRequest[Done]):
    """Save the learner's complete state in the new directory `path`."""

    path: str


class LoadLearner(LearnerRequest[Done]):
    """Resume from a directory that `SaveLearner` wrote, or a copy of it."""

    path: str


class EnvState(Reply):
    """Next turn of a game, or its result."""

    is_over: bool
    was_invalid: bool
    """Whether the rules forbid the last action."""
    teams: tuple[str, ...] | None
    """Label of each player's team, if they win and lose together; empty if the env does not name the teams."""
    eliminated: tuple[int, ...]
    """Players whom the rules have eliminated."""
    pid: int
    """Player whose turn it is; like this player's observation, not set when the game is over."""
    observation: str
    rewards: tuple[float, ...]
    """Reward of each player. Before the end of the game: the rewards if it were truncated now."""
    game_info: str
    """Information from the env as JSON; set when the game is over."""


class MakeEnv(Request[EnvState]):
    """Create and reset an env for a new game."""

    game: int
    env_id: str
    num_players: int
    seed: int
    observation: Observation
    reward_scale: float | None = None
    env_kwargs: dict[str, Any] = {}
    error_allowance: int = 0

    def __post_init__(self) -> None:
        check_plain(self.env_kwargs)


class StepEnv(Request[EnvState]):
    """Play one action. `chance_seed`: seed of the env's random streams from this action on; None: as before."""

    game: int
    action: str
    chance_seed: int | None = None


class DropEnv(Notice):
    """Forget a game."""

    game: int


class Ready(Notice):
    """First message of a worker. `info` is shown at start-up and read by the runtime (see each worker)."""

    info: dict[str, Any]

    def __post_init__(self) -> None:
        check_plain(self.info)


class Cancel(Notice):
    """Ask an engine to drop a request, whose reply is not read any more."""

    request_id: int


class EngineStats(Notice):
    """Load of an engine, sent about once a second while it has work."""

    queued: int
    running: int
    tokens_per_s: float
    cached_share: float
    """Share of prompt tokens that came from the prefix cache since the last report."""
    oom_retries: int = 0
    """Number of steps since the start that were repeated with fewer requests because memory had run out."""


class Crashed(Notice):
    """Last message of a worker that cannot continue."""

    error: str
    is_final: bool
    """Whether a restarted worker would fail in the same way."""
    is_away: bool = False
    """Whether the server of this worker cannot be reached, or was lost."""
    place: str = ""
    """Type of the error, and file and line of the user's code or else of any; empty if it may not happen again."""


class Stop(Notice):
    """Ask a worker to exit."""


_BASES = (Request, LearnerRequest, Reply, Notice)
MESSAGES: tuple[type[Message], ...] = tuple(k for base in _BASES for k in base.__subclasses__() if k not in _BASES)
REPLIES: dict[Callable[..., Message], type[Reply]] = {
    request: get_args(request.__orig_bases__[0])[0]  # type: ignore[attr-defined]
    for request in MESSAGES
    if issubclass(request, Request)
}
"""Reply type of each request, unless the reply is `Failed`."""


def check_lengths(items: Sequence[Generation | TrainItem]) -> None:
    """Raise ValueError if an item does not have exactly one log-probability per completion token."""
    for item in items:
        if len(item.logprobs) != len(item.completion_ids):
            raise ValueError(f"{len(item.logprobs)} logprobs, {len(item.completion_ids)} completion_ids")


def check_plain(value: Any, levels: int = MAX_LEVELS) -> None:
    """Raise ValueError unless `value` is JSON, nested at most `levels` deep."""
    if isinstance(value, (str, int, float, NoneType)):
        return
    if not isinstance(value, (list, tuple, dict)) or levels == 0:
        raise ValueError(f"{type(value).__name__} within {MAX_LEVELS - levels} tables or lists")
    for inner in value.values() if isinstance(value, dict) else value:
        check_plain(inner, levels - 1)
