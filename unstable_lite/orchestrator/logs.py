"""The log file of a process that holds a run, an evaluation or a fine-tuning together."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import sys
from collections.abc import Iterator
from pathlib import Path

from unstable_lite.printable import VisibleFormatter

LOG_BYTES, LOG_BACKUPS = 10_000_000, 5
"""Size of a log file before it rotates, and number of rotated files (reference: `tracker.py`)."""


class _LogFile(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Lose a line on a full disk rather than the run."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextlib.contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write everything that this package logs to one file."""
    handler = _LogFile(path, maxBytes=LOG_BYTES, backupCount=LOG_BACKUPS, encoding="utf-8")
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("unstable_lite")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
        with contextlib.suppress(OSError):  # closing retries a write that failed
            handler.close()
