"""Errors that a user can meet. Each message names the event, its place, and the remedy."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_NOT_THE_USERS = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
"""Directories of this package and of Python's own modules."""
MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""Errors of code, which it raises again in the same circumstances."""
_NO_MEMORY = ("out of memory", "llocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc", "a memory object")
"""Texts in the errors of torch and its libraries if an allocation fails, on a GPU, on the CPU, or before either."""
MEMORY_ADVICE = (
    "for an engine, lower engine.max_parallel_seq, engine.max_model_len or engine.kv_cache_gb; for a learner, "
    "learner.max_tokens_per_micro_batch"
)


class Caught:
    """Captures any exception except those that end the task or the process."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None


class UnstableError(Exception):
    """Base of every error that this package raises for a reason outside its own code."""

    reason = "failed"
    """Reason (`types.REASONS`) in the record of a game that the error makes void."""

    def __init__(self, *arguments: object, reason: str = "") -> None:
        super().__init__(*arguments)
        if reason:
            self.reason = reason


class ConfigError(UnstableError):
    """The configuration cannot be used; `problems` lists every reason found."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class UnsupportedEnvError(UnstableError):
    """A scripted player does not know this env."""


class EnvError(UnstableError):
    """A TextArena env raised, or broke its own contract (rewards missing, not finite, …)."""

    reason = "env_failed"


class EnvRaised(EnvError):
    """An env's `step` raised at an action that a player had chosen."""

    reason = "env_raised"


class RequestError(UnstableError):
    """An engine refused or failed one request; the engine itself works."""

    reason = "engine_failed"


class NoRoomError(RequestError):
    """A worker had no room to write its result at the requested place; the request may name another place."""


class OpponentError(RequestError):
    """A model behind an endpoint does not answer, is paused, or has spent its budget; env and engine work."""

    reason = "opponent_failed"


class AdapterError(UnstableError):
    """An adapter could not be written or loaded, or failed its canary."""


class ModelError(UnstableError):
    """A base model or an adapter could not be loaded, or does not fit the engine."""


class ProtocolError(UnstableError):
    """Bytes on the wire are not a message of this protocol version."""


class WorkerDied(UnstableError):
    """A worker process exited, or reported that it cannot continue."""

    def __init__(self, message: str, is_final: bool = False, is_away: bool = False, place: str = "") -> None:
        """Store the message. `is_final`: a restarted worker would end in the same way.

        `is_away`: its server cannot be reached, or was lost. `place`: see `transport.messages.Crashed`.
        """
        self.is_final = is_final
        self.is_away = is_away
        self.place = place
        super().__init__(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the allocator of a GPU or of the system ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code, which is neither Python's, nor this or an installed package's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        # Code that is compiled or evaluated has no absolute path.
        if path.is_absolute() and not is_installed and not any(map(path.is_relative_to, _NOT_THE_USERS)):
            return frame
    return None


def described(error: BaseException, is_ours_shown: bool = False) -> str:
    """Return type, message and innermost line of the user's code; if `is_ours_shown` and there is none, of any."""
    frames = traceback.extract_tb(error.__traceback__) if is_ours_shown else []
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    frame = users_frame(error) or (ours[-1] if ours else None)
    place = f" ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})" if frame else ""
    return f"{type(error).__name__}: {error}{place}"
