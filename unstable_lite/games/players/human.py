"""A person at the terminal. The typed line is the action; brackets are added if it has none.

An action that the game does not list is played only if it is typed twice, because most games end at an illegal one.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys

from rich.console import Console

from unstable_lite.errors import OpponentError
from unstable_lite.games.players.scripted import legal_actions, lists_actions
from unstable_lite.printable import visible
from unstable_lite.types import Reply

MOST_SHOWN = 20
"""Most legal actions that are listed after an illegal one."""


class HumanPlayer:
    _stdin: asyncio.StreamReader | None = None
    """One reader per process, so that the next player reads input that was typed ahead."""

    def __init__(self, env_id: str, seed: int) -> None:  # noqa: ARG002
        self._env_id, self._console = env_id, Console(highlight=False, markup=False, emoji=False)
        self._seen = ""

    async def act(self, observation: str) -> Reply:
        """Show the observation and read a line. Raises OpponentError at the end of the input."""
        self._console.rule("your turn")
        self._console.print(visible(news(self._seen, observation)))
        self._seen = observation
        legal = legal_actions(self._env_id, observation) if lists_actions(self._env_id) else []
        refused = None
        while True:
            typed = await self._line()
            action = typed if "[" in typed else f"[{typed}]"
            if typed and (not legal or typed == refused or _plain(action) in map(_plain, legal)):
                return Reply(action=action, text=typed, prompt=observation)
            if typed:
                refused = typed
                known = ", ".join(legal[:MOST_SHOWN]) + ", …" * (len(legal) > MOST_SHOWN)
                self._console.print(visible(f"{action} is not legal here. Type one of {known}, or the same again."))

    async def _line(self) -> str:
        self._console.print("> ", end="", style="bold")
        mode = os.fstat(sys.stdin.fileno()).st_mode
        # Reading a file or /dev/null never blocks, and they cannot be polled.
        may_block = sys.stdin.isatty() or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
        line = await (await self._reader()).readline() if may_block else sys.stdin.buffer.readline()
        if not line:
            raise OpponentError("the input has ended, so the human player cannot continue")
        return line.decode(errors="replace").strip()

    @classmethod
    async def _reader(cls) -> asyncio.StreamReader:
        if cls._stdin is None:
            cls._stdin = asyncio.StreamReader()
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(cls._stdin), sys.stdin)  # type: ignore[arg-type]
        return cls._stdin


def news(before: str, observation: str) -> str:
    """Return the new part of an observation: its end, or its paragraphs from the first changed one on."""
    if observation.startswith(before) and observation != before:
        return observation.removeprefix(before).strip()
    same = os.path.commonprefix([before, observation])  # noqa: RUF071 (of two texts)
    return observation[same.rfind("\n\n") + 1 :].strip()


def _plain(action: str) -> str:
    return "".join(action.split()).casefold()
