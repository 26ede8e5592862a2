"""Leave out of batches the steps whose results are all alike (`rewards.reject_zero_signal`).

Owns the decision, the steps that wait for their batch to be complete, and the counts. Knows no transforms: it reads the
results that the buffer wrote into each step. As many steps as a batch has are judged together, because a few results
are alike by chance. Among the games of a group, results are alike if its baseline found them so (`compare`); without
groups, if those of one env, seat and kind of opponents equal each other and the newest one before.

Source: dynamic sampling of Yu et al. 2025, "DAPO", arXiv:2503.14476, which judges groups; there, a batch has no limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from unstable_lite.reward_transformations.averages import Spread, cell_of
from unstable_lite.types import Step

MOST_JUDGED = 4
"""Steps that are judged for one batch, in batches: if they bring too few with a signal, others complete it."""

Chunk = list[Step]


def chunks_that_hold(chunks: Sequence[Chunk], n: int) -> int:
    """Return the number of first chunks that hold at least `n` steps."""
    return next(count for count, size in enumerate(accumulate(map(len, chunks)), 1) if size >= n)


class Rejection:
    def __init__(self) -> None:
        self.spread = Spread()
        """Newest results, with which those of a batch are compared."""
        self._chosen: list[Chunk] = []
        """Chunks of the next batch."""
        self._alike: list[Chunk] = []
        """Chunks without a signal, which complete the next batch if need be."""
        self._held = 0, 0
        """Numbers of chosen chunks and of others that `refill` is to put back."""
        self.filled = 0
        """Number of steps without a signal in the newest batch."""
        self.rejected: Counter[tuple[str, str]] = Counter()
        """Number of rejected steps since the start, by env id and kinds of the opponents."""

    def size(self) -> int:
        """Return the number of steps that are held."""
        return sum(map(len, self.contents()))

    def contents(self) -> list[Chunk]:
        return self._chosen + self._alike

    def clear(self) -> None:
        self._chosen, self._alike = [], []

    def judge(self, chunks: Sequence[Chunk]) -> None:
        """Take chunks from the buffer, and choose those with a signal."""
        for chunk, is_chosen in zip(chunks, self._have_signal(chunks), strict=True):
            (self._chosen if is_chosen else self._alike).append(chunk)

    def remove(self, is_stale: Callable[[Chunk], bool]) -> list[Chunk]:
        """Remove the stale chunks and return them."""
        stale = [chunk for chunk in self.contents() if is_stale(chunk)]
        self._chosen, self._alike = (
            [chunk for chunk in chunks if not is_stale(chunk)] for chunks in (self._chosen, self._alike)
        )
        return stale

    def refill(self, chunks: list[Chunk]) -> list[Chunk]:
        """Take back, after `load_state_dict`, the chunks that were held, which are the last ones; return the others."""
        first = max(0, len(chunks) - sum(self._held))
        self._chosen, self._alike = chunks[first : first + self._held[0]], chunks[first + self._held[0] :]
        return chunks[:first]

    def has_batch(self, n: int) -> bool:
        """Return whether a batch of `n` steps can be taken."""
        return sum(map(len, self._chosen)) >= n or self.size() >= MOST_JUDGED * n

    def take(self, n: int) -> list[Chunk]:
        """Return the chunks of a batch of at least `n` steps; keep the other chosen ones and reject the rest."""
        in_order, num_chosen = self._chosen + self._alike[::-1], len(self._chosen)
        count = chunks_that_hold(in_order, n)
        self.filled = sum(map(len, in_order[num_chosen:count]))
        self._chosen, self._alike, rejected = in_order[count:num_chosen], [], in_order[max(count, num_chosen) :]
        for step in chain.from_iterable(rejected):
            self.rejected[step.env_id, step.context.opponent_kinds if step.context is not None else ""] += 1
        return in_order[:count]

    def metrics(self) -> dict[str, float]:
        """Return the counts of rejected steps, of all and by env and kinds of opponents."""
        by_cell = {f"buffer/rejected-{env_id} ({kinds})": n for (env_id, kinds), n in self.rejected.items()}
        return {"buffer/rejected": self.rejected.total(), "buffer/filled": self.filled, **by_cell}

    def state_dict(self) -> dict[str, Any]:
        """Return counts and the newest results; the chunks that are held are the last of the buffer's contents."""
        rejected = [[*key, n] for key, n in self.rejected.items()]
        held = len(self._chosen), len(self._alike)
        return {"rejected": rejected, "spread": self.spread.state_dict(), "held": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rejected = Counter({(env_id, kinds): n for env_id, kinds, n in state["rejected"]})
        self.spread.load_state_dict(state["spread"])
        self._held = tuple(state["held"])

    def _have_signal(self, chunks: Sequence[Chunk]) -> list[bool]:
        if "group_is_alike" in chunks[0][0].step_info:
            return [not all(step.step_info["group_is_alike"] for step in chunk) for chunk in chunks]
        results = [
            sum(step.step_info["step_reward"] + step.step_info["baseline"] for step in chunk) for chunk in chunks
        ]
        cells = [cell_of(chunk[0].env_id, chunk[0].pid, chunk[0].context) for chunk in chunks]
        different: list[bool] = self.spread.tells_apart(np.array(results, np.float64), cells).tolist()
        return different
