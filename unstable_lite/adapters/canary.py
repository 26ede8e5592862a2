"""Statistics of the canary, which tests whether an engine and the learner differ by more than rounding.

Knows numbers only: log-probabilities of the same tokens from the engine, from the learner with the adapter, and from
the learner without it. Sends no requests and stops nothing; see orchestrator/canary_checks.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from unstable_lite.types import Logprobs, TokenIds

Floats = npt.NDArray[np.float64]

SUSPICIONS = (
    "the adapter has less effect than it should, as if the engine served the base or the scaling were too small",
    "the adapter has more effect than it should, as if the scaling were too large",
    "its log-probabilities differ by more than rounding explains",
    "its log-probabilities differ slightly but persistently by more than rounding explains",
    "its tokens for the same prompts and seeds differ from earlier ones more often than rounding explains",
)

NOISE_FACTOR = 2.0
"""Factor by which the noise of an adapter may exceed the noise of the base at the start."""
EFFECT_SLACK = 0.25
"""Share by which rounding may change the adapter's effect."""
LOGIT_ROUNDING = 1 / 64
"""Share of the adapter's effect on a token by which rounding may change log p there: it is relative (bfloat16: 1/256 of
a logit), so it is larger for a token that the adapter has moved by many nats."""
TAIL_EXPONENT = 2.0
"""Exponent of the assumed tail of differences beyond the largest one at the start; a Gaussian tail falls faster."""
CERTAIN = 0.02
"""Added to 1 - q, so that a token of probability 1 has a finite relative difference. (SmolLM2-135M in bfloat16: mean
|Δ log p| from 0.015 for the most likely tokens to 0.056 for unlikely ones; divided by it, 0.050 to 0.064.)"""
LARGEST_STAKE = 0.95
BY_MUCH, BY_LITTLE = 0.5, 0.8
"""Exponents k of `_log_calibrated`: one near 1 finds small differences if there are enough tokens."""


class Noise:
    """Distribution of the differences between engine and learner while both hold the base: rounding alone."""

    def __init__(self, differences: npt.ArrayLike, learner: npt.ArrayLike, tolerance: float) -> None:
        """Store the noise of some tokens.

        differences: log p by the engine minus log p by the learner, one for each token, all finite.
        learner: log p of the same tokens by the learner.
        """
        signed = np.asarray(differences, np.float64)
        clipped = np.clip(signed, -1.0, 1.0)
        self.level = float(np.abs(clipped).mean()) if len(signed) else 0.0
        """Mean |Δ log p|, each token clipped to 1 so that a few unlikely tokens do not dominate."""
        self._centre = float(clipped.mean()) if len(signed) else 0.0
        # Differences far below the tolerance are harmless, however small the noise was at the start.
        self._scale = max(self.level, tolerance / 2000)
        known = [0.0, *np.sort(np.abs(signed) / _uncertainty(np.asarray(learner, np.float64)))]
        self._sizes = np.maximum(known, tolerance / 20)
        self._fine_sizes = np.maximum(known, tolerance / 2000)

    def log_factors(self, engine: Logprobs, learner: Logprobs, base: Logprobs) -> Floats:
        """Return the logarithm of each token's factor for each suspicion; 0 for the last suspicion."""
        difference, effect = np.float64(engine) - learner, np.float64(learner) - base
        uncertainty, size = _uncertainty(np.asarray(learner, np.float64)), np.abs(effect)
        beyond = (difference - self._centre) * np.sign(effect)
        too_small, too_large = (self._log_of_effect(towards, size, uncertainty) for towards in (-beyond, beyond))
        unexplained = np.maximum(np.abs(difference) - LOGIT_ROUNDING * size, 0.0)
        p_value = self._p_value(unexplained / uncertainty, self._sizes)
        by_much, by_little = _log_calibrated(p_value, BY_MUCH), _log_calibrated(p_value, BY_LITTLE)
        return np.stack([too_small, too_large, by_much, by_little, np.zeros(len(difference))], axis=1)

    def _log_of_effect(self, difference: Floats, effect: Floats, uncertainty: Floats) -> Floats:
        """Return the logarithm of each token's factor for an effect that is wrong in the direction of `difference`."""
        excess = difference - EFFECT_SLACK * effect
        # Of an effect below four times the noise only the sign is evidence, with a stake in proportion to the effect.
        by_sign = np.log1p(np.minimum(LARGEST_STAKE, effect / self._scale) * np.tanh(excess / self._scale))
        p_value = np.where(excess > 0, 0.5 * self._p_value(np.abs(excess) / uncertainty, self._fine_sizes), 1.0)
        return np.where(effect > 4 * self._scale, _log_calibrated(p_value, BY_MUCH), by_sign)

    def _p_value(self, sizes: Floats, known: Floats) -> Floats:
        """Return the share of the known differences, enlarged by NOISE_FACTOR, that are at least as large."""
        reduced = sizes / NOISE_FACTOR
        num_larger = len(known) - np.searchsorted(known, reduced, side="left")
        beyond = known[-1] / np.maximum(reduced, known[-1])
        p_value: Floats = (1 + num_larger) / (1 + len(known)) * beyond**TAIL_EXPONENT
        return p_value


