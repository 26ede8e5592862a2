"""What every engine can do. One file beside this one is one kind of engine; its library is imported only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from unstable_lite import by_name
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import EngineStats, Failed, Generate, Generated

ENGINES = {
    "vllm": "unstable_lite.engines.vllm:VLLMEngine",
    "vllm-server": "unstable_lite.engines.vllm_server:VLLMServerEngine",
    "transformers": "unstable_lite.engines.transformers:TransformersEngine",
    "scripted": "unstable_lite.engines.scripted:ScriptedEngine",
}


class Engine(Protocol):
    """Used from one thread: add requests, step, collect what finished."""

    facts: dict[str, Any]
    """Sent with `Ready`: `kind`, `model`, `device`, `dtype`, `threads`, `max_model_len`, `vocab_size`, versions;
    `prompts` (`Tokenizer.prompts`) where it has a tokenizer."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Load the base model. Raises ModelError with what to do if it cannot be loaded or served."""

    def add_request(self, request: Generate) -> None:
        """Queue a request. Raises RequestError: prompt too long (with its size and the limit), unknown adapter."""

    def step(self) -> Sequence[Generated | Failed]:
        """Advance every running request by a token or more; the ones that finished, or cannot be served after all."""

    def has_unfinished(self) -> bool: ...

    def load_adapter(self, version: int, path: Path) -> str:
        """Load a PEFT directory and return the digest of what was read: `outside_files.adapter_digest` or `digest_of`.

        Raises AdapterError: version known or used before, no slot free, not an adapter of this base.
        """

    def confirm_adapter(self, version: int) -> str:
        """Return the digest that `load_adapter` returned, if the engine still holds what it read.

        An engine that sees that it holds something else returns another text. Raises AdapterError if the version is
        not loaded.
        """

    def unload_adapter(self, version: int) -> None:
        """Raises AdapterError if the version is unknown or has unfinished requests."""

    def stats(self) -> EngineStats:
        """Since the last call."""


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """One that can leave its device to the learner, for `run.mode = "sleep"`."""

    def sleep(self) -> None:
        """Give memory back; nothing is unfinished. Until `wake_up`, nothing else is called."""

    def wake_up(self) -> None:
        """Take it again. Adapters are as they were, prefixes are forgotten."""


@runtime_checkable
class ReturningEngine(Engine, Protocol):
    """One that a worker on another machine can keep when its link is cut while requests are unfinished."""

    def forget_requests(self) -> None:
        """Drop what is unfinished, and let go of its adapters: nobody waits for it, and its ids are used again."""


def load_engine(spec: WorkerSpec) -> Engine:
    """The engine that `config.engine.kind` names; `auto` has been decided by the orchestrator. Raises ConfigError."""
    kind = spec.config.engine.kind
    engine_class: Callable[[WorkerSpec], Engine] = by_name.find(
        "engine.kind", ENGINES.get(kind, kind), cast(Any, ENGINES)
    )
    return engine_class(spec)
