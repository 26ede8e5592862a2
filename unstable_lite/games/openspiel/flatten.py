"""Make the flat list of positions of an OpenSpiel game, in which policies can be evaluated exactly."""

from __future__ import annotations

from functools import cache
from typing import Any

from unstable_lite.config.env_ids import PREFIX, is_openspiel
from unstable_lite.errors import ConfigError
from unstable_lite.games.game_tree import Chance, Decision, DecisionState, End, GameTree
from unstable_lite.games.openspiel.names import last_line, load_game, pyspiel
from unstable_lite.games.openspiel.prompts import action_names, prompt

MOST_STATES, MOST_ANSWERS = 5_000, 50_000
"""Most decision states, and most legal answers in all of them, of a game that is evaluated without being forced to."""
MOST_COUNTED = 20 * MOST_STATES
"""Number of positions at which counting ends, to say how large a game is."""
BOARD_GAMES = ("nim", "tic_tac_toe")
"""Games whose position is the board and the seat to move, whichever moves led there."""
ENDLESS = {
    "connect_four": "it has about 4.5 × 10^12 positions",
    "pig": "a turn may end in the position in which it began, so that positions repeat without end",
}

Moves = tuple[tuple[int, int], ...]
"""Decision states and actions of one seat, in their order."""


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
        self._env_id = env_id
        self._is_board_game = is_board_game
        self._is_forced = is_forced
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
        if len(self.positions) > MOST_COUNTED:
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
        is_whole = len(self.positions) <= MOST_COUNTED
        if not (is_whole and num_states <= MOST_STATES and num_answers <= MOST_ANSWERS):
            reached = "" if is_whole else f" in the first {MOST_COUNTED:,} positions"
            raise ConfigError(
                f"{self._env_id}: it has {num_states:,} decision states with {num_answers:,} legal answers{reached}; "
                f"at most {MOST_STATES:,}, {MOST_ANSWERS:,} and {MOST_COUNTED:,} positions are computed; choose "
                "smaller parameters, or --force"
            )

    def _decision(self, state: Any, seat: int, moves: tuple[Moves, Moves]) -> Decision:
        names, shown = action_names(state, seat), prompt(state, seat)
        if (seat, shown) not in self._numbers:
            self._numbers[seat, shown] = len(self.states)
            self.states.append(DecisionState(seat, shown, tuple(names)))
            self._moves.append(moves[seat])
        number = self._numbers[seat, shown]
        if not self._is_board_game and self._moves[number] != moves[seat]:
            raise ConfigError(
                f"{self._env_id}: its prompt does not show a seat its own earlier moves, so its best response is "
                f"no choice by prompt (of games that show a board only {' and '.join(BOARD_GAMES)} can be evaluated)"
            )
        after = []
        for index, action in enumerate(names.values()):
            extended = list(moves)
            if not self._is_board_game:
                extended[seat] = (*moves[seat], (number, index))
            after.append(self.add(state.child(action), (extended[0], extended[1])))
        return Decision(number, tuple(after))
