"""From a written adapter to one that games may ask for: load on every engine, canary, offer; and back again.

The canary: each engine samples a few tokens of a fixed prompt with the new adapter, and the learner scores those very
tokens, of all engines in one go. They must agree, and be nearer to the adapter than to the base wherever the learner
can tell the two apart. The learner holds only the newest adapter. One that comes back, or that an engine is given which
died and is there again, is held against what engines said with it, to the same prompt and seeds, when it was the
newest.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import numpy as np

from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import AdapterError, RequestError, WorkerDied
from unstable_lite.learners.client import LearnerClient
from unstable_lite.transport.adapters import AdapterArena
from unstable_lite.types import Generation, LearnerLogprobs, Logprobs, TokenIds

T = TypeVar("T")

log = logging.getLogger(__name__)

CANARY_TOKENS = 16
CANARY_SEED = 20_11
BASE_CANARIES = 8
"""Samples that each engine gives of the base, once: a short answer may hold tokens that any distribution is sure of."""
CANARIES = 2
"""Samples of an adapter: the first token of one of them may fall otherwise, by rounding alone, when it is asked again,
and leave nothing to compare."""
UNLOAD_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What one engine's canary told; means over its tokens of |Δ log p|."""

    engine: str
    n: int
    mismatch: float
    """Engine against the learner, with what the engine was asked for."""
    base_gap: float
    """Learner with the adapter against the learner without."""
    engine_to_base: float
    """Engine against the learner without the adapter."""

    def is_of_the_base(self, noise: float) -> bool:
        """Whether the engine answered from the base. noise: mean |Δ log p| of the base itself.

        The smaller of both gaps is what rounding did to these very tokens, which may be far more than `noise`. So the
        other one must stand out from it: an adapter that has hardly left the base is no reason to end a run.
        """
        can_tell = self.base_gap > 4 * max(noise, 1e-4)
        return can_tell and 2 * self.engine_to_base <= self.mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """One canary of an adapter from when the learner held it."""

    seed: int
    completion_ids: TokenIds
    logprobs: Logprobs
    """The engine's."""
    base_logprobs: Logprobs
    """The learner's, without the adapter."""


