"""Weights & Biases, by the extra `wandb`, under the same names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb


class WandbSink:
    def __init__(self, project: str, run_name: str, config: dict[str, Any]) -> None:
        self._run = wandb.init(project=project, name=run_name, config=config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "learner/step": step})

    def close(self) -> None:
        self._run.finish()
