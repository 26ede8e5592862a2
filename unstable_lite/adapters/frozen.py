"""Frozen players: the base, and adapters that do not change, by the names that configs and commands give them.

Owns the adapters that `adapter:DIRECTORY`, `run:DIRECTORY/ckpt-N` (or `newest`, `best`; with `/POLICY` one of several
policies) and `average:DIRECTORY` stand for, the facts that an adapter's files alone show, the copies in a run
directory, and the names, order and best of the adapters that a run saved. Loads no weights; the engines do.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from unstable_lite.adapters.peft_files import (
    CONFIG,
    WEIGHTS,
    adapter_digest,
    check_adapter,
    new_directory,
    read_content,
    read_json,
    sync,
    write_file,
)
from unstable_lite.config.games import EvalEnvSpec, is_policy, parse_player
from unstable_lite.config.reading import read_toml
from unstable_lite.errors import AdapterError, ConfigError
from unstable_lite.files import check_links, read_records
from unstable_lite.rng import derive_seed
from unstable_lite.types import policy_of

NEWEST, BEST = "newest", "best"
COPIES = "opponents"
"""Directory of the copies in a run directory."""
RECORD = "opponent.json"
"""File in a copy that says whose copy it is, and its digest."""
FIRST_FROZEN_VERSION = 1 << 29
"""First id of frozen adapters in a run. Updates count from 1, and adapters that return from 1 << 30."""
_AVERAGE = re.compile(r"(.+?)(/linear)?(?:/ckpt-(\d+(?:,\d+)*))?/*")
NAMED_BY = ("env_id", "num_players", "fixed_opponent", "temperature", "top_p")
"""Keys of an eval env that name its results; other keys may differ between versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenAdapter:
    """Facts about an adapter on disk."""

    path: Path
    """PEFT directory."""
    key: str
    """Digest of its weights and scale."""
    rank: int
    base: str
    """Base model that it names; "" if it names none."""
    sizes: dict[str, tuple[int, int]] = field(hash=False)
    """Inputs and outputs of each linear layer that it adapts, by the layer's name in the model."""


def members(name: str) -> dict[str, float]:
    """Return the weight of each player of an average, of which one is drawn for each game; any other name itself.

    Weights are equal, or with `/linear` the numbers of the updates. Raises ConfigError if there is no such run.
    """
    player = parse_player(name)
    if player.kind != "average":
        return {name: 1.0}
    match = _AVERAGE.fullmatch(player.rest)
    if match is None:
        raise ConfigError(f"{name!r} names no run: write average:RUN")
    run, linear, given = match.groups()
    try:
        updates = list(map(int, given.split(",")) if given else _saved(Path(run).expanduser()))
    except ConfigError as error:
        raise ConfigError(f"{name!r}: {error}") from error
    if len(set(updates)) < len(updates) or (linear and not any(updates)):
        raise ConfigError(f"{name!r}: name each checkpoint once, and for /linear one after update 0")
    return {f"run:{run}/ckpt-{update}": float(update) if linear else 1.0 for update in updates}


def with_members(name: str) -> str:
    """Return an average's name with the numbers of its checkpoints, so that it stays the same; others unchanged."""
    player = parse_player(name)
    if player.kind != "average" or ((match := _AVERAGE.fullmatch(player.rest)) and match[3]):
        return name
    return f"{name.rstrip('/')}/ckpt-{','.join(member.rpartition('-')[2] for member in members(name))}"


def drawn_member(weights: Sequence[float], seed: int, *names: str) -> int:
    """Return the number of the member that plays an average's game of this seed.

    names: key of this average's draws. They are apart from the game's own, which deals by its seed alone.
    """
    return random.Random(derive_seed(seed, *names)).choices(range(len(weights)), weights)[0]


