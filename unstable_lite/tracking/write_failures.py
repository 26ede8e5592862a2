"""Records that cannot be written, for example on a full disk: counted and reported, without an end of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class WriteFailures:
    def __init__(self, alarm: Callable[[str], None]) -> None:
        self.lost_records = 0
        """Number of lines, events and files that could not be written."""
        self._alarm = alarm
        self._failing: dict[str, str] = {}
        """Sinks and files that cannot be written at the moment, with their paths."""
        self._failed_lately: set[str] = set()
        """Sinks and files that failed since the last update."""

    @contextlib.contextmanager
    def survived(self, target: str) -> Iterator[None]:
        """Continue the run if a record cannot be written, because games and updates are worth more than their records.

        Counts the lost records and reports the first failure. The recovery is reported after an update without a
        failure, because on a nearly full disk short lines fit between long ones that fail.
        """
        try:
            yield
        except OSError as error:
            self.lost_records += 1
            self._failed_lately.add(target)
            if target not in self._failing:
                self._failing[target] = error.filename or target
                self._alarm(
                    f"cannot write {self._failing[target]}: {error.strerror}. The run continues without these records "
                    "(run/lost_records counts them) and keeps trying. Free some space"
                )

    def report_recovery(self) -> None:
        """Report the targets that failed before, but not since the last call."""
        for target in self._failing.keys() - self._failed_lately:
            where = self._failing.pop(target)
            self._alarm(f"writes work again after a failure at {where}; {self.lost_records} records were lost in all")
        self._failed_lately.clear()
