"""Does an engine compute what the learner does, or only nearly so because of rounding? The statistics of the canary.

Knows numbers only: log-probabilities of the same tokens, from the engine, from the learner with the adapter, and from
the learner without it. Asks nobody and ends nothing; see publisher.py.

Each engine is under suspicion in several ways: that the adapter counts for *less* than it should (the base answers, or
the scaling is too small), that it counts for *more*, and that its log-probabilities *differ* by more than rounding
explains, by much or by little. For each the evidence is the logarithm of a product with one factor a token. Rounding
alone gives each factor a mean of at most 1, so by Ville's inequality the product ever exceeds 1 / ERROR_RATE with a
probability of at most ERROR_RATE. The evidence at the end of a check is carried into the next one, but never less than
0: a small error that lasts is found in the end, at no cost of tokens. The mean time to a false alarm is then still
1 / ERROR_RATE checks.

Rounding shifts the logits of a context by about the same amount whatever the context is. So it changes log p of a token
of probability q by that times 1 - q: hardly at all if the token is nearly certain. Differences are divided by 1 - q
before they are compared, because an adapter may be far less certain than the base is. (SmolLM2-135M in bfloat16: mean
|Δ log p| from 0.015 for the most likely tokens to 0.056 for unlikely ones, divided by 1 - q 0.050 to 0.064.)

The factors: a token whose |Δ log p| has the p-value p among those measured at the start contributes k p ** (k - 1),
whose mean is 1 if p is uniform (Vovk and Wang 2021); a k near 1 finds small differences, if there are enough tokens.
Where the adapter moves a token by less than four times the noise, the evidence about its effect goes by the sign of the
difference alone, with a stake in proportion to the effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unstable_lite.types import Logprobs, TokenIds

Floats = npt.NDArray[np.float64]

ERROR_RATE = 1e-7
"""Of one check: the probability of taking rounding for wrong weights."""
SUSPICIONS = (
    "the adapter counts for less than it should, as if the base answered or the scaling were too small",
    "the adapter counts for more than it should, as if the scaling were too large",
    "its log-probabilities differ by more than rounding explains",
    "its log-probabilities differ by more than rounding explains, by little and for long",
    "it gives other tokens than before to the same prompts and seeds more often than rounding explains",
)
WRONG_AT = math.log(len(SUSPICIONS) / ERROR_RATE)
OPEN_AT = math.log(10.0)
"""From here on a check asks for more tokens."""
MOST_OF_ONE = WRONG_AT / 4
"""Evidence that one completion can give: its tokens may be wrong together, for one reason that is not the weights."""
CORRELATION = 0.5
"""Exponent of each factor, because the tokens of a completion are not independent. A power below 1 of a factor whose
mean is at most 1 has a mean of at most 1."""
NOISE_FACTOR = 2.0
"""An adapter may make the noise so many times larger than it was with the base at the start."""
EFFECT_SLACK = 0.25
"""Share of the adapter's effect by which rounding may change it."""
TAIL_EXPONENT = 2.0
"""How fast differences beyond the largest one of the start are assumed to become rarer; Gaussian ones do it faster."""
CERTAIN = 0.02
"""Added to 1 - q, so that a token of probability 1 has a finite relative difference."""
LARGEST_STAKE = 0.95
LEAST_PARTING = 0.01
"""Share of tokens, at least, at which rounding is assumed to part two completions of one seed."""
BY_MUCH, BY_LITTLE = 0.5, 0.8
"""The exponents k."""
NOISE_TOKENS = 256
"""To measure the noise by."""
MOST_TOKENS = 512
"""Of one check."""
FEWEST_TOKENS = 6
"""Without so many different ones a check says nothing."""
FIRST_COMPLETIONS = 16
"""Of the base, to measure the noise; more are asked for until there are NOISE_TOKENS tokens."""
MOST_COMPLETIONS = 128
"""Of one check."""


