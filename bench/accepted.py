"""The last accepted results, `baselines/<machine class>/<bench>.json`: what a change is held against.

Only ratios and figures with a target are kept, and the sizes that they belong to: they travel between machines of one
class, absolute figures hardly do. A baseline is written when somebody runs the bench with `--accept`, never by itself.
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

BASELINES = Path(__file__).parent / "baselines"
TOLERANCE = 0.2
"""Relative; each baseline states its own."""


def machine_class() -> str:
    """Cores that may be used and the processor's make: `2core-amd-epyc-25-17` (family, model)."""
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    except OSError:
        facts["model name"] = platform.machine()
    words = [facts.get(key, "") for key in ("model name", "cpu family", "model")]
    slug = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return f"{len(os.sched_getaffinity(0))}core-{slug}"


def baseline_path(bench: str) -> Path:
    """Of this machine's class; it need not exist."""
    return BASELINES / machine_class() / f"{bench}.json"


def read_baseline(path: Path, bench: str, small: bool) -> dict[str, Any]:
    """A baseline, or any earlier result. Raises ValueError with what is wrong with it."""
    try:
        baseline: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError as error:
        classes = sorted(known.parent.name for known in BASELINES.glob(f"*/{bench}.json"))
        others = f"; there are some for {', '.join(classes)}" if classes else ""
        raise ValueError(f"{path}: there is no such result{others} (--accept makes this run the baseline)") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if baseline.get("bench") != bench:
        raise ValueError(f"{path} is a result of {baseline.get('bench')!r}, not of {bench!r}")
    if baseline.get("small", small) != small:
        raise ValueError(f"{path} was measured with other sizes (--small)")
    return baseline


def write_baseline(path: Path, result: dict[str, Any], tolerance: float) -> None:
    """What of a result is worth holding others against."""
    kept = ("bench", "date", "commit", "machine", "packages", "seed", "seconds", "rounds", "small", "load_average")
    judged = [
        {key: row[key] for key in ("name", "unit", "median", "spread", "n", "target")}
        for row in result["ratios"]
        if row["median"] is not None
    ]
    baseline = {key: result[key] for key in kept} | {"tolerance": tolerance, "sizes": result["sizes"], "rows": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(baseline | {"ratios": judged}, indent=2, ensure_ascii=False) + "\n")
