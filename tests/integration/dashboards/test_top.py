"""The dashboard and the files it reads. test_run.py has it watch a real run."""

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyte
import pytest
from rich.console import Console

from fakes import shown_runs
from unstable_lite.adapters.store import try_lock
from unstable_lite.dashboards.league import Result
from unstable_lite.dashboards.run_directory import RunDirectory
from unstable_lite.dashboards.text_rows import all_shortened, sparkline
from unstable_lite.dashboards.top import MachineLoad, draw
from unstable_lite.league.model_registry import ModelRegistry
from unstable_lite.orchestrator.workers import environment
from unstable_lite.tracking.records import LeagueLog

RANDOM = "fixed-scripted:random"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shown_runs.running(tmp_path)


def frame(view: RunDirectory, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(draw(view, width, height, MachineLoad()), width=width, height=height)
    return console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined,no-any-return]


def workers_of(directory: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((directory / "live.json").read_text())["workers"]
    return found


def shown(directory: Path, width: int = 140, height: int = 45, **live: Any) -> str:
    """Return the frame of the run with these changes of its live.json."""
    path = directory / "live.json"
    if live:
        path.write_text(json.dumps(json.loads(path.read_text()) | live))
    view = RunDirectory(directory)
    view.refresh()
    return "\n".join(frame(view, width, height))


def test_time_left_and_results_are_whole_in_the_smallest_terminal(directory: Path) -> None:
    lines = shown(directory, 60, 20, learning_steps=4_000_000, games=10**9).split("\n")
    assert lines[1].endswith("left 1555 h 30 min")
    assert sum(line.startswith("▲") for line in lines) == 3


def test_games_that_ended_early_are_counted_by_reason(directory: Path) -> None:
    path = directory / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    ended = {
        "ended/Nim-v0-train (vendor/model)/context_full": 3.0,
        "ended/TicTacToe-v0-train (mirror)/context_full": 4.0,
        "ended/Nim-v0-train (mirror)/vendor/model does not answer": 1.0,
    }
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | ended)]) + "\n")
    assert "games ended early   7 context_full, 1 vendor/model does not answer" in shown(directory)


def test_worker_in_trouble_is_shown_first_and_the_others_are_counted(directory: Path) -> None:
    engine, learner = workers_of(directory)
    learner |= {"state": "dead", "device": 0}
    many = [engine | {"name": f"engine-{number}", "pid": None} for number in range(30)]
    lines = shown(directory, 80, 24, workers=[*many, learner]).split("\n")
    first = lines.index("workers") + 1
    assert "learner (GPU 0)" in lines[first] and "is dead" in lines[first]
    assert re.fullmatch(r"and \d\d more", lines[first + 2].rstrip())


def test_every_rank_of_the_learner_shows_its_own_load(directory: Path) -> None:
    engine, _ = workers_of(directory)
    places = {"learner": (os.getpid(), "cpu"), "learner-1": (os.getppid(), "cpu"), "learner-2": (None, "elsewhere")}
    rank = {"state": "ready", "waited_for": 1, "stats": None}
    ranks = [rank | {"name": name, "pid": pid, "device": device} for name, (pid, device) in places.items()]
    text = shown(directory, 160, workers=[engine, *ranks])
    for name in ("learner", "learner-1"):
        assert re.search(rf"{name} \(cpu\) +learns +\d+ % CPU +[\d,]+ MiB", text), text
    assert re.search(r"learner-2 \(elsewhere\) +learns", text)
    text = shown(directory, workers=[engine | {"state": "asleep"}])
    assert "sleeps" in text and "2,400 tok" not in text


def test_run_that_has_ended_shows_no_worker_pace_or_time_left(directory: Path) -> None:
    for ending, state in (({}, "ended"), ({"has_failed": True}, "failed"), ({"has_ended": False}, "killed")):
        text = shown(directory, pid=2**22 + 1, **{"has_ended": True} | ending)
        assert text.split("\n")[1].startswith(f"{state}  update 128/255")
        assert "workers" not in text and "tokens/s, " not in text and "left" not in text and "games/s" not in text
        assert f"unstable-lite report {directory}" in text.replace("\n          ", "")


def test_run_that_starts_is_neither_stopped_nor_to_be_resumed(directory: Path) -> None:
    (directory / "live.json").unlink()
    assert "killed" in shown(directory)
    lock = try_lock(directory)
    assert lock is not None
    text = shown(directory)
    os.close(lock)
    assert "starting" in text and "none yet; they are started first" in text
    assert "--resume" not in text and "stopped" not in text


