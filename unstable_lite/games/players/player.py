"""Interface of the players of a game."""

from __future__ import annotations

from typing import Protocol

from unstable_lite.types import Reply


class Player(Protocol):
    async def act(self, observation: str) -> Reply:
        """Answer an observation. Raises RequestError if there is no answer."""
