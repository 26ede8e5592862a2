"""`python -m unstable_lite`, which is also the command `unstable-lite`."""

import os
import signal


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _end)
    from unstable_lite.cli.app import main as command

    command()


def _end(*_: object) -> None:
    """End the process at once on a signal outside a command's body: an import or a parser may swallow an exception."""
    try:
        os.write(2, b"error: interrupted\n")
    finally:  # also if the terminal is closed
        os._exit(130)


if __name__ == "__main__":
    main()
