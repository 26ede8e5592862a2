"""The checkpoint of a run that is served or published."""

from __future__ import annotations

from pathlib import Path

from unstable_lite.adapters.frozen import read_facts
from unstable_lite.adapters.run_adapters import BEST, NEWEST, find_saved
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.models import EvaluatedModel

LAST = "last"


def find_checkpoint(run: Path, which: str) -> EvaluatedModel:
    """Return a checkpoint of a run by its update, or the `best` or `last` one; its name is `<run>/ckpt-N`.

    Raises ConfigError if there is none, AdapterError if its files are not an adapter.
    """
    word = {LAST: NEWEST, NEWEST: NEWEST, BEST: BEST}.get(which, f"ckpt-{which.removeprefix('ckpt-')}")
    if word.startswith("ckpt-") and not word.removeprefix("ckpt-").isdecimal():
        raise ConfigError(f"--checkpoint {which}: give the number of an update, 'best' or 'last'")
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run directory: it does not exist")
    found = read_facts(find_saved(f"{run.resolve()}/{word}"))
    return EvaluatedModel(name=f"{run.resolve().name}/{found.path.name}", key=found.key, adapter=found)
