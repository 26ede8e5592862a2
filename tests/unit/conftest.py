"""A unit test starts no process."""

import subprocess
from typing import Any

import pytest

HARMLESS = ("nvidia-smi", "file", "uname")
"""Programs that a plan asks for the machine's devices, and the import of vLLM for the kind of machine."""


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen.__init__

    def start_if_harmless(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        program = args if isinstance(args, str) else str(args[0])
        assert program in HARMLESS, f"a unit test starts {program}: move it to tests/integration"
        start(self, args, *rest, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", start_if_harmless)
