"""Texts that a person sees, as data files. To write them again: `SNAPSHOTS=write pytest TEST`, then read `git diff`."""

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "snapshots"


def assert_as_before(name: str, text: str) -> None:
    """Compare a text with tests/snapshots/<name>.txt, without spaces at the ends of lines."""
    path = FOLDER / f"{name}.txt"
    shown = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    if os.environ.get("SNAPSHOTS") == "write":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), f"SNAPSHOTS=write pytest writes {path} again"
