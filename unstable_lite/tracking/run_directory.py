"""Files of a run directory: their names, its config and versions, intact checkpoints, and a resume's removals.

Knows nothing of the contents of a checkpoint; see orchestrator/checkpoint.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import time
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import tomli_w
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from unstable_lite.config import Config
from unstable_lite.config.env_ids import slug, with_slugs
from unstable_lite.config.reading import drop_removed, parse_config
from unstable_lite.errors import UnstableError
from unstable_lite.files import keep_records, keep_whole_lines, read_records, replaced
from unstable_lite.planning.defaults import policy_configs, resolve_defaults
from unstable_lite.planning.envs import changed_questions, question_files
from unstable_lite.planning.trust import CONFIG, seal_config
from unstable_lite.tracking.evaluations import evaluation_group
from unstable_lite.tracking.records import train_files
from unstable_lite.tracking.tensorboard import tag_of
from unstable_lite.tracking.versions import versions
from unstable_lite.types import policy_of, uid_of

LEAGUE, WAITING, MANIFEST = "league.json", "waiting.msgpack", "manifest.json"
"""Names of files in a checkpoint."""
RUNS = f"*/*/{CONFIG}"
"""Configs of the runs in an output directory."""
VERSIONS, QUESTIONS = "versions.json", "questions"
"""File in the run directory, and the key in it for the SHA-256 of each file of questions."""
LIVE = "live.json"
"""File in the run directory with the state of a run in progress."""
LIVE_EVERY_S = 2.0
"""Time between two of these states."""
LASTING = (
    *("algorithm", "learner.optimizer", "lora.lora_rank", "lora.lora_alpha", "lora.target_modules"),
    *("buffer.kind", "rewards.group_baseline"),
)
"""Config keys that determine the contents of a checkpoint."""
PAUSED = "PAUSED"
"""File in the run directory; a paused run resumes when it is deleted."""


def create_run_directory(config: Config) -> Path:
    """Create `<output_dir>/<date>/<time>-<name>/` with the resolved config and the versions of all software.

    versions.json also has the SHA-256 of each file of questions. Raises UnstableError if it cannot be written.
    """
    name = config.run.name or default_run_name(config)
    directory = config.run.output_dir / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}-{name}"
    unique = directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(2):
            with contextlib.suppress(FileExistsError):  # only one of several concurrent runs makes it
                unique.mkdir()
                break
            unique = directory.with_name(f"{directory.name}-{attempt}")
        for part in ("checkpoints", "logs", "tensorboard"):
            (unique / part).mkdir()
        content = to_toml(config.model_dump(mode="json")).encode()
        (unique / CONFIG).write_bytes(content)
        seal_config(unique, content)
        digests = {env_id: questions.sha256 for env_id, questions in question_files(config).items()}
        (unique / VERSIONS).write_text(json.dumps(versions() | {QUESTIONS: digests}, indent=2) + "\n")
    except OSError as error:
        raise UnstableError(f"cannot create {unique}: {error.strerror}; choose another run.output_dir") from error
    return unique.resolve()


def replace_config(directory: Path, config: Config, update: int) -> None:
    """Replace the run's config from `update` on. Keep the earlier one as `config-<update>.toml`.

    Raises UnstableError if it cannot be written.
    """
    path, text = directory / CONFIG, to_toml(config.model_dump(mode="json"))
    try:
        seal_config(directory, text.encode())
        before = path.read_text(encoding="utf-8")
        if tomllib.loads(text) == tomllib.loads(before):
            seal_config(directory, before.encode())  # the user who resumed the run trusts it
            return
        earlier = path.with_name(f"config-{update}.toml")
        if not earlier.exists():  # else no checkpoint was made with the present config.toml
            with replaced(earlier) as partial:
                partial.write_text(before, encoding="utf-8")
        with replaced(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnstableError(
            f"cannot write {path}: {error.strerror}; free some space and check its permissions"
        ) from error


def default_run_name(config: Config) -> str:
    model = Path(config.model_name).name if "/" in config.model_name else config.model_name
    envs = "-".join(dict.fromkeys(slug(spec.env_id) for spec in config.train_envs))
    return re.sub(r"[^\w.-]+", "-", f"unstable-lite-{model}-{envs}")[:150]


def recorded_questions(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of questions when the run began, by env id; empty if none is recorded."""
    try:
        return dict(json.loads((directory / VERSIONS).read_text(encoding="utf-8"))[QUESTIONS])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):  # an older run, or a damaged file
        return {}


