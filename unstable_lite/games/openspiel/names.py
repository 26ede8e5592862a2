"""Load OpenSpiel's games by env id, and say which of them can be played by text.

The only module that imports `pyspiel`, and only when a game is asked for: it is an optional dependency.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from unstable_lite.config.env_ids import PREFIX, canonical_env_id
from unstable_lite.errors import ConfigError
from unstable_lite.plugins import suggestion

INSTALL = "pip install 'unstable-lite[openspiel]'"
TURN_BASED = "turn_based_simultaneous_game"
"""OpenSpiel's name of a game that `convert_to_turn_based` made."""
TEAM_GAMES = ("bridge", "euchre", "tiny_bridge_4p")
"""Playable games whose players win and lose in pairs."""
_BY_NAME = {
    "crossword": "its moves are structures, and it does not list the legal ones",
    "quoridor": "OpenSpiel warns of known issues in it",
}
"""Games that cannot be played although their properties say so, with the reason."""


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
    `trial.problem` finds the same problems without printing. Some parameters of some games crash the process.
    """
    try:
        text = canonical_env_id(env_id).removeprefix(PREFIX)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    library = pyspiel()
    if (name := text.partition("(")[0]) not in (known := library.registered_names()):
        raise ConfigError(f"OpenSpiel has no game {name!r}; {_hint(name, known)}")
    try:
        return library.load_game(text)
    except (library.SpielError, ValueError, MemoryError) as error:
        raise ConfigError(f"OpenSpiel refuses {text}: {last_line(str(error))}") from None


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


def _hint(name: str, known: list[str]) -> str:
    longer = [other for other in known if name in other]
    hint = f"did you mean {longer[0]!r}?" if longer else suggestion(name, known)
    return hint if hint.startswith("did you mean") else "`unstable-lite envs openspiel` lists those that can be played"
