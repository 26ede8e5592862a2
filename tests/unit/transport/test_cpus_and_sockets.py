"""CPUs of a container, socket directories that a killed run leaves, and the last message of a failed worker."""

import contextlib
import errno
import os
import re
import socket
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch

import unstable_lite
from unstable_lite.config import Config
from unstable_lite.errors import ConfigError
from unstable_lite.planning.plan import make_plan
from unstable_lite.reward_transformations.transforms import ComposeFinalRewardTransforms
from unstable_lite.rng import derive_seed
from unstable_lite.transport.cpus import usable_cpus
from unstable_lite.transport.rpc import BUS, SOCKETS, make_socket_directory, reap_stale_sockets
from unstable_lite.transport.worker_main import last_words

V1 = "3:cpu,cpuacct:/docker/a\n2:memory:/docker/a\n1:name=systemd:/docker/a\n"


def v1(group: str, quota: int) -> dict[str, str]:
    return {f"cpu{group}/cpu.cfs_quota_us": f"{quota}\n", f"cpu{group}/cpu.cfs_period_us": "100000\n"}


def make_container(root: Path, groups: str, files: dict[str, str]) -> None:
    contents = {f"sys/fs/cgroup/{name}": text for name, text in files.items()} | {"proc/self/cgroup": groups}
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(text))


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000\n", "a/cpu.max": "400000 100000\n"}, 4),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/docker/on/the/host\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a\n", {"a/cpu.max": "50000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "9900000 100000\n"}, 16),
        ("0::/a\n", {"a/cpu.max": "max 100000\n"}, 16),
        ("0::/a\n", {"a/cpu.max": "damaged"}, 16),
        ("0::/a\n", {"a/cpu.max": f"{'9' * 500} 100000\n"}, 16),
        ("0::/\udcff\n\nx\n", {"cpu.max": "300000 100000\n"}, 3),
        (V1, v1("/docker/a", 200_000), 2),
        (V1, v1("/docker/a", -1) | v1("/docker", 300_000), 3),
        (V1, v1("", 300_000), 3),
        (V1, v1("/docker/a", -1) | {"memory/docker/a/cpu.max": "100000 100000"}, 16),
        ("", {}, 16),
    ],
)
def test_number_of_cpus_is_the_smaller_of_mask_and_quota(tmp_path, monkeypatch, groups, files, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    make_container(tmp_path, groups, files)
    assert usable_cpus(tmp_path) == cpus


def test_quota_divides_the_threads_of_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    make_container(tmp_path, "0::/a\n", {"a/cpu.max": "600000 100000\n"})
    monkeypatch.setattr(usable_cpus, "__defaults__", (tmp_path,))
    env = {"env_id": "Nim-v0-train", "num_players": 2, "num_actors": 2}
    plan = make_plan(Config.model_validate({"engine": {"kind": "scripted", "devices": ["cpu"]}, "train_envs": [env]}))
    assert (plan.engine_threads, plan.learner_threads) == (3, 3)


def test_cpus_are_counted_in_one_place_and_by_the_mask_without_control_groups(tmp_path):
    package = Path(unstable_lite.__file__).parent
    counting = re.compile(r"sched_getaffinity|cpu_count")
    assert [path.name for path in package.rglob("*.py") if counting.search(path.read_text())] == ["cpus.py"]
    assert usable_cpus(tmp_path) == len(os.sched_getaffinity(0))


def test_only_socket_directories_of_dead_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, full, starting, foreign = (make_socket_directory() for _ in range(5))
    file, mine = tmp_path / f"{SOCKETS}file", tmp_path / f"{SOCKETS}mine"
    (tmp_path / f"{SOCKETS}link").symlink_to(dead)
    file.touch()
    mine.mkdir()
    (mine / BUS).write_text("a person's file")
    elsewhere = make_socket_directory().rename(tmp_path / "ul-of-another-machine")
    (dead / "env-0.call").touch()
    with contextlib.ExitStack() as stack:
        bound = {
            directory: stack.enter_context(socket.socket(socket.AF_UNIX))
            for directory in (dead, alive, full, foreign, elsewhere)
        }
        for directory, one in bound.items():
            one.bind(str(directory / BUS))
        bound[alive].listen()
        bound[full].listen(0)
        for client in [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]:
            client.setblocking(False)
            client.connect_ex(str(full / BUS))
        for directory in (dead, foreign, elsewhere):
            bound[directory].close()
        own = os.geteuid()
        if own == 0:
            os.chown(foreign, 12345, 12345)
        found = [path for path in reap_stale_sockets() if path.parent == tmp_path]
    assert sorted(found) == ([dead] if own == 0 else sorted([dead, foreign]))
    assert not dead.exists() and alive.exists() and full.exists() and starting.exists()
    assert (mine / BUS).exists() and file.exists() and elsewhere.exists()


def test_error_names_the_line_of_our_own_code_unless_it_says_how_to_act():
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(b"{")
    words = last_words(caught.value)
    place = f"line {caught.tb.tb_lineno}, in test_error_names_the_line_of_our_own_code_unless_it_says_how_to_act"
    assert words.error == f"DecodeError: Input data was truncated (test_cpus_and_sockets.py, {place})"
    assert not words.is_final
    words = last_words(ConfigError("learner.x: set it to 1"))
    assert words.error == "ConfigError: learner.x: set it to 1" and words.is_final


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (lambda: derive_seed(0, object()).nope, "AttributeError"),  # type: ignore[attr-defined]
        (lambda: ComposeFinalRewardTransforms([len])(1.0, 0, "env"), "TypeError"),
        (lambda: torch.zeros(2) @ torch.zeros(3), "RuntimeError"),
        (lambda: Path("/no/such/file").read_text(), "FileNotFoundError"),
        (lambda: Path(b"/").read_text(), "TypeError"),  # type: ignore[arg-type]
    ],
    ids=["its own", "called by the package", "in torch", "no file", "in Python's library"],
)
def test_error_has_the_users_line_as_its_place(code, name):
    with pytest.raises(Exception) as caught:
        code()
    words = last_words(caught.value)
    line = code.__code__.co_firstlineno
    assert words.place == f"{name} {__file__}:{line}"
    assert f"(test_cpus_and_sockets.py, line {line}, in <lambda>)" in words.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory"),
        ConnectionResetError(),
        TimeoutError(),
        OSError(errno.ENOSPC, "no space"),
    ],
    ids=repr,
)
def test_error_from_outside_of_the_code_has_no_place(error):
    with pytest.raises(type(error)) as caught:
        raise error
    assert last_words(caught.value).place == ""


def test_mistake_below_the_package_alone_has_the_packages_line():
    with pytest.raises(TypeError) as caught:
        ComposeFinalRewardTransforms(5)  # type: ignore[arg-type]
    caught.value.__traceback__ = caught.tb.tb_next  # as in a worker, whose own frames are the package's
    assert re.fullmatch(r"TypeError .*/reward_transformations/transforms.py:\d+", last_words(caught.value).place)
