"""Canaries: every engine samples completions of the run's prompts, and the learner scores those very tokens.

adapters/canary.py judges the differences. The learner holds only the newest adapter, so an adapter that returns, or
that a restarted engine loads again, is compared with the answers that engines gave to the same prompts and seeds when
it was the newest. adapters/table.py keeps those answers. A frozen player's adapter is checked once, at the start: the
learner reads its files to score the tokens.
"""

from __future__ import annotations

import base64
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from unstable_lite.adapters.canary import FEWEST_TOKENS, NOISE_TOKENS, Check, Evidence, Floats, Noise
from unstable_lite.adapters.table import AdapterTable, CanaryAnswer, Origin, Weights, number_of_policy
from unstable_lite.config import Config
from unstable_lite.engines.client import EngineClient, EnginePool, all_of
from unstable_lite.errors import AdapterError, WorkerDied
from unstable_lite.games.env_catalogue import is_isolated
from unstable_lite.games.env_start import environment_of
from unstable_lite.games.templates import Template, format_prompt
from unstable_lite.learner.client import LearnerClient
from unstable_lite.transport.codec import number_format
from unstable_lite.types import Generation, LearnerLogprobs, Logprobs, TokenIds

CANARY_PROMPTS = 8
"""Number of prompts of the canary, at most."""
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
    """A check of one engine, and the completions that it sampled."""

    engine: EngineClient
    life: int
    """Life of the engine in which it is checked."""
    check: Check
    generations: list[Generation] = field(default_factory=list)
    base_logprobs: list[Logprobs] = field(default_factory=list)
    """Log-probabilities by the learner without the adapter, of the generations that it has scored."""
    has_died: bool = False

    @property
    def name(self) -> str:
        return self.engine.channel.name


class _State(msgspec.Struct, kw_only=True):
    """State of the canaries in a checkpoint."""

    num_doubts: int
    evidence: dict[str, Evidence]
    base_evidence: dict[str, Evidence]
    weights: list[tuple[Origin, Weights]]
    prompts: list[str]


