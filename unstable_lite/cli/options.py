"""Options that several commands share, and the report of errors."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.printable import visible

if TYPE_CHECKING:
    from rich.console import Console

ConfigPath = Annotated[Path, typer.Argument(help="A TOML file; examples/ has some.")]
TrustConfig = Annotated[
    bool,
    typer.Option("--trust-config", help="Use the code and servers that a foreign run's config.toml names."),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …, for example learner.batch_size=64")]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")]
SetKeys = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, repeated for more.")]
ModelsOfRun = Annotated[
    list[str] | None, typer.Argument(help="'base', run or adapter directories; default: base and RUN.")
]
EXIT_INTERRUPTED = 130
Outputs = Annotated[Path, typer.Option("--outputs", help="Parent of the run directories.")]


class ErrorsAsMessages:
    """Report errors of this package as messages with exit code 1, and Ctrl-C as 130; with `--debug` as tracebacks."""

    def __init__(self, debug: bool) -> None:
        self._debug = debug

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or self._debug:
            return
        if isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if isinstance(error, UnstableError | OSError):
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            for problem in problems:
                print(f"error: {visible(problem)}", file=sys.stderr)  # noqa: T201
            raise typer.Exit(1) from None


def console() -> Console:
    from unstable_lite.dashboards.terminal import VisibleConsole

    return VisibleConsole()
