"""How varied play is: n-grams of actions, entropies of actions and states, distinct trajectories.

Over the newest trajectories of one env. A game costs the hashing of its texts; the figures are made when they are asked
for, once an update, from a window that is bounded in trajectories and in turns.
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
"""Games of many turns fill the window earlier, so that no figure takes longer than some milliseconds."""


class Diversity:
    """One env's newest `window` trajectories. A trajectory is what one collected player saw and did in one game."""

    def __init__(self, window: int, max_turns: int = MAX_TURNS) -> None:
        self._trajectories: deque[tuple[tuple[int, ...], tuple[int, ...]]] = deque()
        """Hashes of states and of actions."""
        self._window = window
        self._max_turns = max_turns
        self._num_turns = 0

    def append(self, states: tuple[int, ...], actions: tuple[int, ...]) -> None:
        """Add a trajectory by the digests of its states and of its actions."""
        self._trajectories.append((states, actions))
        self._num_turns += len(actions)
        while len(self._trajectories) > self._window or self._num_turns > self._max_turns:
            self._num_turns -= len(self._trajectories.popleft()[1])

    def state_dict(self) -> list[Any]:
        return list(self._trajectories)

    def load_state_dict(self, state: list[Any]) -> None:
        for states, actions in state:
            self.append(tuple(states), tuple(actions))

    def metrics(self) -> dict[str, float]:
        """Shares between 0 and 1, entropies in nats, and how many trajectories and turns they are of."""
        all_states, all_actions = zip(*self._trajectories, strict=True) if self._trajectories else ((), ())
        num_trajectories, num_turns = len(self._trajectories), self._num_turns
        states, actions = Counter(chain.from_iterable(all_states)), Counter(chain.from_iterable(all_actions))
        of_turn = Counter(chain.from_iterable(map(range, map(len, all_actions))))
        at_turn: Counter[Hashable] = Counter(chain.from_iterable(map(enumerate, all_actions)))
        own_entropy = sum(map(_own_entropy, all_actions))
        figures: dict[str, float] = {}
        for n in GRAMS:
            grams = list(chain.from_iterable(_grams(own, n) for own in all_actions))
            if grams:
                figures[f"Pct. Unique Action {n}-gram"] = len(set(grams)) / len(grams)
        return figures | {
            "Unique Actions": len(actions),
            "Unique States": len(states),
            "Unique Trajectories": len(set(all_actions)),
            "Action Entropy": _entropy(actions.values(), num_turns),
            "State Entropy": _entropy(states.values(), num_turns),
            # H(action | turn) = H(action, turn) - H(turn): how open a choice is once it is known which turn it is.
            "Action Entropy (per turn)": _entropy(at_turn.values(), num_turns) - _entropy(of_turn.values(), num_turns),
            "Action Entropy (trajectory)": own_entropy / max(num_trajectories, 1),
            "n": num_trajectories,
            "n (turns)": num_turns,
        }


def digests(texts: Iterable[str]) -> tuple[int, ...]:
    return tuple(map(_digest, texts))


def _digest(text: str) -> int:
    """Unlike `hash`, the same in every process: the window outlives this one.

    Two texts of one length and one checksum pass for one, which befalls a full window in some thirty.
    """
    return len(text) << 32 | zlib.crc32(text.encode("utf-8", "surrogatepass"))


def _grams(actions: tuple[int, ...], n: int) -> Iterable[tuple[int, ...]]:
    return zip(*(actions[start:] for start in range(n)), strict=False)


def _own_entropy(actions: tuple[int, ...]) -> float:
    """Of one trajectory's actions; nearly all of them are different, and those need no logarithm each."""
    n, distinct = len(actions), set(actions)
    if len(distinct) == n:
        return math.log(n) if n else 0.0
    return _entropy(map(actions.count, distinct), n)


def _entropy(counts: Iterable[int], total: int) -> float:
    """-Σ p log p of counts; equal counts are taken together, for there are few different ones."""
    return -sum(times * count / total * math.log(count / total) for count, times in Counter(counts).items())
