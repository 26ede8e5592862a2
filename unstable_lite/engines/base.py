"""Interface of engines, and the part that all of them share.

Each file beside this one is one kind of engine; its library is imported only there. The shared part owns the rules of
adapter versions, the checks of requests and the counts of tokens: a version is loaded once, never again after its
unload, and stays while a request needs it. `ScriptedEngine` is the shortest engine: it has no model.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np

from unstable_lite import plugins
from unstable_lite.adapters.peft_files import adapter_digest
from unstable_lite.config import Config
from unstable_lite.errors import AdapterError, ModelError, RequestError
from unstable_lite.games.answers import END_OF_THINKING
from unstable_lite.games.templates import chats_in_use, own_tags, templates_for
from unstable_lite.transport.messages import EngineStats, Failed, Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import PROMPT_TOO_LONG, FinishReason, Generation, TokenIds

if TYPE_CHECKING:
    from unstable_lite.models.tokenization import Tokenizer

ENGINES = {
    "vllm": "unstable_lite.engines.vllm:VLLMEngine",
    "vllm-server": "unstable_lite.engines.vllm_server:VLLMServerEngine",
    "transformers": "unstable_lite.engines.embedded.engine:TransformersEngine",
    "scripted": "unstable_lite.engines.base:ScriptedEngine",
}
REQUEST_TIMEOUT_S = 600.0
"""Time after which a request without a reply fails."""
ENGINE_STALL_S = 300.0
"""Time after which a worker that owes replies but sends nothing is killed and restarted."""
BASE = 0
"""Version of the base, which has no adapter."""
GREEDY_BELOW = 1e-5
"""Temperature below which the most probable token is taken, with its probability at temperature 1, as in vLLM."""

STOP_ID, LOGPROB = 256, -1.0
"""Token that ends a completion of `ScriptedEngine`, and the log-probability of each of its tokens."""


class Engine(Protocol):
    """Engine that is used from one thread: add requests, step, collect the replies."""

    info: dict[str, Any]
    """Facts that are sent with `Ready`: `kind`, `model`, `device`, `dtype`, `threads`, `max_model_len`, `vocab_size`,
    versions, and `prompts` (`Tokenizer.prompts`) if the engine has a tokenizer."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Load the base model. Raises ModelError with a remedy if it cannot be loaded or served."""

    def add_request(self, request: Generate) -> None:
        """Queue a request. It completes exactly `prompt_ids` if they are given, else the ids of `prompt`.

        Raises RequestError if the prompt is too long (`check_length`), or the adapter unknown.
        """

    def step(self) -> Sequence[Generated | Failed]:
        """Advance every running request by a token or more; return the replies of those that finished or failed."""

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
    """Load the engine of `config.engine.kind`, which is not `auto`. Raises ConfigError or ModelError."""
    kind = spec.config.engine.kind
    engine_class: Callable[[WorkerSpec], Engine] = plugins.find(
        "engine.kind", ENGINES.get(kind, kind), cast(Any, ENGINES)
    )
    return engine_class(spec)


