"""Parts of a run that a script may replace: their interfaces, and the checks of the replacements.

Scheduler, registry, buffer and terminal are objects. Tracker and collector need the run directory and the workers, so
they are classes or other callables; the run calls them with the keyword arguments of `Tracker` and `Collector`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from unstable_lite import plugins
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.rollout.collector import Collector
from unstable_lite.tracking.tracker import Tracker

T = TypeVar("T")

STATE = ("state_dict", "load_state_dict")
INTERFACES = {
    "scheduler": ("registry", "next_train_group", "next_eval_job", "update", *STATE),
    "scheduler.registry": (
        *("current", "get", "get_current_ckpt", "get_all_models", "checkpoints", "fixed", "others", "lag"),
        *("add_policy", "add_fixed", "eval_opponent", "frozen_adapters", "set_anchor", "set_active", "bring_back"),
        *("update_ratings", "match_quality", "match_counts", "match_results", "touched", "touched_pairs", *STATE),
    ),
    "buffer": (
        *("batches", "begin_game", "add_game", "get_batch", "has_batch", "has_steps_for", "is_full", "wait_for_room"),
        *("wake", "size", "contents", "refill", "counts", "added", "filtered", "dropped_stale", "dropped_lately"),
        *("left_lately", *STATE),
    ),
    "terminal": ("start", "stop", "stop_counting", "say", "doing", "show_update"),
    "tracker": (
        *("begin_game", "add_record", "add_evaluation", "end_evaluations", "evaluations", "add_train_data", "alarm"),
        *("alarms", "log", "log_update", "latest", "games_finished", "void_games", "state_dict", "resume", "close"),
    ),
    "collector": (
        *("run", "play_round", "evaluate", "evaluating", "tell_new_checkpoint", "games_in_flight", "seats", "runner"),
        *STATE,
    ),
}
"""Names that a run uses of each part. It also sets `buffer.in_flight` and `tracker.registry`."""
_CLASSES: dict[str, type] = {"tracker": Tracker, "collector": Collector}


def check_parts(config: Config, factories: dict[str, Callable[..., Any]], parts: dict[str, Any]) -> None:
    """Raise ConfigError with every reason why a run cannot use these parts; parts that are None are not given.

    factories: `tracker` and `collector`.
    """
    problems = [problem for name, made in factories.items() for problem in _factory_problems(name, made)]
    given = {name: part for name, part in parts.items() if part is not None}
    if hasattr(parts["scheduler"], "registry"):
        given["scheduler.registry"] = parts["scheduler"].registry
    for name, part in given.items():
        if isinstance(part, type):
            problems.append(f"{name}: {part.__name__} is a class; give an object of it")
        else:
            problems += plugins.interface_problems(name, part, INTERFACES[name])
    batches = getattr(parts["buffer"], "batches", config.buffer.kind)
    if batches != config.buffer.kind:
        name = type(parts["buffer"]).__name__
        problems.append(f"buffer: {config.algorithm} learns from {config.buffer.kind}, not from a {name} of {batches}")
    if problems:
        raise ConfigError(*problems)


def made_part(name: str, factory: Callable[..., T], **arguments: Any) -> T:
    """Return the tracker or collector. Raises ConfigError if it lacks a part of the interface."""
    part = plugins.call(name, _name(factory), factory, arguments)
    if problems := plugins.interface_problems(name, part, INTERFACES[name]):
        raise ConfigError(*problems)
    return part


def lasting_state(name: str, part: Any) -> dict[str, Any]:
    """Return a part's state. Raises ConfigError if a checkpoint, which is JSON, would not restore it unchanged."""
    state: dict[str, Any] = part.state_dict()
    is_ours = type(part).__module__.startswith("unstable_lite.")
    return state if is_ours else plugins.lasting(f"{name} {type(part).__name__}", state)


def _factory_problems(name: str, factory: Any) -> Iterator[str]:
    standard = _CLASSES[name]
    if not callable(factory):
        yield (
            f"{name}: an object of type {type(factory).__name__} cannot be called; give a class or a function, because "
            f"the run makes the {name} itself, once it has the arguments"
        )
        return
    arguments = list(inspect.signature(standard).parameters)
    try:
        plugins.check_keywords(name, _name(factory), factory, dict.fromkeys(arguments, _Anything()))
    except ConfigError as error:
        yield from error.problems
    if isinstance(factory, type):
        methods = [method for method in INTERFACES[name] if hasattr(standard, method)]
        yield from plugins.interface_problems(name, factory, methods)


class _Anything:
    """Value of an argument that is not known yet."""


def _name(factory: Any) -> str:
    return getattr(factory, "__name__", None) or type(factory).__name__
