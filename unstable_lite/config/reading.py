"""Read a config from TOML, with every mistake of form found before the run starts."""

from __future__ import annotations

import difflib
import itertools
import logging
import re
import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from unstable_lite.config import Config
from unstable_lite.config.section import Section
from unstable_lite.errors import ConfigError

log = logging.getLogger(__name__)

MAX_LEVELS = 16
"""Deepest nesting of tables and lists."""
REMOVED = {
    "run.mode": 'set run.schedule ("async" or "sync") and engine.when_shared ("split" or "sleep")',
    "run.loop_stall_s": "remove it; it is 30 s, or twice run.env_timeout_s if that is longer",
    "run.max_eval_games_per_ckpt": "set run.eval_share or run.num_eval_workers",
    "engine.adapter_receivers": "set engine.adapter_folder, a folder that this machine and every server see",
    "engine.enforce_eager": "set it in engine.options",
    "learner.gradient_checkpointing": "set learner.activation_checkpointing",
    "learner.use_trainer_cache": "remove it; it only cost memory",
    "learner.kl_stage": 'set learner.kl_reference = "stage:N"',
    "learner.start_timeout_s": "set engine.start_timeout_s, which is also the learner's",
    "learner.logits_chunk_tokens": "lower learner.max_tokens_per_micro_batch if memory is short",
    "learner.shard_base": "remove it; every rank holds the whole base, so take a smaller one or a larger GPU",
    "branching": "examples/branching.py is an env sampler that does the same (docs/branching.md)",
    "tracker.keep_train_data": "remove it; the files of train_data/ may be deleted when the run is over",
}
"""Former keys, with what to write instead."""
_CONSTANTS = """
    run.restart_backoff_s run.max_action_chars run.max_void_games engine.request_timeout_s engine.stall_timeout_s
    learner.update_timeout_s learner.adam_betas learner.infer_mini_batch_size sft.max_games tracker.transcript_every
    tracker.max_part_mb league.rotate_checkpoints_every league.trueskill_beta alarms.*.updates opponents.max_retries
    opponents.pause_s opponents.max_pause_s opponents.outage_s
"""
REMOVED |= dict.fromkeys(_CONSTANTS.split(), "remove it; it is a constant now")
_PRICES = "opponents.max_usd opponents.usd_per_million_prompt_tokens opponents.usd_per_million_completion_tokens"
REMOVED |= dict.fromkeys(_PRICES.split(), "set opponents.max_total_tokens or opponents.max_requests")


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError if it cannot be read, or is not TOML."""
    try:
        return parse_toml(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def read_config(path: Path, overrides: tuple[str, ...] = ()) -> tuple[Config | None, list[str]]:
    """Read a TOML file and apply `section.key=value` overrides; see `parse_config`.

    In the config that a run recorded, keys that no longer exist are ignored. Raises ConfigError if there is no TOML.
    """
    raw = read_toml(path)
    is_recorded = path.name == "config.toml" and path.with_name("versions.json").is_file()
    if is_recorded and (ignored := drop_removed(raw)):
        log.warning("%s: these keys no longer exist and are ignored: %s", path, ", ".join(ignored))
    for override in overrides:
        _apply_override(raw, override)
    try:
        config, problems = parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config, [f"{path}: {problem}" for problem in problems]


def drop_removed(raw: dict[str, Any]) -> list[str]:
    """Remove the keys that no longer exist from a recorded config, and return their names."""
    found: list[str] = []
    for name in REMOVED:
        *sections, key = name.split(".")
        tables = [raw]
        for section in sections:
            inner = [table.values() if section == "*" else [table.get(section)] for table in tables]
            tables = [table for table in itertools.chain(*inner) if isinstance(table, dict)]
        found += [name] * any([table.pop(key, found) is not found for table in tables])
    return found


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """Parse TOML. Raises ConfigError if `content` is not TOML."""
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deep") from error
    except ValueError as error:  # not TOML, not text, or a number of thousands of digits
        raise ConfigError(f"{where}: not TOML: {error}") from error


def parse_config(raw: dict[str, Any]) -> tuple[Config | None, list[str]]:
    """Return the config and its problems of form.

    If there are problems, the config lacks the offending keys (or is None), so that the caller can look for problems of
    meaning in the rest and report all of them together. Raises ConfigError if `raw` is nested too deep or has an
    integer over 64 bits.
    """
    _check_bounds(raw)
    problems: list[str] = []
    while True:
        try:
            return Config.model_validate(raw), problems
        except ValidationError as error:
            problems = problems or _problems(error)
            smaller = _without_offenders(raw, error)
            if smaller == raw:
                return None, problems
            raw = smaller


def _check_bounds(raw: dict[str, Any]) -> None:
    level: list[tuple[str, Any]] = list(raw.items())
    for _ in range(MAX_LEVELS):
        for key, value in level:
            if isinstance(value, int) and value.bit_length() > 63:
                raise ConfigError(f"{key} is an integer of {value.bit_length()} bits; at most 63 and a sign fit")
        tables = [value.items() for _, value in level if isinstance(value, dict)]
        lists = [((key, item) for item in value) for key, value in level if isinstance(value, list | tuple)]
        level = list(itertools.chain(*tables, *lists))
    if level:
        raise ConfigError(f"{level[0][0]} is nested in {MAX_LEVELS} tables or lists; no config key is")


def _without_offenders(raw: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """Return `raw` without the keys that `error` names; an env entry is removed as a whole."""
    locations = ([part for part in detail["loc"] if part != "[key]"] for detail in error.errors())
    offenders: set[tuple[Any, ...]] = {tuple(loc[: 3 if loc[:1] == ["policies"] else 2]) for loc in locations}

    def kept(value: Any, *path: Any) -> Any:
        if isinstance(value, dict):
            return {key: kept(inner, *path, key) for key, inner in value.items() if (*path, key) not in offenders}
        if isinstance(value, list | tuple):
            return [kept(inner, *path, index) for index, inner in enumerate(value) if (*path, index) not in offenders]
        return value

    smaller: dict[str, Any] = kept(raw)
    return smaller


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one key, as in `learner.batch_size=64`: a value that is not TOML is taken as a string."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    try:
        value = parse_toml(f"value = {text}".encode(errors="replace"), override)["value"]
    except ConfigError:
        value = text
    *sections, name = key.strip().split(".")
    table = raw
    for section in sections:
        table = table.setdefault(section, {})
        if isinstance(table, list):
            raise ConfigError(f"override {override!r}: {section} is a list; change it in the file")
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    table[name] = value


def _problems(error: ValidationError) -> list[str]:
    problems = []
    for detail in error.errors(include_url=False):
        if detail["loc"][-1] == "str" and isinstance(detail["input"], dict):
            continue  # a table that is refused as a table need not also be refused as a string
        location = [part for part in detail["loc"] if part != "Transformation" and "[" not in str(part)]
        key = ".".join(map(str, location))
        if (former := re.sub(r"^alarms\.\w+\.", "alarms.*.", key)) in REMOVED:
            problems.append(f"{key} = {detail['input']!r} is no longer a key: {REMOVED[former]}")
        elif detail["type"] == "extra_forbidden":
            problems.append(f"unknown key {key!r}; {_hint(str(location[-1]), _known_keys(location[:-1]))}")
        elif detail["type"] == "missing":
            problems.append(f"{key!r} is missing")
        elif detail["type"] == "too_short" and detail["loc"] == ("train_envs",) and detail["input"]:
            continue  # its entries exist and are refused for other reasons
        else:
            problems.append(f"{key} = {detail['input']!r}: {detail['msg'].removeprefix('Value error, ')}")
    return problems


def _hint(name: str, known: list[str]) -> str:
    """Return the key that an unknown name stands for: one of another section, a similar one, or one by its initials."""
    top = _known_keys([])
    everywhere = {f"{section}.{key}": key for section in top for key in _known_keys([section]) if key not in top}
    meant = [path for path, key in everywhere.items() if key == name]
    by_initials = {key: key for key in known} | everywhere
    meant += [path for path, key in by_initials.items() if "".join(word[:1] for word in key.split("_")) == name]
    meant += difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {meant[0]!r}?" if meant else f"known: {', '.join(known)}"


def _known_keys(location: list[Any]) -> list[str]:
    """Return the keys that exist at `location`, which may contain the index of an entry or the name of a template."""
    model: type[Section] = Config
    for part in location:
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                model = kind
    return [field.alias or name for name, field in model.model_fields.items()]
