"""Publishes and returns, simulated from recorded rounding noise and checked by the code that checks a run's.

    python tests/fakes/noise/simulation.py

This prints the table of docs/curves.md: the number of tokens needed to detect wrong weights.
"""

import sys
from pathlib import Path

import numpy as np

from unstable_lite.adapters.canary import Check, Evidence, Floats, Noise

RECORDED = Path(__file__).with_name("smollm2_bfloat16.npz")
TOLERANCE = 0.2
TOKENS = 16
"""Tokens of one completion of a canary."""
SCORED, SAMPLED = 2, 12
"""Completions of the first two rounds, as in adapter_sync.py for completions of TOKENS tokens."""


def recorded() -> list[Floats]:
    """Return an array per completion: for each token, the engine's log p minus the learner's, and the learner's."""
    with np.load(RECORDED) as file:
        learner = file["transformers/learner"].astype(np.float64)
        pairs = np.stack([file["transformers/engine"] - learner, learner], axis=1)
        return np.split(pairs, np.cumsum(file["transformers/lengths"])[:-1])


class World:
    """Whole completions with the recorded noise, and adapters that change log p by a given amount."""

    def __init__(self, scale: float = 1.0, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self._noise = [one * (scale, 1.0) for one in recorded()]
        self._prompt, self._number = np.zeros(1, np.int32), 0

    def rounding(self) -> tuple[Floats, Floats]:
        """Return the rounding noise of a completion's tokens, and their log p by the learner."""
        one = self._noise[self.rng.integers(len(self._noise))]
        start = self.rng.integers(max(1, len(one) - TOKENS + 1))
        noise, learner = one[start : start + TOKENS].T
        return noise, learner

    def effect(self, mean: float, num_tokens: int) -> Floats:
        """Return a change of log p of mean size `mean`: large for few tokens, small for most."""
        return self.rng.laplace(0.0, mean, num_tokens)

    def start(self) -> Check:
        """Measure the noise, as with the base at the start of a run."""
        check = Check(Evidence(), None, TOLERANCE, SCORED, SAMPLED)
        while wanted := check.num_wanted():
            while check.num_completions < wanted:
                noise, learner = self.rounding()
                self._add(check, learner + noise, learner, learner)
        return check

    def noise(self) -> Noise:
        check = self.start()
        return Noise(np.concatenate(check.differences), np.concatenate(check.learner), TOLERANCE)

    def add(self, noise: Noise, evidence: Evidence, effect: float) -> Check:
        """Check a right engine on an adapter whose mean effect on log p is `effect`."""
        check = Check(evidence, noise, TOLERANCE, SCORED, SAMPLED)
        while wanted := check.num_wanted():
            while check.num_completions < wanted:
                rounding, learner = self.rounding()
                self._add(check, learner + rounding, learner, learner - self.effect(effect, len(rounding)))
        return check

    def come_back(self, noise: Noise, evidence: Evidence, effect: float) -> Check:
        """Check a right engine on a returning adapter: rounding makes some completions diverge early."""
        check = Check(evidence, noise, TOLERANCE, SCORED, SAMPLED)
        while wanted := min(check.num_wanted(), SAMPLED):
            if check.num_completions == wanted:
                break
            while check.num_completions < wanted:
                rounding, learner = self.rounding()
                # The samplers diverge with about the probability by which the two distributions differ.
                parts = np.nonzero(self.rng.random(len(rounding)) < np.abs(rounding) / 2)[0]
                then = np.full(len(rounding), self._number, np.int32)
                now = then.copy()
                now[parts] = -1
                self._number += 1
                base = learner - self.effect(effect, len(rounding))
                check.add_again(self._prompt, now, then, learner + rounding, learner, base)
        return check

    def tokens_to_catch(self, noise: Noise, kind: str, mean: float, most: int = 1 << 15) -> float:
        """Return the number of tokens after which a wrong engine is detected; infinity if `most` do not suffice.

        `kind`: "base" (the base answers, and is `mean` away from the adapter), "twice" (the adapter is scaled twice as
        much), or "other" (a difference of that size that is unrelated to the adapter's effect).
        """
        evidence, num_tokens = Evidence(), 0
        while not evidence.is_wrong and num_tokens < most:
            evidence.begin()
            rounding, learner = self.rounding()
            effect = self.effect(mean, len(rounding))
            error = {"base": -effect, "twice": effect, "other": self.effect(mean, len(rounding))}[kind]
            base = learner if kind == "other" else learner - effect
            evidence.add(noise, learner + rounding + error, learner, base)
            num_tokens += len(rounding)
        return num_tokens if evidence.is_wrong else np.inf

    def _add(self, check: Check, engine: Floats, learner: Floats, base: Floats) -> None:
        self._number += 1
        ids = np.full(len(engine), self._number, np.int32)
        check.add(self._prompt, ids, engine, learner, base)


def main() -> None:
    world = World()
    rows = [("base", "the base answers"), ("twice", "the scaling is twice what it should be"), ("other", "any other")]
    lines = ["| what is wrong | .03 | .1 | .3 |", "| --- | --- | --- | --- |"]
    for kind, what in rows:
        cells = []
        for mean in (0.03, 0.1, 0.3):
            tokens = [world.tokens_to_catch(world.noise(), kind, mean) for _ in range(200)]
            half, most = np.quantile(tokens, [0.5, 0.95], method="higher")
            cells.append(f"{half:.0f} ({most:.0f})" if np.isfinite(most) else "not caught")
        lines.append(f"| {what} | {' | '.join(cells)} |")
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
