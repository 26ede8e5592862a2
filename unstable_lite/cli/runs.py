"""Commands about files on this disk: new, runs, top, report, push."""

from __future__ import annotations

import functools
import itertools
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from unstable_lite.cli.options import Debug, Outputs, TrustConfig, console, errors_as_messages
from unstable_lite.errors import ConfigError, UnstableError

EXAMPLES = {
    "quickstart": ("quickstart.toml",),
    "connect-four": ("connect_four.toml",),
    "liars-dice": ("liars_dice.toml",),
    "kuhn": ("kuhn.toml",),
    "a2c": ("a2c.toml",),
    "league": ("league.toml",),
    "policies": ("main_and_exploiter.toml",),
    "exploiter": ("exploiter.toml",),
    "exploitability": ("exploitability_of_a_model.toml",),
    "warm-start": ("warm_start.toml",),
    "language-model": ("smollm2.toml",),
    "questions": ("questions.toml", "arithmetic.jsonl"),
    "branching": ("branching.toml", "branching.py"),
    "gpu": ("selfplay_24gb.toml",),
    "gpus": ("selfplay_gpu.toml",),
    "game": ("custom_env.toml", "custom_env.py"),
    "algorithm": ("custom_algorithm.toml", "custom_algorithm.py"),
    "reward": ("custom_reward_transformation.toml", "custom_reward_transformation.py"),
    "opponent": ("custom_opponent.toml", "custom_opponent.py"),
    "verifiers": ("verifiers.toml", "verifiers_env.py", "verifiers_guess.py"),
}
"""Files of each example: a config, whose first line describes it, and the files that the config names."""
SCRIPT = "unstable-lite"


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


def new(
    name: Annotated[str | None, typer.Argument(help="Name of the example; without it, all are listed.")] = None,
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Existing or new directory.")] = Path(),
    debug: Debug = False,
) -> None:
    """Write an example: a commented config, and the module or data that it names."""
    with errors_as_messages(debug):
        from unstable_lite.dashboards.terminal import key_value_lines

        out = console()
        if name is None:
            out.print(key_value_lines((name, describe(name)) for name in EXAMPLES), soft_wrap=True)
            out.print("\nto write one into DIR: unstable-lite new NAME DIR")
            return
        for path in write(name, directory):
            out.print(f"wrote {path}", soft_wrap=True)
        if directory != Path():
            out.print(f"cd {shlex.quote(str(directory))}", soft_wrap=True)
        out.print("\n".join(commands(name)), soft_wrap=True, markup=False)


def describe(name: str) -> str:
    """Return the first line of the example's config."""
    with (_source() / EXAMPLES[name][0]).open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").rstrip()


def commands(name: str) -> list[str]:
    """Return the commands that the config names first, such as an installation, and those that check and run it."""
    config = EXAMPLES[name][0]
    with (_source() / config).open(encoding="utf-8") as file:
        first = list(itertools.takewhile(lambda line: line.startswith("#"), file))
    named = [line[4:].strip().replace("python -m unstable_lite", SCRIPT) for line in first if line.startswith("#   ")]
    is_whole = any(line.startswith((f"{SCRIPT} run", f"{SCRIPT} eval")) for line in named)
    return named if is_whole else [*named, f"{SCRIPT} check {config}", f"{SCRIPT} run {config}"]


def write(name: str, directory: Path) -> list[Path]:
    """Write the files of an example into `directory` and return their paths.

    Raises ConfigError for an unknown name. Raises UnstableError if one of the files exists, in which case none is
    written, or if one cannot be written.
    """
    if name not in EXAMPLES:
        raise ConfigError(f"there is no example {name!r}; choose one of {', '.join(EXAMPLES)}")
    paths = [directory / file for file in EXAMPLES[name]]
    try:
        for path in paths:
            if path.exists():
                raise UnstableError(f"{path} exists already, so nothing was written; name another directory")
        directory.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with path.open("xb") as file:
                file.write((_source() / path.name).read_bytes())
    except OSError as error:
        why = "it is a file" if directory.is_file() else error.strerror
        raise UnstableError(f"cannot write to {directory}: {why}; name another directory") from error
    return paths


def _source() -> Path:
    """Return the folder of the examples, which a built package contains, and which lies beside it in a clone."""
    package = Path(__file__).parents[1]
    return packed if (packed := package / "examples").is_dir() else package.parent / "examples"
