"""Weights & Biases sink, with the same metric names. Needs the extra `wandb`."""

from __future__ import annotations

import hashlib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from unstable_lite.config.env_ids import with_slugs
from unstable_lite.types import Histogram


class WandbSink:
    def __init__(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        """`directory`: of the run. A resumed run continues its W&B run."""
        identity = hashlib.blake2b(str(directory).encode(), digest_size=8).hexdigest()
        self._run = wandb.init(
            project=project, name=directory.name, id=identity, resume="allow", dir=directory, config=config
        )
        self._run.define_metric("*", step_metric="learner/step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, {with_slugs(name): value for name, value in metrics.items()})

    def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None:
        self._log(step, {one.name: wandb.Histogram(np_histogram=(one.counts, one.edges)) for one in histograms})

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        self._log(
            step,
            {
                with_slugs(name): wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
                for name, text in texts.items()
            },
        )

    def close(self) -> None:
        self._run.finish()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "learner/step": step})
