"""league.jsonl: the ladder and who met whom, a line an update and an evaluation, of what changed since the last.

All lines together are the league at their last one, and the first n at the n-th.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.trackers.records import AppendFile, to_line


class LeagueLog:
    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._step = 0
        self._models: dict[str, list[Any]] = {}
        self._matches: dict[tuple[str, str], int] = {}

    def log(self, step: int, registry: ModelRegistry) -> None:
        """`models`: [μ, σ, games, active, current] by uid; `matches`: [uid, uid, games].

        An evaluation that is of an earlier step, and ends now, tells of the league as it is now.
        """
        self._step = max(step, self._step)
        current = registry.get_current_ckpt()
        changed = {}
        for uid in registry.touched:
            meta = registry.get(uid)
            row = [round(meta.rating.mu, 4), round(meta.rating.sigma, 4), meta.games, meta.active, uid == current]
            if self._models.get(uid) != row:
                changed[uid] = row
        met = {pair: registry.match_counts[pair] for pair in registry.touched_pairs}
        matches = [[*pair, games] for pair, games in met.items() if self._matches.get(pair) != games]
        self._file.write(to_line({"step": self._step, "models": changed, "matches": matches}))
        self._models |= changed  # of a line that finds no room the next one tells
        self._matches |= met
        registry.touched.clear()
        registry.touched_pairs.clear()

    def close(self) -> None:
        self._file.close()
