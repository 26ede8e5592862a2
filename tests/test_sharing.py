"""Engine and learner on one device: which, with how much of its memory; what cannot work is said before it starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from unstable_lite import sharing
from unstable_lite.config import Config
from unstable_lite.engines import choose
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.evaluator import plan_evaluation
from unstable_lite.plan import Plan, make_plan
from unstable_lite.workers import environment, started_engines

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """So many GPUs of so many GiB, as nvidia-smi would tell."""

    def install(count: int, gib: float = 24) -> None:
        smi = tmp_path / "nvidia-smi"
        smi.write_text(
            f'#!/bin/sh\ncase "$1" in\n-L) for i in $(seq 1 {count}); do echo "GPU $((i-1)): H"; done;;\n'
            f"*) echo {int(gib * 1024)};;\nesac\n"
        )
        smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        choose.gpu_memory_bytes.cache_clear()
        assert choose.count_gpus() == count

    return install


def plan(mode: str = "auto", model: str = "Qwen/Qwen3-1.7B", **sections: Any) -> Plan:
    raw = {
        "model_name": model,
        "run": {"mode": mode},
        "engine": {"kind": "transformers"},
        "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}],
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section}  # type: ignore[dict-item]
    return make_plan(Config.model_validate(raw))


def shares(made: Plan) -> tuple[float | None, float | None]:
    """What engine and learner are told."""
    config = made.divided
    return config.engine.gpu_memory_utilization, config.learner.gpu_memory_utilization


def rows(made: Plan) -> dict[str, str]:
    return dict(made.describe())


def test_auto_shares_where_there_is_one_device_and_divides_its_memory(gpus: Any) -> None:
    gpus(1)
    made = plan()
    assert (made.engine_devices, made.learner_devices, made.shared_devices) == ((0,), (0,), [0])
    assert shares(made) == (0.5, 0.45)
    assert rows(made)["mode"].startswith("share: ")
    assert rows(made)["memory of GPU 0"].startswith("engine 50%, learner 45% of 24.0 GiB; at the least ")
    assert rows(made)["engine memory"] == "50% of the GPU"


def test_with_a_gpu_for_each_nothing_is_divided(gpus: Any) -> None:
    gpus(2)
    made = plan()
    assert (made.engine_devices, made.learner_devices) == ((1,), (0,))
    assert shares(made) == (None, None)
    assert rows(made)["mode"].startswith("async: ") and "memory of GPU 0" not in rows(made)
    assert rows(made)["engine memory"] == "90% of the GPU"


@pytest.mark.parametrize("mode", ["share", "sleep"])
def test_one_device_is_one_device_also_where_there_are_more(gpus: Any, mode: str) -> None:
    gpus(4)
    assert (plan(mode).engine_devices, plan(mode).learner_devices) == ((0,), (0,))
    made = plan(mode, engine={"devices": (2, 3)})
    assert (made.engine_devices, made.learner_devices, made.shared_devices) == ((2, 3), (2,), [2])


def test_taking_turns_leaves_the_engine_more_and_the_learner_no_bound(gpus: Any) -> None:
    gpus(1)
    made = plan("sleep")
    assert shares(made) == (0.7, None)
    assert rows(made)["memory of GPU 0"].startswith("engine 70% of 24.0 GiB while it is awake, learner all")


def test_two_engines_on_one_gpu_divide_the_engines_part(gpus: Any) -> None:
    gpus(1)
    assert shares(plan("share", engine={"devices": (0, 0)})) == (0.25, 0.45)
    assert rows(plan("share", engine={"devices": (0, 0)}))["memory of GPU 0"].startswith("engine 50%, learner 45%")
    given = {"devices": (0, 0), "gpu_memory_utilization": 0.3}
    assert shares(plan("share", engine=given)) == (0.3, 0.35)


def test_parts_that_are_given_are_taken(gpus: Any) -> None:
    gpus(1)
    assert shares(plan(engine={"gpu_memory_utilization": 0.3})) == (0.3, 0.65)
    given = {"engine": {"gpu_memory_utilization": 0.3}, "learner": {"gpu_memory_utilization": 0.6}}
    assert shares(plan("share", **given)) == (0.3, 0.6)


APART = {"learner": {"devices": ("cpu",)}, "engine": {"devices": (0,)}}
TOO_MUCH = {"engine": {"gpu_memory_utilization": 0.6}, "learner": {"gpu_memory_utilization": 0.5}}
TWO_AND_TOO_MUCH = {"engine": {"devices": (0, 0), "gpu_memory_utilization": 0.6}}
SERVER = {"engine": {"kind": "vllm-server", "urls": ("http://a:1",), "adapter_folder": Path("/tmp")}}


@pytest.mark.parametrize(
    ("mode", "model", "sections", "says"),
    [
        ("async", "Qwen/Qwen3-1.7B", {}, r"GPU 0 is both engine's and learner's; set run\.mode = 'share'"),
        ("share", "Qwen/Qwen3-1.7B", APART, r"no device is both engine's \(0\) and learner's \(cpu\)"),
        ("sleep", "Qwen/Qwen3-1.7B", APART, r"no device is both"),
        ("sleep", "Qwen/Qwen3-1.7B", SERVER, r"no device is both engine's \(http://a:1\)"),
        ("share", "Qwen/Qwen3-1.7B", TOO_MUCH, r"more than there is of GPU 0"),
        ("share", "Qwen/Qwen3-1.7B", {"engine": {"gpu_memory_utilization": 0.96}}, r"or leave the learner nothing"),
        ("share", "Qwen/Qwen3-1.7B", TWO_AND_TOO_MUCH, r"\(1\.2 by all engines there\)"),
        ("sleep", "Qwen/Qwen3-1.7B", TWO_AND_TOO_MUCH, r"\(1\.2 by all engines there\)"),
        ("share", "Qwen/Qwen3-8B", {}, r"the engine's part of GPU 0 is 12\.0 GiB, and it needs 1\d\.\d at the least"),
        ("auto", "Qwen/Qwen3-8B", {}, r"the learner's part of GPU 0 is 10\.8 GiB"),
        ("sleep", "Qwen/Qwen3-8B", {}, r"the learner's part of GPU 0 is 6\.0 GiB"),
    ],
)
def test_what_cannot_work_is_said(gpus: Any, mode: str, model: str, sections: Any, says: str) -> None:
    gpus(1, 24)
    with pytest.raises(ConfigError, match=says):
        plan(mode, model, **sections)


def test_the_same_model_fits_a_larger_gpu(gpus: Any) -> None:
    gpus(1, 80)
    for mode in ("share", "sleep"):
        plan(mode, "Qwen/Qwen3-8B")


def test_where_nvidia_smi_does_not_say_only_the_parts_are_checked(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(sharing, "gpu_memory_bytes", lambda device: None)
    assert rows(plan("share", "Qwen/Qwen3-8B"))["memory of GPU 0"].startswith("engine 50%, learner 45%; ")


def test_on_the_cpu_what_the_machine_has_is_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_cpu = {"engine": {"devices": ("cpu",)}, "learner": {"devices": ("cpu",)}}
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sharing, "CGROUP_LIMITS", (str(limit),))
    limit.write_text("max\n")
    assert rows(plan(model="builtin:tiny", **on_cpu))["mode"].startswith("share: ")
    limit.write_text(f"{4 * GIB}\n")
    assert sharing.memory_bytes("cpu") == 4 * GIB
    plan(model="builtin:tiny", **on_cpu)
    with pytest.raises(ConfigError, match=r"engine and learner share 4\.0 GiB of memory, and need"):
        plan(model="Qwen/Qwen3-1.7B", **on_cpu)


def test_vllm_does_not_sleep_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "vllm_usable", lambda devices: (True, "a CPU build"))
    on_cpu = {"engine": {"devices": ("cpu",), "kind": "vllm"}, "learner": {"devices": ("cpu",)}}
    with pytest.raises(ConfigError, match=r"vLLM sleeps on GPUs only; engine\.kind"):
        plan("sleep", "builtin:tiny", **on_cpu)
    plan("share", "builtin:tiny", **on_cpu)


def test_gpu_memory_is_asked_for_by_the_name_that_the_machine_has_for_it(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(4, 8)
    assert choose.gpu_memory_bytes(1) == 8 * GIB
    smi = Path(shutil.which("nvidia-smi") or "")
    smi.write_text('#!/bin/sh\nwhile [ "$1" != "-i" ]; do shift; done; test "$2" = GPU-b && echo 1024\n')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    choose.gpu_memory_bytes.cache_clear()
    assert (choose.gpu_memory_bytes(0), choose.gpu_memory_bytes(1)) == (None, GIB)


@pytest.mark.parametrize("mode", ["share", "sleep", "async"])
def test_an_evaluation_has_the_gpu_to_itself_whatever_training_did(gpus: Any, tmp_path: Path, mode: str) -> None:
    gpus(1)
    config = tmp_path / "trained.toml"
    config.write_text(
        f'model_name = "Qwen/Qwen3-8B"\n[run]\nmode = "{mode}"\n[engine]\nkind = "transformers"\n[[train_envs]]\n'
        'env_id = "TicTacToe-v0-train"\nnum_players = 2\nnum_actors = 2\nprompt_template = "tiny"\n'
    )
    made = plan_evaluation(["base"], output=tmp_path / "eval", config=config, opponents=["scripted:random"]).plan
    assert made.engine_devices == (0,) and made.shared_devices == []
    assert shares(made) == (None, None)


def test_an_evaluation_on_the_cpu_needs_no_room_for_a_learner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{4 * GIB}\n")
    monkeypatch.setattr(sharing, "CGROUP_LIMITS", (str(limit),))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = tmp_path / "trained.toml"
    config.write_text(
        'model_name = "Qwen/Qwen3-1.7B"\n[engine]\nkind = "transformers"\n[[train_envs]]\n'
        'env_id = "TicTacToe-v0-train"\nnum_players = 2\nnum_actors = 2\nprompt_template = "tiny"\n'
    )
    assert plan_evaluation(["base"], output=tmp_path / "eval", config=config, opponents=["scripted:random"]).plan


def test_two_engines_that_have_a_gpu_to_themselves_divide_it(gpus: Any) -> None:
    gpus(2)
    apart = {"learner": {"devices": (0,)}}
    assert shares(plan(engine={"devices": (1, 1)}, **apart)) == (0.45, None)
    assert shares(plan(engine={"devices": (1, 1), "gpu_memory_utilization": 0.3}, **apart)) == (0.3, None)


async def test_engines_of_one_gpu_start_one_after_the_other(
    gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setenv("STARTING", str(tmp_path))
    made = plan(
        model="builtin:tiny",
        engine={"kind": "measuring_engines:MeasuresTheWholeGPU", "devices": (0, 1, 0, 1)},
        learner={"devices": ("cpu",)},
    )
    async with started_engines(made, tmp_path, lambda text: None) as workers:
        assert [process.peer.is_up for process in workers.processes] == [True] * 4


def test_worker_on_a_gpu_gets_few_threads_and_counts_gpus_by_bus(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    made = plan()
    assert (made.engine_threads, made.learner_threads) == (1, 4)
    given = plan(engine={"threads": 3}, learner={"threads": 2})
    assert (given.engine_threads, given.learner_threads) == (3, 2)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert environment(0, 1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert environment(0, 1)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