class EngineShell:
    """Base class of the engines here: implements `Engine` up to `_begin`, `_load`, `_unload` and the steps."""

    kind: ClassVar[str]
    info: dict[str, Any]
    _tokenizer: Tokenizer

    def __init__(self, spec: WorkerSpec, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._max_loras = spec.config.engine.max_loras
        self._max_parallel_seq = spec.config.engine.max_parallel_seq
        self._max_rank = spec.config.lora.lora_rank
        self._digests = {BASE: ""}
        """Digest of each version that is loaded."""
        self._in_use: Counter[int] = Counter()
        """Number of unfinished requests of each version."""
        self._retired: set[int] = set()
        self._oom_retries = 0
        """Number of steps that were repeated in smaller parts, because memory had run out."""
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        self._reported_at = time.monotonic()

    def _describe(self, spec: WorkerSpec, dtype: str, vocab_size: int, **more: Any) -> dict[str, Any]:
        """Return `info` of an engine with a model."""
        return {
            "kind": self.kind,
            "model": spec.config.model_name,
            "device": spec.device,
            "dtype": dtype,
            "threads": spec.threads,
            "max_model_len": self._max_model_len,
            "vocab_size": vocab_size,
            "prompts": checked_prompts(self._tokenizer, spec.config, vocab_size),
            **more,
        }

    def add_request(self, request: Generate) -> None:
        version = request.adapter_version
        if version not in self._digests:  # the base never replaces it
            raise RequestError(f"adapter version {version} is not loaded; {self._loaded()}")
        prompt_ids = self._prompt_ids(request)
        max_tokens = check_length(len(prompt_ids), request.max_tokens, self._max_model_len)
        self._in_use[version] += 1
        try:
            self._begin(request, prompt_ids, max_tokens)
        except (RequestError, RuntimeError, MemoryError):  # those that a worker answers
            self._in_use[version] -= 1
            raise

    def _prompt_ids(self, request: Generate) -> TokenIds:
        return self._tokenizer.prompt_ids(request)

    def _begin(self, request: Generate, prompt_ids: TokenIds, max_tokens: int) -> None:
        """Queue a request, which `_finish` or `_drop` must end."""
        raise NotImplementedError

    def _finish(
        self,
        request: Generate,
        prompt_ids: TokenIds,
        completion_ids: list[int],
        logprobs: Any,
        text: str,
        finish_reason: FinishReason,
        adapter_version: int | None = None,
    ) -> Generated:
        """Return the reply to a request, which is over. adapter_version: the one that was really used."""
        self._in_use[request.adapter_version] -= 1
        generation = Generation(
            prompt_ids=prompt_ids,
            completion_ids=np.array(completion_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            text=text,
            finish_reason=finish_reason,
            adapter_version=request.adapter_version if adapter_version is None else adapter_version,
        )
        return Generated(request_id=request.request_id, generation=generation)

    def load_adapter(self, version: int, path: Path) -> str:
        if version <= BASE:
            raise AdapterError(f"adapter version {version}: versions count from 1; {BASE} is the base")
        if version in self._digests:
            raise AdapterError(f"adapter version {version} is loaded already")
        if version in self._retired:
            raise AdapterError(f"adapter version {version} was unloaded, and a version is never used twice")
        if len(self._digests) > self._max_loras:
            raise AdapterError(
                f"adapter version {version}: all {self._max_loras} slots are taken ({self._loaded()}); unload one or "
                "raise engine.max_loras"
            )
        self._digests[version] = digest = self._load(version, path)
        return digest

    def _load(self, version: int, path: Path) -> str:
        """Load an adapter, whose version is new and has a slot; return its digest. Raises AdapterError."""
        raise NotImplementedError

    def confirm_adapter(self, version: int) -> str:
        digest = self._digest(version)
        return digest if self._holds(version) else f"{digest}, but the engine no longer holds it as it was loaded"

    def _holds(self, version: int) -> bool:  # noqa: ARG002
        """Return whether the loaded adapter is still there, and the same."""
        return True

    def unload_adapter(self, version: int) -> None:
        self._digest(version)
        if count := self._in_use[version]:
            raise AdapterError(f"adapter version {version} has {count} unfinished requests")
        self._unload(version)
        del self._digests[version]  # only now, so that an unload that failed can be repeated
        self._retired.add(version)

    def _unload(self, version: int) -> None:
        raise NotImplementedError

    def _digest(self, version: int) -> str:
        if version == BASE or version not in self._digests:
            raise AdapterError(f"adapter version {version} is not loaded; {self._loaded()}")
        return self._digests[version]

    def _loaded(self) -> str:
        return f"loaded: {', '.join(map(str, sorted(self._digests)))}"

    def _count(self, generated: int = 0, prompt: int = 0, cached: int = 0) -> None:
        """Count tokens for `stats`; `cached` of the `prompt` tokens were not computed again."""
        self._generated_tokens += generated
        self._prompt_tokens += prompt
        self._cached_tokens += cached

    def stats(self) -> EngineStats:
        unfinished = self._in_use.total()
        running = min(unfinished, self._max_parallel_seq)
        return self._report(queued=unfinished - running, running=running)

    def _report(self, queued: int, running: int) -> EngineStats:
        now = time.monotonic()
        stats = EngineStats(
            queued=queued,
            running=running,
            tokens_per_s=self._generated_tokens / max(now - self._reported_at, 1e-9),
            cached_share=self._cached_tokens / max(self._prompt_tokens, 1),
            oom_retries=self._oom_retries,
        )
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        self._reported_at = now
        return stats


class ScriptedEngine(EngineShell):
    """Engine without a model that replies from a list at once, for tests and benches.

    Accepts the same requests, tracks adapters alike and raises the same errors as an engine with a model. A token
    is a byte of UTF-8; `STOP_ID` ends a completion.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        config = spec.config
        super().__init__(spec, config.engine.max_model_len)
        self._replies = config.engine.replies
        self._rng = random.Random(f"{config.run.seed} {spec.name}")
        self._finished: list[Generated] = []
        self.info = {
            "kind": "scripted",
            "model": None,
            "device": spec.device,
            "dtype": None,
            "threads": spec.threads,
            "max_model_len": self._max_model_len,
            "vocab_size": STOP_ID + 1,
            "prompts": {"end_of_thinking": list(END_OF_THINKING.encode())},
        }

    def _prompt_ids(self, request: Generate) -> TokenIds:
        if request.prompt_ids is not None:
            return request.prompt_ids
        return np.frombuffer(request.prompt.encode(), np.uint8).astype(np.int32)

    def _begin(self, request: Generate, prompt_ids: TokenIds, max_tokens: int) -> None:
        rng = self._rng if request.seed is None else random.Random(request.seed)
        reply = rng.choice(self._replies)
        whole_ids = [*reply.encode(), STOP_ID]
        ids = whole_ids[:max_tokens]
        is_whole = len(ids) == len(whole_ids)
        text = reply if is_whole else bytes(ids).decode(errors="replace")
        finish_reason: FinishReason = "stop" if is_whole else "length"
        self._finished.append(self._finish(request, prompt_ids, ids, [LOGPROB] * len(ids), text, finish_reason))
        self._count(generated=len(ids))

    def step(self) -> list[Generated]:
        finished, self._finished = self._finished, []
        return finished

    def has_unfinished(self) -> bool:
        return bool(self._finished)

    def _load(self, version: int, path: Path) -> str:
        if not (path / "adapter_config.json").is_file():
            raise AdapterError(f"adapter version {version}: no adapter_config.json in {path}")
        try:
            return adapter_digest(path)
        except AdapterError:  # the engine needs no weights, so it accepts files without any
            return ""

    def _unload(self, version: int) -> None: ...

    def sleep(self) -> None:
        """Do nothing, because the engine has nothing to release."""

    def wake_up(self) -> None: ...


def check_length(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> int:
    """Return the token limit of the completion. Raises RequestError if the prompt leaves room for none."""
    limit = max_model_len - 1
    if num_prompt_tokens > limit:
        raise RequestError(
            f"prompt has {num_prompt_tokens} tokens; the limit is {limit} "
            f"(engine.max_model_len = {max_model_len}, of which a completion needs one)",
            reason=PROMPT_TOO_LONG,
        )
    if num_prompt_tokens == 0:
        raise RequestError("prompt has 0 tokens; a completion needs at least one")
    if max_tokens < 1:
        raise RequestError(f"max_tokens = {max_tokens}: at least 1")
    return min(max_tokens, max_model_len - num_prompt_tokens)


def checked_prompts(tokenizer: Tokenizer, config: Config, num_rows: int) -> dict[str, Any]:
    """Return the facts with which the orchestrator writes prompts, `Tokenizer.prompts`.

    Raises ModelError if the model's embedding, of `num_rows` rows, has none for a token of a template in use.
    """
    prompts = tokenizer.prompts(chats_in_use(config), own_tags(config))
    templates = templates_for(config, prompts)
    for name in {spec.prompt_template for spec in (*config.train_envs, *config.eval_envs)} & templates.keys():
        if (token_id := int(tokenizer.encode(templates[name].prompt("0", 2)).max(initial=0))) >= num_rows:
            raise ModelError(
                f"{config.model_name}: prompt_template {name!r} contains the token {tokenizer.token(token_id)!r} of id "
                f"{token_id}, and the model's embedding has {num_rows} rows; take the tokenizer of these weights"
            )
    return prompts
