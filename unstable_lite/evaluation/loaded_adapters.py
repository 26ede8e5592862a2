"""Load the adapters of an evaluation into the engines' slots when they are needed, and check them.

A wrong adapter must be an error, and must never silently be the base. A run's canary compares engine and learner. Here
there is no learner, so these checks are weaker; each adapter passes them on each engine before it plays:

- its files exist, have the shapes of this base (the engines refuse others), and do not name another base;
- each answer names this adapter;
- its answers to fixed prompts, sampled with fixed seeds, differ in tokens or log-probabilities from the base's and from
  those of every other loaded adapter, unless its B matrices are all zero.

They do not check that the log-probabilities are right, nor that the adapter was trained under this name: an engine that
applied every adapter at half its scale would pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from unstable_lite.adapters.table import AdapterTable, Origin
from unstable_lite.engines.client import EngineClient
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.evaluation.models import EvaluatedModel
from unstable_lite.orchestrator.workers import EngineWorkers
from unstable_lite.types import BASE, Generation, ModelRef

PROBES = 4
PROBE_TOKENS = 16
PROBE_SEED = 1207
LEAST_GAP = 1e-6
"""Largest difference in log p of two answers of the same weights, unless the base differs from itself by more."""
UNLOAD_RETRIES = 60
UNLOAD_RETRY_S = 1.0


class AdapterSlots:
    """Adapters that the engines hold, in an adapter table. An adapter that returns gets a new id."""

    def __init__(self, workers: EngineWorkers, num_slots: int, prompt: str) -> None:
        self._engines = workers.engines
        self._table = AdapterTable(num_slots)
        self._prompt = prompt
        self._has_model = workers.info.get("model") is not None
        """Whether adapters differ; for the scripted engine, which has none, all answers are the same."""
        self._ids: dict[str, int] = {}
        """Adapter ids by the model's key."""
        self._names: dict[str, str] = {}
        self._zeros = {BASE}
        """Keys of the adapters that answer like the base."""
        self._answers: dict[tuple[str, str], list[Generation]] = {}
        """Answers by engine and the model's key."""
        self._gaps: dict[str, float] = {}
        """Largest difference in log p of two answers of the same weights, by engine."""
        self._last_id = 0

    def ref(self, model: EvaluatedModel) -> ModelRef:
        if model.is_fixed:
            return ModelRef(uid=f"fixed-{model.name}", kind="fixed", name=model.name)
        version = 0 if model.path is None else self._ids[model.key]
        return ModelRef(uid=model.name, kind="checkpoint", adapter_version=version)

    async def hold(self, models: dict[str, EvaluatedModel]) -> None:
        """Load and check these adapters; unload the others. Raises AdapterError."""
        for key in [key for key in self._ids if key not in models]:
            await self._unload(key)
        for key, model in models.items():
            if key not in self._ids:
                await self._load(model)
                await self._try(model)
                id = self._ids[key]
                self._table.check(id)
                self._table.pin(id)
                self._table.offer(id)

    async def _load(self, model: EvaluatedModel) -> None:
        assert model.path is not None
        id = self._last_id = self._last_id + 1
        self._table.add(id, Origin("file", model.key), digest="")
        self._table.load(id)
        try:
            await self._engines.load_adapter(id, model.path)
        except RequestError as error:
            raise AdapterError(f"{model.name} ({model.path}): {error}") from error
        self._ids[model.key] = id
        self._names[model.key] = model.name
        if model.is_zero:
            self._zeros.add(model.key)

    async def _unload(self, key: str) -> None:
        id = self._ids.pop(key)
        if self._table.adapters[id].is_used:
            self._table.unpin(id)
        self._answers = {of: answers for of, answers in self._answers.items() if of[1] != key}
        for attempt in range(UNLOAD_RETRIES):
            try:
                await self._engines.unload_adapter(id)
                self._table.remove(id)
                return
            except RequestError as error:
                # An abandoned game may still have a request in an engine.
                if attempt + 1 == UNLOAD_RETRIES:
                    raise AdapterError(f"{self._names[key]} cannot be unloaded: {error}") from error
            await asyncio.sleep(UNLOAD_RETRY_S)

    async def _try(self, model: EvaluatedModel) -> None:
        """Raise AdapterError if an adapter answers like the base or like another adapter."""
        if not self._has_model:
            return
        for engine in self._engines.engines:
            name = engine.channel.name
            if (name, BASE) not in self._answers:
                self._answers[name, BASE] = await self._ask(engine, 0)
                again = await self._ask(engine, 0)
                self._gaps[name] = max(LEAST_GAP, 4 * _gap(self._answers[name, BASE], again))
            answers = await self._ask(engine, self._ids[model.key])
            for (of, key), others in self._answers.items():
                is_other = of == name and not (model.is_zero and key in self._zeros)
                if is_other and _gap(answers, others) <= self._gaps[name]:
                    raise AdapterError(
                        f"{name} answers like {self._names.get(key, 'the base model')} instead of {model.name} "
                        f"({model.path}), over {PROBES} answers. Either it serves the wrong weights, or the two are "
                        "too alike for this precision; engine.dtype = 'float32' separates "
                        "which"
                    )
            self._answers[name, model.key] = answers

    async def _ask(self, engine: EngineClient, version: int) -> list[Generation]:
        asked = [
            engine.generate(self._prompt, version, seed=PROBE_SEED + index, max_tokens=PROBE_TOKENS)
            for index in range(PROBES)
        ]
        return list(await asyncio.gather(*asked))


def _gap(some: Sequence[Generation], others: Sequence[Generation]) -> float:
    """Return the largest |Δ log p| between two lists of answers; infinite if the tokens differ."""
    gap = 0.0
    for one, other in zip(some, others, strict=True):
        if not np.array_equal(one.completion_ids, other.completion_ids):
            return float("inf")
        gap = max(gap, float(np.abs(one.logprobs - other.logprobs).max()))
    return gap
