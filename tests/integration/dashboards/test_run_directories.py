"""The `runs` command, and run directories in odd states."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fakes import runs, shown_runs
from unstable_lite import files
from unstable_lite.adapters.store import try_lock
from unstable_lite.cli.app import app
from unstable_lite.config.reading import read_config
from unstable_lite.dashboards.report.curves import evaluation_charts, lines_by_name
from unstable_lite.dashboards.run_directory import list_runs, read_groups
from unstable_lite.errors import UnstableError
from unstable_lite.tracking.run_directory import create_run_directory


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return shown_runs.one_player(tmp_path), shown_runs.questions(tmp_path)


def states(outputs: Path) -> dict[Path, str]:
    return {entry.directory: entry.state for entry in list_runs(outputs)}


def command(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["runs", *map(str, words)])
    return result.exit_code, result.output


def test_runs_of_the_night_in_which_clocks_change_are_in_the_order_of_their_start(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    """The run with the first name began later, at a local time that was an hour earlier."""
    began = {two[0]: 1_792_888_800.0 + 1800, two[1]: 1_792_888_800.0}
    for run, when in began.items():
        write_lines(run / "metrics.jsonl", {"step": 0, "time": when})
    assert [(entry.directory, entry.began) for entry in list_runs(tmp_path)] == [*began.items()]
    code, out = command("--outputs", tmp_path)
    assert code == 0 and out.index(str(two[0])) < out.index(str(two[1]))


def test_running_paused_and_killed_runs_are_distinguished(two: tuple[Path, Path], tmp_path: Path) -> None:
    held, other = two
    lock = try_lock(held)
    assert lock is not None
    assert states(tmp_path) == {held: "running", other: "ended"}
    (held / "PAUSED").write_text("why")
    (other / "live.json").write_text(json.dumps({"pid": os.getpid(), "has_ended": False}))
    assert states(tmp_path) == {held: "paused", other: "killed"}
    os.close(lock)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("runs", "--outputs", "none"), "no run"),
        (("report", "."), "run directory"),
        (("top", "."), "run directory"),
        (("top",), "no run"),
    ],
    ids=" ".join,
)
def test_directory_without_a_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 1 and isinstance(ended.exception, SystemExit), ended.exception
    assert says in ended.output


def test_runs_that_start_simultaneously_get_different_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, problems = read_config(runs.write_small(tmp_path))
    assert config is not None and not problems
    monkeypatch.setattr(time, "strftime", lambda form: {"%Y-%m-%d": "2026-01-02"}.get(form, "10-00-00"))
    begun, made = threading.Barrier(8), list[Path]()

    def begin() -> None:
        begun.wait()
        made.append(create_run_directory(config))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8


def test_run_directory_is_the_same_in_every_locale(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from unstable_lite.config.reading import read_config; "
        "from unstable_lite.tracking.run_directory import lasting_changes; "
        "from unstable_lite.tracking.run_directory import create_run_directory, replace_config; "
        "config, _ = read_config(Path(sys.argv[1])); made = create_run_directory(config); "
        "assert read_config(made / 'config.toml')[0] == config; replace_config(made, config, 1); "
        "assert not [*lasting_changes(made, config)]"
    )
    path = runs.write_small(tmp_path)
    path.write_text(path.read_text() + "[templates.mine]\nuser = 'größer → {observation}'\n", encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(path)], env={**os.environ, **locale}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr


def test_text_in_a_run_directory_does_not_control_the_terminal(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Each command prints through one console; errors are printed separately."""
    run = two[1]
    line = json.loads((run / "eval.jsonl").read_text().splitlines()[0])
    write_lines(run / "eval.jsonl", line | {"opponent": "x\x1b]0;OWNED\x1b[2J"})
    write_lines(run / "alarms.jsonl", {"step": 1, "text": "[bold]\x1b]52;c;OWNED\x9b2J"})
    commands: list[list[Any]] = [["runs", "--outputs", tmp_path], ["top", run]]
    commands.append(["check", run / "\x1b[2J"])
    shown = [CliRunner().invoke(app, [*map(str, words)]).output for words in commands]
    assert r"x\x1b]0;OWNED\x1b[2J" in shown[0] and r"[bold]\x1b]52;c;OWNED\x9b2J" in shown[1]
    assert r"\x1b[2J" in shown[2]
    assert not set("".join(shown)) & set("\x1b\x9b")


