"""Files of a run directory: their names, its config and versions, and which checkpoints are intact.

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
from pathlib import Path
from typing import Any

import tomli_w

from unstable_lite.config import Config
from unstable_lite.config.env_ids import slug
from unstable_lite.errors import UnstableError
from unstable_lite.files import replaced
from unstable_lite.planning.envs import question_files
from unstable_lite.planning.trust import CONFIG, seal_config
from unstable_lite.tracking.versions import versions

LEAGUE, WAITING, MANIFEST = "league.json", "waiting.msgpack", "manifest.json"
"""Names of files in a checkpoint."""
RUNS = f"*/*/{CONFIG}"
"""Configs of the runs in an output directory."""
VERSIONS, QUESTIONS = "versions.json", "questions"
"""File in the run directory, and the key in it for the SHA-256 of each file of questions."""
LIVE = "live.json"
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


def runs_in(outputs: Path) -> list[Path]:
    """Return the run directories in `outputs`. Raises UnstableError if there is none."""
    found = [path.parent for path in outputs.glob(RUNS)]
    if not found:
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
            if size(path) != manifest[name]["bytes"]:
                return f"{name} has {size(path)} bytes instead of {manifest[name]['bytes']}"
            if sha256(path) != manifest[name]["sha256"]:
                return f"{name} has other contents than were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # or a loop of links
        return f"its {MANIFEST} cannot be read: {error}"
    return None


def size(path: Path) -> int:
    return path.stat().st_size


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
