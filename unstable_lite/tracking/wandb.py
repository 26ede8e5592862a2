"""Weights & Biases sink, with the same metric names. Needs the extra `wandb`."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import wandb

from unstable_lite.config.env_ids import with_slugs
from unstable_lite.errors import UnstableError
from unstable_lite.files import replaced
from unstable_lite.types import Histogram

IDENTITY = "wandb.json"
"""File in the run directory with the entity, project and id of its W&B run."""
_EVALUATED = re.compile(r"(?:(\w+)/)?evaluation-(.+) \((.+)\)/checkpoint (Points|Reward)")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The W&B run of a run directory."""

    entity: str | None = None
    project: str
    id: str | None = None
    """None: W&B chooses it, or the agent of a sweep, which also decides entity and project."""


class WandbSink:
    def __init__(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        """Begin a W&B run in `project`, or continue that of the run directory.

        Raises UnstableError if W&B does not accept the run.
        """
        path = directory / IDENTITY
        try:
            known = (
                msgspec.json.decode(path.read_bytes(), type=Identity) if path.exists() else Identity(project=project)
            )
            self._run = wandb.init(
                **msgspec.structs.asdict(known),
                name=directory.name,
                resume="allow",  # not "must": the server does not know a run whose offline records are still here
                dir=directory,
                config=config,
                # W&B would print the newest metrics, such as the number of alarms, over the run's own end.
                settings=wandb.Settings(max_end_of_run_history_metrics=0, max_end_of_run_summary_metrics=0),
            )
        except (wandb.Error, msgspec.DecodeError) as error:
            another = f"delete {path} to begin another W&B run; " * path.exists()
            raise UnstableError(
                f"tracker.wandb_project: W&B cannot log this run: {' '.join(str(error).split())}. Log in with "
                "`wandb login`; without network set WANDB_MODE=offline, and upload later with `wandb sync`; "
                f'{another}tracker.wandb_project="" leaves W&B out'
            ) from error
        run = self._run
        identity = Identity(entity=run.entity or None, project=run.project, id=run.id)
        with replaced(path) as partial:
            partial.write_bytes(msgspec.json.encode(identity))
        # An axis besides W&B's own step, which never goes back: updates that a resumed run repeats would be dropped.
        run.define_metric("*", step_metric="learner/step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {with_slugs(name): value for name, value in metrics.items()}
        for found in [*filter(None, map(_EVALUATED.fullmatch, values))]:
            values[sortable(found)] = values[found[0]]
        self._log(step, values)

    def log_histograms(self, step: int, histograms: Sequence[Histogram]) -> None:
        self._log(step, {one.name: wandb.Histogram(np_histogram=(one.counts, one.edges)) for one in histograms})

    def log_texts(self, step: int, texts: Mapping[str, str]) -> None:
        pages = {with_slugs(name): f"<pre>{html.escape(text)}</pre>" for name, text in texts.items()}
        self._log(step, {name: wandb.Html(page, inject=False) for name, page in pages.items()})

    def close(self) -> None:
        """Finish the W&B run; as a failed one while an exception ends the run."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "learner/step": step})


def sortable(evaluated: re.Match[str]) -> str:
    """Return a second name of an evaluation's points or reward, in characters by which W&B can sort and filter."""
    *names, what = evaluated.groups()
    return re.sub(r"\W+", "_", "_".join(filter(None, [what.lower(), *names])), flags=re.ASCII).strip("_")
