"""Checkpoints of a run: save its state, rewind a run directory to the newest intact checkpoint, and resume from it.

A checkpoint is either intact or absent: it is written to a temporary directory, synced and renamed; only then does
`latest` point to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
import shutil
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unstable_lite import plugins
from unstable_lite.adapters.frozen import by_update, update_of
from unstable_lite.adapters.peft_files import sync
from unstable_lite.adapters.table import number_of_policy
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError, ProtocolError, UnstableError
from unstable_lite.files import check_links, read_records
from unstable_lite.orchestrator.evaluations import Evaluations, evaluated_cell, evaluated_cells, is_evaluated
from unstable_lite.tracking.run_directory import (
    LEAGUE,
    MANIFEST,
    WAITING,
    find_damage,
    lasting_changes,
    replace_config,
    rewind,
    sha256,
)
from unstable_lite.transport.codec import decode_values, encode
from unstable_lite.transport.messages import check_lengths, check_plain
from unstable_lite.types import Step, uid_of

if TYPE_CHECKING:
    from unstable_lite.orchestrator.checkpoint_pool import TrainedPolicy
    from unstable_lite.orchestrator.progress import Progress
    from unstable_lite.orchestrator.wiring import RunParts

STEPS_IN_FRAME = 1000
"""Number of waiting steps in a frame. At a few hundred kB a step that is far below the limit of a frame."""
LENGTH_BYTES = 4
"""Size of the length before each frame, little-endian."""


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
    final, partial = checkpoints / f"ckpt-{update}", checkpoints / f".ckpt-{update}.partial"
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
    manifest = {name: {"bytes": (partial / name).stat().st_size, "sha256": sha256(partial / name)} for name in names}
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
    frames = [encode(chunk for _, chunk in chunks) for _, chunks in by_frame]
    return b"".join(len(frame).to_bytes(LENGTH_BYTES, "little") + frame for frame in frames)


def _unpack(content: bytes) -> list[list[Step]]:
    """Return the chunks that `_pack` packed. Raises ProtocolError or ValueError for other contents."""
    waiting, at = list[list[Step]](), 0
    while at < len(content):
        start = at + LENGTH_BYTES
        at = start + int.from_bytes(content[at:start], "little")
        waiting += decode_values(list[Step], content[start:at])
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


class CheckpointSaver:
    """Saves the state of every part of a run, and restores it."""

    def __init__(self, parts: RunParts, progress: Progress, evaluations: Evaluations) -> None:
        self.newest: Path | None = None
        """The newest checkpoint."""
        self.saved_update = 0
        """Update of the newest checkpoint."""
        self.in_background: asyncio.Task[None] | None = None
        """Writes a checkpoint beside the updates; the last of such tasks."""
        self._parts = parts
        self._progress = progress
        self._evaluations = evaluations
        self._is_due = False
        self._has_failed = False
        """Whether the last attempt to write a checkpoint failed."""

    def _stateful(self) -> dict[str, Any]:
        """Return the parts that have a state, by their keys in a checkpoint, in the order in which they load it."""
        names = ("registry", "scheduler", "adapter_sync", "collector", "health")
        stateful = {name: getattr(self._parts, name) for name in names} | {"seats": self._parts.collector.seats}
        for name, policy in self._parts.policies.items():
            stateful |= {uid_of(name, "buffer"): policy.buffer, uid_of(name, "pool"): policy.pool}
        return stateful

    async def resume(self, checkpoint: Checkpoint) -> dict[str, float]:
        """Restore the state of `checkpoint` in every process; return the canary's metrics."""
        parts, canary = self._parts, dict[str, float]()
        self._restore(checkpoint)
        for policy in parts.policies.values():
            await policy.learner.load(checkpoint.directory / policy.name)
            canary = await sync_unchanged(parts, policy, policy.version)
        for policy in parts.policies.values():
            await policy.pool.resume()
        replace_config(parts.directory, parts.plan.config, self._progress.updates)  # only now: all of the state fits
        return canary

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Load the orchestrator's state. Games that were in flight when it was saved are lost."""
        progress, state, policies = self._progress, checkpoint.state, self._parts.policies
        with checkpoint.understood():
            alone = {"updates": state["updates"], "skipped": state["skipped_updates"]}
            for name, saved in state.get("policies", {"": alone}).items():
                policies[name].restore(saved)
            left_out = {name: part.load_state_dict(state[name]) for name, part in self._stateful().items()}
        for text in left_out["scheduler"]:
            self._parts.terminal.say(text)
        self.newest, self.saved_update = checkpoint.directory, progress.updates
        for policy in policies.values():
            own = [c for c in checkpoint.waiting if number_of_policy(c[0].generation.adapter_version) == policy.number]
            policy.buffer.refill(own)

    def _decide(self) -> bool:
        """Return whether a checkpoint is due after an update; one that could not be written stays due."""
        run, updates = self._parts.plan.config.run, self._progress.updates
        self._is_due = (self._is_due or updates % run.checkpoint_every == 0) and updates < run.learning_steps
        return self._is_due

    async def save_if_due(self) -> None:
        """Write a checkpoint after an update if one is due, and wait for it."""
        if self._decide():
            await self._save()

    def begin_to_save_if_due(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to write a checkpoint in `tasks` after an update, if one is due and none is being written."""
        if self._decide() and (self.in_background is None or self.in_background.done()):
            self.in_background = tasks.create_task(self._write(self._progress.updates, self._checkpoint()))

    async def save_newest(self, is_last: bool = False) -> tuple[Path | None, int]:
        """Save the last update unless it is saved; return the newest checkpoint, if there is one, and its update."""
        if self.in_background is not None:
            await self.in_background
        if self._progress.updates != self.saved_update:
            await self._save(is_last)
        return self.newest, self.saved_update

    async def _save(self, is_last: bool = False) -> None:
        for policy in self._parts.policies.values():
            await policy.pool.settled()
        await self._write(self._progress.updates, self._checkpoint(), is_last)

    def _checkpoint(self) -> Coroutine[Any, Any, Path]:
        """Take everything that has to survive as it is at this moment; awaiting the result writes it."""
        parts, progress, policies = self._parts, self._progress, self._parts.policies
        stateful = self._stateful() | {"tracker": parts.tracker}
        state = {
            "updates": progress.updates,
            **({} if "" in policies else {"policies": {name: each.state() for name, each in policies.items()}}),
            "skipped_updates": progress.skipped,
            "evaluated": self._evaluations.done(),
            **{name: lasting_state(name, part) for name, part in stateful.items()},
        }
        self._is_due, waiting = False, list[list[Step]]()
        for policy in policies.values():
            policy.pool.tell_saving()
            waiting += policy.buffer.contents()

        async def save_learners(directory: Path) -> None:
            # All begin before the next update, which would replace their states.
            await asyncio.gather(*(policy.learner.save(directory / policy.name) for policy in policies.values()))

        return save_checkpoint(parts.directory / "checkpoints", progress.updates, state, waiting, save_learners)

    async def _write(self, update: int, checkpoint: Coroutine[Any, Any, Path], is_last: bool = False) -> None:
        """Write the checkpoint of `update`. If that fails, the previous one stays and the next update tries again.

        Raises UnstableError if there is no next update.
        """
        try:
            path = await checkpoint
        except UnstableError as error:
            newest = f"the newest is {self.newest.name}" if self.newest else "there is none yet"
            if is_last:
                raise UnstableError(
                    f"the last checkpoint, of update {update}, could not be written, and {newest}: {error}\n"
                    f"(free some space, then: run --resume {shlex.quote(str(self._parts.directory))})"
                ) from error
            if not self._has_failed:
                self._parts.alarm(
                    f"a checkpoint could not be written, and {newest}; each update will try again until one can: "
                    f"{error}"
                )
            self._has_failed = self._is_due = True
            return
        if self._has_failed:
            self._parts.alarm(f"checkpoints are written again: {path.name}")
        self._has_failed = False
        self.newest, self.saved_update = path, update
        for policy in self._parts.policies.values():
            await policy.pool.tell_saved()


def lasting_state(name: str, part: Any) -> dict[str, Any]:
    """Return a part's state. Raises ConfigError if a checkpoint, which is JSON, would not restore it unchanged."""
    state: dict[str, Any] = part.state_dict()
    is_ours = type(part).__module__.startswith("unstable_lite.")
    return state if is_ours else plugins.lasting(f"{name} {type(part).__name__}", state)


async def sync_unchanged(parts: RunParts, policy: TrainedPolicy, version: int) -> dict[str, float]:
    """Sync a policy's adapter, as it is, to every engine as `version`; return the canary's metrics."""
    digest = await policy.learner.write_adapter(version, parts.store)
    return await parts.adapter_sync.sync(version, digest)


def rewind_to_checkpoint(directory: Path, config: Config, say: Callable[[str], None]) -> Checkpoint:
    """Return the newest intact checkpoint, and remove everything that the run recorded after it.

    Raises ConfigError if the config differs from the run's in a key on which its checkpoints depend; UnstableError if
    there is no checkpoint, if the run has made all its updates, or if the directory cannot be written to.
    """
    check_links(directory)
    if problems := [*lasting_changes(directory, config)]:
        raise ConfigError(*problems)
    checkpoint = read_checkpoint(newest_checkpoint(directory / "checkpoints", say))
    with checkpoint.understood():
        updates, state = checkpoint.state["updates"], checkpoint.state["tracker"]
        if updates != update_of(checkpoint.directory) or type(updates) is not int:
            raise ValueError(f"updates = {updates!r} in {checkpoint.directory.name}")
        scheduler = checkpoint.state["scheduler"]
        num_games, in_flight = sum(scheduler["games"].values()), set(scheduler["in_flight"])
        unfinished = {model for model, *_ in state["tallies"]} | {checkpoint.state["registry"]["current"]}
        unfinished |= {policy["current"] for policy in checkpoint.state.get("policies", {}).values()}
        evaluated = {tuple(cell) for cell in checkpoint.state["evaluated"]}
    if has_ended(directory, config, updates):
        raise UnstableError(f"{directory} already made its {updates} updates. To train further: run.learning_steps=N")
    # In mode `sync`, evaluations that the checkpoint does not contain are repeated: ratings and games depend on them.
    is_made_again = config.run.schedule == "sync" and is_evaluated(config.run, updates)

    def is_repeated(line: dict[str, Any]) -> bool:
        if line["label"] == "concurrent":
            return line["model"] in unfinished
        return is_made_again and line["step"] == updates and evaluated_cell(line) not in evaluated

    for left in (directory / "checkpoints").glob(".*.partial*"):  # by a run that ended while it was saving
        shutil.rmtree(left, ignore_errors=True)
    try:
        rewind(directory, updates, num_games, in_flight, is_repeated)
    except OSError as error:
        raise UnstableError(
            f"{error.filename or directory}: the records after update {updates} cannot be removed: {error.strerror}. "
            "Free some space, and make the directory writable"
        ) from error
    say(f"resuming after update {updates}, from {checkpoint.directory.name}")
    return checkpoint


def has_ended(directory: Path, config: Config, updates: int) -> bool:
    """Return whether a run has made all its updates, and the evaluations after the last of them."""
    if updates != config.run.learning_steps or not config.run.eval_games:
        return updates >= config.run.learning_steps
    lines = [line for line in read_records(directory / "eval.jsonl") if line["label"] != "concurrent"]
    return {evaluated_cell(line) for line in lines if line["step"] == updates}.issuperset(evaluated_cells(config))
