"""List of OpenSpiel's games for `unstable-lite envs`."""

from __future__ import annotations

from typing import Any

from unstable_lite.config.env_ids import PREFIX
from unstable_lite.errors import ConfigError
from unstable_lite.games.openspiel.names import INSTALL, pyspiel, why_unplayable
from unstable_lite.games.openspiel.prompts import has_rules


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
            rows.append((PREFIX + kind.short_name, players, _remark(kind)))
    return rows


def _remark(kind: Any) -> str:
    information = {
        "PERFECT_INFORMATION": "perfect information",
        "IMPERFECT_INFORMATION": "hidden information",
        "ONE_SHOT": "one move",
    }[kind.information.name]
    properties = [
        information,
        *(["simultaneous moves"] if kind.dynamics.name == "SIMULTANEOUS" else []),
        *(["chance"] if kind.chance_mode.name != "DETERMINISTIC" else []),
        *(["with rules text"] if has_rules(kind) else []),
    ]
    return ", ".join(properties)
