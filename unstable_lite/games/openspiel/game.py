"""OpenSpiel's games by env id: one game, used like `games.environments.Environment`, a trial of one, and their list.

The only module that imports `pyspiel`, and only when a game is asked for: it is an optional dependency.

Chance is drawn by the number of the chance event and the game's seed alone, so that the same seed deals the same cards
to any players. Moves that are simultaneous are asked for seat by seat; no seat is shown another's choice.

The trial runs in a process of its own, because some parameters crash OpenSpiel, hang it, or make it print. The process
`python -m unstable_lite.games.openspiel.game ENV_ID NUM_PLAYERS` prints the reason why the game cannot be played, as
JSON, or null.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
from functools import cache
from typing import Any

from unstable_lite.config.env_ids import PREFIX, canonical_env_id
from unstable_lite.errors import ConfigError
from unstable_lite.games.local_game import LocalGame
from unstable_lite.games.openspiel.prompts import WORDINGS, action_names, prompt, read_action
from unstable_lite.plugins import suggestion
from unstable_lite.rng import derive_seed
from unstable_lite.types import UTILITY

INSTALL = "pip install 'unstable-lite[openspiel]'"
TEAM_GAMES = ("bridge", "euchre", "tiny_bridge_4p")
"""Playable games whose players win and lose in pairs."""
_BY_NAME = {
    "crossword": "its moves are structures, and it does not list the legal ones",
    "quoridor": "OpenSpiel warns of known issues in it",
}
"""Games that cannot be played although their properties say so, with the reason."""

FORGETS = "its prompt does not show a seat all of its own earlier moves"
INFORMATION_FAULTS = {
    "dark_hex": "its prompt has the number of all attempts, so it shows the other player's failed attempts",
    **dict.fromkeys(("dark_hex_ir", "go_fish", "liars_dice_ir", "phantom_ttt_ir", "repeated_leduc_poker"), FORGETS),
}
"""Playable games whose information states differ from the knowledge of the seat, as a test over the catalogue finds."""
TRIAL_S = 20
"""Most CPU time of a trial, in seconds; it may wait ten times as long for a busy machine."""
TRIAL_MOVES = 60
"""Number of random moves that are tried."""
_INFORMATION = {
    "PERFECT_INFORMATION": "perfect information",
    "IMPERFECT_INFORMATION": "hidden information",
    "ONE_SHOT": "one move",
}


def pyspiel() -> Any:
    """Return the module. Raises ConfigError if the package is not installed."""
    try:
        import pyspiel as library
    except ImportError as error:
        raise ConfigError(f"OpenSpiel's games need the package open-spiel: {INSTALL} ({error})") from error
    return library


@cache
def load_game(env_id: str) -> Any:
    """Return the `pyspiel.Game` of an env id, for example `openspiel:liars_dice(dice_sides=3)`.

    Raises ConfigError with the last line of OpenSpiel's own error, which it also prints to standard error;
    `trial_problem` finds the same problems without printing. Some parameters of some games crash the process.
    """
    try:
        text = canonical_env_id(env_id).removeprefix(PREFIX)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    library = pyspiel()
    if (name := text.partition("(")[0]) not in (known := library.registered_names()):
        longer = next((f"did you mean {other!r}?" for other in known if name in other), suggestion(name, known))
        listed = "`unstable-lite envs openspiel` lists those that can be played"
        hint = longer if longer.startswith("did you mean") else listed
        raise ConfigError(f"OpenSpiel has no game {name!r}; {hint}")
    try:
        return library.load_game(text)
    except (library.SpielError, ValueError, MemoryError) as error:
        raise ConfigError(f"OpenSpiel refuses {text}: {last_line(str(error))}") from None


def information_fault(env_id: str) -> str | None:
    """Return the fault of the prompts of a game, or None. Raises ConfigError like `load_game`."""
    game = load_game(env_id)
    name, parameters = game.get_type().short_name, game.get_parameters()
    if name == "dark_hex" and (parameters["gameversion"] != "cdh" or parameters["obstype"] != "reveal-nothing"):
        return None  # the number is that of the turns, which both players know
    return INFORMATION_FAULTS.get(name)


def last_line(text: str) -> str:
    """Return the last line of an error message that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")


def why_unplayable(game_type: Any) -> str | None:
    """Return the reason why no game of this type can be played by text, or None. `game_type`: `pyspiel.GameType`."""
    if game_type.short_name in _BY_NAME:
        return _BY_NAME[game_type.short_name]
    if not game_type.default_loadable:
        return "it is made from another game or from a file, and an env id names one game"
    if game_type.dynamics.name == "MEAN_FIELD":
        return "it is a mean-field game, which has no players at seats"
    if game_type.chance_mode.name == "SAMPLED_STOCHASTIC":
        return "it draws its chance outcomes itself, so a game would not follow from its seed"
    if game_type.information.name != "PERFECT_INFORMATION" and not game_type.provides_information_state_string:
        return "it hides information and has no information state string, so a prompt could not hold all a seat knows"
    return None


