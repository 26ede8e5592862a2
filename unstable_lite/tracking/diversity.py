"""Diversity of play: n-grams of actions, entropies of actions and states, distinct trajectories.

Covers the newest trajectories of one env. Adding a game only hashes its texts; the metrics are computed once per
update, over a window with limits on trajectories and turns.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Any

GRAMS = (1, 2, 3, 4)
MAX_TURNS = 16_384
"""Limit of the turns in a window, so that each metric takes at most a few milliseconds."""


class Diversity:
    """Newest `window` trajectories of one env: the states and actions of one collected player in one game each."""

    def __init__(self, window: int, max_turns: int = MAX_TURNS) -> None:
        self._trajectories: deque[tuple[tuple[int, ...], tuple[int, ...]]] = deque()
        """Hashes of states and of actions."""
        self._window = window
        self._max_turns = max_turns
        self._num_turns = 0

    def append(self, states: tuple[int, ...], actions: tuple[int, ...]) -> None:
        """Add a trajectory, given the digests of its states and of its actions."""
        self._trajectories.append((states, actions))
        self._num_turns += len(actions)
        while len(self._trajectories) > self._window or self._num_turns > self._max_turns:
            self._num_turns -= len(self._trajectories.popleft()[1])

    def state_dict(self) -> list[Any]:
        return [[list(states), list(actions)] for states, actions in self._trajectories]

    def load_state_dict(self, state: list[Any]) -> None:
        for states, actions in state:
            self.append(tuple(states), tuple(actions))

    def metrics(self) -> dict[str, float]:
        """Return shares between 0 and 1, entropies in nats, and the numbers of trajectories and turns."""
        all_states, all_actions = zip(*self._trajectories, strict=True) if self._trajectories else ((), ())
        num_trajectories, num_turns = len(self._trajectories), self._num_turns
        states, actions = Counter(chain.from_iterable(all_states)), Counter(chain.from_iterable(all_actions))
        of_turn = Counter(chain.from_iterable(map(range, map(len, all_actions))))
        at_turn: Counter[Hashable] = Counter(chain.from_iterable(map(enumerate, all_actions)))
        own_entropy = sum(map(_own_entropy, all_actions))
        metrics: dict[str, float] = {}
        for n in GRAMS:
            grams = list(chain.from_iterable(_grams(own, n) for own in all_actions))
            if grams:
                metrics[f"Pct. Unique Action {n}-gram"] = len(set(grams)) / len(grams)
        return metrics | {
            "Unique Actions": len(actions),
            "Unique States": len(states),
            "Unique Trajectories": len(set(all_actions)),
            "Action Entropy": entropy(actions.values(), num_turns),
            "State Entropy": entropy(states.values(), num_turns),
            # H(action | turn) = H(action, turn) - H(turn): uncertainty of an action given the number of its turn.
            "Action Entropy (per turn)": entropy(at_turn.values(), num_turns) - entropy(of_turn.values(), num_turns),
            "Action Entropy (trajectory)": own_entropy / max(num_trajectories, 1),
            "n": num_trajectories,
            "n (turns)": num_turns,
        }


def digests(texts: Iterable[str]) -> tuple[int, ...]:
    return tuple(map(_digest, texts))


def _digest(text: str) -> int:
    """Return a digest that, unlike `hash`, is the same in every process, because the window survives a resume.

    Two texts of equal length and checksum count as one; this happens in about one of thirty full windows.
    """
    return len(text) << 32 | zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _grams(actions: tuple[int, ...], n: int) -> Iterable[tuple[int, ...]]:
    return zip(*(actions[start:] for start in range(n)), strict=False)


def _own_entropy(actions: tuple[int, ...]) -> float:
    """Return the entropy of one trajectory's actions; if all differ, which is common, one logarithm suffices."""
    n, distinct = len(actions), set(actions)
    if len(distinct) == n:
        return math.log(n) if n else 0.0
    return entropy(map(actions.count, distinct), n)


def entropy(counts: Iterable[int], total: int) -> float:
    """Return -Σ p log p of counts; equal counts are taken together, because there are few different ones."""
    return -sum(times * count / total * math.log(count / total) for count, times in Counter(counts).items())
