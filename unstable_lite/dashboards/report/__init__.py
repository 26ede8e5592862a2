"""Report of a run as one HTML file, to be opened from disk without a network.

Reads the directory of a run, which may be in progress, and changes nothing there. Knows nothing of the making of runs.
Texts of models and all other foreign texts go into the page as compressed data and onto the screen as text, never as
markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from unstable_lite.dashboards.report.games import read_games
from unstable_lite.dashboards.report.page import render
from unstable_lite.dashboards.run_directory import read_groups
from unstable_lite.errors import UnstableError
from unstable_lite.files import replaced, understood
from unstable_lite.models.local_tokenizer import find_tokenizer

MAX_GAMES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    path: Path
    size_bytes: int
    games: int
    """Number of games of which the page has every turn."""
    games_read: int


def write_report(directories: Sequence[Path], output: Path, max_games: int = MAX_GAMES) -> Written:
    """Write the page of one run, or of several side by side.

    max_games: most transcripts per run of training games, of evaluation games and of void games, evenly spread over
    the run. Raises UnstableError if a directory is not a run's or cannot be read, or if the extra `report` is missing.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UnstableError("a report needs plotly: pip install 'unstable-lite[report]'") from None
    groups, games = read_groups(directories), []
    runs = [run for group in groups for run in group.runs]
    for run in runs:
        with understood(run.directory):
            games.append(
                read_games(run.directory, find_tokenizer(str(run.config["model_name"])), max_games, run.config)
            )
    directories_read = ", ".join(str(run.directory) for run in runs)
    try:
        with understood(directories_read):
            page = render(groups, games, get_plotlyjs())
    except jinja2.UndefinedError as error:  # a config without a key that every run writes
        raise UnstableError(f"{directories_read}: its files are not as a run writes them ({error})") from error
    with replaced(output) as partial:
        partial.write_bytes(page)
    num_kept, num_read = sum(len(of_run.kept) for of_run in games), sum(of_run.num_read for of_run in games)
    return Written(path=output, size_bytes=len(page), games=num_kept, games_read=num_read)
