"""Commands about runs on this disk: runs, top, report, push."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated

import typer

from unstable_lite.cli.options import Debug, Outputs, TrustConfig, console, errors_as_messages


def runs(outputs: Outputs = Path("outputs"), debug: Debug = False) -> None:
    """List the runs in --outputs, the newest first."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.run_directory import list_runs, runs_table
        from unstable_lite.dashboards.terminal import print_lines

        print_lines(console(), runs_table(list_runs(outputs)))


def top(
    directory: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run directory; default: the newest in --outputs.")
    ] = None,
    outputs: Outputs = Path("outputs"),
    debug: Debug = False,
) -> None:
    """Watch a run from another terminal without affecting it. Key: q."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.run_directory import RunDirectory
        from unstable_lite.dashboards.top import show_once, watch
        from unstable_lite.files import understood
        from unstable_lite.tracking.run_directory import newest_run

        run, out = RunDirectory(directory or newest_run(outputs)), console()
        with understood(run.directory):
            (watch if out.is_terminal and sys.stdin.isatty() else show_once)(run, out)


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


def push(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    repository: Annotated[str, typer.Argument(metavar="REPO", help="USER/NAME on the Hugging Face hub.")],
    checkpoint: Annotated[str, typer.Option(help="The number of an update, 'best' or 'last'.")] = "last",
    merge: Annotated[bool, typer.Option("--merge", help="The whole model, with the adapter merged in.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        Path | None, typer.Option("--dry-run", metavar="DIR", help="Write this new folder, and upload nothing.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The base on the hub, if model_name is a local directory.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Licence for the card, such as 'apache-2.0'.")] = None,
    with_options: Annotated[bool, typer.Option("--with-options", help="Also publish env_kwargs and options.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Upload without a question.")] = False,
    trust_config: TrustConfig = False,
    debug: Debug = False,
) -> None:
    """Publish a checkpoint on the Hugging Face hub: adapter or merged model, with a model card."""
    with errors_as_messages(debug):
        from unstable_lite.sharing.publishing import Publication

        say = functools.partial(console().print, soft_wrap=True)
        publication = Publication(
            run_directory,
            repository,
            checkpoint,
            base=base_model,
            merges=merge,
            license=license,
            trusts_config=trust_config,
            with_options=with_options,
        )
        if dry_run is not None:
            publication.write(dry_run)
            say(f"{dry_run}: {', '.join(sorted(file.name for file in dry_run.iterdir()))}")
        else:
            asked = not yes and sys.stdin.isatty()
            may_publish = functools.partial(typer.confirm, f"Publish this as {repository}?")
            say(publication.upload(private, say, may_publish if asked else lambda: True))