class CanaryChecks:
    def __init__(
        self,
        engines: EnginePool,
        learners: Sequence[LearnerClient],
        table: AdapterTable,
        prompts: Sequence[str],
        tolerance: float,
        alarm: Callable[[str], None],
    ) -> None:
        """`learners`: of each policy, in the order of their numbers."""
        self.num_doubts = 0
        """Number of checks that ended without a verdict."""
        self._engines = engines
        self._learners = learners
        self._table = table
        self._prompts = prompts
        self._asked = list(prompts)
        """Prompts that answers name by their numbers: those of this run and, after a resume, those of earlier ones."""
        self._tolerance = tolerance
        self._alarm = alarm
        self._has_reported_few = False
        self._evidence: dict[str, Evidence] = {}
        """Evidence of all new adapters together against each engine, by its name and the policy's number if not 0."""
        self._frozen_evidence: dict[str, Evidence] = {}
        """The same of all frozen players; not saved, because every start checks them again."""
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
                    f"in mean log p over {canary.check.num_tokens} tokens, each of which counts at most 1 "
                    f"(learner.canary_tolerance = {self._tolerance:g}). They do not hold the same weights, or one "
                    "computes them wrongly, for example at another temperature. If they are not yet float32, try that "
                    "for engine.dtype and learner.dtype (on a GPU with engine.kind = 'transformers'): rounding then "
                    "nearly disappears"
                )
        differences = [part for canary in canaries for part in canary.check.differences]
        learner = [part for canary in canaries for part in canary.check.learner]
        self._noise = Noise(np.concatenate(differences), np.concatenate(learner), self._tolerance)
        lengths = [len(generation.completion_ids) for canary in canaries for generation in canary.generations]
        mean_length = sum(lengths) / len(lengths)
        self._num_scored = min(max(math.ceil(SCORED_TOKENS / mean_length), SCORED[0]), SCORED[1])
        self._num_sampled = min(max(math.ceil(SAMPLED_TOKENS / mean_length), SAMPLED[0]), SAMPLED[1])
        num_tokens = min(canary.check.num_tokens for canary in canaries)
        if num_tokens < FEWEST_TOKENS or num_tokens <= len(self._prompts):  # the stop token alone, after each prompt
            self._report_few("the base model", num_tokens, NOISE_TOKENS)
        return self._metrics(canaries)

    async def check_new(self, id: int, directory: Path | None = None) -> dict[str, float]:
        """Compare every engine with the learner, which holds adapter `id` now, or reads it in `directory`.

        Raises AdapterError if an engine computes something else.
        """
        canaries = await self._check_everywhere(id, directory)
        for canary in canaries:
            claim = f"does not compute like the learner with {self._table.describe(id)}"
            self._judge(canary.name, claim, canary.check)
        num_tokens = min(canary.check.num_tokens for canary in canaries)
        if num_tokens < FEWEST_TOKENS:
            self._report_few(self._table.describe(id), num_tokens, SCORED_TOKENS)
        return self._metrics(canaries)

    async def check_returned(self, engine: EngineClient, id: int) -> None:
        """Compare an engine with the answers that engines gave with these weights when the learner held them.

        The same seeds must give the same tokens, up to where rounding parts them, as likely as they were then. Raises
        AdapterError if they do not.
        """
        weights = self._table.weights_of(id)
        # Described now, because the adapter may be retired and gone before the last answer.
        claim = f"does not answer as it did before with {self._table.describe(id)}"
        known = weights.answers.get(engine.channel.name) or next(iter(weights.answers.values()))
        evidence = weights.evidence.setdefault(engine.channel.name, Evidence())
        check = Check(evidence, self._noise, self._tolerance, self._num_scored, len(known))
        while asked := known[check.num_completions : check.num_wanted()]:
            answers = await all_of(self._ask(engine, id, self._asked[then.prompt], then.seed) for then in asked)
            pairs = [(then, now) for then, now in zip(asked, answers, strict=True) if now is not None]
            unscored = [now for then, now in pairs if id and then.base_logprobs is None]
            scored = await self._score(unscored) if unscored else {}
            for then, now in pairs:
                base = then.base_logprobs if id else then.logprobs
                base = scored[_tokens(now)].base if base is None else base
                check.add_again(
                    now.prompt_ids, now.completion_ids, then.completion_ids, now.logprobs, then.logprobs, base
                )
        self._judge(engine.channel.name, claim, check)

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence, and the answers of weights that can return, JSON-able."""
        table = self._table
        kept = [(origin, table.weights[origin]) for origin in table.stored().values()]
        state: dict[str, Any] = msgspec.to_builtins(
            _State(
                num_doubts=self.num_doubts,
                evidence=_carried(self._evidence),
                base_evidence=_carried(table.weights_of(0).evidence),
                weights=[(origin, replace(known, evidence=_carried(known.evidence))) for origin, known in kept],
                prompts=self._asked,
            ),
            enc_hook=_to_plain,
        )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loaded = msgspec.convert(state, _State, dec_hook=_to_array)
        answers = [answer for _, known in loaded.weights for given in known.answers.values() for answer in given]
        if not {answer.prompt for answer in answers} <= set(range(len(loaded.prompts))):
            raise ValueError("an answer of the canary names a prompt that was not saved")
        self.num_doubts, self._evidence = loaded.num_doubts, loaded.evidence
        self._table.weights_of(0).evidence = loaded.base_evidence
        self._table.weights |= dict(loaded.weights)
        # Answers of the base and of frozen players name prompts already, so the loaded ones get new numbers.
        self._asked = list(dict.fromkeys([*self._asked, *loaded.prompts]))
        for answer in answers:
            answer.prompt = self._asked.index(loaded.prompts[answer.prompt])

    async def _check_everywhere(self, id: int, directory: Path | None = None) -> list[_Canary]:
        """Compare every engine with the learner, with the adapter that it holds now or reads, or with the base.

        An engine that died since it answered, and was restarted, is compared again.
        """
        canaries: list[_Canary] = []
        while unchecked := await self._unchecked(canaries):
            canaries += await self._check(unchecked, id, directory)
        self._table.weights_of(id).answers |= {c.name: self._answers(id, c) for c in canaries}
        return canaries

    async def _unchecked(self, canaries: Sequence[_Canary]) -> list[EngineClient]:
        """Return the engines that are up, without those of `canaries` that have not died since."""
        up, checked = await self._engines.wait_for_one(), [(canary.name, canary.life) for canary in canaries]
        return [engine for engine in up if (engine.channel.name, engine.channel.life) not in checked]

    async def _check(self, engines: Sequence[EngineClient], id: int, directory: Path | None) -> list[_Canary]:
        """Check engines in rounds, as long as any of them needs more tokens; return those that did not die."""
        against, noise = self._evidence if directory is None else self._frozen_evidence, self._noise if id else None
        limits, canaries = (self._tolerance, self._num_scored, self._num_sampled), []
        policy = number_of_policy(id)
        for engine in engines:
            key = engine.channel.name + f" {policy}" * bool(policy)
            check = Check(against.setdefault(key, Evidence()), noise, *limits)
            canaries.append(_Canary(engine=engine, life=engine.channel.life, check=check))
        while unfinished := [canary for canary in canaries if not canary.has_died and canary.check.num_wanted()]:
            await self._sample_more(id, unfinished)
            await self._score_more(id, [canary for canary in unfinished if not canary.has_died], directory)
        return [canary for canary in canaries if not canary.has_died]

    async def _sample_more(self, id: int, canaries: Sequence[_Canary]) -> None:
        """Let engines sample the completions that their checks need next; of an adapter all that they may need."""
        least, asked = self._num_sampled if id else 0, list[tuple[_Canary, int]]()
        for one in canaries:
            asked += [(one, n) for n in range(len(one.generations), max(one.check.num_wanted(), least))]
        asking = (self._ask(c.engine, id, self._prompt(id, number), CANARY_SEED + number) for c, number in asked)
        for (canary, _), answer in zip(asked, await all_of(asking, but=WorkerDied), strict=True):
            if answer is None:
                canary.has_died = True
            else:
                canary.generations.append(answer)

    async def _score_more(self, id: int, canaries: Sequence[_Canary], directory: Path | None) -> None:
        """Let the learner score the completions that the checks need next, and compare them."""
        new = [(c, one) for c in canaries for one in c.generations[c.check.num_completions : c.check.num_wanted()]]
        generations, policy = [generation for _, generation in new], number_of_policy(id)
        scored = await self._score(generations, directory, policy) if new else {}
        for canary, generation in new:
            self._compare(id, canary, generation, scored[_tokens(generation)])

    def _compare(self, id: int, canary: _Canary, generation: Generation, scored: LearnerLogprobs) -> None:
        expected = scored.adapter if id else scored.base
        for whose, logprobs in (("the learner", expected), (canary.name, generation.logprobs)):
            if id and not np.isfinite(logprobs).all():
                remedy = "the update made them overflow. Lower learner.learning_rate and resume from the newest "
                remedy += "checkpoint, if there is one"
                if self._table.origin(id).kind == "file":
                    remedy = "its weights are too large for this precision"
                raise AdapterError(
                    f"canary: with {self._table.describe(id)} log-probabilities are not numbers any more (those of "
                    f"{whose}): {remedy}"
                )
        canary.base_logprobs.append(scored.base)
        canary.check.add(generation.prompt_ids, generation.completion_ids, generation.logprobs, expected, scored.base)

    def _answers(self, id: int, canary: _Canary) -> list[CanaryAnswer]:
        """Return the answers of a check that are kept, to compare an engine with later."""
        sampled = itertools.zip_longest(canary.generations[: SAMPLED[1]], canary.base_logprobs[: SAMPLED[1]])
        return [
            CanaryAnswer(
                prompt=self._asked.index(self._prompt(id, number)),
                seed=CANARY_SEED + number,
                completion_ids=generation.completion_ids,
                logprobs=generation.logprobs,
                base_logprobs=base_logprobs,
            )
            for number, (generation, base_logprobs) in enumerate(sampled)
        ]

    def _judge(self, name: str, claim: str, check: Check) -> None:
        """Raise AdapterError if an engine is wrong; raise an alarm if that stays open. `claim`: about the engine."""
        evidence = check.evidence
        found = f"10^{evidence.strength:.1f} to 1 against rounding, now over {check.num_tokens} tokens whose log p "
        found += f"differ by {check.mismatch:.4f} on average: {evidence.suspicion}"
        if evidence.is_wrong:
            raise AdapterError(
                f"canary: {name} {claim} ({found}). It does not hold these weights, or computes them wrongly"
            )
        if check.num_tokens == 0:
            self.num_doubts += 1
            self._alarm(
                f"canary: {name} gave other tokens than before to every prompt and seed, so it stays open whether it "
                f"{claim}; its weights are those that were written (digest). The run continues"
            )
        elif evidence.is_open:
            self.num_doubts += 1
            self._alarm(f"canary: it stays open whether {name} {claim} ({found}). The run continues")

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

    async def _score(
        self, generations: Iterable[Generation], directory: Path | None = None, policy: int = 0
    ) -> dict[tuple[bytes, bytes], LearnerLogprobs]:
        """Return the learner's log-probabilities by the tokens, because many engines give the same answers."""
        distinct = {_tokens(generation): generation for generation in generations}
        return dict(zip(distinct, await self._learners[policy].score([*distinct.values()], directory), strict=True))


