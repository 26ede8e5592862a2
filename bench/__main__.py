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

from bench.accepted import TOLERANCE, baseline_path, read_baseline, write_baseline
from bench.harness import Failure, Options, Report

ACCEPTED = "accepted"
"""Value of `--compare` without a file."""

COMMANDS = ("acceptance", "study")
"""Packages with a command of their own, because they have no rounds and no baseline."""

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
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file, and its plot beside it.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of one sample.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per side.")] = 5,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="[FILE]",
            help="Show an earlier result beside this one; fail if a metric with a target is worse. Without FILE: "
            "the accepted result of this bench and machine class, in bench/baselines/.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help=f"Relative tolerance of --compare. Default: that of FILE, or {TOLERANCE}."),
    ] = None,
    accept: Annotated[
        bool, typer.Option(help="Make this result the baseline of this bench and machine class.")
    ] = False,
    minutes: Annotated[float, typer.Option(min=0.05, help="faults: duration of the faults; 60 is a soak test.")] = 1.0,
    seed: int = 0,
    small: Annotated[bool, typer.Option(help="Use smoke-test sizes.")] = False,
    profile: Annotated[bool, typer.Option(help="orchestrator: print the most expensive functions.")] = False,
    simulate: Annotated[bool, typer.Option(help="scale: simulate 1 to 1,024 engines, checked by real ones.")] = False,
    device: Annotated[
        str, typer.Option(help=f"cpu, or cuda for {', '.join(ON_CUDA)}; cuda uses the shape of Qwen3-1.7B.")
    ] = "cpu",
) -> None:
    """Answer one question: how fast is this, compared with the alternatives?"""
    if name not in bench_names():
        raise typer.BadParameter(f"unknown bench {name!r}; choose one of {', '.join(bench_names())}")
    for flag, is_given, owner in (("--profile", profile, "orchestrator"), ("--simulate", simulate, "scale")):
        if is_given and name != owner:
            raise typer.BadParameter(f"{flag} works only with {owner}")
    if device not in ("cpu", "cuda") or (device != "cpu" and name not in ON_CUDA):
        raise typer.BadParameter(f"--device is cpu or, for {', '.join(ON_CUDA)}, cuda")
    if accept and small:
        raise typer.BadParameter("--accept needs full sizes; drop --small")
    kind = "-".join([name, *["simulated"] * simulate, *[device] * (device != "cpu")])
    baseline: dict[str, Any] | None = None
    against = baseline_path(kind) if compare == ACCEPTED else Path(compare or "")
    if compare is not None:
        try:
            baseline = read_baseline(against, kind, small)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    if tolerance is None:
        tolerance = TOLERANCE if baseline is None else float(baseline.get("tolerance", TOLERANCE))
    options = Options(
        seconds=seconds,
        rounds=rounds,
        minutes=minutes,
        seed=seed,
        small=small,
        profile=profile,
        simulate=simulate,
        device=device,
    )
    console = Console(width=None if Console().is_terminal else 150)
    try:
        report: Report = importlib.import_module(f"bench.{name}").run(options)
    except Failure as error:
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from error
    report.bench = kind
    report.show(console, baseline)
    result = report.to_json()
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        if report.figure is not None:
            json_file.with_suffix(".svg").write_text(report.figure)
    if baseline is not None and (worse := report.worse_than(baseline, tolerance)):
        console.print(f"worse than {against} by more than {tolerance:.0%}: {'; '.join(worse)}", highlight=False)
        raise typer.Exit(1)
    if accept:
        write_baseline(baseline_path(kind), result, tolerance)
        console.print(f"accepted: {baseline_path(kind)}", highlight=False)


def with_default(arguments: list[str]) -> list[str]:
    """Insert the default value after a `--compare` without one."""
    full = []
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        full += [argument, ACCEPTED] if argument == "--compare" and following.startswith("--") else [argument]
    return full


if __name__ == "__main__":
    if (name := "".join(sys.argv[1:2])) in COMMANDS:
        sys.argv = [f"{sys.argv[0]} {name}", *sys.argv[2:]]
        typer.run(importlib.import_module(f"bench.{name}.command").main)
    sys.argv[1:] = with_default(sys.argv[1:])
    typer.run(main)
