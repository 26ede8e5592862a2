"""Accepted results in `baselines/<machine class>/<bench>.json`, with which changes are compared.

Keeps only ratios and metrics with a target, and the sizes that they belong to: these can be compared across machines of
one class; absolute metrics hardly can. A baseline is written only by `--accept`.
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
"""Default relative tolerance. Each baseline states its own."""


def machine_class() -> str:
    """Return the usable cores and the processor's make: `2core-amd-epyc-25-17` (family, model)."""
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    except OSError:
        info["model name"] = platform.machine()
    words = [info.get(key, "") for key in ("model name", "cpu family", "model")]
    slug = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")
    return f"{len(os.sched_getaffinity(0))}core-{slug}"


def baseline_path(bench: str) -> Path:
    """Return the baseline's path for this machine's class. The file may not exist."""
    return BASELINES / machine_class() / f"{bench}.json"


def read_baseline(path: Path, bench: str, small: bool) -> dict[str, Any]:
    """Read a baseline or any earlier result. Raises ValueError if it is missing, unreadable or not comparable."""
    try:
        baseline: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError as error:
        classes = sorted(known.parent.name for known in BASELINES.glob(f"*/{bench}.json"))
        others = f"; there are some for {', '.join(classes)}" if classes else ""
        raise ValueError(f"{path}: no such result{others} (--accept makes this run the baseline)") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if baseline.get("bench") != bench:
        raise ValueError(f"{path} is a result of {baseline.get('bench')!r}, not of {bench!r}")
    if baseline.get("small", small) != small:
        raise ValueError(f"{path} was measured with different sizes (--small)")
    return baseline


def write_baseline(path: Path, result: dict[str, Any], tolerance: float) -> None:
    """Write the parts of a result with which later results are compared."""
    kept = ("bench", "date", "commit", "machine", "packages", "seed", "seconds", "rounds", "small", "load_average")
    judged = [
        {key: row[key] for key in ("name", "unit", "median", "spread", "n", "target")}
        for row in result["ratios"]
        if row["median"] is not None
    ]
    baseline = {key: result[key] for key in kept} | {"tolerance": tolerance, "sizes": result["sizes"], "rows": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(baseline | {"ratios": judged}, indent=2, ensure_ascii=False) + "\n")
