"""Errors that a user can meet. Each message names the event, its place, and the remedy."""

_NO_MEMORY = ("out of memory", "llocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc", "a memory object")
"""Texts in the errors of torch and its libraries if an allocation fails, on a GPU, on the CPU, or before either."""
MEMORY_ADVICE = (
    "for an engine, lower engine.max_parallel_seq, engine.max_model_len or engine.kv_cache_gb; for a learner, "
    "learner.max_tokens_per_micro_batch or learner.logits_chunk_tokens"
)


class UnstableError(Exception):
    """Base of every error that this package raises for a reason outside its own code."""


class ConfigError(UnstableError):
    """The configuration cannot be used; `problems` lists every reason found."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class UnsupportedEnvError(UnstableError):
    """A scripted player does not know this env."""


class EnvError(UnstableError):
    """A TextArena env raised, or broke its own contract (rewards missing, not finite, …)."""


class RequestError(UnstableError):
    """An engine refused or failed one request; the engine itself works."""


class NoRoomError(RequestError):
    """A worker had no room to write its result at the requested place; the request may name another place."""


class OpponentError(RequestError):
    """A model behind an endpoint does not answer, is paused, or has spent its budget; env and engine work."""


class AdapterError(UnstableError):
    """An adapter could not be written or loaded, or failed its canary."""


class ModelError(UnstableError):
    """A base model or an adapter could not be loaded, or does not fit the engine."""


class ProtocolError(UnstableError):
    """Bytes on the wire are not a message of this protocol version."""


class WorkerDied(UnstableError):
    """A worker process exited, or reported that it cannot continue."""

    def __init__(self, message: str, is_final: bool = False, is_away: bool = False) -> None:
        """Store the message. `is_final`: a restarted worker would end in the same way.

        `is_away`: its server cannot be reached, or was lost.
        """
        self.is_final = is_final
        self.is_away = is_away
        super().__init__(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the allocator of a GPU or of the system ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)