def lasting_changes(directory: Path, config: Config) -> Iterator[str]:
    """Yield a message for each key in which `config` differs from the run's own and no longer fits its checkpoints.

    Also yield one for each file of questions that changed.
    """
    yield from changed_questions(config, recorded_questions(directory))
    raw = tomllib.loads((directory / CONFIG).read_text(encoding="utf-8"))
    drop_removed(raw)
    own, _ = parse_config(raw)
    if own is None:
        return
    before, now = (policy_configs(resolve_defaults(each)) for each in (own, config))
    if [*before] != [*now]:
        yield (
            f"policies = {', '.join(now) or 'none'}: the run's checkpoints have {', '.join(before) or 'none'}, in this "
            "order. Leave the policies as they are, or start a new run"
        )
        return
    for policy, name in itertools.product(before, LASTING):
        section, _, key = name.rpartition(".")
        tables = (configs[policy].model_dump(mode="json") for configs in (before, now))
        was, is_now = ((table[section] if section else table)[key] for table in tables)
        if was != is_now:
            yield (
                f"{uid_of(policy, name)} = {json.dumps(is_now)}: the run's checkpoints were made with "
                f"{json.dumps(was)}. Leave it as it is, or start a new run from the adapter: lora.initial_lora_path"
            )


def runs_in(outputs: Path) -> list[Path]:
    """Return the run directories in `outputs`. Raises UnstableError if there is none."""
    if not (found := [path.parent for path in outputs.glob(RUNS)]):
        raise UnstableError(f"there is no run in {outputs.absolute()}; name another directory with --outputs")
    return found


def newest_run(outputs: Path) -> Path:
    """Return the run directory that changed last. Raises UnstableError if there is none."""
    return max(runs_in(outputs), key=lambda directory: directory.stat().st_ctime)


def find_damage(directory: Path) -> str | None:
    """Describe how a checkpoint is damaged; return None if it is intact."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name in dict.fromkeys((LEAGUE, WAITING, *manifest)):
            path = directory / name
            if name not in manifest or not path.resolve().is_relative_to(directory.resolve()):
                return f"its {MANIFEST} does not name {name} among its own files"
            if path.exists() and not path.is_file():
                return f"{name} is not a file"
            if (size := path.stat().st_size) != manifest[name]["bytes"]:
                return f"{name} has {size} bytes instead of {manifest[name]['bytes']}"
            if sha256(path) != manifest[name]["sha256"]:
                return f"{name} has other contents than were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # or a loop of links
        return f"its {MANIFEST} cannot be read: {error}"
    return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_toml(table: dict[str, Any]) -> str:
    """Return `table` as TOML. Keys whose value is None are left out, because TOML has no null."""
    return tomli_w.dumps(_without_none(table))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def rewind(
    directory: Path,
    update: int,
    num_games: int,
    in_flight: Collection[int],
    is_repeated: Callable[[dict[str, Any]], bool],
) -> None:
    """Remove all records after `update` from a run directory, because the run makes them again.

    Each file is replaced atomically or not at all.
    `num_games`: number of games handed out by then; later games get their numbers again. `in_flight`: those that were
    not over. `is_repeated`: whether a line of eval.jsonl is of an evaluation that continues or is made again.
    """
    evaluations = directory / "eval.jsonl"
    names = set[tuple[int, str]]()
    for line in filter(is_repeated, read_records(evaluations)):
        group = evaluation_group(line["label"], line["env_id"], line["opponent"], policy_of(line.get("model", "")))
        names |= {(line["step"], tag(f"{group} n")) for tag in (str, with_slugs, tag_of)}  # `with_slugs`: older files

    def is_kept(step: int, logged: Iterable[str]) -> bool:
        return step <= update and not any((step, name) in names for name in logged)

    keep_whole_lines(directory / "metrics.jsonl", lambda line: is_kept(line["step"], line))
    _rewind_tensorboard(directory / "tensorboard", is_kept)
    for name in ("league.jsonl", "alarms.jsonl"):
        keep_whole_lines(directory / name, lambda line: bool(line["step"] <= update))

    def is_known(game: dict[str, Any]) -> bool:
        """Return whether kept records count the game's result; for an evaluation with a quota, eval.jsonl may."""
        number, label = game["game_idx"], game["eval_label"]
        return bool(number < num_games and (number not in in_flight or label is not None))

    keep_records(directory / "games.jsonl", is_known, num_late=len(in_flight))
    for number, path in train_files(directory).items():
        if number > update:
            path.unlink()
    # Last, because it determines the records to remove from the other files.
    keep_whole_lines(evaluations, lambda line: line["step"] <= update and not is_repeated(line))


def _rewind_tensorboard(directory: Path, is_kept: Callable[[int, Iterable[str]], bool]) -> None:
    old = sorted(directory.glob("events.out.tfevents.*"))
    events = [(raw, _event(raw, path)) for path in old for raw in RawEventFileLoader(str(path)).Load()]
    kept = [raw for raw, event in events if is_kept(event.step, (value.tag for value in event.summary.value))]
    if len(kept) == len(events):
        return
    # TensorBoard reads files in the order of their names, which begin with a number.
    with replaced(old[0]) as partial, partial.open("wb") as file:
        writer = RecordWriter(file)
        for raw in kept:
            writer.write(raw)
    for path in old[1:]:
        path.unlink()


def _event(raw: bytes, path: Path) -> Event:
    try:
        return Event.FromString(raw)
    except DecodeError as error:
        raise UnstableError(f"{path}: a record is not an event of TensorBoard ({error}); move the file away") from None
