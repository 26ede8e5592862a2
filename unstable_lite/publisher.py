"""From a written adapter to one that games may ask for: load on every engine, confirm, canary, offer; and back again.

Identity first: the learner says the digest of each adapter that it writes, and each engine the digest of what it
read, so another version, another adapter or a damaged file is refused whatever its size. Then the canary, for what is
computed with it: each engine samples completions of a prompt of the run, and the learner scores those very tokens.
canary.py says what follows from the differences.

The learner holds only the newest adapter. One that comes back, or that an engine is given which died and is there
again, is compared with what engines said with it, to the same prompts and seeds, when it was the newest.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from unstable_lite.canary import FEWEST_TOKENS, NOISE_TOKENS, Check, Evidence, Noise
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import AdapterError, RequestError, WorkerDied
from unstable_lite.learners.client import LearnerClient
from unstable_lite.transport.adapters import AdapterArena
from unstable_lite.types import Generation, LearnerLogprobs, Logprobs, TokenIds

T = TypeVar("T")

log = logging.getLogger(__name__)

CANARY_TOKENS = 16
"""Of one completion."""
CANARY_SEED = 20_11
SCORED_TOKENS, SCORED = 32, (2, 8)
"""An adapter is judged by about so many tokens at first, in so many completions: the learner scores no more of them as
long as nothing speaks against the engine."""
SAMPLED_TOKENS, SAMPLED = 192, (12, 32)
"""Engines sample about so many at once, in so many completions: they are there if more are needed, and to compare with
if the adapter comes back."""
NEW = -1
UNLOAD_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """One completion of an adapter from when the learner held it."""

    prompt: str
    seed: int
    completion_ids: TokenIds
    logprobs: Logprobs
    """The engine's."""
    base_logprobs: Logprobs | None
    """The learner's, without the adapter; None if it was not asked for them."""


@dataclass(slots=True, kw_only=True)
class _Canary:
    """A check of one engine, and what it answered."""

    engine: EngineClient
    check: Check
    answers: list[tuple[str, int, Generation]] = field(default_factory=list)
    """Prompt, seed and completion."""
    base_logprobs: list[Logprobs] = field(default_factory=list)
    """For each completion that was scored."""
    has_died: bool = False

    @property
    def name(self) -> str:
        return self.engine.peer.name

    def remembered(self) -> list[_Remembered]:
        base: list[Logprobs | None] = [*self.base_logprobs]
        base += [None] * (len(self.answers) - len(base))
        return [
            _Remembered(
                prompt=prompt,
                seed=seed,
                completion_ids=generation.completion_ids,
                logprobs=generation.logprobs,
                base_logprobs=base_logprobs,
            )
            for (prompt, seed, generation), base_logprobs in zip(self.answers, base, strict=True)
        ][: SAMPLED[1]]


