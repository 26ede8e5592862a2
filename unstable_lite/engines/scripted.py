"""Engine without a model that replies from a list at once, for tests and benches.

Accepts the same requests, tracks adapters alike and raises the same errors as an engine with a model. A token
is a byte of UTF-8; 256 ends a completion.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from unstable_lite.adapters.peft_files import adapter_digest
from unstable_lite.engines.base import EngineShell
from unstable_lite.errors import AdapterError
from unstable_lite.games.answers import END_OF_THINKING
from unstable_lite.transport.messages import Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import FinishReason, TokenIds

STOP_ID = 256
LOGPROB = -1.0


class ScriptedEngine(EngineShell):
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
