"""A person at the terminal. The typed line is the action; brackets are added if it has none."""

from __future__ import annotations

import asyncio
import os
import stat
import sys

from rich.console import Console

from unstable_lite.errors import OpponentError
from unstable_lite.printable import visible
from unstable_lite.types import Reply


class HumanPlayer:
    _stdin: asyncio.StreamReader | None = None
    """One reader per process, so that the next player reads input that was typed ahead."""

    def __init__(self, env_id: str, seed: int) -> None:  # noqa: ARG002
        self._console = Console(highlight=False, markup=False)

    async def act(self, observation: str) -> Reply:
        """Show the observation and read a line. Raises OpponentError at the end of the input."""
        self._console.rule("your turn")
        self._console.print(visible(observation.strip()))
        self._console.print("> ", end="", style="bold")
        line = await (await self._reader()).readline() if _may_block() else sys.stdin.buffer.readline()
        if not line:
            raise OpponentError("the input has ended, so the human player cannot continue")
        typed = line.decode(errors="replace").strip()
        action = typed if "[" in typed else f"[{typed}]"
        return Reply(action=action, text=typed, prompt=observation)

    @classmethod
    async def _reader(cls) -> asyncio.StreamReader:
        if cls._stdin is None:
            cls._stdin = asyncio.StreamReader()
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(cls._stdin), sys.stdin)  # type: ignore[arg-type]
        return cls._stdin


def _may_block() -> bool:
    """Return whether reading the input may block; a file or /dev/null never does, and cannot be polled."""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    return sys.stdin.isatty() or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
