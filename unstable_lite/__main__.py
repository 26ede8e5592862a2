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
    """End while the modules are imported: nothing is open yet, and an import could swallow an exception."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
