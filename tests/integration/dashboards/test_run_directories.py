"""The `runs` command, and run directories in odd states."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
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
from unstable_lite.orchestrator.checkpoint import save_checkpoint
from unstable_lite.tracking.run_directory import create_run_directory


async def write_run(outputs: Path, name: str, checkpoints: tuple[int, ...], **changes: str) -> Path:
    """Write a run directory as a run with these checkpoints leaves it; the learner's part is some bytes."""
    directory = outputs / "2026-01-02" / name
    (directory / "checkpoints").mkdir(parents=True)
    text = runs.write_small(directory).read_text()
    for old, new in changes.items():
        key = old.replace("__", " = ")
        assert key in text
        text = text.replace(key, new)
    (directory / "small.toml").unlink()
    (directory / "config.toml").write_text(text)
    (directory / "versions.json").write_text("{}")

    async def save_learner(to: Path) -> None:
        (to / "adapter_model.safetensors").write_bytes(bytes(50_000))

    for number in checkpoints:
        await save_checkpoint(directory / "checkpoints", number, {"updates": number}, [], save_learner)
    newest = max(checkpoints, default=0)
    metrics = [
        {"step": n, "time": float(n), "run/games": 10 * n, "learner/entropy": 1 / n, "learner/num_tokens": 7}
        for n in range(1, newest + 1)
    ]
    write_lines(directory / "metrics.jsonl", *metrics)
    write_lines(directory / "eval.jsonl")
    write_lines(directory / "live.json", {"pid": os.getpid(), "has_ended": True, "learning_steps": 9})
    (directory / "lock").touch()
    return directory


