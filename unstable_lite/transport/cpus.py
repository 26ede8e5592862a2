"""Number of CPUs that a process may use: the smaller of its affinity mask and the CPU quota of its container."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Return the number of whole CPUs, at least 1. `root`: directory that holds `proc` and `sys`."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota, in CPUs, of this process's control group and of each of its ancestors that has one."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controllers and "cpu")  # version 1 has a directory for each controller
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        # A container may have its own group at the top, although the path is that on the host.
        own = top / path.strip("/")
        for group in itertools.takewhile(lambda group: group != top.parent, (own, *own.parents)):  # noqa: B023
            with contextlib.suppress(OSError, ValueError, ArithmeticError):  # there is no such file, or no quota
                quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
                if quota > 0:
                    yield quota / period
