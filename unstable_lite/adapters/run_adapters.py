"""Adapters that a run saved: their names, their order, and the best of them by the run's own evaluations.

Reads names, eval.jsonl and config.toml of a run directory; knows nothing of an adapter's contents.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

from unstable_lite.config.games import EvalEnvSpec
from unstable_lite.config.reading import parse_toml
from unstable_lite.errors import ConfigError
from unstable_lite.files import read_records

NEWEST, BEST = "newest", "best"
_NAMED_BY = ("env_id", "num_players", "fixed_opponent", "temperature", "top_p")
"""Keys of an eval env that name its results; other keys may differ between versions."""
_RUN_WORD = re.compile(r"(.+)/(ckpt-\d+|newest|best)/*")


def update_of(path: Path) -> int | None:
    """Return the number in `ckpt-<number>`; None for any other name."""
    match = re.fullmatch(r"ckpt-(\d+)", path.name)
    return int(match[1]) if match else None


def by_update(directory: Path) -> dict[int, Path]:
    """Return the checkpoints or adapters in a directory by update, oldest first."""
    found = [(update, path) for path in directory.glob("ckpt-*") if (update := update_of(path)) is not None]
    return dict(sorted(found))


def find_saved(word: str) -> Path:
    """Return the adapter that `DIRECTORY/ckpt-N`, `DIRECTORY/newest` or `DIRECTORY/best` names.

    Kept adapters count like checkpoints. Raises ConfigError if there is no such run or adapter.
    """
    match = _RUN_WORD.fullmatch(word)
    if match is None:
        raise ConfigError("write run:DIRECTORY/ckpt-N, run:DIRECTORY/newest or run:DIRECTORY/best")
    run, which = Path(match[1]).expanduser(), match[2]
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run} is not a run directory: it has no checkpoints/")
    saved = by_update(run / "adapters") | by_update(run / "checkpoints")
    if not saved:
        raise ConfigError(f"{run} has no checkpoint yet")
    if which == BEST:
        return saved[_best_update(run, saved)]
    update = max(saved) if which == NEWEST else int(which.removeprefix("ckpt-"))
    if update not in saved:
        there = ", ".join(f"ckpt-{number}" for number in sorted(saved)[-10:])
        raise ConfigError(f"{run} has no {which}; its newest are {there}")
    return saved[update]


def _best_update(run: Path, saved: dict[int, Path]) -> int:
    """Return the update of the saved adapter with the best mean points over all of the run's eval envs.

    Only evaluations with a quota count, because the others have few games; a single-player env counts with its mean
    reward; of equal means the newest is taken. Raises ConfigError if no saved adapter was evaluated on all eval envs.
    """
    results: dict[int, dict[tuple[str, str], float]] = {}
    for line in read_records(run / "eval.jsonl"):
        update = update_of(Path(line["model"]))
        result = line["mean_reward"] if line["points"] is None else line["points"]
        if line["label"] != "concurrent" and update in saved and result is not None:
            results.setdefault(update, {})[line["env_id"], line["opponent"]] = result
    envs = _eval_envs(run)
    means = {
        update: fmean(of_env[env] for env in envs) for update, of_env in results.items() if envs and envs <= {*of_env}
    }
    if not means:
        raise ConfigError(
            f"{run} has no saved checkpoint that was evaluated on all of its eval_envs (run.eval_games, "
            "run.eval_every), so none is the best: name one as run:DIRECTORY/ckpt-N, or use run:DIRECTORY/newest"
        )
    return max(means, key=lambda update: (means[update], update))


def _eval_envs(run: Path) -> set[tuple[str, str]]:
    """Return env and opponent of each eval env in a run's config."""
    path = run / "config.toml"
    try:
        envs: list[dict[str, Any]] = parse_toml(path.read_bytes(), str(path)).get("eval_envs", [])
        specs = [EvalEnvSpec.model_validate({key: env[key] for key in _NAMED_BY if key in env}) for env in envs]
        return {(spec.env_id, spec.opponent) for spec in specs}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not the config of a run: {type(error).__name__}: {error}") from error
