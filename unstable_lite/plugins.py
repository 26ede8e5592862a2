"""Find the plugins that a config names: built-in ones by a short name, custom ones as `module:Class`.

Knows nothing of the plugins' purpose; every mistake is a ConfigError that says where the name is used.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from unstable_lite.errors import ConfigError, UnstableError, described

T = TypeVar("T")

_PLAIN_TYPES: dict[str, tuple[type, ...]] = {"float": (float, int), "int": (int,), "bool": (bool,), "str": (str,)}
_importing = threading.local()
"""Has `depth`, the number of modules that this thread is importing because a config names them."""


def environment_without_keys() -> dict[str, str]:
    """Return the environment of this process without API keys, which the code of plugins and models does not get."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint at the names that may replace an unknown one."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


def find(what: str, name: str, known: Mapping[str, T]) -> T:
    """Return `known[name]`, or the attribute that `module:attribute` names."""
    if name in known:
        return known[name]
    module_name, colon, attribute = name.partition(":")
    if not colon or name.startswith("."):
        raise ConfigError(f"unknown {what} {name!r}; {suggestion(name, known)}")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # plugin code may raise anything; report it
        reason = str(error) if isinstance(error, ImportError) else described(error)
        raise ConfigError(f"{what} {name!r}: cannot import {module_name!r}: {reason}") from error
    try:
        found: T = getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(f"{what} {name!r}: {module_name!r} has no {attribute!r}") from error
    return found


def import_module(name: str) -> ModuleType:
    """Import a module that a config names; `check_not_imported` refuses a start within it."""
    _importing.depth = getattr(_importing, "depth", 0) + 1
    try:
        return importlib.import_module(name)
    finally:
        _importing.depth -= 1


def check_not_imported() -> None:
    """Raise ConfigError if this thread is importing a module that a config names, here or in a worker."""
    if getattr(_importing, "depth", 0):
        raise ConfigError(
            "this file starts a run or an evaluation when it is imported for a class that a config names: put the "
            'start under `if __name__ == "__main__":`'
        )


def name_of(what: str, plugin: type) -> str:
    """Return the `module:Class` by which another process imports a class. Raises ConfigError if none can."""
    if getattr(sys.modules.get(plugin.__module__), plugin.__name__, None) is not plugin:
        raise ConfigError(
            f"{what}: workers import {plugin.__qualname__} by its name; define it under this name at the top level of "
            "a module"
        )
    if plugin.__module__ != "__main__":
        return f"{plugin.__module__}:{plugin.__name__}"
    main = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m
        return f"{main.__spec__.name}:{plugin.__name__}"
    file = Path(getattr(main, "__file__", None) or "no file")
    found = PathFinder.find_spec(file.stem)  # does not find modules that are loaded, such as an imported namesake
    if found is None or found.origin is None or Path(found.origin).resolve() != file.resolve():
        raise ConfigError(
            f"{what}: workers cannot import {plugin.__name__} from a notebook, a command line, or a script with the "
            "name of another module; move the class to a file of its own and import it"
        )
    return f"{file.stem}:{plugin.__name__}"


def interface_problems(what: str, part: object, names: Iterable[str]) -> list[str]:
    """Return the problem of a custom part that lacks names of its interface."""
    missing = [name for name in names if not hasattr(part, name)]
    described = f"the class {part.__name__}" if isinstance(part, type) else f"an object of type {type(part).__name__}"
    return [f"{what}: {described} has no {', '.join(missing)}"] if missing else []


def call(what: str, name: str, function: Callable[..., T], keywords: Mapping[str, Any]) -> T:
    """Return `function(**keywords)`. Raises ConfigError for keywords that it cannot take and for any error inside."""
    check_keywords(what, name, function, keywords)
    try:
        return function(**keywords)
    except UnstableError:
        raise
    except Exception as error:  # plugin code may raise anything; report it
        raise ConfigError(f"{what} {name!r}: {described(error)}") from error


def check_keywords(what: str, name: str, function: Callable[..., Any], keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError for every keyword that is unknown, missing or of a wrong plain type."""
    if problems := _keyword_problems(function, keywords):
        raise ConfigError(*(f"{what} {name!r}: {problem}" for problem in problems))


def lasting(owner: str, state: T) -> T:
    """Return `state`, which a checkpoint saves as JSON. Raises ConfigError if JSON would not restore it unchanged."""
    try:
        is_kept = json.loads(json.dumps(state)) == state
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{owner}: the return value of state_dict cannot be saved as JSON: {error}") from error
    if not is_kept:
        raise ConfigError(
            f"{owner}: JSON would change the return value of state_dict; use text for keys, lists for tuples, and no "
            f"NaN: {state!r:.300}"
        )
    return state


def _keyword_problems(function: Callable[..., Any], keywords: Mapping[str, Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # the cause has the reason if it is a functools.partial
        return [f"it cannot take the arguments that every plugin of its kind gets: {error.__cause__ or error}"]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    problems = []
    for key, value in keywords.items():
        if key not in named:
            if not takes_any:
                problems.append(f"unknown keyword {key!r}; {suggestion(key, named)}")
        elif problem := _type_problem(named[key].annotation, value):
            problems.append(f"{key} = {value!r}: {problem}")
    missing = [n for n, p in named.items() if p.default is p.empty and n not in keywords]
    return problems + [f"keyword {n!r} is missing" for n in missing]


def _type_problem(annotation: Any, value: Any) -> str | None:
    """Return the problem of a value of a plain type; the callee checks other types."""
    type_name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    allowed = _PLAIN_TYPES.get(type_name)
    if allowed is None:
        return None
    is_bool_for_number = isinstance(value, bool) and bool not in allowed
    if not isinstance(value, allowed) or is_bool_for_number:
        return f"must be of type {type_name}"
    return "must be finite" if isinstance(value, float) and not math.isfinite(value) else None
