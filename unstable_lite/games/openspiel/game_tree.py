"""A two-player zero-sum game of OpenSpiel as a flat list of positions: values and best responses of known policies.

A policy is a list of arrays, one for each decision state, with the probability of each legal action there. The rest is
the probability of other answers, which forfeit the game, as illegal ones do in play: the seat gets the lowest utility,
the other seat its negative. `flatten` makes the list; knows no models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from unstable_lite.config.env_ids import PREFIX, is_openspiel
from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel.game import information_fault, last_line, load_game, pyspiel
from unstable_lite.games.openspiel.prompts import action_names, prompt

MOST_STATES, MOST_ANSWERS = 5_000, 50_000
"""Most decision states, and most legal answers in all of them, of a game that is evaluated without being forced to."""
MOST_COUNTED = 20 * MOST_STATES
"""Number of positions at which counting ends, to say how large a game is; fewer where positions are boards."""
BOARD_GAMES = ("nim", "tic_tac_toe")
"""Games whose position is the board and the seat to move, whichever moves led there."""
ENDLESS = {
    "connect_four": "it has about 4.5 × 10^12 positions",
    "pig": "a turn may end in the position in which it began, so that positions repeat without end",
}

Moves = tuple[tuple[int, int], ...]
"""Decision states and actions of one seat, in their order."""
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
    """Probabilities of the results for one seat, and its expected utility: numbers, or arrays for several policies."""

    win: Any
    draw: Any
    loss: Any
    utility: Any


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
        return float(sum(of.utility for of in self.best_outcomes(policy, policy)) / 2)

    def best_outcomes(self, fitted: Policy, played: Policy) -> list[Outcomes]:
        """Return, by seat, the results there of the best response to `fitted`, against `played` at the other seat."""
        return [self.outcomes(played, seat, self.best_response(fitted, seat)) for seat in (0, 1)]

    def outcomes(self, policy: Policy, seat: int, own: Policy) -> Outcomes:
        """Return the results of `own` at `seat` against `policy` at the other one.

        The arrays of `policy` may have a second axis, of several policies.
        """
        results: list[tuple[Any, float]] = []
        """Probability and utility for the seat of each end."""
        for reach, position in zip(self._reach(policy, seat, own), self.positions, strict=True):
            if isinstance(position, End):
                results.append((reach, position.utility if seat == 0 else -position.utility))
            elif isinstance(position, Decision):
                is_own = self.states[position.state].seat == seat
                played = (own if is_own else policy)[position.state]
                forfeit = self.lowest_utility if is_own else -self.lowest_utility
                results.append((reach * np.maximum(0.0, 1.0 - played.sum(0)), forfeit))
        return Outcomes(
            win=sum((chance for chance, utility in results if utility > 0), 0.0),
            draw=sum((chance for chance, utility in results if utility == 0), 0.0),
            loss=sum((chance for chance, utility in results if utility < 0), 0.0),
            utility=sum((chance * utility for chance, utility in results), 0.0),
        )

    def best_response(self, policy: Policy, seat: int) -> Policy:
        """Return a policy with the highest utility at `seat` against `policy`, which is defined for that seat's states.

        It never forfeits, because no result is worse.
        """
        reach_N = self._reach(policy, seat, None)
        at: dict[int, list[int]] = {}
        for number, position in enumerate(self.positions):
            if isinstance(position, Decision) and self.states[position.state].seat == seat:
                at.setdefault(position.state, []).append(number)

        @cache
        def best_of(state: int) -> int:
            totals = np.zeros(len(self.states[state].actions))
            for number in at[state]:
                for action, successor in enumerate(self.positions[number].successors):  # type: ignore[union-attr]
                    totals[action] += reach_N[number] * value_of(successor)
            return int(totals.argmax())

        @cache
        def value_of(number: int) -> float:
            position = self.positions[number]
            if isinstance(position, End):
                return position.utility if seat == 0 else -position.utility
            if isinstance(position, Chance):
                return sum(p * value_of(n) for p, n in zip(position.probabilities, position.successors, strict=True))
            if self.states[position.state].seat == seat:
                return value_of(position.successors[best_of(position.state)])
            played = policy[position.state]
            value = sum(float(p) * value_of(n) for p, n in zip(played, position.successors, strict=True))
            return value - max(0.0, 1.0 - float(played.sum())) * self.lowest_utility

        return [
            np.eye(len(about.actions))[best_of(state)] if about.seat == seat else np.zeros(len(about.actions))
            for state, about in enumerate(self.states)
        ]

    def average(self, policies: Sequence[Policy], weights: Sequence[float]) -> Policy:
        """Return the policy of a seat that draws one of `policies`, by weight, before a game and plays it throughout.

        In a decision state each one counts by its weight times the probability that its own actions lead there; a state
        that none of them reaches is uniform. Raises ConfigError if several histories share a position: then that
        probability is not one number. Source: Kuhn 1953, "Extensive games and the problem of information".
        """
        if self.shares_positions:
            raise ConfigError("the average of policies has no exact value in a game whose positions are boards")
        played_S, reached_S = [np.zeros(len(state.actions)) for state in self.states], np.zeros(len(self.states))
        for (policy, weight), seat in itertools.product(zip(policies, weights, strict=True), (0, 1)):
            # All histories of a state have the same own actions, so the probability of the others' actions cancels out.
            for reach, position in zip(self._reach(uniform(self), seat, policy), self.positions, strict=True):
                if isinstance(position, Decision) and self.states[position.state].seat == seat:
                    reached_S[position.state] += weight * reach
                    played_S[position.state] += weight * reach * policy[position.state]
        pairs = zip(played_S, reached_S, strict=True)
        return [played / reached if reached else np.full(len(played), 1 / len(played)) for played, reached in pairs]

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

    def _reach(self, policy: Policy, seat: int, own: Policy | None) -> list[Any]:
        """Return the probability that chance and both seats lead to each position.

        `own`: policy of `seat`; if None it plays every action with weight 1.
        """
        reach_N: list[Any] = [0.0] * len(self.positions)
        reach_N[-1] = 1.0
        for number in range(len(self.positions) - 1, -1, -1):
            position, reach = self.positions[number], reach_N[number]
            if isinstance(position, End) or (np.ndim(reach) == 0 and not reach):
                continue
            if isinstance(position, Chance):
                weights: Sequence[Any] = position.probabilities
            elif self.states[position.state].seat != seat:
                played = policy[position.state]
                weights = played.tolist() if played.ndim == 1 else list(played)
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


@cache
def flatten(env_id: str, is_forced: bool = False) -> GameTree:
    """Return the positions of a two-player zero-sum game. `is_forced`: whether to accept any size.

    Raises ConfigError for another kind of game, and for one that is too large, with its number of decision states.
    """
    if not is_openspiel(env_id):
        raise ConfigError(f"{env_id}: only games of OpenSpiel ({PREFIX}NAME) can be evaluated exactly")
    library, game = pyspiel(), load_game(env_id)
    kind = game.get_type()
    if game.num_players() != 2 or kind.utility.name != "ZERO_SUM":
        raise ConfigError(f"{env_id}: exact evaluation needs a zero-sum game of two players")
    if (reason := ENDLESS.get(kind.short_name)) is not None:
        raise ConfigError(f"{env_id}: it cannot be evaluated exactly: {reason}")
    if (fault := information_fault(env_id)) is not None:
        raise ConfigError(f"{env_id}: its exact value would be that of another game: {fault}")
    builder = _Builder(env_id, kind.short_name in BOARD_GAMES, is_forced)
    if kind.dynamics.name == "SIMULTANEOUS":
        game = library.convert_to_turn_based(game)
    try:
        builder.add(game.new_initial_state(), ((), ()))
    except RecursionError:
        raise ConfigError(f"{env_id}: its games are too long to be evaluated exactly") from None
    except (library.SpielError, ValueError) as error:
        raise ConfigError(f"{env_id}: OpenSpiel cannot play it: {last_line(str(error))}") from None
    builder.check_size()
    return GameTree(tuple(builder.positions), tuple(builder.states), float(game.min_utility()))


@cache
def solved_moves(env_id: str) -> dict[str, list[str]] | None:
    """Return the optimal actions by observation, as a player writes them; None for a game that is not solved so."""
    if not is_openspiel(env_id) or load_game(env_id).get_type().short_name not in BOARD_GAMES:
        return None
    try:
        found = flatten(env_id).optimal_actions()
    except ConfigError:  # too large
        return None
    return {observation: [f"[{action}]" for action in actions] for observation, actions in found.items()}


class _Builder:
    def __init__(self, env_id: str, is_board_game: bool, is_forced: bool) -> None:
        self.positions: list[End | Chance | Decision] = []
        self.states: list[DecisionState] = []
        self._env_id, self._is_board_game, self._is_forced = env_id, is_board_game, is_forced
        self._most_counted = 2 * MOST_STATES if is_board_game else MOST_COUNTED  # few positions of a board are ends
        self._boards: dict[tuple[str, int] | None, int] = {}
        """Numbers of positions by board and seat to move; empty for a game whose positions are histories."""
        self._numbers: dict[tuple[int, str], int] = {}
        """Numbers of decision states by seat and prompt."""
        self._moves: list[Moves] = []
        """Own earlier moves of the seat, by decision state."""

    def add(self, state: Any, moves: tuple[Moves, Moves]) -> int:
        """Add a position after all of its successors and return its number. `moves`: of each seat so far."""
        board = (str(state), int(state.current_player())) if self._is_board_game else None
        if board in self._boards:
            return self._boards[board]
        if len(self.positions) > self._most_counted:
            self.check_size()
        if state.is_terminal():
            position: End | Chance | Decision = End(float(state.returns()[0]))
        elif state.is_chance_node():
            outcomes = state.chance_outcomes()
            after = [self.add(state.child(action), moves) for action, _ in outcomes]
            position = Chance(tuple(chance for _, chance in outcomes), tuple(after))
        else:
            position = self._decision(state, int(state.current_player()), moves)
        self.positions.append(position)
        number = len(self.positions) - 1
        if board is not None:
            self._boards[board] = number
        return number

    def check_size(self) -> None:
        """Raise ConfigError for a game that is too large, unless it is forced."""
        if self._is_forced:
            return
        num_states, num_answers = len(self.states), sum(len(state.actions) for state in self.states)
        is_whole = len(self.positions) <= self._most_counted
        if not (is_whole and num_states <= MOST_STATES and num_answers <= MOST_ANSWERS):
            reached = "" if is_whole else f" in the first {self._most_counted:,} positions"
            raise ConfigError(
                f"{self._env_id}: it has {num_states:,} decision states with {num_answers:,} legal answers{reached}; "
                f"at most {MOST_STATES:,}, {MOST_ANSWERS:,} and {self._most_counted:,} positions are computed; "
                "choose smaller parameters, or --force"
            )

    def _decision(self, state: Any, seat: int, moves: tuple[Moves, Moves]) -> Decision:
        names, shown = action_names(state, seat), prompt(state, seat)
        number = self._numbers.setdefault((seat, shown), len(self.states))
        if number == len(self.states):
            self.states.append(DecisionState(seat, shown, tuple(names)))
            self._moves.append(moves[seat])
        if not self._is_board_game and self._moves[number] != moves[seat]:
            raise ConfigError(
                f"{self._env_id}: its prompt does not show a seat its own earlier moves, so its best response is "
                f"no choice by prompt (of games that show a board only {' and '.join(BOARD_GAMES)} can be evaluated)"
            )
        after = []
        for index, action in enumerate(names.values()):
            own = moves[seat] if self._is_board_game else (*moves[seat], (number, index))
            after.append(self.add(state.child(action), (own, moves[1]) if seat == 0 else (moves[0], own)))
        return Decision(number, tuple(after))
