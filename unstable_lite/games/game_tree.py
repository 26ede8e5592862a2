"""A two-player zero-sum game as a flat list of positions: values, outcomes and best responses of known policies.

Pure: knows no rules, models or files; games/openspiel/flatten.py makes the list. A policy is a list of arrays, one for
each decision state, with the probability of each legal action there. The rest is the probability of other answers,
which forfeit the game, as illegal ones do in play: the seat gets the lowest utility, the other seat its negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Policy = Sequence[npt.NDArray[np.float64]]
"""Probabilities of the legal actions, by decision state, whichever seat it belongs to."""


@dataclass(frozen=True, slots=True)
class DecisionState:
    """Knowledge of a seat that has to act, and its legal actions."""

    seat: int
    observation: str
    """Observation that the seat gets there, and in no other decision state."""
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    utility: float
    """Utility of seat 0, in the game's units; seat 1 gets its negative."""


@dataclass(frozen=True, slots=True)
class Chance:
    probabilities: tuple[float, ...]
    successors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    state: int
    """Number of the decision state."""
    successors: tuple[int, ...]
    """Positions after each of its actions."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Probabilities of the results for one seat, and its expected utility."""

    win: float
    draw: float
    loss: float
    utility: float


@dataclass(frozen=True, slots=True)
class GameTree:
    """Positions of a game, each after all of its successors; the last one is the start.

    Positions may be shared by several histories if every decision state is a single position (perfect information).
    Otherwise each history has its own, and each seat remembers everything that it saw and did (perfect recall).
    """

    positions: tuple[End | Chance | Decision, ...]
    states: tuple[DecisionState, ...]
    lowest_utility: float

    @property
    def num_answers(self) -> int:
        return sum(len(state.actions) for state in self.states)

    @property
    def shares_positions(self) -> bool:
        """Whether several histories lead to one position."""
        successors = [n for position in self.positions if not isinstance(position, End) for n in position.successors]
        return len(set(successors)) < len(successors)

    def exploitability(self, policy: Policy) -> float:
        """Return how much best responses win on average, over both seats, against `policy`; 0 for an equilibrium.

        Source: Lanctot et al. 2019, "OpenSpiel", arXiv:1908.09453: NashConv divided by the number of players.
        """
        return sum(self.outcomes(policy, seat, self.best_response(policy, seat)).utility for seat in (0, 1)) / 2

    def outcomes(self, policy: Policy, seat: int, own: Policy) -> Outcomes:
        """Return the results of `own` at `seat` against `policy` at the other one."""
        win = draw = loss = utility = 0.0
        reach_N = self._reach(policy, seat, own)
        sign = 1 if seat == 0 else -1

        def add(probability: float, own_utility: float) -> None:
            nonlocal win, draw, loss, utility
            utility += probability * own_utility
            win += probability * (own_utility > 0)
            draw += probability * (own_utility == 0)
            loss += probability * (own_utility < 0)

        for reach, position in zip(reach_N, self.positions, strict=True):
            if isinstance(position, End):
                add(reach, sign * position.utility)
            elif isinstance(position, Decision):
                is_own = self.states[position.state].seat == seat
                played = (own if is_own else policy)[position.state]
                forfeit = self.lowest_utility if is_own else -self.lowest_utility
                add(reach * max(0.0, 1.0 - float(played.sum())), forfeit)
        return Outcomes(win, draw, loss, utility)

    def best_response(self, policy: Policy, seat: int) -> Policy:
        """Return a policy with the highest utility at `seat` against `policy`, which is defined for that seat's states.

        It never forfeits, because no result is worse.
        """
        reach_N = self._reach(policy, seat, None)
        at: dict[int, list[int]] = {}
        for number, position in enumerate(self.positions):
            if isinstance(position, Decision) and self.states[position.state].seat == seat:
                at.setdefault(position.state, []).append(number)
        best: dict[int, int] = {}
        values: dict[int, float] = {}
        sign = 1 if seat == 0 else -1

        def best_of(state: int) -> int:
            if state not in best:
                totals = np.zeros(len(self.states[state].actions))
                for number in at[state]:
                    for action, successor in enumerate(self.positions[number].successors):  # type: ignore[union-attr]
                        totals[action] += reach_N[number] * value_of(successor)
                best[state] = int(totals.argmax())
            return best[state]

        def value_of(number: int) -> float:
            if number not in values:
                values[number] = compute(number)
            return values[number]

        def compute(number: int) -> float:
            position = self.positions[number]
            if isinstance(position, End):
                return sign * position.utility
            if isinstance(position, Chance):
                return sum(p * value_of(n) for p, n in zip(position.probabilities, position.successors, strict=True))
            if self.states[position.state].seat == seat:
                return value_of(position.successors[best_of(position.state)])
            played = policy[position.state]
            value = sum(float(p) * value_of(n) for p, n in zip(played, position.successors, strict=True))
            return value - max(0.0, 1.0 - float(played.sum())) * self.lowest_utility

        response = []
        for state, about in enumerate(self.states):
            chosen = np.zeros(len(about.actions))
            if about.seat == seat:
                chosen[best_of(state)] = 1.0
            response.append(chosen)
        return response

    def optimal_actions(self) -> dict[str, list[str]]:
        """Return every action that keeps the value of a position, by its observation; for perfect information only."""
        values: list[float] = []
        """Values of the positions for seat 0."""
        optimal: dict[str, list[str]] = {}
        for position in self.positions:
            if isinstance(position, End):
                values.append(position.utility)
            elif isinstance(position, Chance):
                chances = zip(position.probabilities, position.successors, strict=True)
                values.append(sum(p * values[number] for p, number in chances))
            else:
                state = self.states[position.state]
                after = [values[number] for number in position.successors]
                values.append(best := max(after) if state.seat == 0 else min(after))
                pairs = zip(state.actions, after, strict=True)
                optimal[state.observation] = [action for action, value in pairs if value == best]
        return optimal

    def average(self, policies: Sequence[Policy]) -> Policy:
        """Return the policy of a seat that draws one of `policies` before each game and plays as it does.

        In a decision state each one counts by the probability that its own actions lead there; a state that none of
        them reaches is uniform. Raises ValueError if positions are shared: then that probability is not one number.
        Source: Kuhn 1953, "Extensive games and the problem of information".
        """
        if self.shares_positions:
            raise ValueError("several histories share a position")
        played_S = [np.zeros(len(state.actions)) for state in self.states]
        reached_S = np.zeros(len(self.states))
        for policy in policies:
            own_S = self._own_reach(policy)
            reached_S += own_S
            for played, own, of_policy in zip(played_S, own_S, policy, strict=True):
                played += own * of_policy
        pairs = zip(played_S, reached_S, strict=True)
        return [played / reached if reached else np.full(len(played), 1 / len(played)) for played, reached in pairs]

    def _own_reach(self, policy: Policy) -> npt.NDArray[np.float64]:
        """Return the probability that a seat's own actions lead to each of its decision states."""
        own_N2 = np.ones((len(self.positions), 2))
        own_S = np.zeros(len(self.states))
        for number in range(len(self.positions) - 1, -1, -1):
            position = self.positions[number]
            if isinstance(position, End):
                continue
            own_N2[list(position.successors)] = own_N2[number]
            if isinstance(position, Decision):
                seat = self.states[position.state].seat
                own_S[position.state] = own_N2[number, seat]
                own_N2[list(position.successors), seat] *= policy[position.state]
        return own_S

    def _reach(self, policy: Policy, seat: int, own: Policy | None) -> list[float]:
        """Return the probability that chance and both seats lead to each position.

        `own`: policy of `seat`; if None it plays every action with weight 1.
        """
        reach_N = [0.0] * len(self.positions)
        reach_N[-1] = 1.0
        for number in range(len(self.positions) - 1, -1, -1):
            position, reach = self.positions[number], reach_N[number]
            if isinstance(position, End) or not reach:
                continue
            if isinstance(position, Chance):
                weights: Sequence[float] = position.probabilities
            elif self.states[position.state].seat != seat:
                weights = policy[position.state].tolist()
            else:
                weights = [1.0] * len(position.successors) if own is None else own[position.state].tolist()
            for weight, successor in zip(weights, position.successors, strict=True):
                reach_N[successor] += reach * weight
        return reach_N


def renormalised(policy: Policy) -> Policy:
    """Return the policy given that its answers are legal; uniform where no legal answer has any probability."""
    return [p / p.sum() if p.sum() > 0 else np.full(len(p), 1 / len(p)) for p in policy]


def uniform(tree: GameTree) -> Policy:
    """Return the policy of `scripted:random`."""
    return [np.full(len(state.actions), 1 / len(state.actions)) for state in tree.states]