BAD = {
    "deep": ("metrics.jsonl", "[" * 200_000 + "\n"),
    "infinite step": ("metrics.jsonl", '{"step": 1e999}\n'),
    "step as text": ("metrics.jsonl", '{"step": "x"}\n'),
    "empty evaluation": ("eval.jsonl", "{}\n"),
    "points as text": ("eval.jsonl", '{"step": 1, "n": 3, "points": "x", "label": "l", "model": "ckpt-1"}\n'),
    "live": ("live.json", '{"pid": "x", "learning_steps": [1]}'),
    "deep config": ("config.toml", "x = " + "[" * 5000 + "]" * 5000),
    "config": ("config.toml", "train_envs = 5\n[run]\nlearning_steps = 3"),
    "alarm": ("alarms.jsonl", '{"step": [1], "text": ""}\n'),
    "no text": ("eval.jsonl", b"\xff\xfe\n"),
    "empty config": ("config.toml", ""),
    "config of no text": ("config.toml", b"\xff\xfe"),
    "config that is a list": ("config.toml", "[1]"),
    "no file": ("metrics.jsonl", None),
    "league": ("league.jsonl", '{"step": 1, "models": 5, "matches": 3}\n'),
}
"""File and content, None for a directory, which is refused as another user's file would be."""


@pytest.mark.parametrize("damage", BAD)
def test_damaged_file_hides_no_other_run_and_is_named_by_commands_on_its_own(
    two: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    name, content = BAD[damage]
    (two[1] / name).unlink()
    if content is None:
        (two[1] / name).mkdir()
    else:
        (two[1] / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert states(tmp_path) == {two[0]: "ended", two[1]: "unreadable"}
    code, out = command("--outputs", tmp_path)
    assert code == 0 and str(two[0]) in out
    for words in (["top", two[1]], ["report", two[1], "--output", tmp_path / "report.html"]):
        ended = CliRunner().invoke(app, [*map(str, words)])
        assert isinstance(ended.exception, SystemExit), f"{words[0]} ended with {ended.exception!r}"
        assert ended.exit_code == 1 and str(two[1]) in ended.output
        assert name in ended.output or damage in ("empty evaluation", "live"), "only the run is named"


def test_live_view_that_is_a_list_counts_as_none(two: tuple[Path, Path], tmp_path: Path) -> None:
    (two[1] / "live.json").write_text("[]")
    assert states(tmp_path) == {two[0]: "ended", two[1]: "killed"}
    for words in (["top", two[1]], ["report", two[1], "--output", tmp_path / "report.html"]):
        assert CliRunner().invoke(app, [*map(str, words)]).exit_code == 0


def test_endless_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1000)
    line = json.dumps({"step": 1, "text": "x" * 900}).encode() + b"\n"
    path = tmp_path / "games-000001.jsonl.gz"
    path.write_bytes(gzip.compress(line * 3 + bytes(10**6)))
    read = files.read_part(path)
    assert [len(next(read)["text"]) for _ in range(3)] == [900] * 3
    with pytest.raises(UnstableError, match=r"line 4 .* 1000 bytes"):
        next(read)


def test_runs_of_equal_names_are_labelled_by_their_folders(tmp_path: Path) -> None:
    places = ("a/day/run", "b/day/run", "b/eve/run", "b/eve/other")
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shown_runs.failed(tmp_path / "made").rename(tmp_path / place)
    groups = read_groups([tmp_path / place for place in places])
    assert sorted(run.label for group in groups for run in group.runs) == ["a/day/run", "b/day/run", "eve/run", "other"]


def test_evaluation_between_the_kept_updates_of_a_long_run_has_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unstable_lite.dashboards.run_directory.MAX_POINTS", 10)
    (group,) = read_groups([shown_runs.quickstart(tmp_path)])
    (run,) = group.runs
    assert 85 not in run.steps
    chart, *_ = evaluation_charts([run])
    (line,) = lines_by_name([group])[chart["name"]]
    assert [point.step for point in line["points"]] == [0, 85, 170, 255]
    assert None not in [point.hours for point in line["points"][1:]]
