"""Lease of the newest adapter for one turn (`league.adapter_policy` "turn")."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from unstable_lite.adapters.table import AdapterTable
from unstable_lite.league.model_registry import ModelRegistry


@contextlib.contextmanager
def leased_newest(registry: ModelRegistry, table: AdapterTable) -> Iterator[int]:
    """Lease the adapter of the current policy and yield its version, 0 if it is the base.

    Nothing is awaited between the two, so the adapter cannot retire between them.
    """
    version = registry.current.adapter_version or 0
    with table.leased(version):
        yield version
