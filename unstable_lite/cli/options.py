"""Options that several commands share, and the report of errors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unstable_lite.errors import ConfigError, UnstableError
from unstable_lite.orchestrator.event_loop import end_handlers
from unstable_lite.printable import visible

if TYPE_CHECKING:
    from rich.console import Console

ConfigPath = Annotated[Path, typer.Argument(help="A TOML file; `new` writes some.")]
TrustConfig = Annotated[
    bool, typer.Option("--trust-config", help="Use the code and servers that a foreign run's config.toml names.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value …, for example learner.batch_size=64")]
Debug = Annotated[bool, typer.Option("--debug", help="Tracebacks instead of messages.")]
SetKeys = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, repeated for more; engine.temperature=0.6")
]
ModelsOfRun = Annotated[
    list[str] | None, typer.Argument(help="'base', run or adapter directories; default: base and RUN.")
]
Outputs = Annotated[Path, typer.Option("--outputs", help="Parent of the run directories.")]


class _Interrupted(KeyboardInterrupt):
    """Unlike KeyboardInterrupt itself, it never makes Python end by SIGINT although it was caught."""


def _interrupt(*_: object) -> None:
    raise _Interrupted


@contextlib.contextmanager
def errors_as_messages(debug: bool) -> Iterator[None]:
    """Report errors of this package as messages with exit code 1, and signals as 130; with `debug` as tracebacks."""
    try:
        with contextlib.ExitStack() as stack:
            for signum, handler in end_handlers().items():
                if handler is not signal.SIG_IGN:
                    stack.callback(signal.signal, signum, handler)
                    signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else _interrupt)
            yield
    except (KeyboardInterrupt, asyncio.CancelledError, UnstableError, OSError) as error:
        if debug:
            raise
        if isinstance(error, KeyboardInterrupt):
            print("error: interrupted", file=sys.stderr)  # noqa: T201
        if not isinstance(error, UnstableError | OSError):
            raise typer.Exit(130) from None
        for problem in error.problems if isinstance(error, ConfigError) else [str(error)]:
            print(f"error: {visible(problem)}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None


def console() -> Console:
    from unstable_lite.dashboards.terminal import VisibleConsole

    return VisibleConsole()
