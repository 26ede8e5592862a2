"""An engine without a model, for tests and benches: it draws its answers from a list, at once.

Token ids are UTF-8 bytes; every log-probability is -1. Adapters are kept count of as by a real engine.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.transport.child import WorkerSpec
from unstable_lite.transport.messages import EngineStats, Generate, Generated
from unstable_lite.types import Generation

STOP_ID = 256


class ScriptedEngine:
    def __init__(self, spec: WorkerSpec) -> None:
        self._config = spec.config.engine
        self._replies = [(reply, _ids(reply, stop=True)) for reply in self._config.replies]
        self._random = random.Random(spec.config.run.seed)
        self._waiting: list[Generate] = []
        self._loaded = {0}
        self._used = {0}
        self._tokens = 0
        self._since = time.monotonic()
        self.facts: dict[str, Any] = {"kind": "scripted", "replies": len(self._replies)}

    def add_request(self, request: Generate) -> None:
        if request.adapter_version not in self._loaded:
            raise RequestError(f"adapter version {request.adapter_version} is not loaded")
        self._waiting.append(request)

    def step(self) -> list[Generated]:
        waiting, self._waiting = self._waiting, []
        return [self._answer(request) for request in waiting]

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def load_adapter(self, version: int, path: Path) -> None:
        if version in self._used:
            raise AdapterError(f"adapter version {version} was used before")
        if len(self._loaded) > self._config.max_loras:
            raise AdapterError(f"no adapter slot free: engine.max_loras = {self._config.max_loras}")
        if not (path / "adapter_config.json").is_file():
            raise AdapterError(f"no adapter_config.json in {path}")
        self._used.add(version)
        self._loaded.add(version)

    def unload_adapter(self, version: int) -> None:
        if version not in self._loaded or version == 0:
            raise AdapterError(f"adapter version {version} is not loaded")
        self._loaded.remove(version)

    def stats(self) -> EngineStats:
        now = time.monotonic()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        return EngineStats(queued=len(self._waiting), running=0, tokens_per_s=rate, cached_share=0.0)

    def _answer(self, request: Generate) -> Generated:
        stream = self._random if request.seed is None else random.Random(request.seed)
        text, ids = stream.choice(self._replies)
        is_whole = len(ids) <= request.max_tokens
        ids = ids[: request.max_tokens]
        self._tokens += len(ids)
        return Generated(
            request_id=request.request_id,
            generation=Generation(
                prompt_ids=_ids(request.prompt),
                completion_ids=ids,
                logprobs=np.full(len(ids), -1.0, np.float32),
                text=text if is_whole else text.encode()[: request.max_tokens].decode(errors="ignore"),
                finish_reason="stop" if is_whole else "length",
                adapter_version=request.adapter_version,
            ),
        )


def _ids(text: str, stop: bool = False) -> np.ndarray:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return np.append(ids, np.int32(STOP_ID)) if stop else ids
