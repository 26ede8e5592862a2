"""Small real runs: their config and process, and the resources that must be released."""

import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import psutil
from typer.testing import CliRunner

from unstable_lite.cli.app import app

TESTS = str(Path(__file__).parents[1])
TORCHLESS = "fakes.numpy_learner"
SMALL = """
model_name = "builtin:tiny"
[run]
learning_steps = 3
num_collection_workers = 24
num_eval_workers = 2
eval_share = 1
eval_games = 6
checkpoint_every = 2
output_dir = "OUTPUT"
name = "small"
[engine]
kind = "transformers"
temperature = 1.0
max_generation_len = 12
max_model_len = 512
kv_cache_gb = 0.1
[learner]
batch_size = 24
learning_rate = 1e-3
activation_checkpointing = false
[league]
opponent_sampling_strategy = { mirror = 0.5, fixed = 0.5 }
fixed_opponents = ["scripted:random"]
[[train_envs]]
env_id = "Nim-v0-train"
num_players = 2
num_actors = 1
prompt_template = "tiny"
[[eval_envs]]
env_id = "Nim-v0-train"
num_players = 2
prompt_template = "tiny"
fixed_opponent = "scripted:random"
"""

SCRIPTED = ("engine.kind=scripted", "learner.canary_tolerance=10.0")
"""Overrides for claims that no sampled token concerns: an engine without weights, with which no canary could agree."""
PLAYS_NIM = (
    *SCRIPTED,
    'engine.replies=["\\\\boxed{[0 1]}", "\\\\boxed{[1 1]}", "\\\\boxed{[2 1]}"]',
    "engine.max_model_len=4096",
)
"""Overrides for an engine whose replies are legal until a pile is empty; its tokens are bytes."""


def write_small(directory: Path) -> Path:
    path = directory / "small.toml"
    # Another test may start a run in the same second: the names of their arenas must differ.
    name = f"small-{zlib.crc32(bytes(directory)):x}"
    path.write_text(SMALL.replace("OUTPUT", str(directory / "outputs")).replace('"small"', f'"{name}"'))
    return path


def command(*arguments: str | Path, module: str = "unstable_lite") -> list[str]:
    return [sys.executable, "-m", module, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return the environment of a command, whose config can name modules in tests/."""
    return {**os.environ, "COLUMNS": "200", "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])}


def start(*arguments: str | Path, module: str = "unstable_lite", **variables: str) -> subprocess.Popen[str]:
    """Start a run as a user would, without a terminal, with more variables in its environment."""
    words, pipe = command(*arguments, module=module), subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment() | variables)


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def output_of(ended: tuple[int, str, str]) -> str:
    """Return the output of a command that must have ended without an error."""
    code, out, err = ended
    assert code == 0, out + err
    return out


def run(*arguments: str | Path) -> tuple[int, str, str]:
    return finish(start(*arguments))


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    """Run a command that starts no run in this process, which saves a second of imports; return as `run` does."""
    ended = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    return ended.exit_code, ended.stdout, ended.stderr


def start_torchless(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command whose learner is that of `fakes.numpy_learner`."""
    return start(*arguments, module=TORCHLESS, **variables)


def run_torchless(*arguments: str | Path, **variables: str) -> tuple[int, str, str]:
    return finish(start_torchless(*arguments, **variables))


def run_directory(directory: Path) -> Path:
    (found,) = (directory / "outputs").glob("*/*")
    return found


def wait_for(condition: Callable[[], object], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def num_updates(directory: Path) -> int:
    """Return the number of updates in metrics.jsonl of the only run in `directory`."""
    lines = [line for path in directory.glob("outputs/*/*/metrics.jsonl") for line in path.read_text().splitlines()]
    return sum('learner/loss"' in line for line in lines)


def undocumented_metrics(directory: Path) -> list[str]:
    """Return a run's metrics that docs/curves.md names neither in full nor, without the group, by their own name."""
    page = (Path(__file__).parents[2] / "docs" / "curves.md").read_text()
    recorded = {name for line in (directory / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    undocumented = []
    for name in recorded - {"step", "time"}:
        general = re.sub(r"^(collection-|exploration/)[^/]+", r"\1{env}", name)
        general = re.sub(r"^evaluation-[^/]+", "evaluation-{env} ({opponent})", general)
        general = re.sub(r"^trueskill/[^/ ]+ current", "trueskill/{env} current", general)
        general = re.sub(r"/engine-\d+/", "/engine-{i}/", general)
        general = re.sub(r"^alarms/\w+", "alarms/{name}", general)
        general = re.sub(r"^ended/.+ \(.+\)/\w+$", "ended/{env} ({opponent})/{reason}", general)
        general = re.sub(r"\(\d+\S* turns\)", "(5-8 turns)", general)
        general = re.sub(r"pid=\d+", "pid=0", re.sub(r"\d-gram$", "1-gram", general))
        general = re.sub(r"(checkpoint [A-Z][\w ]*) (low|high)$", r"\1", general.replace("/concurrent ", "/"))
        own = general.rpartition("/")[2]
        if not any(f"`{text}`" in page for text in (general, own, f"collection-{{env}}/{own}")):
            undocumented.append(name)
    return sorted(undocumented)


def children_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def are_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=0)[1]


def arenas_named(name: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"unstable_lite-{name}*"))
