"""The command of a study as a user starts it, with files and outputs in one directory."""

import os
import subprocess
from pathlib import Path

from bench.harness import REPOSITORY
from fakes import runs

USES_NUMPY_LEARNER = """
import sys
if sys.orig_argv[2:4] == ["unstable_lite", "run"]:
    from fakes import numpy_learner
    numpy_learner.use()
"""


def places_in(directory: Path) -> tuple[str, ...]:
    return "--json", str(directory / "tiny.json"), "--output", str(directory / "outputs")


def start(study: Path, directory: Path, *arguments: str, is_torchless: bool = False) -> subprocess.Popen[str]:
    """Start the command. is_torchless: let its runs use the learner of `fakes.numpy_learner`."""
    (directory / "path").mkdir(exist_ok=True)
    (directory / "path" / "sitecustomize.py").write_text(USES_NUMPY_LEARNER * is_torchless)
    path = [str(directory / "path"), str(REPOSITORY), runs.TESTS, os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        runs.command("study", study, *places_in(directory), *arguments, module="bench"),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
