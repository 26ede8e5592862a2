"""`python -m bench NAME`: measure one thing against another, in ratios."""

from __future__ import annotations

import importlib
import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.harness import Failure, Options, Report


class Name(StrEnum):
    orchestrator = "orchestrator"
    engine = "engine"
    handoff = "handoff"
    learner = "learner"
    faults = "faults"
    startup = "startup"


def main(
    name: Name,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of one sample.")] = 2.0,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each side.")] = 5,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier result, shown beside this one; what has a target may be no worse.")
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="By so much, relative, it may.")] = 0.2,
    minutes: Annotated[float, typer.Option(min=0.05, help="faults: how long they strike; 60 is a soak.")] = 1.0,
    seed: int = 0,
    small: Annotated[bool, typer.Option(help="Sizes of a smoke test.")] = False,
    profile: Annotated[bool, typer.Option(help="orchestrator: print what costs most.")] = False,
) -> None:
    """Answer one question: how fast is it, against what it should be compared with?"""
    baseline = None
    if compare is not None:
        try:
            baseline = json.loads(compare.read_text())
        except (OSError, ValueError) as error:
            raise typer.BadParameter(f"{compare}: {error}") from error
        if baseline.get("bench") != name:
            raise typer.BadParameter(f"{compare} is a result of {baseline.get('bench')!r}, not of {name.value!r}")
    if profile and name is not Name.orchestrator:
        raise typer.BadParameter("--profile is for the orchestrator")
    options = Options(seconds=seconds, rounds=rounds, minutes=minutes, seed=seed, small=small, profile=profile)
    console = Console(width=None if Console().is_terminal else 150)
    try:
        report: Report = importlib.import_module(f"bench.{name.value}").run(options)
    except Failure as error:
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from error
    report.show(console, baseline)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")
    if baseline is not None and (worse := report.worse_than(baseline, tolerance)):
        console.print(f"worse than {compare} by more than {tolerance:.0%}: {'; '.join(worse)}", highlight=False)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