def find_adapter(name: str, *copies: Path | None) -> FrozenAdapter:
    """Return the adapter that `name` stands for: its copy in the first of the directories `copies` that has one.

    Raises ConfigError if there is no such directory, run or checkpoint; AdapterError if its files are not an adapter,
    or if the copy is damaged.
    """
    for directory in copies:
        if directory is None or not (copy := directory / slug(name)).is_dir():
            continue
        found, written = read_facts(copy), read_json(copy / RECORD).get("digest")
        if (digest := adapter_digest(copy)) != written:
            raise AdapterError(
                f"{copy} is damaged: the digest of its adapter is {digest}, {written} was written. Restore the "
                "directory from a backup, or remove it to copy the opponent again from where its name points now"
            )
        return found
    player = parse_player(name)
    if player.kind == "run":
        try:
            return read_facts(find_saved(player.rest))
        except ConfigError as error:
            raise ConfigError(f"{name!r}: {error}") from error
    path = Path(player.rest).expanduser()
    if player.kind == "average":
        raise ConfigError(f"{name!r} draws a checkpoint for each game; name one of them here")
    if not path.is_dir():
        raise ConfigError(f"{name!r}: there is no directory {path}")
    return read_facts(path)


def read_facts(path: Path) -> FrozenAdapter:
    """Read an adapter. Raises AdapterError unless both files exist and are valid."""
    path = path.resolve()
    stored, header = check_adapter(path)
    try:
        with (path / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
    except OSError as error:
        raise AdapterError(f"{path} is not a readable adapter: {error}") from error
    halves = {name.removeprefix("base_model.model.").partition(".lora_")[::2]: e.shape for name, e in header.items()}
    layers = dict.fromkeys(layer for layer, _ in halves)
    return FrozenAdapter(
        path=path,
        # The same matrices with another scale are another model.
        key=f"{digest}-{stored.get('r')}-{stored.get('lora_alpha')}" + "-rslora" * bool(stored.get("use_rslora")),
        rank=stored["r"],
        base=str(stored.get("base_model_name_or_path") or ""),
        sizes={layer: (halves[layer, "A.weight"][1], halves[layer, "B.weight"][0]) for layer in layers},
    )


def keep_copy(name: str, copies: Path, others: Path | None = None) -> FrozenAdapter:
    """Return the copy of an adapter in the directory `copies`, made now unless there is one.

    others: directory of another run's copies, from which it is made if they include it.
    Raises ConfigError and AdapterError as `find_adapter` does, NoRoomError and AdapterError as `new_directory` does,
    and OSError if the directory `copies` cannot be made.
    """
    found = find_adapter(name, copies, others)
    copy = copies / slug(name)
    if found.path == copy.resolve():
        return found
    contents = {file: read_content(found.path / file) for file in (CONFIG, WEIGHTS)}
    copies.mkdir(parents=True, exist_ok=True)
    sync(copies.parent)
    with new_directory(copy, sum(map(len, contents.values()))) as unfinished:
        for file, content in contents.items():
            write_file(unfinished / file, content)
        record = {"name": name, "source": str(found.path), "digest": adapter_digest(unfinished)}
        write_file(unfinished / RECORD, json.dumps(record, indent=2).encode())
    return read_facts(copy)


def source_of(name: str, copies: Path) -> str:
    """Return the directory that an adapter was copied from. Raises AdapterError for a copy without a record."""
    return str(read_json(copies / slug(name) / RECORD).get("source"))


def copies_of(config: Path) -> Path | None:
    """Return the directory of the copies if `config` is the config.toml of a run that has them."""
    copies = config.parent / COPIES
    return copies if config.name == "config.toml" and copies.is_dir() else None


def slug(name: str) -> str:
    """Return the directory name of a copy: readable, and different for different names."""
    readable = re.sub(r"[^\w.-]+", "-", name)[-60:].strip("-.")
    return f"{readable}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def update_of(path: Path) -> int | None:
    """Return the number in `ckpt-<number>`; None for any other name."""
    match = re.fullmatch(r"ckpt-(\d+)", path.name)
    return int(match[1]) if match else None


def by_update(directory: Path) -> dict[int, Path]:
    """Return the checkpoints or adapters in a directory by update, oldest first."""
    found = [(update, path) for path in directory.glob("ckpt-*") if (update := update_of(path)) is not None]
    return dict(sorted(found))


def find_saved(word: str) -> Path:
    """Return the adapter that `DIRECTORY/ckpt-N`, `DIRECTORY/newest` or `DIRECTORY/best` names.

    If the run has several policies it is that of `main`, else of the first one, or of the one named after another `/`.
    Kept adapters count like checkpoints, if the run has one policy. Raises ConfigError if there is no such run, policy
    or adapter.
    """
    match = re.fullmatch(r"(.+)/(ckpt-\d+|newest|best)(?:/(\w+))?/*", word)
    if match is None:
        raise ConfigError("write run:DIRECTORY/ckpt-N, run:DIRECTORY/newest or run:DIRECTORY/best")
    run, which, policy = Path(match[1]).expanduser(), match[2], match[3]
    if which == BEST:
        return find_best(run, policy)[0]
    saved = _saved(run, policy)
    update = max(saved) if which == NEWEST else int(which.removeprefix("ckpt-"))
    if update not in saved:
        there = ", ".join(f"ckpt-{number}" for number in sorted(saved)[-10:])
        raise ConfigError(f"{run} has no {which}; its newest are {there}")
    return saved[update]


def find_best(run: Path, policy: str | None = None) -> tuple[Path, str]:
    """Return the saved adapter with the best mean points over all of the run's eval envs, and a text about it.

    Only evaluations with a quota count, and none against a policy that learns if there are others; a single-player env
    counts with its mean reward; of equal means the newest is taken. policy: as `find_saved` takes it. Raises
    ConfigError as `find_saved`, and if no saved adapter was evaluated on all eval envs.
    """
    policy = policies_of(run)[0] if policy is None else policy
    saved = _saved(run, policy)
    results: dict[int, dict[tuple[str, str], float]] = {}
    for line in read_records(run / "eval.jsonl"):
        # A policy counts its own updates, and a checkpoint of several policies those of the run.
        update = line["step"] if policy else update_of(Path(line["model"]))
        result = line["mean_reward"] if line["points"] is None else line["points"]
        is_own = policy_of(line["model"]) == policy and line["label"] != "concurrent"
        if is_own and update in saved and result is not None:
            results.setdefault(update, {})[line["env_id"], line["opponent"]] = result
    envs = _eval_envs(run)
    envs = {env for env in envs if not is_policy(env[1])} or envs
    means = {
        update: fmean(of_env[env] for env in envs) for update, of_env in results.items() if envs and envs <= {*of_env}
    }
    if not means:
        raise ConfigError(
            f"{run} has no saved checkpoint that was evaluated on all of its eval_envs (run.eval_games, "
            "run.eval_every), so none is the best: name one as run:DIRECTORY/ckpt-N, or use run:DIRECTORY/newest"
        )
    best, count = saved[max(means, key=lambda update: (means[update], update))], len(means)
    of = f"best of {count} evaluated checkpoint{'s' * (count > 1)}"
    return best, f"{name_of(best)}, {of}: {shlex.quote(f'run:{run}/{BEST}')}"


def name_of(adapter: Path) -> str:
    """Return the name of a saved adapter: `ckpt-40`, or `ckpt-40/main` of one of several policies."""
    return adapter.name if update_of(adapter.parent) is None else f"{adapter.parent.name}/{adapter.name}"


def policies_of(run: Path) -> list[str]:
    """Return the names of a run's policies, first the one that is meant if none is named; "" for the only one."""
    policies = read_toml(path).get("policies") if (path := run / "config.toml").is_file() else None
    names = filter(re.compile(r"\w+").fullmatch, policies if isinstance(policies, dict) else ())
    return sorted(names, key=lambda name: name != "main") or [""]


def _saved(run: Path, policy: str | None = None) -> dict[int, Path]:
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run} is not a run directory: it has no checkpoints/")
    check_links(run)
    saved, policies = by_update(run / "adapters") | by_update(run / "checkpoints"), policies_of(run)
    if not saved:
        raise ConfigError(f"{run} has no checkpoint yet")
    if (name := policies[0] if policy is None else policy) not in policies:
        raise ConfigError(f"{run} has no policy {name!r}; it has {', '.join(filter(None, policies)) or 'only one'}")
    return {update: path / name for update, path in saved.items()}


def _eval_envs(run: Path) -> set[tuple[str, str]]:
    """Return env and opponent of each eval env in a run's config."""
    path = run / "config.toml"
    try:
        envs: list[dict[str, Any]] = read_toml(path).get("eval_envs", [])
        specs = [EvalEnvSpec.model_validate({key: env[key] for key in NAMED_BY if key in env}) for env in envs]
        return {(spec.env_id, spec.opponent) for spec in specs}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not the config of a run: {type(error).__name__}: {error}") from error