def _uncertainty(logprobs: Floats) -> Floats:
    """Return 1 - q + CERTAIN for each probability q: a shift of a logit changes log p in proportion to 1 - q."""
    return 1 - np.exp(np.minimum(logprobs, 0.0)) + CERTAIN


def _log_calibrated(p_value: Floats, exponent: float) -> Floats:
    """Return the logarithm of k p ** (k - 1), whose mean is 1 if p is uniform (Vovk and Wang 2021)."""
    return (exponent - 1) * np.log(p_value) + math.log(exponent)


ERROR_RATE = 1e-7
"""Probability that one check mistakes rounding for wrong weights."""
WRONG_AT = math.log(len(SUSPICIONS) / ERROR_RATE)
OPEN_AT = math.log(10.0)
"""Evidence above which a check asks for more tokens."""
MOST_OF_ONE = WRONG_AT / 4
"""Limit of the evidence from one completion: one cause other than the weights can affect all its tokens."""
CORRELATION = 0.5
"""Exponent of each factor, because the tokens of a completion are not independent. A power below 1 of a factor whose
mean is at most 1 has a mean of at most 1."""
LEAST_PARTING = 0.01
"""Least assumed share of tokens at which rounding makes two completions of one seed diverge."""


@dataclass(slots=True)
class Evidence:
    """Evidence against one engine: for each fault in SUSPICIONS the logarithm of a product with a factor per token.

    Under rounding alone the mean of each factor is at most 1, so by Ville's inequality the product ever exceeds
    1 / ERROR_RATE with a probability of at most ERROR_RATE. A check carries its evidence into the next one, but never
    less than 0: a small persistent error is found without more tokens, and the mean time to a false alarm is still
    1 / ERROR_RATE checks.
    """

    logs: Floats = field(default_factory=lambda: np.zeros(len(SUSPICIONS)))
    """Logarithm of the product for each suspicion, over earlier checks and this one."""

    def begin(self) -> None:
        """Begin a check: drop the evidence in favour of the engine."""
        self.logs = np.maximum(self.logs, 0.0)

    def add(self, noise: Noise, engine: Logprobs, learner: Logprobs, base: Logprobs) -> None:
        """Add the tokens of one completion."""
        one = CORRELATION * noise.log_factors(engine, learner, base).sum(axis=0)
        self.logs = self.logs + np.minimum(one, MOST_OF_ONE)

    def add_parting(self, noise: Noise, num_common: int, has_parted: bool) -> None:
        """Add whether a resampled completion diverged after `num_common` tokens.

        The other hypothesis is that every second token diverges. Two distributions diverge at a token with a
        probability of half the mean |Δ log p|; this assumes four times as much.
        """
        probability = min(max(NOISE_FACTOR * noise.level, LEAST_PARTING), 0.5)
        log_factor = num_common * math.log(0.5 / (1 - probability)) + has_parted * math.log(0.5 / probability)
        self.logs = self.logs.copy()
        self.logs[-1] += min(log_factor, MOST_OF_ONE)

    @property
    def is_open(self) -> bool:
        """Whether the evidence against the engine calls for more tokens."""
        return bool(self.logs.max() > OPEN_AT)

    @property
    def is_wrong(self) -> bool:
        return bool(self.logs.max() >= WRONG_AT)

    @property
    def suspicion(self) -> str:
        """Suspicion with the strongest evidence."""
        return SUSPICIONS[int(self.logs.argmax())]

    @property
    def strength(self) -> float:
        """Evidence for the strongest suspicion, as a power of ten."""
        return float(self.logs.max()) / math.log(10)


