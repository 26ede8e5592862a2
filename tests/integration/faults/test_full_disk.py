"""A disk that fills up: existing files stay intact, lost records are reported, and the run continues.

If no small disk can be mounted, a limit on the size of files replaces it.
"""

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fakes import run_files, runs
from unstable_lite.config.tracking import TrackerConfig
from unstable_lite.errors import UnstableError
from unstable_lite.files import AppendFile, RecordLog, read_records, write_whole
from unstable_lite.orchestrator.checkpoint import save_checkpoint
from unstable_lite.tracking.records import JsonlSink
from unstable_lite.tracking.run_directory import find_damage
from unstable_lite.tracking.tensorboard import TensorBoardSink
from unstable_lite.tracking.tracker import Tracker


@contextlib.contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_failed_append_leaves_no_partial_record(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    file.write(b"first\n")
    with file_limit(9), pytest.raises(OSError, match=r"too large: '.*/file'"):
        file.write(b"second\n")
    file.write(b"third\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"first\nthird\n"


def test_record_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with file_limit(50), pytest.raises(OSError, match=r"step\.jsonl\.gz"):
        write_whole(tmp_path / "step.jsonl.gz", [{"n": n} for n in range(10_000)])
    assert list(tmp_path.iterdir()) == []


def test_records_stay_in_current_part_if_no_new_part_can_be_created(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "games.jsonl", part_mb=0.0001)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        log.write({"n": 0, "text": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    log.write({"n": 1})
    log.close()
    assert [record["n"] for record in read_records(tmp_path / "games.jsonl")] == [0, 1]


def test_run_reports_each_loss_of_records_once_and_its_end_once(tmp_path: Path) -> None:
    reported: list[str] = []
    (tmp_path / "tensorboard").mkdir()
    sinks = [JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path / "tensorboard")]
    tracker = Tracker(tmp_path, sinks, TrackerConfig(), reported.append)
    metrics = {f"learner/metric {n}": float(n) for n in range(20)}
    tracker.log_update(1, metrics)
    with file_limit(1000):
        for step in (2, 3):
            tracker.log_update(step, metrics)
    assert [text.partition("cannot write ")[2].partition(":")[0] for text in reported] == [
        str(tmp_path / "metrics.jsonl"),
        str(next((tmp_path / "tensorboard").iterdir())),
    ]
    assert tracker.failures.lost_records == 4
    assert "learner/metric 19" in tracker.latest, "the display needs no disk"
    for step in (4, 5):
        tracker.log_update(step, metrics)
    assert len(reported) == len(tracker.alarms) == 4
    assert all("4 records" in text for text in reported[2:])
    tracker.close()
    lines = run_files.metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 4, 5]
    assert lines[1]["run/lost_records"] == 4
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Tensors("learner/metric 7")] == [1, 4, 5]


async def test_checkpoint_without_room_leaves_the_previous_one_intact(tmp_path: Path) -> None:
    async def save_learner(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(b"x" * 500)

    async def save(update: int, state: dict[str, Any]) -> Path:
        return await save_checkpoint(tmp_path, update, state, [], save_learner)

    before = await save(1, {})
    with file_limit(1000), pytest.raises(UnstableError, match=r"cannot write .*/ckpt-2: File too large"):
        await save(2, {"text": "x" * 2000})
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt-1", "latest"}
    assert find_damage(before) is None
    assert find_damage(await save(2, {"text": "x" * 2000})) is None
    assert (tmp_path / "latest").resolve().name == "ckpt-2"
    shutil.rmtree(tmp_path)  # someone made room by deleting everything: saving still works
    assert find_damage(await save(3, {})) is None


class SmallDisks:
    """A mount namespace whose /dev/shm has 60 MB and whose output directory has 200 MB."""

    def __init__(self, tmp_path: Path) -> None:
        self._directory = tmp_path / "outputs"
        self._directory.mkdir()
        script = "mount -t tmpfs -o size=60m none /dev/shm && mount -t tmpfs -o size=200m none $0"
        self._holder = subprocess.Popen(
            ["unshare", "-m", "sh", "-c", f"{script} && echo up && exec sleep 900", str(self._directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout.readline() == "up\n"
        root = Path(f"/proc/{self._holder.pid}/root")
        self.shared_memory, self.outputs = root / "dev/shm", root / self._directory.relative_to("/")

    def start(self, out: Path, *arguments: str | Path, **environment: str) -> subprocess.Popen[str]:
        with out.open("w") as file:
            return subprocess.Popen(
                ["nsenter", "-t", str(self._holder.pid), "-m", *runs.command(*arguments, module=runs.TORCHLESS)],
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env={**runs.environment(), **environment},
            )

    def make_read_only(self) -> None:
        mount = ["mount", "-o", "remount,ro", str(self._directory)]
        subprocess.run(["nsenter", "-t", str(self._holder.pid), "-m", *mount], check=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[SmallDisks]:
    if os.geteuid() != 0 or not shutil.which("nsenter"):
        pytest.skip("small disks of its own take root and util-linux")
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    disks = SmallDisks(tmp_path)
    yield disks
    disks.close()


def fill(disk: Path) -> Path:
    """Fill the disk to its last page and return the filler file."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 12))
    return filler


def test_unwritable_output_directory_is_refused_before_start(small_disks: SmallDisks, tmp_path: Path) -> None:
    small, run = runs.write_small(tmp_path), small_disks.outputs / "run"
    run.mkdir()
    (run / "config.toml").write_text(small.read_text())
    small_disks.make_read_only()
    for arguments, reason in (
        (("run", small), f"{tmp_path / 'outputs'} "),
        (("run", "--resume", tmp_path / "outputs" / "run"), f"{tmp_path / 'outputs'} "),
        (("run", "--resume", tmp_path / "outputs" / "run", f"run.output_dir={tmp_path}"), "Read-only file system"),
    ):
        assert small_disks.start(tmp_path / "out", *arguments).wait(120) == 1
        reported = (tmp_path / "out").read_text()
        assert "\nerror: " in f"\n{reported}", reported
        assert reason in reported
        assert "waiting for engine-0" not in reported
        assert "Traceback" not in reported


def checkpoints_in(disk: Path) -> list[int]:
    numbers = [path.name.removeprefix("ckpt-") for path in disk.glob("*/*/checkpoints/ckpt-*")]
    return sorted(map(int, numbers))


def without_clock(directory: Path) -> dict[str, str]:
    """Return an environment in which the wall clock is a day late and jumps back a day at every third reading."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        "import itertools, time\n"
        "real, looks = time.time, itertools.count()\n"
        "time.time = lambda: real() - 86400 * (1 + next(looks) // 3)\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(directory), runs.environment()["PYTHONPATH"]])}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_run_survives_full_disk_then_full_shm_and_resumes_after_both(small_disks: SmallDisks, tmp_path: Path) -> None:
    out, outputs = tmp_path / "out", small_disks.outputs
    overrides = ("run.checkpoint_every=1", "run.eval_games=0", "run.num_eval_workers=0", "run.learning_steps=10000")
    process = small_disks.start(out, "run", runs.write_small(tmp_path), *overrides)

    def has_logged(text: str) -> bool:
        assert process.poll() is None, out.read_text()
        return text in out.read_text()

    runs.wait_for(lambda: has_logged("run directory") and len(checkpoints_in(outputs)) >= 2)
    had_room = {*range(1, checkpoints_in(outputs)[-1] + 1)}  # updates whose records both files had room for
    filler = fill(outputs)
    runs.wait_for(lambda: has_logged("the newest is ckpt-"))
    runs.wait_for(lambda: has_logged("metrics.jsonl: No space left on device"))
    filler.unlink()
    runs.wait_for(lambda: has_logged("checkpoints are written again"))
    runs.wait_for(lambda: has_logged("metrics.jsonl; "))

    fill(small_disks.shared_memory)
    runs.wait_for(lambda: has_logged("From now on adapters go through"))
    (directory,) = outputs.glob("*/*")
    before = run_files.metrics(directory)[-1]["step"]
    runs.wait_for(lambda: process.poll() is None and checkpoints_in(outputs)[-1] > before)
    had_room |= {*range(before, checkpoints_in(outputs)[-1] + 1)}

    children = runs.children_of(process)
    filler = fill(outputs)
    assert process.wait(120) == 1
    text = out.read_text()
    assert "No space left on device" in text[text.rindex("error: ") :]
    assert "Traceback" not in text
    runs.wait_for(lambda: runs.are_gone(children))
    assert [path.name for path in small_disks.shared_memory.iterdir()] == ["filler"]
    assert not list(directory.glob("unstable_lite-*"))
    assert not any(map(find_damage, (directory / "checkpoints").glob("ckpt-*")))

    filler.unlink()
    newest = checkpoints_in(outputs)[-1]
    seen_inside = tmp_path / "outputs" / directory.relative_to(outputs)
    process = small_disks.start(
        out, "run", "--resume", seen_inside, f"run.learning_steps={newest + 1}", **without_clock(tmp_path / "site")
    )
    assert process.wait(240) == 0, out.read_text()
    assert not list((directory / "checkpoints").glob(".*"))
    steps = [line["step"] for line in run_files.metrics(directory)]
    events = EventAccumulator(str(directory / "tensorboard"), {"tensors": 0})  # 0 loads all events
    events.Reload()
    for logged in steps, [event.step for event in events.Tensors("learner/loss")]:
        assert logged == sorted(set(logged)), "the order does not depend on the wall clock"
        assert logged[-1] == newest + 1
        assert had_room <= set(logged)
    assert find_damage(directory / "checkpoints" / f"ckpt-{newest + 1}") is None
