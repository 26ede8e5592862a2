"""The messages between the orchestrator and its workers.

Every request carries a `request_id` and gets exactly one reply with the same id: the reply that its docstring names, or
`Failed`. codec.py turns messages into bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import msgspec

from unstable_lite.types import Generation, Histogram, LearnerLogprobs, Logprobs, TrainItem

MAX_LEVELS = 16
"""Deepest nesting of a field that may hold any JSON value."""


class _Message(msgspec.Struct, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. On the wire a message is an array of its fields."""


class Generate(_Message, tag=True):
    """Ask an engine for one completion. Reply: `Generated`."""

    request_id: int
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


class Generated(_Message, tag=True):
    request_id: int
    generation: Generation

    def __post_init__(self) -> None:
        check_lengths([self.generation])


class LoadAdapter(_Message, tag=True):
    """Load a PEFT directory under a version that was never used before. Reply: `AdapterDigest` of the adapter read."""

    request_id: int
    version: int
    path: str


class ConfirmAdapter(_Message, tag=True):
    """Ask an engine for the digest of the adapter that it holds as `version`. Reply: `AdapterDigest`."""

    request_id: int
    version: int


class AdapterDigest(_Message, tag=True):
    """Digest of the adapter that a worker wrote, read or holds, computed by `peft_files.digest_of`."""

    request_id: int
    seconds: float
    digest: str


class UnloadAdapter(_Message, tag=True):
    """Forget a version; no request may use it again. Reply: `Done`."""

    request_id: int
    version: int


class Sleep(_Message, tag=True):
    """Answer all earlier requests, then release the device memory until `WakeUp`. Reply: `Done`."""

    request_id: int


class WakeUp(_Message, tag=True):
    """Allocate the device memory again; the adapters are unchanged. Reply: `Done`."""

    request_id: int


class Update(_Message, tag=True):
    """Make one optimiser step on a batch, then write the new adapter to `path`. Reply: `Updated`."""

    request_id: int
    items: tuple[TrainItem, ...]
    version: int
    """Adapter version that this update creates."""
    path: str
    state_path: str
    """New directory for the learner's complete state, written before the reply; see `LoadLearner`."""

    def __post_init__(self) -> None:
        check_lengths(self.items)


class Updated(_Message, tag=True):
    request_id: int
    metrics: dict[str, float]
    skipped: str | None
    """Reason why no adapter was made (a non-finite loss or gradient), or None."""
    logprobs: tuple[Logprobs, ...] = ()
    """Log-probabilities of each item's trained tokens before the step; only with `tracker.keep_tokens`."""
    histograms: tuple[Histogram, ...] = ()
    """Histograms of this update; empty if this repeats a reply that was lost."""
    digest: str = ""
    """Digest of the adapter that was written; empty if the update was skipped."""


class WriteAdapter(_Message, tag=True):
    """Write the adapter that training starts from to `path`, as `version`. Reply: `AdapterDigest`."""

    request_id: int
    version: int
    path: str
    state_path: str


class Score(_Message, tag=True):
    """Compute the learner's log-probabilities of the items' completion tokens. Reply: `Scored`."""

    request_id: int
    items: tuple[TrainItem, ...]

    def __post_init__(self) -> None:
        check_lengths(self.items)


class Scored(_Message, tag=True):
    request_id: int
    logprobs: tuple[LearnerLogprobs, ...]
    """Log-probabilities in the order of the items."""

    def __post_init__(self) -> None:
        for logprobs in self.logprobs:
            if len(logprobs.adapter) != len(logprobs.base):
                raise ValueError(f"{len(logprobs.adapter)} adapter, {len(logprobs.base)} base log-probabilities")


class FineTuning(_Message, tag=True):
    """Progress of a fine-tuning worker, sent without a request."""

    update: int
    total: int
    loss: float


class FineTuned(_Message, tag=True):
    """Result of a fine-tuning worker, which has written the adapter into `sft.output`; sent without a request."""

    metrics: dict[str, float]
    left_out: dict[str, int]
    """Number of pairs that were not trained on, by reason."""


class LoadLearner(_Message, tag=True):
    """Resume from a directory that `Update` or `WriteAdapter` wrote, or a copy of it. Reply: `Done`.

    If the update that wrote the directory is requested again because its reply was lost, the learner only repeats the
    reply.
    """

    request_id: int
    path: str


class MakeEnv(_Message, tag=True):
    """Create and reset an env for a new game. Reply: `EnvState`."""

    request_id: int
    game: int
    env_id: str
    num_players: int
    seed: int
    observation: str


class StepEnv(_Message, tag=True):
    """Play one action. Reply: `EnvState`."""

    request_id: int
    game: int
    action: str


class DropEnv(_Message, tag=True):
    """Forget a game. No reply."""

    game: int


class EnvState(_Message, tag=True):
    """Next turn of a game, or its result."""

    request_id: int
    is_over: bool
    was_invalid: bool
    """Whether the rules forbid the last action."""
    has_teams: bool
    """Whether its players win and lose in teams."""
    pid: int
    """Player whose turn it is; like this player's observation, not set when the game is over."""
    observation: str
    rewards: tuple[float, ...]
    """Reward of each player. Before the end of the game: the rewards if it were truncated now."""
    game_info: str
    """Information from the env as JSON; set when the game is over."""


class Done(_Message, tag=True):
    request_id: int
    seconds: float


class Failed(_Message, tag=True):
    """Reply to a request that failed; the worker itself still works."""

    request_id: int
    error: str
    is_no_room: bool = False
    """Whether the request failed because its output did not fit in the given location; another one may have room."""


class Ready(_Message, tag=True):
    """First message of a worker. `info` is shown at start-up and read by the runtime (see each worker)."""

    info: dict[str, Any]

    def __post_init__(self) -> None:
        check_plain(self.info)


class EngineStats(_Message, tag=True):
    """Load of an engine, sent about once a second while it has work."""

    queued: int
    running: int
    tokens_per_s: float
    cached_share: float
    """Share of prompt tokens that came from the prefix cache since the last report."""
    oom_retries: int = 0
    """Number of steps since the start that were repeated with fewer requests because memory had run out."""


class Crashed(_Message, tag=True):
    """Last message of a worker that cannot continue."""

    error: str
    is_final: bool
    """Whether a restarted worker would fail in the same way."""
    is_away: bool = False
    """Whether the server of this worker cannot be reached, or was lost."""


class Stop(_Message, tag=True):
    """Ask a worker to exit. No reply."""


Message = (
    Generate
    | Generated
    | LoadAdapter
    | ConfirmAdapter
    | AdapterDigest
    | UnloadAdapter
    | Sleep
    | WakeUp
    | Update
    | Updated
    | WriteAdapter
    | Score
    | Scored
    | LoadLearner
    | FineTuning
    | FineTuned
    | MakeEnv
    | StepEnv
    | DropEnv
    | EnvState
    | Done
    | Failed
    | Ready
    | EngineStats
    | Crashed
    | Stop
)

REPLIES: dict[Any, Any] = {
    Generate: Generated,
    LoadAdapter: AdapterDigest,
    ConfirmAdapter: AdapterDigest,
    UnloadAdapter: Done,
    Sleep: Done,
    WakeUp: Done,
    Update: Updated,
    WriteAdapter: AdapterDigest,
    Score: Scored,
    LoadLearner: Done,
    MakeEnv: EnvState,
    StepEnv: EnvState,
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
