"""The errors a user can meet. Each message says what, where, and what to do."""

_NO_MEMORY = ("out of memory", "llocate memory", "not enough memory", "ALLOC_FAILED", "bad_alloc", "a memory object")
"""In what torch and its libraries say when an allocation fails, on a GPU, on the CPU, or before either is asked."""
MEMORY_ADVICE = (
    "for an engine lower engine.max_parallel_seq, engine.max_model_len or engine.kv_cache_gb, for a learner "
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
    """An engine refused or failed one request; the engine itself is well."""


class NoRoomError(RequestError):
    """A worker could not write what it was asked for where it was asked to; the same request may go elsewhere."""


class OpponentError(RequestError):
    """A model behind an endpoint does not answer, is paused or its budget is spent; env and engine are well."""


class AdapterError(UnstableError):
    """An adapter could not be published, loaded, or did not pass its canary."""


class ModelError(UnstableError):
    """A base model or an adapter could not be loaded, or does not fit the engine."""


class ProtocolError(UnstableError):
    """Bytes on the wire are not a message of this protocol version."""


class WorkerDied(UnstableError):
    """A worker process ended or answered that it cannot go on."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        """`is_final`: another one in its place would end in the same way."""
        self.is_final = is_final
        super().__init__(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it tells of memory that is not there: of a GPU's allocator, or the system's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _NO_MEMORY)