def canary_prompts(config: Config, templates: Mapping[str, Template]) -> list[str]:
    """Return the first prompts of up to CANARY_PROMPTS different games, of all envs in turn.

    An env whose reset is slow, or that needs its own process, gives one prompt.
    """
    prompts: dict[str, None] = {}
    for seed in range(CANARY_PROMPTS):
        for spec in config.train_envs:
            if len(prompts) == CANARY_PROMPTS:
                break
            if seed and is_isolated(spec):
                continue
            _, observation = environment_of(spec, seed).observe()
            prompts[format_prompt(spec.prompt_template, observation, spec.num_players, templates)] = None
    return list(prompts)


def _carried(evidence: dict[str, Evidence]) -> dict[str, Evidence]:
    """Return the evidence with which the next checks begin, if there is any, so that a resume changes none of it."""
    logs = {engine: np.maximum(one.logs, 0.0) for engine, one in sorted(evidence.items())}
    return {engine: Evidence(carried) for engine, carried in logs.items() if carried.any()}


def _to_plain(array: Floats | TokenIds | Logprobs) -> list[float] | str:
    if array.dtype == np.float64:
        return list(map(float, array))
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _to_array(hint: Any, saved: Any) -> Floats | TokenIds | Logprobs:
    number = number_format(hint)
    return np.array(saved, number) if number == np.float64 else np.frombuffer(base64.b64decode(saved), number)


def _tokens(generation: Generation) -> tuple[bytes, bytes]:
    return generation.prompt_ids.tobytes(), generation.completion_ids.tobytes()
