"""Trace of the files of the package that a turn and an adapter pass, in the orchestrator and in an engine."""

import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import unstable_lite
from unstable_lite.engines.base import ScriptedEngine
from unstable_lite.orchestrator.canary_checks import CANARY_TOKENS
from unstable_lite.transport.messages import Generate
from unstable_lite.transport.worker_main import WorkerSpec

PACKAGE = f"{Path(unstable_lite.__file__).parent}/"
ENGINE_FILE = "engine-walks.json"
Name = Literal["turn", "adapter"]


class Walks:
    """Profile function that notes the files whose functions are entered, while a walk is under way.

    A coroutine that began before the walk is not part of it, although it continues.
    """

    def __init__(self, marks: Mapping[tuple[str, str], Name | None]) -> None:
        """marks: the walk, or None for its end, by ("call" or "return", qualified name of the function)."""
        self.files: dict[str, dict[str, set[str]]] = {"turn": defaultdict(set), "adapter": defaultdict(set)}
        """Functions by file, by walk."""
        self.current: Name | None = None
        self._marks = marks
        self._before: set[FrameType] = set()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
            return
        self.current = self._marks.get((event, code.co_qualname), self.current)
        if event == "call":
            self.note(frame)

    def note(self, frame: FrameType) -> None:
        """Note the file of a function that is entered."""
        name, is_coroutine = frame.f_code.co_filename, frame.f_code.co_flags & inspect.CO_COROUTINE
        if self.current is None:
            if is_coroutine:
                self._before.add(frame)
        elif name.startswith(PACKAGE) and frame not in self._before and frame.f_code.co_name != "<module>":
            self.files[self.current][name.removeprefix(PACKAGE)].add(frame.f_code.co_qualname)


class TracedEngine(ScriptedEngine):
    """Engine that writes the walks of its process into `run.output_dir` at its end."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._walks = Walks({})
        self._file = Path(spec.config.run.output_dir) / ENGINE_FILE
        sys.setprofile(self._walks)

    def add_request(self, request: Generate) -> None:
        self._begin_walk("adapter" if request.max_tokens == CANARY_TOKENS else "turn")
        super().add_request(request)

    def load_adapter(self, version: int, path: Path) -> str:
        self._begin_walk("adapter")
        return super().load_adapter(version, path)

    def _begin_walk(self, name: Name) -> None:
        """Begin a walk with the functions that called the engine."""
        self._walks.current = name
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            self._walks.note(frame)
            frame = frame.f_back

    def close(self) -> None:
        sys.setprofile(None)
        files = {walk: {name: sorted(of) for name, of in found.items()} for walk, found in self._walks.files.items()}
        self._file.write_text(json.dumps(files))