def write_lines(path: Path, *lines: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluated(model: str, win_rate: float, n: int = 40, label: str = "update") -> dict[str, Any]:
    wins, cell = round(win_rate * n), {"env_id": "Nim-v0-train", "opponent": "scripted:random"}
    who = {"label": label, "model": model, "step": int(model.removeprefix("ckpt-")), **cell}
    rest = {"points": win_rate, "mean_reward": 0.0, "reward_std": 0.9, "invalid": 0, "void": 0}
    return {**who, "n": n, "wins": wins, "draws": 0, "losses": n - wins, **rest}


@pytest.fixture
async def two(tmp_path: Path) -> tuple[Path, Path]:
    """Return a run with four checkpoints, of which the second was best, and a later one with another seed."""
    old = await write_run(tmp_path, "10-00-00-old", (2, 4, 6, 8))
    write_lines(
        old / "eval.jsonl",
        evaluated("ckpt-4", 0.75),
        evaluated("ckpt-8", 0.5),
        evaluated("ckpt-9", 1.0, 3, "concurrent"),
    )
    new = await write_run(tmp_path, "11-00-00-new", (1,), learning_steps__3="learning_steps = 3\nseed = 5")
    return old, new


@pytest.fixture
def held(two: tuple[Path, Path]) -> Iterator[Path]:
    """Return the first of the two runs, locked as if it were running."""
    lock = try_lock(two[0])
    assert lock is not None
    yield two[0]
    os.close(lock)


def command(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["runs", *map(str, words)])
    return result.exit_code, result.output


async def test_runs_are_listed_newest_first_with_their_progress(two: tuple[Path, Path], tmp_path: Path) -> None:
    new, old = list_runs(tmp_path)
    assert (old.directory, new.directory) == two
    assert (old.updates, old.state, new.result) == ("8/9", "ended", "no evaluation yet")
    code, out = command("--outputs", tmp_path)
    assert code == 0
    first, second = out.index(str(two[1])), out.index(str(two[0]))
    assert first < second
    assert "ended               8/9  " in out
    assert "random: 75.0 % → 50.0 % (34.6–65.4), and 1 more" in out  # the evaluation with a quota comes first


async def test_runs_of_the_night_in_which_clocks_change_are_in_the_order_of_their_start(tmp_path: Path) -> None:
    """The second run began later, at a local time that was an hour earlier."""
    began = dict[Path, float]()
    for number, name in enumerate(("02-40-00-first", "02-10-00-second")):
        run = await write_run(tmp_path, name, ())
        began[run] = 1_792_888_800.0 + 1800 * number
        write_lines(run / "metrics.jsonl", {"step": 0, "time": began[run]})
    assert {entry.directory: entry.began for entry in list_runs(tmp_path)} == began
    assert [entry.directory.name[9:] for entry in list_runs(tmp_path)] == ["second", "first"]


async def test_running_paused_killed_and_unreadable_runs_are_distinguished(held: Path, tmp_path: Path) -> None:
    new, old = list_runs(tmp_path)
    assert (old.state, new.state) == ("running", "ended")
    (held / "PAUSED").write_text("why")
    (new.directory / "live.json").write_text(json.dumps({"pid": os.getpid(), "has_ended": False}))
    new, old = list_runs(tmp_path)
    assert (old.state, new.state) == ("paused", "killed")
    (new.directory / "config.toml").write_text("not toml")
    assert [entry.state for entry in list_runs(tmp_path)] == ["unreadable", "paused"]


def test_directory_without_runs_is_named(tmp_path: Path) -> None:
    code, out = command("--outputs", tmp_path / "none")
    assert code == 1 and "no run" in out and "Traceback" not in out


async def test_unreadable_run_hides_no_other(two: tuple[Path, Path], tmp_path: Path) -> None:
    (two[0] / "metrics.jsonl").unlink()
    (two[0] / "metrics.jsonl").mkdir()  # refused as another user's file would be
    assert sorted(entry.state for entry in list_runs(tmp_path)) == ["ended", "unreadable"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]"])
async def test_run_with_a_damaged_config_is_named(two: tuple[Path, Path], content: bytes) -> None:
    (two[1] / "config.toml").write_bytes(content)
    ended = CliRunner().invoke(app, ["report", str(two[1])])
    assert ended.exit_code == 1
    assert str(two[1] / "config.toml") in ended.output


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
        "from unstable_lite.orchestrator.checkpoint import lasting_changes; "
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


async def test_text_in_a_run_directory_does_not_control_the_terminal(two: tuple[Path, Path], tmp_path: Path) -> None:
    """Each command prints through one console; errors are printed separately."""
    run = two[1]
    write_lines(run / "eval.jsonl", evaluated("ckpt-1", 0.5) | {"opponent": "x\x1b]0;OWNED\x1b[2J"})
    write_lines(run / "alarms.jsonl", {"step": 1, "text": "\x1b]52;c;OWNED\x9b2J"})
    commands: list[list[Any]] = [["runs", "--outputs", tmp_path], ["top", run]]
    commands.append(["check", run / "\x1b[2J"])
    shown = [CliRunner().invoke(app, [*map(str, words)]).output for words in commands]
    assert r"x\x1b]0;OWNED\x1b[2J" in shown[0] and r"\x1b]52;c;OWNED\x9b2J" in shown[1]
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
}


@pytest.mark.parametrize("damage", BAD)
async def test_one_bad_line_hides_no_other_run(two: tuple[Path, Path], tmp_path: Path, damage: str) -> None:
    name, content = BAD[damage]
    (two[1] / name).write_text(content)
    assert [(entry.directory, entry.state) for entry in list_runs(tmp_path)] == [
        (two[1], "unreadable"),
        (two[0], "ended"),
    ]
    code, out = command("--outputs", tmp_path)
    assert code == 0 and str(two[0]) in out


@pytest.mark.parametrize("damage", [*BAD, "live as list", "league"])
async def test_one_bad_line_is_named_by_commands_on_its_run(
    two: tuple[Path, Path], tmp_path: Path, damage: str
) -> None:
    more = {"live as list": ("live.json", "[]"), "league": ("league.jsonl", '{"step": 1, "models": 5, "matches": 3}\n')}
    name, content = {**BAD, **more}[damage]
    (two[1] / name).write_text(content)
    for words in (["top", two[1]], ["report", two[1], "--output", tmp_path / "report.html"]):
        ended = CliRunner().invoke(app, [*map(str, words)])
        if ended.exit_code:
            assert isinstance(ended.exception, SystemExit), f"{words[0]} ended with {ended.exception!r}"
            assert str(two[1]) in ended.output


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
        shown_runs.quickstart(tmp_path / "made").rename(tmp_path / place)
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
