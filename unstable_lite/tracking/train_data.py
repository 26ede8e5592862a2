"""Training data: one compressed file of JSON Lines for each update, written in a thread beside the event loop.

Knows nothing of losses; a row is a step as the learner received it, with its text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from unstable_lite.files import write_whole
from unstable_lite.types import Logprobs, Step

log = logging.getLogger(__name__)

Batch = Sequence[Step] | Sequence[Sequence[Step]]
"""Steps, or whole episodes of steps."""


class TrainDataFiles:
    """Files of training data; `step-000001.jsonl.gz` has the batch of the first update."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train-data")
        self._writing: Future[None] | None = None

    async def write(self, update: int, version: int, batch: Batch, logprobs: Sequence[Logprobs] = ()) -> None:
        """Start writing after the previous file is done. Raises OSError if the previous file could not be written."""
        before, self._writing = self._writing, None
        try:
            if before is not None:
                await asyncio.wrap_future(before)
        finally:
            self._writing = self._thread.submit(self._write, update, version, batch, logprobs)

    def close(self) -> None:
        """Wait for the last file."""
        self._thread.shutdown()
        if self._writing is not None and (error := self._writing.exception()) is not None:
            log.error("%s: the last batch could not be written: %s", self._directory, error)

    def _write(self, update: int, version: int, batch: Batch, logprobs: Sequence[Logprobs | None]) -> None:
        path = self._directory / f"step-{update:06d}.jsonl.gz"
        steps = list(steps_of(batch))
        of_steps = logprobs or [None] * len(steps)
        write_whole(path, [step_to_json(step, version, one) for step, one in zip(steps, of_steps, strict=True)])


def train_files(directory: Path) -> dict[int, Path]:
    """Return the files of training data of a run directory by update, oldest first."""
    paths = sorted((directory / "train_data").glob("step-*.jsonl.gz"))
    return {int(path.name.removeprefix("step-").removesuffix(".jsonl.gz")): path for path in paths}


def steps_of(batch: Batch) -> Iterator[Step]:
    for entry in batch:
        if isinstance(entry, Step):
            yield entry
        else:
            yield from entry


def step_to_json(step: Step, version: int, logprobs: Logprobs | None = None) -> dict[str, Any]:
    """Return a step as a row. `reward` is after all stages; `step_info` has each stage.

    `version`: of the policy that was updated. `logprobs`: of the completion's tokens under that policy; None if the
    step was too long to train on. Minus the engine's log-probabilities in games.jsonl, they are the logarithms of the
    tokens' importance weights.
    """
    generation = step.generation
    row = {
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
    if generation.forced is not None:
        row["forced_tokens"] = len(generation.forced.ids)
    if step.weight != 1:
        row["weight"] = step.weight
    if step.token_weights is not None:
        row["token_weights"] = np.asarray(step.token_weights).tolist()
    if logprobs is not None:
        row["learner_logprobs"] = [round(logprob, 4) for logprob in logprobs.tolist()]
    return row