class OpenSpielGame(LocalGame):
    """A game that an illegal answer ends, unless it may be repeated; see `close` for its cost."""

    def __init__(
        self, env_id: str, num_players: int, seed: int, reward_scale: float | None = None, error_allowance: int = 0
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
        kind, pids = game.get_type(), range(num_players)
        self.teams: dict[int, str] | None = None
        """Label of each player's team, if players win and lose together."""
        if kind.short_name in TEAM_GAMES:
            self.teams = {pid: str(pid % 2) for pid in pids}
        elif kind.utility.name == "IDENTICAL" and num_players > 1:
            self.teams = dict.fromkeys(pids, "all")
        self.eliminated: tuple[int, ...] = ()
        self.was_invalid = False
        """Whether the last action was illegal."""
        self._game = game
        self._seed = seed
        largest = max(abs(game.min_utility()), abs(game.max_utility())) or 1.0
        self._scale = 1 / largest if reward_scale is None else reward_scale
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
        if not self._state.is_simultaneous_node():
            self._state.apply_action(names[name])
        else:
            self._chosen.append(names[name])
            if len(self._chosen) == self.num_players:
                self._state.apply_actions(self._chosen)
                self._chosen = []
        self._continue()
        return bool(self._state.is_terminal())

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        """Return every player's reward, which is its utility times the scale, and remarks that hold the utility.

        An illegal answer costs its seat the lowest utility of the game, so no called bet costs more; in a zero-sum game
        of two the other gets the negative of that, in other games the others get 0.
        """
        about: dict[int, dict[str, Any]] = {}
        if self._offence is None:
            utilities = [float(utility) for utility in self._state.returns()]
        else:
            pid, answer = self._offence
            lowest = float(self._game.min_utility())
            is_zero_sum = self.num_players == 2 and self._game.get_type().utility.name == "ZERO_SUM"
            utilities = [-lowest if is_zero_sum else 0.0] * self.num_players
            utilities[pid] = lowest
            about[pid] = {"invalid_move": True, "reason": f"Player {pid} gave no legal action: {answer[:200]!r}"}
        remarks = {pid: {UTILITY: utility} | about.get(pid, {}) for pid, utility in enumerate(utilities)}
        return {pid: utility * self._scale for pid, utility in enumerate(utilities)}, remarks

    def rewards_so_far(self) -> dict[int, float]:
        """Return every player's reward if the game ends now: 0, or in a single-player game its returns so far."""
        if self.num_players > 1:
            return dict.fromkeys(range(self.num_players), 0.0)
        return {0: self._state.returns()[0] * self._scale}

    def _pid(self) -> int:
        return len(self._chosen) if self._state.is_simultaneous_node() else int(self._state.current_player())

    def _continue(self) -> None:
        """Draw the chance outcomes up to the next decision."""
        while self._state.is_chance_node():
            actions, chances = zip(*self._state.chance_outcomes(), strict=True)
            rng = random.Random(derive_seed(self._seed, "deal", self._num_deals))
            (drawn,) = rng.choices(actions, chances)
            self._state.apply_action(drawn)
            self._num_deals += 1


@cache
def trial_problem(env_id: str, num_players: int) -> str | None:
    """Return the reason why the game cannot be played by this number of players, or None. Takes 0.2 s."""
    try:
        pyspiel()
        canonical_env_id(env_id)
    except (ConfigError, ValueError) as error:
        return str(error)
    command = [sys.executable, "-m", __name__, env_id, str(num_players), str(TRIAL_S)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * TRIAL_S, env=os.environ | paths)
    except subprocess.TimeoutExpired:
        return f"OpenSpiel did not play {TRIAL_MOVES} moves of it within {10 * TRIAL_S} s; use other parameters"
    if done.returncode == 0:
        found: str | None = json.loads(done.stdout)
        return found
    if done.returncode == -signal.SIGXCPU:
        return f"OpenSpiel did not play {TRIAL_MOVES} moves of it in {TRIAL_S} s of CPU time; use other parameters"
    if done.returncode < 0:
        return f"OpenSpiel crashes with these parameters (signal {-done.returncode}); use others"
    return f"OpenSpiel cannot play it: {last_line(done.stderr)}"


def _try(env_id: str, num_players: int) -> str | None:
    try:
        game = load_game(env_id)
    except ConfigError as error:
        return str(error)
    if (reason := why_unplayable(game.get_type())) is not None:
        return f"cannot be played by text: {reason}"
    if game.num_players() != num_players:
        name = env_id.removeprefix(PREFIX).partition("(")[0]
        more = f", or the game's own parameter: {PREFIX}{name}(players=…)" if "players" in game.get_parameters() else ""
        return f"is a game of {game.num_players()}: set num_players = {game.num_players()}{more}"
    rng, played = random.Random(0), OpenSpielGame(env_id, num_players, seed=0)
    for _ in range(TRIAL_MOVES):
        state, pid = played.position
        names = list(action_names(state, pid))
        if not names:
            return "with these parameters a player has no move"
        if "\x1b" in prompt(state, pid):
            return "its text has escape codes for colours; set ansi_color_output=False"
        if played.step(f"[{rng.choice(names)}]"):
            break
    return None


def describe_games() -> list[tuple[str, str, str]]:
    """Return (env id, players, remark) of every game that can be played by text; one row if the package is missing."""
    try:
        library = pyspiel()
    except ConfigError:
        return [(f"{PREFIX}…", "?", f"91 games of OpenSpiel: {INSTALL}")]
    rows = []
    for kind in library.registered_games():
        if why_unplayable(kind) is None:
            fewest, most = kind.min_num_players, kind.max_num_players
            players = str(fewest) if fewest == most else f"{fewest}-{most}, by its parameter"
            remarks = (
                _INFORMATION[kind.information.name],
                "simultaneous moves" * (kind.dynamics.name == "SIMULTANEOUS"),
                "chance" * (kind.chance_mode.name != "DETERMINISTIC"),
                "with rules text" * (kind.short_name in WORDINGS),
                INFORMATION_FAULTS.get(kind.short_name, ""),
            )
            rows.append((PREFIX + kind.short_name, players, ", ".join(filter(None, remarks))))
    return rows


if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_CPU, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    print(json.dumps(_try(sys.argv[1], int(sys.argv[2]))))  # noqa: T201
