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
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import numpy as np

from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import AdapterError, RequestError
from unstable_lite.evaluation.cells import Cell, in_rounds
from unstable_lite.evaluation.models import BASE_MODEL, EvaluatedModel
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
    """Adapters that the engines hold. An adapter that returns gets a new id."""

    def __init__(self, workers: EngineWorkers, num_slots: int, prompt: str) -> None:
        self._engines = workers.engines
        self._num_slots = num_slots
        self._prompt = prompt
        self._has_model = workers.info.get("model") is not None
        """Whether adapters differ; for the scripted engine, which has none, all answers are the same."""
        self._ids = {BASE: 0}
        """Ids of the loaded adapters by the model's key."""
        self._models = {BASE: BASE_MODEL}
        """Loaded adapters and the base, by key."""
        self._answers: dict[str, dict[str, list[Generation]]] = {}
        """Answers by engine and the model's key."""
        self._gaps: dict[str, float] = {}
        """Largest difference in log p of two answers of the same weights, by engine."""
        self._last_id = 0

    def ref(self, model: EvaluatedModel) -> ModelRef:
        if model.is_fixed:
            return ModelRef(uid=f"fixed-{model.name}", kind="fixed", name=model.name)
        return ModelRef(uid=model.name, kind="checkpoint", adapter_version=self._ids[model.key])

    async def rounds(self, cells: Iterable[Cell]) -> AsyncIterator[list[Cell]]:
        """Yield the cells in rounds, each with its adapters loaded and checked. Raises AdapterError."""
        for round_ in in_rounds(cells, self._num_slots):
            await self.hold({key: model for cell in round_ for key, model in cell.adapters.items()})
            yield round_

    async def hold(self, models: Mapping[str, EvaluatedModel]) -> None:
        """Load and check these adapters, given by key; unload the others. Raises AdapterError."""
        for key in [key for key in self._ids if key != BASE and key not in models]:
            await self._unload(key)
        for key, model in models.items():
            if key not in self._ids:
                self._last_id += 1
                await self._load(self._engines, self._last_id, model)
                self._ids[key], self._models[key] = self._last_id, model
                for engine in self._engines.engines:
                    await self._check(engine, model)

    async def restore(self, engine: EngineClient) -> None:
        """Load and check on a restarted engine the adapters that are held; then it may be asked again.

        Raises AdapterError, also if one cannot be loaded any more.
        """
        self._answers.pop(engine.channel.name, None)
        for key, model in self._models.items():
            if key != BASE:
                await self._load(engine, self._ids[key], model)
                await self._check(engine, model)
        self._engines.mark_ready(engine)

    async def _load(self, engines: EnginePool | EngineClient, id: int, model: EvaluatedModel) -> None:
        """Load an adapter on all engines or on one. Raises AdapterError if it cannot be loaded."""
        assert model.path is not None
        try:
            await engines.load_adapter(id, model.path)
        except RequestError as error:
            raise AdapterError(f"{model.name} ({model.path}): {error}") from error

    async def _unload(self, key: str) -> None:
        id, model = self._ids.pop(key), self._models.pop(key)
        for answers in self._answers.values():
            answers.pop(key, None)
        for attempt in range(UNLOAD_RETRIES):
            try:
                await self._engines.unload_adapter(id)
                return
            except RequestError as error:
                # An abandoned game may still have a request in an engine.
                if attempt + 1 == UNLOAD_RETRIES:
                    raise AdapterError(f"{model.name} cannot be unloaded: {error}") from error
            await asyncio.sleep(UNLOAD_RETRY_S)

    async def _check(self, engine: EngineClient, model: EvaluatedModel) -> None:
        """Raise AdapterError if an adapter answers like the base or like another adapter."""
        if not self._has_model:
            return
        name = engine.channel.name
        known = self._answers.setdefault(name, {})
        if BASE not in known:
            known[BASE] = await self._ask(engine, 0)
            self._gaps[name] = max(LEAST_GAP, 4 * _gap(known[BASE], await self._ask(engine, 0)))
        answers = await self._ask(engine, self._ids[model.key])
        for other, its_answers in ((self._models[key], found) for key, found in known.items()):
            if _gap(answers, its_answers) <= self._gaps[name] and not (model.is_zero and other.is_zero):
                raise AdapterError(
                    f"{name} answers like {'the base model' if other is BASE_MODEL else other.name} instead of "
                    f"{model.name} ({model.path}), over {PROBES} answers. Either it serves the wrong weights, or the "
                    "two are too alike for this precision; engine.dtype = 'float32' separates which"
                )
        known[model.key] = answers

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
