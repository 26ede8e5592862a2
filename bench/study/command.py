"""`python -m bench study FILE.toml`: run every arm with every seed, and write the results after each run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console

from bench.harness import REPOSITORY
from bench.study.page import note_of, number, to_html, to_markdown, to_plots
from bench.study.reading import Checked, read_study
from bench.study.results import MAX_BYTES, read_results, record_run, remarks, write_results
from bench.study.running import Task, finished_directory, make_warm_start, run_all, task_of, wait_for_orphans
from unstable_lite.adapters.store import try_lock
from unstable_lite.cli.options import errors_as_messages
from unstable_lite.errors import UnstableError
from unstable_lite.files import replaced

RESULTS = REPOSITORY / "bench" / "results" / "studies"


def main(
    file: Annotated[Path, typer.Argument(help="A study file; examples/studies/ has some.")],
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Results, with table and plots beside. Default: bench/results/studies/NAME.json."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Parent of the run directories and page. Default: outputs/studies/NAME.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at once.")] = 1,
    again: Annotated[bool, typer.Option(help="Repeat the runs whose config is not the study's any more.")] = False,
    show: Annotated[bool, typer.Option(help="Run nothing; write table, plots and page of the results.")] = False,
) -> None:
    """Run arms × seeds, one seed of every arm after the other. The same command continues a study that was stopped."""
    with errors_as_messages(debug=False):
        checked = read_study(file)
        session = _Session(
            checked,
            json_file or RESULTS / f"{checked.study.name}.json",
            (output or Path("outputs") / "studies" / checked.study.name).absolute(),
        )
        with session.locked():
            is_whole = session.run(jobs, again, show)
        raise typer.Exit(0 if is_whole else 1)


class _Session:
    def __init__(self, checked: Checked, json_file: Path, output: Path) -> None:
        self._checked, self._json, self._output = checked, json_file, output
        self._console = Console(width=None if Console().is_terminal else 150)
        self._results = read_results(json_file, checked.study.name)
        study = checked.study
        self._tasks = [task_of(checked, arm, seed, output) for seed in study.seeds for arm in study.arms]
        self._failed: list[str] = []
        self._left: list[Task] = []
        """Runs that have not ended."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the output folder's lock. Raises UnstableError if another study has it."""
        self._output.mkdir(parents=True, exist_ok=True)
        if (lock := try_lock(self._output)) is None:
            raise UnstableError(f"{self._output}: another process runs this study; name another folder with --output")
        try:
            yield
        finally:
            os.close(lock)

    def run(self, jobs: int, again: bool, show: bool) -> bool:
        """Run the missing runs, and write everything. Return whether the study is whole."""
        measures = self._checked.study.measures
        changed = {task: keys for task in self._tasks if (keys := self._changed(task))}
        for task, keys in changed.items():
            todo = "it is repeated" if again else "it is left out; --again repeats it"
            self._say(f"{task.label}: its config has changed since it ran ({'; '.join(keys[:5])}): {todo}")
        for task in self._tasks:
            record = self._results.runs.get(task.key)
            if record is not None and task not in changed and not record["measures"].keys() >= measures.keys():
                self._record(task)  # measures that are new in the file, if the run directory is here
        if not show:
            left = [task for task in self._tasks if (again if task in changed else task.key not in self._results.runs)]
            wait_for_orphans(left, self._say)
            self._left = [task for task in left if not self._record(task)]
            self._write()
            self._make_targets(jobs)
            for task in self._left:
                make_warm_start(self._checked, task, self._say)
            run_all(self._left.copy(), jobs, lambda task: self._announce(task, jobs), self._ended, self._say)
        for text in (*self._write(), *self._failed, f"results: {self._json}; page: {self._page}"):
            self._say(text)
        return not self._failed and len(self._results.of(self._checked)) == len(self._tasks)

    def _make_targets(self, jobs: int) -> None:
        """Make the runs whose checkpoints are played. If one fails, the runs that need it are left out."""
        named = {target.name: target for task in self._left for target in task.targets}
        wait_for_orphans([*named.values()], self._say)
        missing = [target for target in named.values() if finished_directory(target) is None]
        for target in missing:
            make_warm_start(self._checked, target, self._say)
        say = self._say
        run_all(missing, jobs, lambda one: say(one.label), lambda one, why: say(f"  {one.label} {why or 'ended'}"), say)
        lost = {task: target for task in self._left for target in task.targets if finished_directory(target) is None}
        self._failed += [f"failed: {task.label}, whose target failed; log: {lost[task].log}" for task in lost]
        self._left = [task for task in self._left if task not in lost]

    @property
    def _page(self) -> Path:
        return self._output / "study.html"

    def _changed(self, task: Task) -> list[str]:
        return self._results.changed(self._checked, *task.key) if task.key in self._results.runs else []

    def _record(self, task: Task) -> bool:
        """Add the record of a run if it is finished. Return whether it is."""
        if (directory := finished_directory(task)) is None:
            return False
        record_run(self._checked, task.arm, task.seed, directory, self._results)
        return True

    def _announce(self, task: Task, jobs: int) -> None:
        """Say which run starts, and the time left by the mean times of finished runs: of the arm, else of all."""
        taken, left = [(arm, run["seconds"]) for (arm, _), run in self._results.runs.items()], ""
        if taken:
            of_arm = [[seconds for arm, seconds in taken if arm == one.arm.name] for one in self._left]
            left_s = sum(fmean(own or [seconds for _, seconds in taken]) for own in of_arm) / jobs
            left = f", about {left_s / 60:.0f} min left" if left_s > 90 else f", about {left_s:.0f} s left"
        where = f"run {self._tasks.index(task) + 1} of {len(self._tasks)}"
        self._say(f"{where}: {task.label} ({len(self._left)} to go{left})")

    def _ended(self, task: Task, failure: str | None) -> None:
        self._left.remove(task)
        if failure is None and self._record(task):
            self._write()
            run = self._results.runs[task.key]
            primary = self._checked.study.primary
            self._say(f"  {task.label}: {run['seconds']:.0f} s, {primary} {number(run['measures'][primary])}")
        else:
            self._failed.append(f"failed: {task.label}; log: {task.log}")
            self._say(f"  {task.label} {failure}")

    def _write(self) -> list[str]:
        """Write JSON, table, plots and page; return the table and the notes."""
        study = self._checked.study
        content = write_results(self._json, self._checked, self._results)
        notes = [*note_of(study, content), *remarks(self._checked, self._results.of(self._checked))]
        if (size := self._json.stat().st_size) > MAX_BYTES:
            notes.append(f"{self._json} has {size / 1e6:.1f} MB; keep fewer measures or divide the study")
        table = to_markdown(study, content, notes)
        plots = {self._json.with_name(self._json.stem + end): text for end, text in to_plots(study, content).items()}
        pages = {self._json.with_suffix(".md"): table, self._page: to_html(study, content, notes)}
        for path, text in (pages | plots).items():
            with replaced(path) as partial:
                partial.write_text(text, encoding="utf-8")
        return [table]

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
