"""A real `unstable-lite serve` process."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes import runs

KEY = "sk-key-of-the-test"


@dataclass(frozen=True)
class Served:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


@contextmanager
def served(run: Path, log: Path, *arguments: str) -> Iterator[Served]:
    """Serve a run with a key at a free port; yield once it is ready."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            runs.command("serve", run, "--port", "0", "--api-key-env", "SERVE_API_KEY", *arguments),
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "SERVE_API_KEY": KEY, "COLUMNS": "200"},
        )
    try:
        runs.wait_for(lambda: process.poll() is not None or b"Ctrl-C ends it" in log.read_bytes(), 600)
        found = re.search(r"at (http://\S+/v1);", log.read_text())
        assert found, log.read_text()
        yield Served(process, found[1], log)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(60)
