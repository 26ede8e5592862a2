"""What was trained on: one compressed file of JSON Lines for each update, written beside the event loop.

Knows nothing of losses; a row is a step as the learner was given it, with the text that it is of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unstable_lite.trackers.records import write_whole
from unstable_lite.types import Step

log = logging.getLogger(__name__)

Batch = Sequence[Step] | Sequence[Sequence[Step]]
"""Steps, or whole episodes of them."""


class TrainDataFiles:
    """`step-000001.jsonl.gz` is what the first update trained on."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-data")
        self._writing: Future[None] | None = None

    async def write(self, update: int, version: int, batch: Batch) -> None:
        """Start writing once the file before is done; raises OSError if that one could not be written."""
        before, self._writing = self._writing, None
        try:
            if before is not None:
                await asyncio.wrap_future(before)
        finally:
            self._writing = self._thread.submit(self._write, update, version, batch)

    def close(self) -> None:
        """Waits for the last file."""
        self._thread.shutdown()
        if self._writing is not None and (error := self._writing.exception()) is not None:
            log.error("%s: the last batch could not be written: %s", self._directory, error)

    def _write(self, update: int, version: int, batch: Batch) -> None:
        path = self._directory / f"step-{update:06d}.jsonl.gz"
        write_whole(path, [step_to_json(step, version) for step in steps_of(batch)])


def steps_of(batch: Batch) -> Iterator[Step]:
    for entry in batch:
        if isinstance(entry, Step):
            yield entry
        else:
            yield from entry


def step_to_json(step: Step, version: int) -> dict[str, Any]:
    """`version`: of the policy that was updated. `reward` is after all stages; `step_info` has them one by one."""
    generation = step.generation
    return {
        "pid": step.pid,
        "obs": step.obs,
        "act": step.act,
        "reward": step.reward,
        "env_id": step.env_id,
        "step_info": step.step_info,
        "format_feedback": step.format_feedback,
        "prompt_tokens": len(generation.prompt_ids),
        "completion_tokens": len(generation.completion_ids),
        "finish_reason": generation.finish_reason,
        "adapter_version": generation.adapter_version,
        "staleness": version - generation.adapter_version,
    }
