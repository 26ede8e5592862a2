"""One stage, as a process that `command.py` starts: `python -m bench.acceptance STAGE OUT DEVICE SEED LIMIT_S`."""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.acceptance.stages import STAGES
from bench.harness import Failure, Options

STACKS_S = 5.0
"""Time before the limit at which the stacks of all threads are written to the log."""


def main() -> None:
    name, directory, device, seed, limit_s = sys.argv[1:]
    faulthandler.dump_traceback_later(max(1.0, float(limit_s) - STACKS_S))
    small = device == "cpu"
    options = Options(
        seconds=0.2 if small else 2.0,
        rounds=1 if small else 5,
        minutes=1.0,
        seed=int(seed),
        small=small,
        device=device,
    )
    outcome: dict[str, Any]
    try:
        report = STAGES[name].load()(options, Path(directory))
    except Failure as error:
        outcome = {"unmet": [str(error)], "report": None}
    else:
        report.show(Console(width=150))
        outcome = {"unmet": report.unmet(), "report": report.to_json()}
    (Path(directory) / f"{name}.outcome").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