NOISE_TOKENS = 256
"""Number of tokens from which the noise is measured."""
MOST_TOKENS = 512
"""Token limit of one check."""
FEWEST_TOKENS = 6
"""Number of different tokens below which a check is inconclusive."""
FIRST_COMPLETIONS = 16
"""Completions of the base to measure the noise; more are requested until there are NOISE_TOKENS tokens."""
MOST_COMPLETIONS = 128
"""Completion limit of one check."""


class Check:
    """Canary of one engine: compares completions until the evidence suffices."""

    def __init__(self, evidence: Evidence, noise: Noise | None, tolerance: float, first: int, sampled: int) -> None:
        """`noise`: None while it is measured with the base. `first`, `sampled`: completions after rounds 1 and 2."""
        evidence.begin()
        self.evidence = evidence
        self.num_completions = 0
        # Of the new tokens of each completion: log p by the engine minus that by the learner, log p by the learner, and
        # that minus log p by the learner without the adapter.
        self.differences: list[Logprobs] = []
        self.learner: list[Logprobs] = []
        self.effects: list[Logprobs] = []
        self._seen: set[tuple[bytes, bytes]] = set()
        """Prompt, and completion up to a token, for each token that was compared."""
        self._noise = noise
        self._tolerance = tolerance
        self._first, self._sampled = first, sampled

    def add(self, prompt_ids: TokenIds, completion_ids: TokenIds, *logprobs: Logprobs) -> None:
        """Compare one completion; `logprobs`: by the engine, by the learner, by the learner without the adapter.

        Completions of one prompt have bit-identical log-probabilities in their common prefix, so each token after a
        prompt and its preceding tokens is compared once.
        """
        prompt = prompt_ids.tobytes()
        starts = [(prompt, completion_ids[: n + 1].tobytes()) for n in range(len(completion_ids))]
        is_new = np.array([start not in self._seen for start in starts], np.bool_)
        self._seen.update(starts)
        engine, learner, base = (part[is_new] for part in logprobs)
        self.num_completions += 1
        self.differences.append(engine - learner)
        self.learner.append(learner)
        self.effects.append(learner - base)
        if self._noise is not None:
            self.evidence.add(self._noise, engine, learner, base)

    def add_again(self, prompt_ids: TokenIds, now_ids: TokenIds, then_ids: TokenIds, *logprobs: Logprobs) -> None:
        """Compare a completion with an earlier one of the same seed, up to their first difference.

        `logprobs`: by the engine now, by the engine then, and by the learner without the adapter.
        """
        n = min(len(now_ids), len(then_ids))
        differs = np.nonzero(now_ids[:n] != then_ids[:n])[0]
        num_common = int(differs[0]) if len(differs) else n
        self.add(prompt_ids, now_ids[:num_common], *(part[:num_common] for part in logprobs))
        if self._noise is not None:
            self.evidence.add_parting(self._noise, num_common, bool(len(differs)))

    def num_wanted(self) -> int:
        """Return the total number of completions to compare before the next look; 0 if the check is complete."""
        n = self.num_completions
        if n == 0:
            return FIRST_COMPLETIONS if self._noise is None else self._first
        if n >= MOST_COMPLETIONS or not self._needs_more():
            return 0
        return self._sampled if self._noise is not None and n < self._sampled else min(2 * n, MOST_COMPLETIONS)

    def _needs_more(self) -> bool:
        if self._noise is None:
            return self.num_tokens < (NOISE_TOKENS if self.level <= self._tolerance else MOST_TOKENS)
        if self.num_tokens < FEWEST_TOKENS:
            return True
        is_settled = self.evidence.is_wrong and self.num_completions >= self._sampled
        return self.evidence.is_open and not is_settled and self.num_tokens < MOST_TOKENS

    @property
    def num_tokens(self) -> int:
        """Number of different tokens."""
        return len(self._seen)

    @property
    def mismatch(self) -> float:
        """Mean |Δ log p|."""
        return _mean_size(self.differences)

    @property
    def level(self) -> float:
        """Mean |Δ log p|, each token clipped to 1."""
        return _mean_size(self.differences, 1.0)

    @property
    def base_gap(self) -> float:
        """Mean absolute effect of the adapter on log p."""
        return _mean_size(self.effects)


def _mean_size(values: Sequence[Logprobs], most: float = math.inf) -> float:
    sizes = np.minimum(np.abs(np.concatenate([np.zeros(0, np.float32), *values])), most)
    return float(sizes.mean()) if len(sizes) else 0.0
