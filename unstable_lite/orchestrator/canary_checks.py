"""Canaries: every engine samples completions of the run's prompts, and the learner scores those very tokens.

adapters/canary.py judges the differences. The learner holds only the newest adapter, so an adapter that returns, or
that a restarted engine loads again, is compared with the answers that engines gave to the same prompts and seeds when
it was the newest. adapters/table.py keeps those answers.
"""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from unstable_lite.adapters.canary import FEWEST_TOKENS, NOISE_TOKENS, Check, Evidence, Noise
from unstable_lite.adapters.table import AdapterTable, CanaryAnswer, Origin, Weights
from unstable_lite.engines.client import EngineClient, EnginePool
from unstable_lite.errors import AdapterError, WorkerDied
from unstable_lite.learner.client import LearnerClient
from unstable_lite.types import Generation, LearnerLogprobs, Logprobs

T = TypeVar("T")

CANARY_TOKENS = 16
"""Length limit of one completion."""
CANARY_SEED = 20_11
SCORED_TOKENS, SCORED = 32, (2, 8)
"""Tokens, and least and most completions, by which an adapter is judged at first. The learner scores more of them only
if these speak against the engine."""
SAMPLED_TOKENS, SAMPLED = 192, (12, 32)
"""Tokens, and least and most completions, that engines sample at once, so that they exist if more are needed, or if the
adapter returns."""


@dataclass(slots=True, kw_only=True)
class _Canary:
    """A check of one engine, and its answers."""

    engine: EngineClient
    check: Check
    answers: list[tuple[str, int, Generation]] = field(default_factory=list)
    """Prompt, seed and completion."""
    base_logprobs: list[Logprobs] = field(default_factory=list)
    """The learner's log-probabilities with the base, for each completion that was scored."""
    has_died: bool = False

    @property
    def name(self) -> str:
        return self.engine.channel.name

    def to_keep(self) -> list[CanaryAnswer]:
        base: list[Logprobs | None] = [*self.base_logprobs]
        base += [None] * (len(self.answers) - len(base))
        return [
            CanaryAnswer(
                prompt=prompt,
                seed=seed,
                completion_ids=generation.completion_ids,
                logprobs=generation.logprobs,
                base_logprobs=base_logprobs,
            )
            for (prompt, seed, generation), base_logprobs in zip(self.answers, base, strict=True)
        ][: SAMPLED[1]]