def test_resume_and_best_are_offered_only_of_checkpoints_that_exist(tmp_path: Path) -> None:
    stopped = shown_runs.failed(tmp_path / "failed")
    assert "--resume" not in shown(stopped)
    (stopped / "checkpoints/ckpt-2").mkdir(parents=True)
    assert "--resume" in shown(stopped)
    ended = shown_runs.quickstart(tmp_path / "ended")
    shutil.rmtree(ended / "checkpoints/ckpt-85")
    assert "ckpt-255, best of 2 evaluated checkpoints" in shown(ended)


def test_run_without_a_quota_of_evaluation_games_announces_none(tmp_path: Path) -> None:
    run = shown_runs.without_evaluation(tmp_path)
    config = (run / "config.toml").read_text()
    for workers, says in ((16, "games beside training"), (0, "no evaluation is planned")):
        changed = re.sub("eval_games = \\d+", f"eval_games = 0\nnum_eval_workers = {workers}", config)
        (run / "config.toml").write_text(changed)
        assert "before training" not in shown(run) and says in shown(run)


def test_run_that_stops_writing_is_shown_as_silent(directory: Path) -> None:
    assert shown(directory, 80, 24, time=time.time() - 3600).split("\n")[1].startswith("silent for 1 h 0 min")


def test_pace_is_that_of_the_newest_updates_regardless_of_the_clock(directory: Path) -> None:
    path = directory / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changes = [
        {"step": n, "time": 3.0 * n + 36000 * (n > 150), "run/seconds": 100.0 + 3 * n, "run/games": 900 + 6 * n}
        for n in range(129, 159)
    ]
    lines = [lines[-1] | change for change in changes]
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    view = RunDirectory(directory)
    view.refresh()
    assert view.pace() == (3.0, 2.0)
    path.write_text(json.dumps(lines[0]) + "\n")
    view.refresh()
    assert view.pace() is None  # a single update has no pace


