"""`python -m bench NAME`: measure one thing against another, as ratios."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.harness import Failure, Options, Report

TOLERANCE = 0.2
"""Default relative tolerance of `--compare`. A file in baselines/ states its own."""

COMMANDS = ("acceptance", "study")
"""Packages with a command of their own, because they have no rounds."""

ON_CUDA = ("engine", "handoff", "learner", "sustained")


def bench_names() -> list[str]:
    """Return the modules of this package that define `run`. Found, not listed, so that none is forgotten."""
    return sorted(
        file.stem for file in Path(__file__).parent.glob("*.py") if re.search(r"^def run\(", file.read_text(), re.M)
    )


def main(
    name: Annotated[
        str, typer.Argument(help=f"{', '.join(bench_names())}; also acceptance and study: see their --help")
    ],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of one sample.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per side.")] = 5,
    compare: Annotated[
        Path | None,
        typer.Option(help="Show an earlier result beside this one; fail if a metric with a target is worse."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help=f"Relative tolerance of --compare. Default: that of the file, or {TOLERANCE}."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.05, help="faults: duration of the faults; 60 is a soak test.")] = 1.0,
    seed: int = 0,
    small: Annotated[bool, typer.Option(help="Use smoke-test sizes.")] = False,
    device: Annotated[
        str, typer.Option(help=f"cpu, or cuda for {', '.join(ON_CUDA)}; cuda uses the shape of Qwen3-1.7B.")
    ] = "cpu",
) -> None:
    """Answer one question: how fast is this, compared with the alternatives?"""
    if name not in bench_names():
        raise typer.BadParameter(f"unknown bench {name!r}; choose one of {', '.join(bench_names())}")
    if device not in ("cpu", "cuda") or (device != "cpu" and name not in ON_CUDA):
        raise typer.BadParameter(f"--device is cpu or, for {', '.join(ON_CUDA)}, cuda")
    kind = name if device == "cpu" else f"{name}-{device}"
    baseline = None if compare is None else read_result(compare, kind, small)
    if tolerance is None:
        tolerance = (baseline or {}).get("tolerance", TOLERANCE)
    options = Options(seconds=seconds, rounds=rounds, minutes=minutes, seed=seed, small=small, device=device)
    console = Console(width=None if Console().is_terminal else 150)
    try:
        report: Report = importlib.import_module(f"bench.{name}").run(options)
    except Failure as error:
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from error
    report.bench = kind
    report.show(console, baseline)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    if baseline is not None and (worse := report.worse_than(baseline, tolerance)):
        console.print(f"worse than {compare} by more than {tolerance:.0%}: {'; '.join(worse)}", highlight=False)
        raise typer.Exit(1)


def read_result(path: Path, bench: str, small: bool) -> dict[str, Any]:
    """Read an earlier result of a bench. Raises BadParameter if it is unreadable or not comparable."""
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    if (result.get("bench"), result.get("small", small)) != (bench, small):
        raise typer.BadParameter(f"{path} is a result of {result.get('bench')}, not of {bench}{' --small' * small}")
    return result


if __name__ == "__main__":
    if (name := "".join(sys.argv[1:2])) in COMMANDS:
        sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
        typer.run(importlib.import_module(f"bench.{name}.command").main)
    typer.run(main)