class Noise:
    """What engine and learner differ by while both hold the base: the distribution that rounding alone has."""

    def __init__(self, differences: npt.ArrayLike, learner: npt.ArrayLike, tolerance: float) -> None:
        """Remember the noise of some tokens.

        differences: log p by the engine less log p by the learner, one for each token, all of them finite.
        learner: log p by the learner of the same tokens.
        """
        signed = np.asarray(differences, np.float64)
        sizes = np.abs(signed)
        self.level = float(np.minimum(sizes, 1.0).mean()) if len(sizes) else 0.0
        """Mean |Δ log p|; a token counts as 1 at most, so that a few unlikely ones do not decide it."""
        self._centre = float(np.clip(signed, -1.0, 1.0).mean()) if len(sizes) else 0.0
        # What is far below the tolerance is harmless, however small the noise was at the start.
        self._scale = max(self.level, tolerance / 2000)
        known = [0.0, *np.sort(sizes / _uncertainty(np.asarray(learner, np.float64)))]
        self._sizes = np.maximum(known, tolerance / 20)
        self._fine_sizes = np.maximum(known, tolerance / 2000)

    def log_factors(self, engine: Logprobs, learner: Logprobs, base: Logprobs) -> Floats:
        """Logarithm of each token's factor for each suspicion; those of the last one are 0."""
        difference, effect = np.float64(engine) - learner, np.float64(learner) - base
        factors = np.zeros((len(difference), len(SUSPICIONS)))
        uncertainty = _uncertainty(np.asarray(learner, np.float64))
        p_value = self._p_value(np.abs(difference) / uncertainty, self._sizes)
        factors[:, 2], factors[:, 3] = _log_calibrated(p_value, BY_MUCH), _log_calibrated(p_value, BY_LITTLE)
        stake = np.minimum(LARGEST_STAKE, np.abs(effect) / self._scale)
        for column, direction in ((0, -np.sign(effect)), (1, np.sign(effect))):
            excess = (difference - self._centre) * direction - EFFECT_SLACK * np.abs(effect)
            by_sign = np.log1p(stake * np.tanh(excess / self._scale))
            p_value = np.where(excess > 0, 0.5 * self._p_value(np.abs(excess) / uncertainty, self._fine_sizes), 1.0)
            is_plain = np.abs(effect) > 4 * self._scale
            factors[:, column] = np.where(is_plain, _log_calibrated(p_value, BY_MUCH), by_sign)
        return factors

    def log_parting_factor(self, num_common: int, has_parted: bool) -> float:
        """Logarithm of the factor of one completion that is sampled again, against one whose every second token parts.

        Two distributions part at a token with half the mean |Δ log p| as probability, so this assumes four times more.
        """
        probability = min(max(NOISE_FACTOR * self.level, LEAST_PARTING), 0.5)
        return num_common * math.log(0.5 / (1 - probability)) + has_parted * math.log(0.5 / probability)

    def _p_value(self, sizes: Floats, known: Floats) -> Floats:
        """Share of the known differences, enlarged by NOISE_FACTOR, that are at least so large."""
        reduced = sizes / NOISE_FACTOR
        num_larger = len(known) - np.searchsorted(known, reduced, side="left")
        beyond = known[-1] / np.maximum(reduced, known[-1])
        p_value: Floats = (1 + num_larger) / (1 + len(known)) * beyond**TAIL_EXPONENT
        return p_value


def _uncertainty(logprobs: Floats) -> Floats:
    """Return what rounding's effect on each log-probability is in proportion to."""
    return 1 - np.exp(np.minimum(logprobs, 0.0)) + CERTAIN


def _log_calibrated(p_value: Floats, exponent: float) -> Floats:
    logarithm: Floats = (exponent - 1) * np.log(p_value) + math.log(exponent)
    return logarithm


@dataclass(slots=True)
class Evidence:
    """What speaks against one engine."""

    logs: Floats = field(default_factory=lambda: np.zeros(len(SUSPICIONS)))
    """For each suspicion the logarithm of the product, from earlier checks and from this one."""

    def begin(self) -> None:
        """Begin a check: what speaks for the engine is forgotten."""
        self.logs = self.carried

    @property
    def carried(self) -> Floats:
        """What the next check begins with."""
        return np.maximum(self.logs, 0.0)

    def add(self, noise: Noise, engine: Logprobs, learner: Logprobs, base: Logprobs) -> None:
        """Add tokens of one completion."""
        one = CORRELATION * noise.log_factors(engine, learner, base).sum(axis=0)
        self.logs = self.logs + np.minimum(one, MOST_OF_ONE)

    def add_parting(self, noise: Noise, num_common: int, has_parted: bool) -> None:
        """Add whether a completion that is sampled again gave another token after `num_common` tokens."""
        self.logs = self.logs.copy()
        self.logs[-1] += min(noise.log_parting_factor(num_common, has_parted), MOST_OF_ONE)

    @property
    def is_open(self) -> bool:
        """Whether something speaks against the engine, so that more tokens are needed."""
        return bool(self.logs.max() > OPEN_AT)

    @property
    def is_wrong(self) -> bool:
        return bool(self.logs.max() >= WRONG_AT)

    @property
    def suspicion(self) -> str:
        """The strongest one."""
        return SUSPICIONS[int(self.logs.argmax())]

    @property
    def strength(self) -> float:
        """Of the strongest suspicion, as a power of ten."""
        return float(self.logs.max()) / math.log(10)


