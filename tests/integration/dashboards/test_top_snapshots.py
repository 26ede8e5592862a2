"""The text of the dashboard at four sizes, for each of the runs in `shown_runs`."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.shown_runs import CASES
from tests.fakes.snapshots import assert_as_before
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.dashboards.terminal import VisibleConsole
from unstable_lite.dashboards.top import MachineLoad, draw

SIZES = ((60, 20), (80, 24), (120, 36), (200, 50))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_top_looks_as_before(case: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    view, frames = RunDirectory(case(Path("outputs"))), []
    view.refresh()
    for width, height in SIZES:
        console = VisibleConsole(file=io.StringIO(), width=width, height=height, color_system=None)
        console.print(draw(view, width, height, MachineLoad()), width=width, height=height)
        frame = console.file.getvalue()
        assert frame.count("\n") == height
        frames.append(f"{width} × {height}\n{frame}")
    assert_as_before(f"top/{case.__name__}", "\n".join(frames))
