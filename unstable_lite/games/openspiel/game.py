"""One game of an OpenSpiel env, used like `games.environments.Environment`.

Chance is drawn by the number of the chance event and the game's seed alone, so that the same seed deals the same cards
to any players. Moves that are simultaneous are asked for seat by seat; no seat is shown another's choice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel.names import TEAM_GAMES, load_game
from unstable_lite.games.openspiel.prompts import action_names, prompt, read_action
from unstable_lite.rng import derive_seed
from unstable_lite.types import UTILITY


def default_scale(game: Any) -> float:
    """Return the `reward_scale` with which rewards are between -1 and 1. `game`: `pyspiel.Game`."""
    return 1 / (max(abs(game.min_utility()), abs(game.max_utility())) or 1.0)


class OpenSpielGame:
    """A game that an illegal answer ends, unless it may be repeated; see `close` for its cost."""

    def __init__(
        self,
        env_id: str,
        num_players: int,
        seed: int,
        reward_scale: float | None = None,
        error_allowance: int = 0,
    ) -> None:
        """Start the game. `reward_scale`: default: 1 / the largest size of a utility.

        error_allowance: number of illegal answers in a row that a player may repeat.

        Raises ConfigError for an unknown game, parameters that it does not have, or another number of players.
        """
        game = load_game(env_id)
        if game.num_players() != num_players:
            raise ConfigError(f"{env_id} is a game of {game.num_players()}, not of num_players = {num_players}")
        self.env_id = env_id
        self.num_players = num_players
        self.has_teams = game.get_type().short_name in TEAM_GAMES
        """Whether players win and lose together, in teams."""
        self.was_invalid = False
        """Whether the last action was illegal."""
        self._game = game
        self._seed = seed
        self._scale = default_scale(game) if reward_scale is None else reward_scale
        self._num_deals = 0
        self._error_allowance = error_allowance
        self._num_errors = 0
        """Number of illegal answers since the last legal one."""
        self._offence: tuple[int, str] | None = None
        """Seat that answered illegally, and its answer."""
        self._chosen: list[int] = []
        """Actions of the first seats at a node of simultaneous moves."""
        self._state = game.new_initial_state()
        self._continue()

    @property
    def position(self) -> tuple[Any, int]:
        """State (`pyspiel.State`) and the player who acts next."""
        return self._state, self._pid()

    def reseed(self, seed: int) -> None:
        """Draw the outcomes of chance from here on with another seed."""
        self._seed = seed

    def observe(self) -> tuple[int, str]:
        """Return the current player and its prompt."""
        pid = self._pid()
        remark = "\nYour last answer was not a legal action. Answer again." * bool(self._num_errors)
        return pid, prompt(self._state, pid) + remark

    def step(self, action: str) -> bool:
        """Play `action` for the current player; return whether the game is over."""
        pid = self._pid()
        names = action_names(self._state, pid)
        name = read_action(action, names)
        self.was_invalid = name is None
        if name is None and self._num_errors < self._error_allowance:
            self._num_errors += 1
            return False
        self._num_errors = 0
        if name is None:
            self._offence = (pid, action)
            return True
        if self._state.is_simultaneous_node():
            self._choose(names[name])
        else:
            self._state.apply_action(names[name])
        self._continue()
        return bool(self._state.is_terminal())

    def play(self, action: str) -> tuple[int, str] | None:
        """Call `step`, and `observe` unless the game is over."""
        return None if self.step(action) else self.observe()

    async def advance(self, action: str) -> tuple[int, str] | None:
        """Call `play`. It is async because an isolated env, used in the same way, waits for its process."""
        return self.play(action)

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        """Return every player's reward, which is its utility times the scale, and remarks that hold the utility.

        An illegal answer costs its seat the lowest utility of the game, so no called bet costs more; in a zero-sum game
        of two the other gets the negative of that, in other games the others get 0.
        """
        utilities = self._utilities()
        remarks: dict[int, dict[str, Any]] = {pid: {UTILITY: utility} for pid, utility in enumerate(utilities)}
        if self._offence is not None:
            pid, answer = self._offence
            remarks[pid] |= {"invalid_move": True, "reason": f"Player {pid} gave no legal action: {answer[:200]!r}"}
        return {pid: utility * self._scale for pid, utility in enumerate(utilities)}, remarks

    def rewards_so_far(self) -> dict[int, float]:
        """Return every player's reward if the game ends now: 0, or in a single-player game its returns so far."""
        if self.num_players > 1:
            return dict.fromkeys(range(self.num_players), 0.0)
        return {0: self._state.returns()[0] * self._scale}

    def drop(self) -> None:
        """Abandon the game, finished or not."""

    def _pid(self) -> int:
        return len(self._chosen) if self._state.is_simultaneous_node() else int(self._state.current_player())

    def _choose(self, action: int) -> None:
        """Keep a simultaneous action; apply all of them once every seat has chosen."""
        self._chosen.append(action)
        if len(self._chosen) == self.num_players:
            self._state.apply_actions(self._chosen)
            self._chosen = []

    def _continue(self) -> None:
        """Draw the chance outcomes up to the next decision."""
        while self._state.is_chance_node():
            outcomes: Sequence[tuple[int, float]] = self._state.chance_outcomes()
            rng = random.Random(derive_seed(self._seed, "deal", self._num_deals))
            (drawn,) = rng.choices([action for action, _ in outcomes], [chance for _, chance in outcomes])
            self._state.apply_action(drawn)
            self._num_deals += 1

    def _utilities(self) -> list[float]:
        if self._offence is None:
            return [float(utility) for utility in self._state.returns()]
        lowest = float(self._game.min_utility())
        is_zero_sum = self.num_players == 2 and self._game.get_type().utility.name == "ZERO_SUM"
        utilities = [-lowest if is_zero_sum else 0.0] * self.num_players
        utilities[self._offence[0]] = lowest
        return utilities
