"""Spelling of the env ids of OpenSpiel's games: `openspiel:NAME` or `openspiel:NAME(parameter=value,...)`.

Knows only the text; whether a game and its parameters exist is OpenSpiel's business (`games.openspiel.names`).
"""

from __future__ import annotations

import re

PREFIX = "openspiel:"
"""Reserved prefix: no module of this name can register TextArena envs."""
_GAME = re.compile(r"([a-z0-9_]+)(?:\((.*)\))?", re.ASCII)
_PARAMETER = re.compile(r"(\w+)=([\w.;+\-\[\]]*)", re.ASCII)
_MENTIONED = re.compile(r"openspiel:[a-z0-9_]+(?:\([^()\s]*\))?", re.ASCII)
_IN_SLUG = str.maketrans(
    {":": "-", "(": "-", ",": "-", "=": "-", ";": "-", "-": "minus", "+": "plus"} | dict.fromkeys(")[]")
)


def is_openspiel(env_id: str) -> bool:
    return env_id.startswith(PREFIX)


def canonical_env_id(env_id: str) -> str:
    """Return the one spelling of an env id: parameters sorted by name, no spaces, `True` and `False` capitalised.

    Ids of TextArena's envs are returned unchanged. Raises ValueError for an id that cannot be parsed.
    """
    if not is_openspiel(env_id):
        return env_id
    text = env_id.removeprefix(PREFIX).replace(" ", "")
    game = _GAME.fullmatch(text)
    if game is None:
        raise ValueError(
            f"{env_id!r} is not an OpenSpiel game: write openspiel:NAME or openspiel:NAME(parameter=value)"
        )
    parameters: dict[str, str] = {}
    for part in (game[2] or "").split(",") if game[2] else ():
        parameter = _PARAMETER.fullmatch(part)
        if parameter is None:
            raise ValueError(
                f"{env_id!r}: {part!r} is not a parameter: write name=value, where the value has letters, digits and "
                "any of _ . ; + - [ ]"
            )
        name, value = parameter.groups()
        if name in parameters:
            raise ValueError(f"{env_id!r} has the parameter {name!r} twice")
        parameters[name] = value.capitalize() if value.lower() in ("true", "false") else value
    inside = ",".join(f"{name}={parameters[name]}" for name in sorted(parameters))
    return f"{PREFIX}{game[1]}({inside})" if inside else f"{PREFIX}{game[1]}"


def slug(env_id: str) -> str:
    """Return the env id for names of files and tags: `openspiel-kuhn_poker-players-3`; TextArena's ids unchanged."""
    return env_id.translate(_IN_SLUG) if is_openspiel(env_id) else env_id


def with_slugs(text: str) -> str:
    """Return `text`, such as the name of a metric, with a slug in place of each env id of OpenSpiel."""
    return _MENTIONED.sub(lambda mentioned: slug(mentioned[0]), text)
