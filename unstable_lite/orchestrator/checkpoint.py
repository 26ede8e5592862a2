"""Checkpoints of a run: each is either intact or absent.

A checkpoint is written to a temporary directory, synced and renamed; only then does `latest` point to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import struct
import tomllib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstable_lite.adapters.peft_files import sync
from unstable_lite.adapters.run_adapters import by_update
from unstable_lite.config import Config
from unstable_lite.config.reading import parse_config
from unstable_lite.errors import ProtocolError, UnstableError
from unstable_lite.planning.algorithm_defaults import resolve_defaults
from unstable_lite.planning.questions import changed_questions
from unstable_lite.planning.trust import CONFIG
from unstable_lite.tracking.run_directory import (
    LEAGUE,
    MANIFEST,
    WAITING,
    find_damage,
    recorded_questions,
    sha256,
    size,
)
from unstable_lite.transport.codec import pack_all, unpack_all
from unstable_lite.transport.messages import check_lengths, check_plain
from unstable_lite.types import Step

STEPS_IN_FRAME = 1000
"""Number of waiting steps in a frame. At a few hundred kB a step that is far below the limit of a frame."""
LENGTH_BYTES = 4
"""Size of the length before each frame, little-endian."""
LASTING = (
    "algorithm",
    "learner.optimizer",
    "lora.lora_rank",
    "lora.lora_alpha",
    "lora.target_modules",
    "buffer.kind",
    "rewards.group_baseline",
)
"""Config keys that determine the contents of a checkpoint."""


def lasting_changes(directory: Path, config: Config) -> Iterator[str]:
    """Yield a message for each key in which `config` differs from the run's own and no longer fits its checkpoints.

    Also yield one for each file of questions that changed.
    """
    yield from changed_questions(config, recorded_questions(directory))
    own, _ = parse_config(tomllib.loads((directory / CONFIG).read_text(encoding="utf-8")))
    if own is None:
        return
    tables = [resolve_defaults(each).model_dump(mode="json") for each in (own, config)]
    for name in LASTING:
        section, _, key = name.rpartition(".")
        before, now = ((table[section] if section else table)[key] for table in tables)
        if before != now:
            yield (
                f"{name} = {json.dumps(now)}: the run's checkpoints were made with {json.dumps(before)}. "
                "Leave it as it is, or start a new run from the adapter: lora.initial_lora_path"
            )


def save_checkpoint(
    checkpoints: Path,
    update: int,
    state: dict[str, Any],
    waiting: Sequence[list[Step]],
    save_learner: Callable[[Path], Awaitable[None]],
) -> Coroutine[Any, Any, Path]:
    """Return a coroutine that writes `ckpt-<update>/` and returns its path.

    The directory holds the learner's files, `league.json` and the buffer's steps. `state` and `waiting` are copied now,
    so they may change before the coroutine is awaited. Awaiting it raises UnstableError if the checkpoint cannot be
    written; then nothing of it is left.
    """
    final = checkpoints / f"ckpt-{update}"
    partial = checkpoints / f".ckpt-{update}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    contents = {LEAGUE: json.dumps(state, separators=(",", ":")).encode(), WAITING: _pack(waiting)}

    async def write() -> Path:
        try:
            partial.mkdir(parents=True)
            await save_learner(partial)
            await asyncio.to_thread(_finish, partial, final, contents)
        except (OSError, UnstableError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise UnstableError(f"cannot write {final}: {error.strerror}") from error
            raise
        return final

    return write()


def _finish(partial: Path, final: Path, contents: Mapping[str, bytes]) -> None:
    """Add `contents` and the manifest to a directory, and give it its final name once everything is on disk."""
    for name, content in contents.items():
        (partial / name).write_bytes(content)
    names = sorted(str(file.relative_to(partial)) for file in partial.rglob("*") if file.is_file())
    manifest = {name: {"bytes": size(partial / name), "sha256": sha256(partial / name)} for name in names}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
    for file in [*partial.rglob("*"), partial]:
        sync(file)
    partial.rename(final)
    with contextlib.suppress(OSError):  # the checkpoint is intact, and `--resume` finds the newest itself
        link = final.with_name(".latest")
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.rename(final.with_name("latest"))
        sync(final.parent)


def newest_checkpoint(checkpoints: Path, say: Callable[[str], None]) -> Path:
    """Return the newest intact checkpoint; rename damaged newer ones, and report why with `say`.

    Raises UnstableError if there is none.
    """
    for directory in reversed(by_update(checkpoints).values()):
        if (damage := find_damage(directory)) is None:
            return directory
        aside = directory.with_name(f"damaged-{directory.name}")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        say(f"{directory.name} cannot be used ({damage}); it is now {aside.name}")
    raise UnstableError(f"{checkpoints}: there is no checkpoint to resume from")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The orchestrator's part of an intact checkpoint; the learner reads its own files."""

    directory: Path
    state: dict[str, Any]
    waiting: list[list[Step]]

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Raise UnstableError if code in the body finds a `state` that this version would not have written.

        An intact file may still have the wrong contents, because its writer also wrote its checksum.
        """
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, struct.error) as error:
            raise _not_understood(self.directory / LEAGUE, f"{type(error).__name__}: {error}") from error


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read an intact checkpoint. Raises UnstableError for contents that this version would not have written."""
    path = directory / WAITING
    try:
        waiting = _unpack(path.read_bytes())
        path = directory / LEAGUE
        state: dict[str, Any] = json.loads(path.read_bytes())
    except (ProtocolError, ValueError, RecursionError) as error:
        raise _not_understood(path, str(error)) from error
    return Checkpoint(directory=directory, state=state, waiting=waiting)


def _pack(waiting: Sequence[list[Step]]) -> bytes:
    """Return frames, each after its length. A frame has the chunks whose first steps are in the same thousand."""
    first_steps = itertools.accumulate(map(len, waiting), initial=0)
    by_frame = itertools.groupby(zip(first_steps, waiting, strict=False), lambda pair: pair[0] // STEPS_IN_FRAME)
    frames = [pack_all(chunk for _, chunk in chunks) for _, chunks in by_frame]
    return b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in frames)


def _unpack(content: bytes) -> list[list[Step]]:
    """Return the chunks that `_pack` packed. Raises ProtocolError or ValueError for other contents."""
    waiting: list[list[Step]] = []
    at = 0
    while at < len(content):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(content[at:start], "little")
        waiting += unpack_all(list[Step], content[start:at])
    for step in itertools.chain.from_iterable(waiting):
        check_lengths([step.generation])
        check_plain(step.step_info)
    return waiting


def _not_understood(path: Path, reason: str) -> UnstableError:
    return UnstableError(
        f"{path} is intact, but this version of unstable_lite would not have written it ({reason}). Resume with the "
        f"version that wrote it (its commit is in versions.json), or remove {path.parent} to resume from the "
        "checkpoint before it"
    )
