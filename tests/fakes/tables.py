"""Adapter tables as games see them."""

from __future__ import annotations

from unstable_lite.adapters.table import AdapterTable, Origin


def offer(table: AdapterTable, id: int) -> None:
    """Take an adapter through its states until games may use it."""
    table.add(id, Origin("update", str(id)), f"digest of {id}")
    table.load(id)
    table.check(id)
    table.pin(id)
    table.offer(id)