class NoMeter:
    """The NVML of a machine with two GPUs, the second of which has no power meter."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index > 1:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return self.nvmlDeviceGetHandleByIndex(["GPU-a", "GPU-b"].index(uuid))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError
        return 345_600

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=3 << 30, total=80 << 30)


def test_gpu_shows_the_power_and_memory_that_it_reports() -> None:
    load = MachineLoad()
    load._nvml = NoMeter()
    shown = [load.of({"device": device, "pid": 2**22}) for device in (0, 1, 2)]
    assert shown == ["346 W  3.0/80 GiB", "3.0/80 GiB", ""]
    assert load.of({"device": "cpu", "pid": 2**22}) == ""
    assert "% CPU" in load.of({"device": "cpu", "pid": os.getpid()})
    load._nvml = None
    assert "MiB" in load.of({"device": 0, "pid": os.getpid()})


@pytest.mark.parametrize("visible", ["1,0", "1, 0", "GPU-b,GPU-a"])
def test_gpu_of_the_run_is_matched_through_its_visible_devices(visible: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    given = [environment((device,), threads=1)["CUDA_VISIBLE_DEVICES"] for device in (0, 1)]
    load = MachineLoad()
    load._nvml = NoMeter()
    shown = [load.of({"device": device, "gpu": gpu, "pid": 2**22}) for device, gpu in enumerate(given)]
    assert shown == ["3.0/80 GiB", "346 W  3.0/80 GiB"]


def test_busy_process_shows_load_at_the_first_look() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            # On a full machine a process may not get a turn in the time of one look, so several first looks are taken.
            looks = (MachineLoad().of({"device": "cpu", "pid": process.pid}) for _ in range(20))
            assert any(not look.startswith("0 % CPU") for look in looks)
        finally:
            process.kill()


def test_log_of_the_league_has_only_the_models_and_pairs_that_changed(tmp_path: Path) -> None:
    registry, league = ModelRegistry(), LeagueLog(tmp_path / "league.jsonl")
    for step in (1, 2, 3):
        registry.add_policy(f"ckpt-{step}", step, step)
        registry.update_ratings({0: f"ckpt-{step}", 1: "base"}, {0: 1.0, 1: -1.0}, "Nim-v0-train")
        league.log(step, registry)
    league.close()
    last = json.loads((tmp_path / "league.jsonl").read_text().splitlines()[-1])
    assert set(last["models"]) == {"base", "ckpt-2", "ckpt-3"}  # a newer one than ckpt-2 is the current one
    assert last["matches"] == [["base", "ckpt-3", 1, 0, 0, 1]]


def test_rewritten_file_is_read_again_and_a_partial_line_waits(directory: Path) -> None:
    view = RunDirectory(directory)
    view.refresh()
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        new = lines[0].replace('"step": 1', '"step": 129')
        file.write(new[:20])
        file.flush()
        view.refresh()
        assert view.num_updates == 128
        file.write(new[20:])
    view.refresh()
    assert view.num_updates == 129
    (directory / "new").write_text("".join(lines[:5]))
    (directory / "new").rename(path)  # as a resumed run does
    view.refresh()
    assert view.num_updates == 5


def test_league_is_added_to_and_read_again_if_rewritten(directory: Path) -> None:
    view = RunDirectory(directory)
    view.refresh()
    before = view.league()
    path = directory / "league.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        file.write(json.dumps({"step": 129, "models": {}, "matches": [["ckpt-128", RANDOM, 102, 75, 1, 26]]}) + "\n")
    view.refresh()
    assert view.league() is before
    assert view.league().of(RANDOM, "ckpt-128") == Result(102, won=26, drawn=1, lost=75)
    assert view.league().games["ckpt-128"] == 102
    (directory / "new").write_text("".join(lines[:5] * 40))  # not shorter, as that of a resumed run may be
    (directory / "new").rename(path)
    view.refresh()
    assert view.league().of("ckpt-128", RANDOM) is None
    assert view.league().games[RANDOM] == 500


def test_run_that_has_not_begun_or_lost_its_files_is_shown(directory: Path) -> None:
    for name in ("metrics.jsonl", "league.jsonl", "eval.jsonl", "live.json"):
        (directory / name).unlink()
        view = RunDirectory(directory)
        view.refresh()
        assert not view.live or view.is_running
        assert len(frame(view, 80, 24)) == 24
    assert "killed" in frame(view, 80, 24)[1]


def test_long_labels_keep_indent_and_ends_unless_two_would_be_alike() -> None:
    first, second = (f"  openspiel:nim(pile_sizes={pile};2;3;4;5), scripted:random" for pile in (1, 2))
    assert all_shortened([first, "base"]) == ["  openspiel:ni…scripted:random", "base"]
    assert all_shortened([first, second]) == [first, second]


def test_sparkline_holds_the_whole_run_in_means_and_marks_spikes() -> None:
    rising = [0.4 + update / 640 for update in range(128)]
    assert sparkline(rising, 8, is_share=True) == (
        "▄▄▄▄▅▅▅▅",
        pytest.approx(0.4117, abs=1e-4),
        pytest.approx(0.5868, abs=1e-4),
    )
    assert sparkline([3.0, 3.1, 3.0, math.nan], 9)[0] == "███ "
    bars, low, high = sparkline([1.0] * 40 + [50.0] + [1.0] * 40, 9, spikes={40})
    assert (bars, low, high) == ("████!████", 1.0, 1.0)
    assert sparkline([-2.0, 0.0], 2)[0] == "▁█"
    assert sparkline([], 10)[0] == ""


class Terminal:
    """A `top` process in its own terminal, as a person sees it."""

    def __init__(self, directory: Path, width: int, height: int, *arguments: str) -> None:
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        self._resize(width, height)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unstable_lite", "top", str(directory), *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
            | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(slave)

    def _resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def resize(self, width: int, height: int) -> None:
        self.screen.resize(height, width)
        self._resize(width, height)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, condition: Callable[[str], bool]) -> str:
        deadline = time.monotonic() + 60
        while not condition(text := "\n".join(self.screen.display)):
            assert time.monotonic() < deadline, text
            if select.select([self._master], [], [], 0.2)[0]:
                try:
                    self._stream.feed(os.read(self._master, 65536))
                except OSError:  # the terminal is closed
                    time.sleep(0.05)
        return text

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(directory: Path) -> Iterator[Terminal]:
    live = json.loads((directory / "live.json").read_text())
    live["time"] += 600  # a busy machine needs long to start the process, and the run must not count as silent
    (directory / "live.json").write_text(json.dumps(live))
    terminal = Terminal(directory, 100, 32)
    yield terminal
    terminal.close()


def test_user_can_watch_resize_and_quit(terminal: Terminal) -> None:
    terminal.wait_for(lambda text: "running" in text and "update 128/255" in text and "+26.0" in text)
    terminal.press("mx")  # no keys
    terminal.resize(59, 20)
    terminal.wait_for(lambda text: "60 × 20" in text and "59 × 20" in text)
    terminal.resize(80, 24)
    terminal.wait_for(lambda text: "update 128/255" in text and "workers" in text)
    terminal.press("q")
    terminal.wait_for(lambda _: terminal.process.poll() == 0)