class Publisher:
    def __init__(
        self,
        engines: EnginePool,
        learner: LearnerClient,
        arena: AdapterArena,
        canary_prompt: str,
        max_loras: int,
        tolerance: float,
    ) -> None:
        self.num_waits = 0
        """How often a new adapter had to wait for a slot."""
        self._remembered: dict[int, dict[str, list[_Remembered]]] = {}
        """By version and engine."""
        self._keeps: set[int] = set()
        """Versions that are remembered after they are unloaded: they may come back."""
        self._held: dict[int, int] = {}
        """What every engine is to hold: version, and the version that it was when the learner held it."""
        self._engines = engines
        self._learner = learner
        self._arena = arena
        self._prompt = canary_prompt
        self._max_loras = max_loras
        self._tolerance = tolerance
        self._noise = 0.0
        """Mean mismatch of the base: what two implementations of the same weights differ by."""
        self._loaded: set[int] = set()
        self._is_unloading = False
        self._slot_freed = asyncio.Condition()

    async def check_base(self) -> dict[str, float]:
        """The canary without an adapter, before the first game: do engines and learner hold the same base?"""
        canaries = await self._ask_canaries(0, BASE_CANARIES)
        self._noise = fmean(canary.mismatch for canary in canaries)
        return self._verdict(0, canaries)

    async def publish(self, version: int) -> dict[str, float]:
        """Load `version` everywhere and try it; when this returns, games may use it.

        Waits for a free adapter slot. Raises AdapterError if the canary fails, RequestError if an engine of this
        machine, or every engine, does not load it.
        """
        async with self._slot_freed:
            if len(self._loaded) >= self._max_loras:
                self.num_waits += 1
                log.warning("adapter %d waits: %d are loaded, engine.max_loras = %d", version, *self._slots())
            await self._slot_freed.wait_for(lambda: len(self._loaded) < self._max_loras)
        self._loaded.add(version)
        self._held[version] = version
        await self._engines.load_adapter(version, self._arena.path(version))
        return self._verdict(version, await self._ask_canaries(version, CANARIES))

    async def restore(self, engine: EngineClient) -> None:
        """Give an engine that died and is there again what the others hold, and try it; then it may be asked again.

        Raises AdapterError if it does not answer as the one that died did.
        """
        given: set[int] = set()
        tried: set[int] = set()
        # What the others hold changes meanwhile. What is just being published nobody remembers: `publish` tries it.
        while True:
            # First, for it takes up slots: one that comes back from elsewhere may hold what was retired long ago.
            while retired := engine.adapters - self._held.keys():
                await engine.unload_adapter(min(retired))
            new = sorted(
                version for version in {0, *self._held} - tried if version not in given or self._knows(version)
            )
            if not new:
                break
            given.update(new)
            tried.update(filter(self._knows, new))
            await _all_of(self._give_back(engine, version) for version in new)
        self._engines.take_back(engine)

    def _knows(self, version: int) -> bool:
        return self._held.get(version, 0) in self._remembered

    async def _give_back(self, engine: EngineClient, version: int) -> None:
        if version and version not in self._held:  # it was retired meanwhile
            return
        published_as = self._held.get(version, 0)
        try:
            if version:
                await engine.load_adapter(version, self._arena.path(version))
            if remembered := self._remembered.get(published_as):
                await self._check_returned(engine, version, remembered)
        except RequestError:
            if not version or version in self._held:  # else it was retired meanwhile
                raise

    @property
    def has_slot(self) -> bool:
        """Whether the next adapter finds a free slot, or one that is about to be."""
        is_freeing = self._is_unloading or not self._arena.unreferenced.empty()
        return is_freeing or len(self._loaded) < self._max_loras

    def reserve_spare_slot(self, version: int) -> bool:
        """Take a slot for an adapter that comes back, unless it is the one that the next new adapter needs."""
        if len(self._loaded) + 1 >= self._max_loras:
            return False
        self._loaded.add(version)
        return True

    async def give_slot_back(self, version: int) -> None:
        """Of a version that no engine has loaded."""
        async with self._slot_freed:
            self._loaded.discard(version)
            self._slot_freed.notify_all()

    async def bring_back(self, version: int, published_as: int) -> None:
        """Load again, as `version`, in its reserved slot, what was once published as `published_as`, and try it.

        Raises RequestError if no engine can load it; AdapterError if the engines differ in that, or one does not
        answer as it did.
        """
        failure: RequestError | None = None
        self._held[version] = published_as
        try:
            await self._engines.load_adapter(version, self._arena.path(version))
        except* RequestError as errors:
            failure = RequestError(str(errors.exceptions[0]))
        if failure is not None:
            del self._held[version]
            if any(version in engine.adapters for engine in self._engines.engines):
                raise AdapterError(f"adapter {version} is loaded by some engines, not by others: {failure}")
            raise failure
        remembered = self._remembered[published_as]
        # One that dies is tried when it is back.
        await _all_of((self._check_returned(e, version, remembered) for e in self._engines.up), but=WorkerDied)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of versions that may come back, JSON-able."""
        remembered = {
            str(version): {
                engine: [[c.seed, *map(_to_text, (c.completion_ids, c.logprobs, c.base_logprobs))] for c in known]
                for engine, known in self._remembered[version].items()
            }
            for version in sorted(self._keeps & self._remembered.keys())
        }
        return {"num_waits": self.num_waits, "remembered": remembered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_waits = state["num_waits"]
        for version, by_engine in state["remembered"].items():
            self.keep(int(version))
            self._remembered[int(version)] = {
                engine: [
                    _Remembered(
                        seed=seed,
                        completion_ids=_from_text(ids, "<i4"),
                        logprobs=_from_text(logprobs, "<f4"),
                        base_logprobs=_from_text(base_logprobs, "<f4"),
                    )
                    for seed, ids, logprobs, base_logprobs in known
                ]
                for engine, known in by_engine.items()
            }

    def keep(self, published_as: int) -> None:
        """It may come back."""
        self._keeps.add(published_as)

    def forget(self, published_as: int) -> None:
        """It will not come back."""
        self._keeps.discard(published_as)
        if published_as not in self._held.values():
            self._remembered.pop(published_as, None)

    async def retired(self) -> None:
        """Wait until what nobody holds is unloaded, so that its slots are free."""
        await self._arena.unreferenced.join()

    async def retire_unreferenced(self) -> None:
        """Unload and unlink what nobody holds any more, for ever."""
        while True:
            version = await self._arena.unreferenced.get()
            self._is_unloading = True
            try:
                await self._engines.unload_adapter(version)
                while any(version in engine.adapters for engine in self._engines.up):  # one came back meanwhile
                    await self._engines.unload_adapter(version)
                published_as = self._held.pop(version)
                if published_as not in self._keeps:
                    self.forget(published_as)
            except* RequestError as errors:
                # A game that was given up may still have a request in an engine.
                log.info("adapter %d stays a little longer: %s", version, errors.exceptions[0])
                asyncio.get_running_loop().call_later(UNLOAD_RETRY_S, self._put_back, version)
            else:
                self._arena.unlink(version)
                async with self._slot_freed:
                    self._loaded.discard(version)
                    self._slot_freed.notify_all()
                self._arena.unreferenced.task_done()
            finally:
                self._is_unloading = False

    def _put_back(self, version: int) -> None:
        """To be tried again; only now is the last try over, or `retired` would not wait for the next one."""
        self._arena.unreferenced.put_nowait(version)
        self._arena.unreferenced.task_done()

    def _slots(self) -> tuple[int, int]:
        return len(self._loaded), self._max_loras

    async def _ask_canaries(self, version: int, count: int) -> list[Canary]:
        """The answers to `count` seeds, asked for at once, of every engine that is up when the last one is scored.

        One that died since it answered, and is there again, is asked again.
        """
        canaries: dict[tuple[str, int], list[Canary]] = {}
        while silent := {
            (e.peer.name, e.peer.life): e
            for e in await self._engines.wait_for_one()
            if (e.peer.name, e.peer.life) not in canaries
        }:
            asked = [(life, seed) for life in silent for seed in range(CANARY_SEED, CANARY_SEED + count)]
            asking = (self._ask_canary(silent[life], version, seed) for life, seed in asked)
            answers = dict(zip(asked, await _all_of(asking, but=WorkerDied), strict=True))
            told = {key: answer for key, answer in answers.items() if answer is not None}
            scored = await self._score(told.values()) if told else {}
            for name, _ in silent:
                self._remembered.get(version, {}).pop(name, None)
            for (life, seed), answer in told.items():
                canary = self._compare(life[0], version, seed, answer, scored[_tokens(answer)])
                canaries.setdefault(life, []).append(canary)
        return [canary for of_engine in canaries.values() for canary in of_engine]

    async def _ask_canary(self, engine: EngineClient, version: int, seed: int) -> Generation:
        return await engine.generate(self._prompt, version, seed=seed, max_tokens=CANARY_TOKENS)

    async def _score(self, generations: Iterable[Generation]) -> dict[tuple[bytes, bytes], LearnerLogprobs]:
        """By the tokens: many engines say the same."""
        distinct = {_tokens(generation): generation for generation in generations}
        return dict(zip(distinct, await self._learner.score(list(distinct.values())), strict=True))

    def _compare(self, engine: str, version: int, seed: int, generation: Generation, scored: LearnerLogprobs) -> Canary:
        if seed < CANARY_SEED + CANARIES:
            self._remembered.setdefault(version, {}).setdefault(engine, []).append(
                _Remembered(
                    seed=seed,
                    completion_ids=generation.completion_ids,
                    logprobs=generation.logprobs,
                    base_logprobs=scored.base,
                )
            )
        expected = scored.adapter if version else scored.base
        return Canary(
            engine=engine,
            n=len(generation.completion_ids),
            mismatch=_mean_gap(generation.logprobs, expected),
            base_gap=_mean_gap(expected, scored.base),
            engine_to_base=_mean_gap(generation.logprobs, scored.base),
        )

    async def _check_returned(
        self, engine: EngineClient, version: int, remembered: Mapping[str, list[_Remembered]]
    ) -> None:
        """The same seeds must give the same tokens, up to where rounding parts them, as likely as they were then."""
        then, now, base = [], [], []
        canaries = remembered.get(engine.peer.name) or next(iter(remembered.values()))
        answers = await _all_of(self._ask_canary(engine, version, canary.seed) for canary in canaries)
        for canary, generation in zip(canaries, answers, strict=True):
            assert generation is not None
            n = _num_common(canary.completion_ids, generation.completion_ids)
            then.append(canary.logprobs[:n])
            now.append(generation.logprobs[:n])
            base.append(canary.base_logprobs[:n])
        then_N, now_N, base_N = map(np.concatenate, (then, now, base))
        mismatch = _mean_gap(then_N, now_N) if len(then_N) else np.inf
        can_tell = len(then_N) > 0 and _mean_gap(then_N, base_N) > 4 * max(self._noise, 1e-4)
        if not mismatch <= self._tolerance or (can_tell and _mean_gap(now_N, base_N) <= mismatch):
            raise AdapterError(
                f"canary: {engine.peer.name} does not answer as it once did with what is now loaded as adapter "
                f"{version}: {len(now_N)} of {sum(len(canary.completion_ids) for canary in canaries)} tokens are the "
                f"same, and their log p differs by {mismatch:.4f} (learner.canary_tolerance = {self._tolerance})"
            )

    def _verdict(self, version: int, canaries: list[Canary]) -> dict[str, float]:
        """The worst engine's figures as metrics. Raises AdapterError for an engine that does not sing in tune."""
        worst = max(canaries, key=lambda canary: canary.mismatch)
        what = f"adapter {version}" if version else "the base model"
        for canary in canaries:
            if canary.is_of_the_base(self._noise):
                raise AdapterError(
                    f"canary: {canary.engine} answers as the base model where {what} is asked for (log p is "
                    f"{canary.engine_to_base:.4f} from the base, {canary.mismatch:.4f} from the adapter)"
                )
        if version and not np.isfinite(worst.mismatch):
            raise AdapterError(
                f"canary: with {what} log-probabilities are no numbers any more: the update made them overflow; "
                "lower learner.learning_rate and go on from the newest checkpoint, if there is one"
            )
        if not worst.mismatch <= self._tolerance:
            raise AdapterError(
                f"canary: {worst.engine} and the learner disagree about {what} by {worst.mismatch:.4f} in mean log p "
                f"over {worst.n} tokens (learner.canary_tolerance = {self._tolerance}). They do not hold the same "
                "weights, or one computes them wrongly; dtype float32 on both sides tells which."
            )
        return {
            "canary/mismatch": worst.mismatch,
            "canary/base_gap": worst.base_gap,
            "canary/n": worst.n,
        }


async def _all_of(asked: Iterable[Coroutine[Any, Any, T]], but: type[Exception] | tuple[()] = ()) -> list[T | None]:
    """Ask at once and wait for all; None for one that ended by `but`. Raises the first error of another kind."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, but):
            raise result
    return [None if isinstance(result, BaseException) else result for result in results]


def _to_text(array: np.ndarray[Any, np.dtype[Any]]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _from_text(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype)


def _tokens(generation: Generation) -> tuple[bytes, bytes]:
    return generation.prompt_ids.tobytes(), generation.completion_ids.tobytes()


def _num_common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differs = np.nonzero(a[:n] != b[:n])[0]
    return int(differs[0]) if len(differs) else n


def _mean_gap(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).mean())
