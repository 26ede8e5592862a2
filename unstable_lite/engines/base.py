"""Interface of engines. Each file beside this one is one kind of engine; its library is imported only there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from unstable_lite import plugins
from unstable_lite.transport.messages import EngineStats, Failed, Generate, Generated, Progress
from unstable_lite.transport.worker_main import WorkerSpec

ENGINES = {
    "vllm": "unstable_lite.engines.vllm:VLLMEngine",
    "vllm-server": "unstable_lite.engines.vllm_server.engine:VLLMServerEngine",
    "transformers": "unstable_lite.engines.embedded.engine:TransformersEngine",
    "scripted": "unstable_lite.engines.scripted:ScriptedEngine",
}


class Engine(Protocol):
    """Engine that is used from one thread: add requests, step, collect the replies."""

    info: dict[str, Any]
    """Facts that are sent with `Ready`: `kind`, `model`, `device`, `dtype`, `threads`, `max_model_len`, `vocab_size`,
    versions, and `prompts` (`Tokenizer.prompts`) if the engine has a tokenizer."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Load the base model. Raises ModelError with a remedy if it cannot be loaded or served."""

    def add_request(self, request: Generate) -> None:
        """Queue a request. It completes exactly `prompt_ids` if they are given, else the ids of `prompt`.

        Raises RequestError if the prompt is too long (with its size and the limit), or the adapter unknown.
        """

    def step(self) -> Sequence[Generated | Failed | Progress]:
        """Advance every running request by a token or more; return the replies of those that finished or failed.

        An engine that streams also returns `Progress` of requests with `is_streamed`.
        """

    def has_unfinished(self) -> bool: ...

    def load_adapter(self, version: int, path: Path) -> str:
        """Load a PEFT directory and return its digest: `peft_files.adapter_digest` or `digest_of`.

        Raises AdapterError if the version was used before, no slot is free, or the adapter is for another base.
        """

    def confirm_adapter(self, version: int) -> str:
        """Return the digest that `load_adapter` returned, if the engine still holds that adapter.

        An engine that detects another one returns another text. Raises AdapterError if the version is
        not loaded.
        """

    def unload_adapter(self, version: int) -> None:
        """Unload an adapter. Raises AdapterError if the version is unknown or has unfinished requests."""

    def stats(self) -> EngineStats:
        """Return the counts since the last call."""


@runtime_checkable
class SleepingEngine(Engine, Protocol):
    """Engine that can leave its device to the learner, for `engine.when_shared = "sleep"`."""

    def sleep(self) -> None:
        """Release memory. No request is unfinished, and no other method is called until `wake_up`."""

    def wake_up(self) -> None:
        """Allocate the memory again. Adapters are as before; cached prefixes are dropped."""


def load_engine(spec: WorkerSpec) -> Engine:
    """Return the class of `config.engine.kind`, which is not `auto`. Raises ConfigError."""
    kind = spec.config.engine.kind
    engine_class: Callable[[WorkerSpec], Engine] = plugins.find(
        "engine.kind", ENGINES.get(kind, kind), cast(Any, ENGINES)
    )
    return engine_class(spec)
