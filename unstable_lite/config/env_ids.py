"""Spelling of the env ids that name no class of TextArena.

They are OpenSpiel's games, `openspiel:NAME` or `openspiel:NAME(parameter=value,...)`, and files of questions,
`questions:PATH.jsonl`. Knows only the text. `games.openspiel.game` knows whether a game and its parameters exist;
`games.questions` reads a file.
"""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "openspiel:"
"""Reserved prefix: no module of this name can register TextArena envs."""
QUESTIONS, SUFFIX = "questions:", ".jsonl"
"""Reserved prefix, and the end of every path after it."""
_GAME = re.compile(r"([a-z0-9_]+)(?:\((.*)\))?", re.ASCII)
_PARAMETER = re.compile(r"(\w+)=([\w.;+\-\[\]]*)", re.ASCII)
_MENTIONED = re.compile(r"openspiel:[a-z0-9_]+(?:\([^()\s]*\))?|questions:.+?\.jsonl(?=[ /]|$)", re.ASCII)
_IN_SLUG = str.maketrans(
    {":": "-", "(": "-", ",": "-", "=": "-", ";": "-", "-": "minus", "+": "plus"} | dict.fromkeys(")[]")
)


def is_openspiel(env_id: str) -> bool:
    return env_id.startswith(PREFIX)


def is_built_in(env_id: str) -> bool:
    """Return whether the env is a game of OpenSpiel or a file of questions, for which no class is imported."""
    return env_id.startswith((PREFIX, QUESTIONS))


def is_judged(env_id: str) -> bool:
    """Return whether a player's free answer is right or wrong there, instead of a move from a list of legal ones."""
    return env_id.startswith(QUESTIONS)


def content_file(env_id: str) -> Path | None:
    """Return the file from which an env plays, in its order, and that a resume must find unchanged; None if none."""
    return Path(env_id.removeprefix(QUESTIONS)) if env_id.startswith(QUESTIONS) else None


def canonical_env_id(env_id: str) -> str:
    """Return the one spelling of an env id: parameters sorted by name, no spaces, `True` and `False` capitalised.

    The path of a file of questions becomes absolute, so that a resumed run finds it from any working directory. Ids of
    TextArena's envs are returned unchanged. Raises ValueError for an id that cannot be parsed.
    """
    if (path := content_file(env_id)) is not None:
        if path.suffix != SUFFIX or not env_id.isprintable() or "|" in env_id:
            raise ValueError(f"{env_id!r} is not a file of questions: write {QUESTIONS}PATH{SUFFIX}, without |")
        try:
            return f"{QUESTIONS}{path.expanduser().absolute()}"
        except RuntimeError as error:
            raise ValueError(f"{env_id!r}: {error} Write the whole path") from None
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
    """Return the env id for names of files and tags: `openspiel-kuhn_poker-players-3`; TextArena's ids unchanged.

    A file of questions gives `questions-NAME` without its directory, so that runs on several machines have one tag.
    """
    if (path := content_file(env_id)) is not None:
        return "questions-" + re.sub(r"[^\w.-]+", "-", path.stem)
    return env_id.translate(_IN_SLUG) if is_openspiel(env_id) else env_id


def with_slugs(text: str) -> str:
    """Return `text`, such as the name of a metric, with a slug in place of each env id that has another."""
    return _MENTIONED.sub(lambda mentioned: slug(mentioned[0]), text)
