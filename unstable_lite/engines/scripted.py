"""Engine without a model that replies from a list at once, for tests and benches.

Accepts the same requests, tracks adapters alike and raises the same errors as an engine with a model. A token
is a byte of UTF-8; 256 ends a completion.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.adapters.peft_files import adapter_digest
from unstable_lite.engines.adapter_slots import AdapterVersions
from unstable_lite.engines.request_checks import Throughput, check_length
from unstable_lite.errors import AdapterError
from unstable_lite.games.thinking import END_OF_THINKING
from unstable_lite.transport.messages import EngineStats, Generate, Generated
from unstable_lite.transport.worker_main import WorkerSpec
from unstable_lite.types import Generation

STOP_ID = 256
LOGPROB = -1.0


class ScriptedEngine:
    def __init__(self, spec: WorkerSpec) -> None:
        config = spec.config
        self._replies = config.engine.replies
        self._max_model_len = config.engine.max_model_len
        self._adapters = AdapterVersions(config.engine.max_loras)
        self._rng = random.Random(f"{config.run.seed} {spec.name}")
        self._finished: list[Generated] = []
        self._throughput = Throughput()
        self.info: dict[str, Any] = {
            "kind": "scripted",
            "model": None,
            "device": spec.device,
            "dtype": None,
            "threads": spec.threads,
            "max_model_len": self._max_model_len,
            "vocab_size": STOP_ID + 1,
            "prompts": {"end_of_thinking": list(END_OF_THINKING.encode())},
        }

    def add_request(self, request: Generate) -> None:
        self._adapters.check_loaded(request.adapter_version)
        prompt_ids = request.prompt_ids
        if prompt_ids is None:
            prompt_ids = np.frombuffer(request.prompt.encode(), np.uint8).astype(np.int32)
        max_tokens = check_length(len(prompt_ids), request.max_tokens, self._max_model_len)
        rng = self._rng if request.seed is None else random.Random(request.seed)
        reply = rng.choice(self._replies)
        whole_ids = np.array([*reply.encode(), STOP_ID], np.int32)
        completion_ids = whole_ids[:max_tokens]
        is_whole = len(completion_ids) == len(whole_ids)
        generation = Generation(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=np.full(len(completion_ids), LOGPROB, np.float32),
            text=reply if is_whole else bytes(completion_ids.tolist()).decode(errors="replace"),
            finish_reason="stop" if is_whole else "length",
            adapter_version=request.adapter_version,
        )
        self._finished.append(Generated(request_id=request.request_id, generation=generation))
        self._throughput.count(generated=len(completion_ids))

    def step(self) -> list[Generated]:
        finished, self._finished = self._finished, []
        return finished

    def has_unfinished(self) -> bool:
        return bool(self._finished)

    def load_adapter(self, version: int, path: Path) -> str:
        self._adapters.check_new(version)
        if not (path / "adapter_config.json").is_file():
            raise AdapterError(f"adapter version {version}: no adapter_config.json in {path}")
        try:
            digest = adapter_digest(path)
        except AdapterError:  # the engine needs no weights, so it accepts files without any
            digest = ""
        return self._adapters.add(version, digest)

    def confirm_adapter(self, version: int) -> str:
        return self._adapters.digest(version)

    def unload_adapter(self, version: int) -> None:
        self._adapters.remove(version)

    def sleep(self) -> None:
        """Do nothing, because the engine has nothing to release."""

    def wake_up(self) -> None: ...

    def stats(self) -> EngineStats:
        return self._throughput.report(queued=0, running=len(self._finished))