class CanaryChecks:
    def __init__(
        self,
        engines: EnginePool,
        learner: LearnerClient,
        table: AdapterTable,
        prompts: Sequence[str],
        tolerance: float,
        alarm: Callable[[str], None],
    ) -> None:
        self.num_doubts = 0
        """Number of checks that ended without a verdict."""
        self._engines = engines
        self._learner = learner
        self._table = table
        self._prompts = prompts
        self._tolerance = tolerance
        self._alarm = alarm
        self._has_reported_few = False
        self._evidence: dict[str, Evidence] = {}
        """Evidence of all new adapters together against each engine, by its name."""
        self._noise = Noise([], [], tolerance)
        self._num_scored, self._num_sampled = SCORED[1], SAMPLED[1]

    async def check_base(self) -> dict[str, float]:
        """Measure the effect of rounding on the base on each engine, before the first game.

        Raises AdapterError if an engine does not hold the learner's base.
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
            self._report_few("the base model", num_tokens, NOISE_TOKENS)
        return self._metrics(canaries)

    async def check_new(self, id: int) -> dict[str, float]:
        """Compare every engine with the learner, which holds adapter `id` now.

        Raises AdapterError if an engine computes something else.
        """
        canaries = await self._check_everywhere(id)
        for canary in canaries:
            self._judge(canary.name, id, canary.check, "does not compute like the learner with")
        num_tokens = min(canary.check.num_tokens for canary in canaries)
        if num_tokens < FEWEST_TOKENS:
            self._report_few(f"adapter {id}", num_tokens, SCORED_TOKENS)
        return self._metrics(canaries)

    async def check_returned(self, engine: EngineClient, id: int) -> None:
        """Compare an engine with the answers that engines gave with these weights when the learner held them.

        The same seeds must give the same tokens, up to where rounding parts them, as likely as they were then. Raises
        AdapterError if they do not.
        """
        weights = self._table.weights[self._table.origin(id)]
        known = weights.answers.get(engine.channel.name) or next(iter(weights.answers.values()))
        evidence = weights.evidence.setdefault(engine.channel.name, Evidence())
        check = Check(evidence, self._noise, self._tolerance, self._num_scored, len(known))
        while asked := known[check.num_completions : check.num_wanted()]:
            answers = await all_of(self._ask(engine, id, then.prompt, then.seed) for then in asked)
            pairs = [(then, now) for then, now in zip(asked, answers, strict=True) if now is not None]
            unscored = [now for then, now in pairs if id and then.base_logprobs is None]
            scored = await self._score(unscored) if unscored else {}
            for then, now in pairs:
                base_logprobs = then.logprobs
                if id:
                    base_logprobs = scored[_tokens(now)].base if then.base_logprobs is None else then.base_logprobs
                logprobs = (now.logprobs, then.logprobs, base_logprobs)
                check.add_again(now.prompt_ids, now.completion_ids, then.completion_ids, *logprobs)
        self._judge(engine.channel.name, id, check, "does not answer as it did before with")

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence, and the answers of weights that can return, JSON-able."""
        kept = [(origin, self._table.weights[origin]) for origin in self._table.stored().values()]
        prompts = list(dict.fromkeys(a.prompt for _, known in kept for each in known.answers.values() for a in each))
        return {
            "num_doubts": self.num_doubts,
            "evidence": _evidence_to_json(self._evidence),
            "base_evidence": _evidence_to_json(self._table.weights[self._table.origin(0)].evidence),
            "prompts": prompts,
            "weights": [
                {
                    "origin": list(origin),
                    "stored_as": known.stored_as,
                    "digest": known.digest,
                    "evidence": _evidence_to_json(known.evidence),
                    "answers": {
                        engine: [
                            [
                                prompts.index(answer.prompt),
                                answer.seed,
                                *map(_to_text, (answer.completion_ids, answer.logprobs)),
                                None if answer.base_logprobs is None else _to_text(answer.base_logprobs),
                            ]
                            for answer in answers
                        ]
                        for engine, answers in known.answers.items()
                    },
                }
                for origin, known in kept
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_doubts = state["num_doubts"]
        self._evidence = _evidence_from_json(state["evidence"])
        self._table.weights[self._table.origin(0)].evidence = _evidence_from_json(state["base_evidence"])
        for known in state["weights"]:
            self._table.weights[Origin(*known["origin"])] = Weights(
                digest=known["digest"],
                stored_as=known["stored_as"],
                evidence=_evidence_from_json(known["evidence"]),
                answers={
                    engine: [
                        CanaryAnswer(
                            prompt=state["prompts"][prompt],
                            seed=seed,
                            completion_ids=_from_text(ids, "<i4"),
                            logprobs=_from_text(logprobs, "<f4"),
                            base_logprobs=None if base_logprobs is None else _from_text(base_logprobs, "<f4"),
                        )
                        for prompt, seed, ids, logprobs, base_logprobs in answers
                    ]
                    for engine, answers in known["answers"].items()
                },
            )

    async def _check_everywhere(self, id: int) -> list[_Canary]:
        """Compare every engine with the learner, with the adapter that the learner holds now, or with the base.

        In rounds, as long as more tokens are needed. An engine that died since it answered, and was restarted, is asked
        again.
        """
        canaries: dict[tuple[str, int], _Canary] = {}
        weights = self._table.weights[self._table.origin(id)]
        while silent := {
            (e.channel.name, e.channel.life): e
            for e in await self._engines.wait_for_one()
            if (e.channel.name, e.channel.life) not in canaries
        }:
            new = {life: _Canary(engine=engine, check=self._check(engine, id)) for life, engine in silent.items()}
            while open_canaries := [c for c in new.values() if not c.has_died and c.check.num_wanted()]:
                await self._compare_more(id, open_canaries)
            canaries |= {life: canary for life, canary in new.items() if not canary.has_died}
            for canary in new.values():
                if not canary.has_died:
                    weights.answers[canary.name] = canary.to_keep()
        return list(canaries.values())

    def _check(self, engine: EngineClient, id: int) -> Check:
        evidence = self._evidence.setdefault(engine.channel.name, Evidence())
        return Check(evidence, self._noise if id else None, self._tolerance, self._num_scored, self._num_sampled)

    async def _compare_more(self, id: int, canaries: Sequence[_Canary]) -> None:
        """Let the engines sample the missing completions, and the learner score them."""
        asked: list[tuple[_Canary, str, int]] = []
        for canary in canaries:
            most = max(canary.check.num_wanted(), self._num_sampled) if id else canary.check.num_wanted()
            numbers = range(len(canary.answers), most)
            asked += [(canary, self._prompt(id, number), CANARY_SEED + number) for number in numbers]
        asking = (self._ask(canary.engine, id, prompt, seed) for canary, prompt, seed in asked)
        for (canary, prompt, seed), answer in zip(asked, await all_of(asking, but=WorkerDied), strict=True):
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
            self._compare(id, canary, generation, scored[_tokens(generation)])

    def _compare(self, id: int, canary: _Canary, generation: Generation, scored: LearnerLogprobs) -> None:
        expected = scored.adapter if id else scored.base
        for whose, logprobs in (("the learner", expected), (canary.name, generation.logprobs)):
            if id and not np.isfinite(logprobs).all():
                raise AdapterError(
                    f"canary: with adapter {id} log-probabilities are not numbers any more (those of {whose}): the "
                    "update made them overflow. Lower learner.learning_rate and resume from the newest checkpoint, if "
                    "there is one"
                )
        canary.base_logprobs.append(scored.base)
        canary.check.add(generation.prompt_ids, generation.completion_ids, generation.logprobs, expected, scored.base)

    def _judge(self, name: str, id: int, check: Check, claim: str) -> None:
        """Raise AdapterError if an engine is wrong; raise an alarm if that stays open."""
        adapter, evidence = f"adapter {id}" if id else "the base model", check.evidence
        found = (
            f"10^{evidence.strength:.1f} to 1 against rounding, now over {check.num_tokens} tokens whose log p differ "
            f"by {check.mismatch:.4f} on average: {evidence.suspicion}"
        )
        if evidence.is_wrong:
            raise AdapterError(
                f"canary: {name} {claim} {adapter} ({found}). It does not hold these weights, or computes them wrongly"
            )
        if check.num_tokens == 0:
            self.num_doubts += 1
            self._alarm(
                f"canary: {name} gave other tokens than before to every prompt and seed of {adapter}, so nothing could "
                "be compared; its weights are those that were written (digest). The run continues"
            )
        elif evidence.is_open:
            self.num_doubts += 1
            self._alarm(f"canary: it stays open whether {name} {claim} {adapter} ({found}). The run continues")

    def _report_few(self, subject: str, num_tokens: int, wanted: int) -> None:
        """Raise an alarm, once a run."""
        self.num_doubts += 1
        if not self._has_reported_few:
            self._has_reported_few = True
            self._alarm(
                f"canary: answers of {subject} to the run's first prompts have only {num_tokens} different tokens, "
                f"{wanted} are wanted: whether engines compute like the learner can hardly be checked. Look at "
                "the answers (games.jsonl), and whether prompt_template suits the model"
            )

    def _metrics(self, canaries: Sequence[_Canary]) -> dict[str, float]:
        """Return the metrics of the engine that differs most."""
        worst = max((canary.check for canary in canaries), key=lambda check: check.mismatch)
        return {
            "canary/mismatch": worst.mismatch,
            "canary/base_gap": worst.base_gap,
            "canary/n": worst.num_tokens,
            "canary/noise": self._noise.level,
            "canary/evidence": max(canary.check.evidence.strength for canary in canaries),
            "canary/doubts": self.num_doubts,
        }

    def _prompt(self, id: int, number: int) -> str:
        """Return a new prompt for each completion of the base; of an adapter one for all that are sampled at once."""
        return self._prompts[(id + number // SAMPLED[1] if id else number) % len(self._prompts)]

    async def _ask(self, engine: EngineClient, id: int, prompt: str, seed: int) -> Generation:
        return await engine.generate(prompt, id, seed=seed, max_tokens=CANARY_TOKENS)

    async def _score(self, generations: Iterable[Generation]) -> dict[tuple[bytes, bytes], LearnerLogprobs]:
        """Return the learner's log-probabilities by the tokens, because many engines give the same answers."""
        distinct = {_tokens(generation): generation for generation in generations}
        return dict(zip(distinct, await self._learner.score(list(distinct.values())), strict=True))


async def all_of(asked: Iterable[Coroutine[Any, Any, T]], but: type[Exception] | tuple[()] = ()) -> list[T | None]:
    """Ask at once and wait for all; None for one that ended by `but`. Raises the first error of another kind."""
    results = await asyncio.gather(*asked, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, but):
            raise result
    return [None if isinstance(result, BaseException) else result for result in results]


def _evidence_to_json(evidence: dict[str, Evidence]) -> dict[str, list[float]]:
    return {engine: of.carried.tolist() for engine, of in sorted(evidence.items()) if of.carried.any()}


def _evidence_from_json(saved: dict[str, list[float]]) -> dict[str, Evidence]:
    return {engine: Evidence(np.array(logs)) for engine, logs in saved.items()}


def _to_text(array: np.ndarray[Any, np.dtype[Any]]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _from_text(text: str, dtype: str) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype)


def _tokens(generation: Generation) -> tuple[bytes, bytes]:
    return generation.prompt_ids.tobytes(), generation.completion_ids.tobytes()


def _between(bounds: tuple[int, int], number: float) -> int:
    return min(max(math.ceil(number), bounds[0]), bounds[1])
