"""Commands about runs on this disk: runs, export, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unstable_lite.cli.options import Debug, Outputs, console, errors_as_messages

runs_app = typer.Typer(help="The runs on this disk: list, compare, prune.", invoke_without_command=True)


@runs_app.callback()
def runs(
    context: typer.Context,
    outputs: Outputs = Path("outputs"),
    debug: Debug = False,
) -> None:
    """List the runs in --outputs, the newest first; or compare or prune them."""
    if context.invoked_subcommand is None:
        with errors_as_messages(debug):
            from unstable_lite.dashboards.runs import list_runs, runs_table

            console().print(runs_table(list_runs(outputs)), soft_wrap=True)


@runs_app.command("compare")
def compare_runs(
    run_directories: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Run directories.")],
    debug: Debug = False,
) -> None:
    """Show the config keys in which runs differ, and their results, side by side."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.runs import column_name, compare

        out = console()
        directories, differing, results = compare(run_directories)
        for number, directory in enumerate(directories):
            out.print(f"{column_name(number)}  {directory}", soft_wrap=True)
        if differing.row_count:
            out.print(differing)
        else:
            out.print("their configs are the same")
        out.print(results)


@runs_app.command("prune")
def prune_runs(
    run_directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN…]", help="Run directories; default: all in --outputs.")
    ] = None,
    outputs: Outputs = Path("outputs"),
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only list.")] = False,
    keep: Annotated[int, typer.Option(min=1, help="Number of newest intact checkpoints to keep of each run.")] = 1,
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only runs without a write for this number of days.")
    ] = 0.0,
    train_data: Annotated[
        bool, typer.Option("--train-data", help="Also train_data/, which report and export read.")
    ] = False,
    empty: Annotated[bool, typer.Option("--empty", help="Also whole runs without a checkpoint.")] = False,
    debug: Debug = False,
) -> None:
    """Remove older checkpoints of runs that have ended. Those that a resume needs and the best evaluated ones stay."""
    with errors_as_messages(debug):
        from rich import filesize

        from unstable_lite.dashboards.runs import find_prunable, prune, say_prunable

        def say(text: str) -> None:
            console().print(text, soft_wrap=True)

        prunables = find_prunable(outputs, run_directories or (), keep, older_than, train_data, empty)
        num_bytes = say_prunable(prunables, say)
        if not num_bytes:
            say("nothing to prune")
        elif not yes:
            say(f"{filesize.decimal(num_bytes)} in all; nothing was removed; add --yes to remove them")
        else:
            for prunable in prunables:
                if prunable.paths and (reason := prune(prunable)) is not None:
                    say(f"{prunable.directory}: nothing was removed, because {reason}")
                    num_bytes -= prunable.size_bytes
            say(f"{filesize.decimal(num_bytes)} freed")


def export(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    output: Annotated[Path | None, typer.Option(help="An empty or new directory; default: RUN/csv.")] = None,
    safe_for_spreadsheets: Annotated[
        bool,
        typer.Option("--safe-for-spreadsheets", help="Put an apostrophe before text that would be a formula."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the CSV files of UnstableBaselines: training data, evaluation, collection."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.export import export_csv

        target = output or run_directory / "csv"
        counts = export_csv(run_directory, target, safe_for_spreadsheets)
        console().print(
            f"{target}: {', '.join(f'{count} files in {kind}/' for kind, count in counts.items())}", soft_wrap=True
        )


def report(
    run_directories: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run directories; several are compared.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Default: RUN/report.html, or report.html here for several runs.")
    ] = None,
    games: Annotated[
        int, typer.Option(min=1, help="Most transcripts of each run and kind (training, evaluation, void).")
    ] = 2000,
    debug: Debug = False,
) -> None:
    """Write one HTML file with curves, ladder, matches and a browser of games, which needs no network."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.report import write_report

        default = run_directories[0] / "report.html" if len(run_directories) == 1 else Path("report.html")
        written = write_report(run_directories, output or default, games)
        console().print(
            f"{written.path}: {written.games:,} of {written.games_read:,} games turn by turn, "
            f"{written.size_bytes / 1e6:.1f} MB; open it in a browser",
            soft_wrap=True,
        )