class Publisher:
    def __init__(
        self,
        engines: EnginePool,
        learner: LearnerClient,
        arena: AdapterArena,
        canary_prompts: Sequence[str],
        max_loras: int,
        tolerance: float,
        alarm: Callable[[str], None],
    ) -> None:
        self.num_waits = 0
        """How often a new adapter had to wait for a slot."""
        self.num_doubts = 0
        """Checks that ended without a verdict."""
        self._has_said_few = False
        self._evidence: dict[tuple[str, int], Evidence] = {}
        """By engine and the version that was tried again; NEW for all new versions together."""
        self._digests: dict[int, str] = {}
        """By version: what the learner wrote."""
        self._remembered: dict[int, dict[str, list[_Remembered]]] = {}
        """By version and engine."""
        self._keeps: set[int] = set()
        """Versions that are remembered after they are unloaded: they may come back."""
        self._held: dict[int, int] = {}
        """What every engine is to hold: version, and the version that it was when the learner held it."""
        self._engines = engines
        self._learner = learner
        self._arena = arena
        self._prompts = canary_prompts
        self._alarm = alarm
        self._max_loras = max_loras
        self._tolerance = tolerance
        self._noise = Noise([], [], tolerance)
        self._num_scored, self._num_sampled = SCORED[1], SAMPLED[1]
        self._loaded: set[int] = set()
        self._is_unloading = False
        self._slot_freed = asyncio.Condition()

    async def check_base(self) -> dict[str, float]:
        """Measure what rounding does to the base on each engine, before the first game.

        Raises AdapterError for an engine that does not hold the learner's base.
        """
        canaries = await self._check_everywhere(0)
        for canary in canaries:
            if not canary.check.level <= self._tolerance:
                raise AdapterError(
                    f"canary: {canary.name} and the learner disagree about the base model by {canary.check.level:.4f} "
                    f"in mean log p over {canary.check.num_tokens} tokens (learner.canary_tolerance = "
                    f"{self._tolerance:g}). They do not hold the same weights, or one computes them wrongly, for "
                    "example at another temperature. Try float32 for engine.dtype and learner.dtype: rounding then "
                    "nearly disappears"
                )
        differences = [part for canary in canaries for part in canary.check.differences]
        learner = [part for canary in canaries for part in canary.check.learner]
        self._noise = Noise(np.concatenate(differences), np.concatenate(learner), self._tolerance)
        lengths = [len(generation.completion_ids) for canary in canaries for _, _, generation in canary.answers]
        mean_length = sum(lengths) / len(lengths)
        self._num_scored = _between(SCORED, SCORED_TOKENS / mean_length)
        self._num_sampled = _between(SAMPLED, SAMPLED_TOKENS / mean_length)
        num_tokens = min(canary.check.num_tokens for canary in canaries)
        if num_tokens < FEWEST_TOKENS or num_tokens <= len(self._prompts):  # the stop token alone, after each prompt
            self._say_few("the base model", num_tokens, NOISE_TOKENS)
        return self._figures(canaries)

    async def publish(self, version: int, digest: str) -> dict[str, float]:
        """Load `version` everywhere and try it; when this returns, games may use it.

        `digest`: of the adapter that the learner wrote. Waits for a free adapter slot. Raises AdapterError if an engine
        read another adapter or the canary fails, RequestError if an engine of this machine, or every engine, does not
        load it.
        """
        async with self._slot_freed:
            if len(self._loaded) >= self._max_loras:
                self.num_waits += 1
                log.warning("adapter %d waits: %d are loaded, engine.max_loras = %d", version, *self._slots())
            await self._slot_freed.wait_for(lambda: len(self._loaded) < self._max_loras)
        self._loaded.add(version)
        self._held[version] = version
        self._digests[version] = digest
        await self._engines.load_adapter(version, self._arena.path(version))
        await _all_of((self._confirm(engine, version) for engine in self._engines.up), but=WorkerDied)
        canaries = await self._check_everywhere(version)
        for canary in canaries:
            self._judge(canary.name, version, canary.check, "does not compute what the learner does with")
        num_tokens = min(canary.check.num_tokens for canary in canaries)
        if num_tokens < FEWEST_TOKENS:
            self._say_few(f"adapter {version}", num_tokens, SCORED_TOKENS)
        return self._figures(canaries)

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
                await self._confirm(engine, version)
            if remembered := self._remembered.get(published_as):
                await self._check_returned(engine, version, published_as, remembered)
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

        Raises RequestError if no engine can load it, or if its files were damaged meanwhile; AdapterError if the
        engines differ in that, or one does not answer as it did.
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
        digests = await _all_of((engine.adapter_digest(version) for engine in self._engines.up), but=WorkerDied)
        if len(set(digests)) == 1 and digests[0] not in (None, self._digests[published_as]):
            await self._engines.unload_adapter(version)
            del self._held[version]
            raise RequestError(
                f"its files were damaged since adapter {published_as} was written: their digest is {digests[0]}, it "
                f"was {self._digests[published_as]}"
            )
        await _all_of((self._confirm(engine, version) for engine in self._engines.up), but=WorkerDied)
        remembered = self._remembered[published_as]
        # One that dies is tried when it is back.
        checking = (self._check_returned(e, version, published_as, remembered) for e in self._engines.up)
        await _all_of(checking, but=WorkerDied)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered of versions that may come back, JSON-able."""
        kept = {version: self._remembered[version] for version in sorted(self._keeps & self._remembered.keys())}
        prompts = list(
            dict.fromkeys(c.prompt for by_engine in kept.values() for known in by_engine.values() for c in known)
        )
        return {
            "num_waits": self.num_waits,
            "num_doubts": self.num_doubts,
            "evidence": [
                [*whose, evidence.carried.tolist()]
                for whose, evidence in sorted(self._evidence.items())
                if evidence.carried.any() and (whose[1] in (NEW, 0) or whose[1] in kept)
            ],
            "digests": {str(version): self._digests[version] for version in kept},
            "prompts": prompts,
            "remembered": {
                str(version): {
                    engine: [
                        [
                            prompts.index(canary.prompt),
                            canary.seed,
                            *map(_to_text, (canary.completion_ids, canary.logprobs)),
                            None if canary.base_logprobs is None else _to_text(canary.base_logprobs),
                        ]
                        for canary in known
                    ]
                    for engine, known in by_engine.items()
                }
                for version, by_engine in kept.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_waits, self.num_doubts = state["num_waits"], state["num_doubts"]
        for name, version, logs in state["evidence"]:
            self._evidence[name, version] = Evidence(np.array(logs))
        for version, by_engine in state["remembered"].items():
            self.keep(int(version))
            self._digests[int(version)] = state["digests"][version]
            self._remembered[int(version)] = {
                engine: [
                    _Remembered(
                        prompt=state["prompts"][prompt],
                        seed=seed,
                        completion_ids=_from_text(ids, "<i4"),
                        logprobs=_from_text(logprobs, "<f4"),
                        base_logprobs=None if base_logprobs is None else _from_text(base_logprobs, "<f4"),
                    )
                    for prompt, seed, ids, logprobs, base_logprobs in known
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
            self._digests.pop(published_as, None)
            self._evidence = {whose: of for whose, of in self._evidence.items() if whose[1] != published_as}

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

    async def _confirm(self, engine: EngineClient, version: int) -> None:
        """Raise AdapterError if the engine holds another adapter as `version` than the learner wrote."""
        published_as = self._held.get(version)
        if published_as is None:  # it was retired meanwhile
            return
        expected, found = self._digests[published_as], await engine.adapter_digest(version)
        if found != expected:
            raise AdapterError(
                f"{engine.peer.name} holds another adapter as version {version} than the learner wrote"
                f"{f' as version {published_as}' * (published_as != version)}: the digest of what it read is {found}, "
                f"the learner's is {expected}. It read another version or adapter, or its file was damaged on the way"
            )

    async def _check_everywhere(self, version: int) -> list[_Canary]:
        """Compare every engine with the learner, with the adapter that the learner holds now, or with the base.

        In rounds, as long as more tokens are needed. An engine that died since it answered, and is there again, is
        asked again.
        """
        canaries: dict[tuple[str, int], _Canary] = {}
        while silent := {
            (e.peer.name, e.peer.life): e
            for e in await self._engines.wait_for_one()
            if (e.peer.name, e.peer.life) not in canaries
        }:
            new = {life: _Canary(engine=engine, check=self._check(engine, version)) for life, engine in silent.items()}
            while open_canaries := [c for c in new.values() if not c.has_died and c.check.num_wanted()]:
                await self._compare_more(version, open_canaries)
            canaries |= {life: canary for life, canary in new.items() if not canary.has_died}
            for canary in new.values():
                if not canary.has_died:
                    self._remembered.setdefault(version, {})[canary.name] = canary.remembered()
        return list(canaries.values())

    def _check(self, engine: EngineClient, version: int) -> Check:
        evidence, noise = self._evidence_of(engine.peer.name, NEW), self._noise if version else None
        return Check(evidence, noise, self._tolerance, self._num_scored, self._num_sampled)

    async def _compare_more(self, version: int, canaries: Sequence[_Canary]) -> None:
        """One round: the engines sample what is missing, and the learner scores it."""
        asked: list[tuple[_Canary, str, int]] = []
        for canary in canaries:
            most = max(canary.check.num_wanted(), self._num_sampled) if version else canary.check.num_wanted()
            numbers = range(len(canary.answers), most)
            asked += [(canary, self._prompt(version, number), CANARY_SEED + number) for number in numbers]
        asking = (self._ask(canary.engine, version, prompt, seed) for canary, prompt, seed in asked)
        for (canary, prompt, seed), answer in zip(asked, await _all_of(asking, but=WorkerDied), strict=True):
            if answer is None:
                canary.has_died = True
            else:
                canary.answers.append((prompt, seed, answer))
        to_score = [
            (canary, generation)
            for canary in canaries
            if not canary.has_died
            for _, _, generation in canary.answers[canary.check.num_completions : canary.check.num_wanted()]
        ]
        scored = await self._score(generation for _, generation in to_score) if to_score else {}
        for canary, generation in to_score:
            self._compare(version, canary, generation, scored[_tokens(generation)])

    def _compare(self, version: int, canary: _Canary, generation: Generation, scored: LearnerLogprobs) -> None:
        expected = scored.adapter if version else scored.base
        for whose, logprobs in (("the learner", expected), (canary.name, generation.logprobs)):
            if version and not np.isfinite(logprobs).all():
                raise AdapterError(
                    f"canary: with adapter {version} log-probabilities are no numbers any more (those of {whose}): the "
                    "update made them overflow; lower learner.learning_rate and go on from the newest checkpoint, if "
                    "there is one"
                )
        canary.base_logprobs.append(scored.base)
        canary.check.add(generation.prompt_ids, generation.completion_ids, generation.logprobs, expected, scored.base)

    async def _check_returned(
        self, engine: EngineClient, version: int, published_as: int, remembered: Mapping[str, list[_Remembered]]
    ) -> None:
        """The same seeds must give the same tokens, up to where rounding parts them, as likely as they were then."""
        known = remembered.get(engine.peer.name) or next(iter(remembered.values()))
        evidence = self._evidence_of(engine.peer.name, published_as)
        check = Check(evidence, self._noise, self._tolerance, self._num_scored, len(known))
        while asked := known[check.num_completions : check.num_wanted()]:
            answers = await _all_of(self._ask(engine, version, then.prompt, then.seed) for then in asked)
            pairs = [(then, now) for then, now in zip(asked, answers, strict=True) if now is not None]
            unscored = [now for then, now in pairs if version and then.base_logprobs is None]
            scored = await self._score(unscored) if unscored else {}
            for then, now in pairs:
                base_logprobs = then.logprobs
                if version:
                    base_logprobs = scored[_tokens(now)].base if then.base_logprobs is None else then.base_logprobs
                logprobs = (now.logprobs, then.logprobs, base_logprobs)
                check.add_again(now.prompt_ids, now.completion_ids, then.completion_ids, *logprobs)
        self._judge(engine.peer.name, version, check, "does not answer as it once did with what is now loaded as")

    def _judge(self, name: str, version: int, check: Check, what: str) -> None:
        """Raise AdapterError if an engine is wrong; raise an alarm if that stays open."""
        adapter, evidence = f"adapter {version}" if version else "the base model", check.evidence
        found = (
            f"10^{evidence.strength:.1f} to 1 against rounding, now over {check.num_tokens} tokens whose log p differ "
            f"by {check.mismatch:.4f} on average: {evidence.suspicion}"
        )
        if evidence.is_wrong:
            raise AdapterError(
                f"canary: {name} {what} {adapter} ({found}). It does not hold these weights, or computes them wrongly"
            )
        if check.num_tokens == 0:
            self.num_doubts += 1
            self._alarm(
                f"canary: {name} gave other tokens than before to every prompt and seed of {adapter}, so nothing could "
                "be compared; its weights are those that were published (digest). The run goes on"
            )
        elif evidence.is_open:
            self.num_doubts += 1
            self._alarm(f"canary: it stays open whether {name} {what} {adapter} ({found}). The run goes on")

    def _say_few(self, what: str, num_tokens: int, wanted: int) -> None:
        """Raise an alarm, once a run."""
        self.num_doubts += 1
        if not self._has_said_few:
            self._has_said_few = True
            self._alarm(
                f"canary: answers of {what} to the run's first prompts have only {num_tokens} different tokens, "
                f"{wanted} are wanted: whether engines compute what the learner does can hardly be checked. Look at "
                "what the model answers (games.jsonl), and whether prompt_template suits it"
            )

    def _figures(self, canaries: Sequence[_Canary]) -> dict[str, float]:
        """Of the engine that differs most, as metrics."""
        worst = max((canary.check for canary in canaries), key=lambda check: check.mismatch)
        return {
            "canary/mismatch": worst.mismatch,
            "canary/base_gap": worst.base_gap,
            "canary/n": worst.num_tokens,
            "canary/noise": self._noise.level,
            "canary/evidence": max(canary.check.evidence.strength for canary in canaries),
            "canary/doubts": self.num_doubts,
        }

    def _evidence_of(self, name: str, version: int) -> Evidence:
        return self._evidence.setdefault((name, version), Evidence())

    def _prompt(self, version: int, number: int) -> str:
        """Of the base a prompt for each completion; of an adapter one for all that are sampled at once, in turn."""
        return self._prompts[(version + number // SAMPLED[1] if version else number) % len(self._prompts)]

    async def _ask(self, engine: EngineClient, version: int, prompt: str, seed: int) -> Generation:
        return await engine.generate(prompt, version, seed=seed, max_tokens=CANARY_TOKENS)

    async def _score(self, generations: Iterable[Generation]) -> dict[tuple[bytes, bytes], LearnerLogprobs]:
        """By the tokens: many engines say the same."""
        distinct = {_tokens(generation): generation for generation in generations}
        return dict(zip(distinct, await self._learner.score(list(distinct.values())), strict=True))


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


def _between(bounds: tuple[int, int], number: float) -> int:
    return min(max(math.ceil(number), bounds[0]), bounds[1])
