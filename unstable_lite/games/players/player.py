"""What sits at a seat."""

from __future__ import annotations

from typing import Protocol

from unstable_lite.types import Reply


class Player(Protocol):
    async def act(self, observation: str) -> Reply:
        """Answer what this player sees. Raises RequestError if no answer can be had."""
