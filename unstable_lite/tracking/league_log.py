"""league.jsonl: ratings and results, one line per update and per evaluation with the changes since the last line.

The first n lines together are the league at the n-th line.
"""

from __future__ import annotations

from pathlib import Path

from unstable_lite.files import AppendFile, to_line
from unstable_lite.league.model_registry import ModelRegistry


class LeagueLog:
    def __init__(self, path: Path) -> None:
        self._file = AppendFile(path)
        self._step = 0

    def log(self, step: int, registry: ModelRegistry) -> None:
        """Write the changes.

        `models`: [μ, σ, games, active, current] by uid; `matches`: [uid, uid, games, won, drawn, lost], the results of
        the first of two different models against the second, by rank as in the ratings.
        An evaluation of an earlier step that ends now logs the league as it is now.
        """
        self._step = max(step, self._step)
        current = registry.get_current_ckpt()
        models = {}
        for uid in registry.touched:
            meta = registry.get(uid)
            rating = round(meta.rating.mu, 4), round(meta.rating.sigma, 4)
            models[uid] = [*rating, meta.games, meta.active, uid == current]
        matches = [
            [*pair, registry.match_counts[pair], *registry.match_results.get(pair, (0, 0, 0))]
            for pair in registry.touched_pairs
        ]
        self._file.write(to_line({"step": self._step, "models": models, "matches": matches}))
        registry.touched.clear()  # after the write: if it fails, the next line has these changes
        registry.touched_pairs.clear()

    def close(self) -> None:
        self._file.close()