class NewTokens:
    """Which tokens of a check were not seen in it before.

    Completions of one prompt that begin alike have the same log-probabilities there, to the last bit: the same
    rounding error twice is no second piece of evidence.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[bytes, bytes]] = set()
        self.count = 0

    def of(self, prompt_ids: TokenIds, completion_ids: TokenIds) -> npt.NDArray[np.bool_]:
        """Return for each token whether it is new after this prompt and these tokens before it; count those."""
        prompt = prompt_ids.tobytes()
        starts = [(prompt, completion_ids[: n + 1].tobytes()) for n in range(len(completion_ids))]
        is_new = np.array([start not in self._seen for start in starts], np.bool_)
        self._seen.update(starts)
        self.count += int(is_new.sum())
        return is_new


class Check:
    """The canary of one engine: completion after completion is compared until enough is known."""

    def __init__(self, evidence: Evidence, noise: Noise | None, tolerance: float, first: int, sampled: int) -> None:
        """`noise`: None where it is being measured, with the base. `first`, `sampled`: completions of two rounds."""
        evidence.begin()
        self.evidence = evidence
        self.num_completions = 0
        self.differences: list[Logprobs] = []
        """Of new tokens: log p by the engine less log p by the learner."""
        self.learner: list[Logprobs] = []
        """Of new tokens: log p by the learner."""
        self.effects: list[Logprobs] = []
        """Of new tokens: log p by the learner with the adapter less without."""
        self._tokens = NewTokens()
        self._noise = noise
        self._tolerance = tolerance
        self._first, self._sampled = first, sampled

    def add(self, prompt_ids: TokenIds, completion_ids: TokenIds, *logprobs: Logprobs) -> None:
        """Compare one completion; `logprobs`: by the engine, by the learner, by the learner without the adapter."""
        is_new = self._tokens.of(prompt_ids, completion_ids)
        engine, learner, base = (part[is_new] for part in logprobs)
        self.num_completions += 1
        self.differences.append(engine - learner)
        self.learner.append(learner)
        self.effects.append(learner - base)
        if self._noise is not None:
            self.evidence.add(self._noise, engine, learner, base)

    def add_again(self, prompt_ids: TokenIds, now_ids: TokenIds, then_ids: TokenIds, *logprobs: Logprobs) -> None:
        """Compare a completion with what the same seed gave before, up to where the two part.

        `logprobs`: by the engine now and then, and by the learner without the adapter.
        """
        n = min(len(now_ids), len(then_ids))
        differs = np.nonzero(now_ids[:n] != then_ids[:n])[0]
        num_common = int(differs[0]) if len(differs) else n
        self.add(prompt_ids, now_ids[:num_common], *(part[:num_common] for part in logprobs))
        if self._noise is not None:
            self.evidence.add_parting(self._noise, num_common, bool(len(differs)))

    def num_wanted(self) -> int:
        """Return how many completions, in all, are to be compared before the next look; 0 if enough is known."""
        n = self.num_completions
        if n >= MOST_COMPLETIONS or (n and not self._needs_more()):
            return 0
        if self._noise is None:
            return min(2 * n, MOST_COMPLETIONS) or FIRST_COMPLETIONS
        if n < self._sampled:
            return self._sampled if n else self._first
        return min(2 * n, MOST_COMPLETIONS)

    def _needs_more(self) -> bool:
        if self._noise is None:
            return self.num_tokens < (NOISE_TOKENS if self.level <= self._tolerance else MOST_TOKENS)
        if self.num_tokens < FEWEST_TOKENS:
            return True
        is_settled = self.evidence.is_wrong and self.num_completions >= self._sampled
        return self.evidence.is_open and not is_settled and self.num_tokens < MOST_TOKENS

    @property
    def num_tokens(self) -> int:
        """Different ones."""
        return self._tokens.count

    @property
    def mismatch(self) -> float:
        """Mean |Δ log p|."""
        return _mean_size(self.differences)

    @property
    def level(self) -> float:
        """The same, in which no token counts for more than 1."""
        return _mean_size([np.clip(part, -1.0, 1.0) for part in self.differences])

    @property
    def base_gap(self) -> float:
        """Mean effect of the adapter on log p."""
        return _mean_size(self.effects)


def _mean_size(values: Sequence[Logprobs]) -> float:
    flat = np.concatenate([np.zeros(0, np.float32), *values])
    return float(np.abs(flat).mean()) if len(flat) else 0.0
