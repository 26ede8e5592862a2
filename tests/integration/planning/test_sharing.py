"""Engine and learner on one device: the division of its memory, and the refusal of impossible plans before start."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes import gpus as gpus_on_this_machine
from unstable_lite.config import Config
from unstable_lite.engines import devices as engines_devices
from unstable_lite.engines import vllm_checks
from unstable_lite.errors import ConfigError
from unstable_lite.evaluation.plan import plan_evaluation
from unstable_lite.models import resolve_model
from unstable_lite.orchestrator.workers import environment, started_engines
from unstable_lite.planning import placement
from unstable_lite.planning.plan import Plan, make_engine_plan, make_plan

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that makes nvidia-smi report `count` GPUs of `gib` GiB."""

    return partial(gpus_on_this_machine.install, monkeypatch, tmp_path)


@pytest.fixture
def limit_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], object]:
    """Return a function that limits the memory of this process's cgroup to some GiB; at first it has no limit."""
    file = tmp_path / "memory.max"
    file.write_text("max\n")
    monkeypatch.setattr(placement, "CGROUP_LIMITS", (str(file),))
    return lambda gib: file.write_text(f"{gib * GIB}\n")


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_devices, "vllm_usable", lambda devices: (True, "a GPU build"))


def plan(when_shared: str = "split", model: str = "Qwen/Qwen3-1.7B", **sections: Any) -> Plan:
    raw = {
        "model_name": model,
        "engine": {"kind": "transformers", "when_shared": when_shared},
        "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2, "prompt_template": "tiny"}],
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section  # type: ignore[dict-item]
    return make_plan(Config.model_validate(raw))


def rows(made: Plan) -> dict[str, str]:
    return dict(made.describe())


TWO, FOUR = {"devices": (0, 1)}, {"devices": (0, 1, 2, 3)}
ON_0 = {"devices": (0,)}
PAIR = {"engine": {"kind": "vllm", "tensor_parallel": 2}}


@pytest.mark.parametrize(
    ("when_shared", "engines", "learner", "given", "of_engines", "of_learner"),
    [
        ("split", (0,), (0,), (None, None), [0.5], 0.45),
        ("sleep", (0,), (0,), (None, None), [0.7], None),
        ("split", (1,), (0,), (None, None), [0.9], None),
        ("split", (2, 3), (2,), (None, None), [0.5, 0.9], 0.45),
        ("sleep", (2, 3), (2,), (None, None), [0.7, 0.9], None),
        ("split", (0, 0), (0,), (None, None), [0.25, 0.25], 0.45),
        ("split", (0, 0), (0,), (0.3, None), [0.3, 0.3], 0.35),
        ("split", (0, 0, 1), (0,), (None, None), [0.25, 0.25, 0.9], 0.45),
        ("split", (1, 1), (0,), (None, None), [0.45, 0.45], None),
        ("split", (1, 1), (0,), (0.3, None), [0.3, 0.3], None),
        ("split", (0,), (0,), (0.3, None), [0.3], 0.65),
        ("split", (0,), (0,), (0.3, 0.6), [0.3], 0.6),
        ("split", (0,), (0,), (0.8, 0.2), [0.8], 0.2),
        ("split", (0,), (0,), (0.9, 0.1), [0.9], 0.1),
    ],
)
def test_engines_and_learner_get_their_shares_of_each_device(
    gpus: Any, when_shared: str, engines: Any, learner: Any, given: Any, of_engines: list[float], of_learner: Any
) -> None:
    gpus(4, 80)
    ours, theirs = ({"gpu_memory_utilization": share} for share in given)
    made = plan(when_shared, engine={"devices": engines} | ours, learner={"devices": learner} | theirs)
    assert [made.divided_for(devices).engine.gpu_share for devices in made.devices_by_engine] == of_engines
    assert made.divided_for(made.learner_devices).learner.gpu_memory_utilization == of_learner


def test_auto_shares_a_single_gpu_and_separates_two(gpus: Any) -> None:
    for count, devices in ((1, ((0,), (0,), [0])), (2, ((1,), (0,), []))):
        gpus(count)
        made = plan()
        assert (made.engine_devices, made.learner_devices, made.shared_devices) == devices


def test_check_shows_shares_and_which_engines_sleep(gpus: Any) -> None:
    gpus(1)
    made = rows(plan())
    assert made["memory of GPU 0"].startswith("engine 50%, learner 45% of 24.0 GiB")
    assert made["engine memory"] == "50% of the GPU"
    assert rows(plan("sleep"))["memory of GPU 0"].startswith("engine 70% of 24.0 GiB")
    gpus(2)
    made = rows(plan())
    assert made["shared devices"].startswith("none: ") and "memory of GPU 0" not in made
    assert made["engine memory"] == "90% of the GPU"
    gpus(4)
    for when, share in (("sleep", "70%"), ("split", "50%")):
        made = rows(plan(when, engine=FOUR, learner=TWO))
        assert re.match(
            rf"{when}: on GPU 0 and GPU 1 engine.*; only generation on GPU 2 and GPU 3", made["shared devices"]
        )
        assert made["engine memory"] == f"{share} of GPU 0, {share} of GPU 1, 90% of GPU 2, 90% of GPU 3"


@pytest.mark.usefixtures("with_vllm")
def test_engine_across_a_shared_and_another_gpu_sleeps_whole(gpus: Any) -> None:
    gpus(4)
    made = plan("sleep", engine=PAIR["engine"] | FOUR, learner=ON_0)
    assert "sleep: on GPU 0 and GPU 1 engines sleep" in rows(made)["shared devices"]
    assert [made.divided_for(devices).engine.gpu_share for devices in made.devices_by_engine] == [0.7, 0.9]


async def test_each_engine_worker_receives_its_own_share(gpus: Any, tmp_path: Path) -> None:
    gpus(2)
    scripted = {"kind": "scripted", "devices": (0, 1)}
    made = plan("sleep", "builtin:tiny", engine=scripted, learner={"devices": (0,)})
    async with started_engines(made, tmp_path, lambda text: None) as workers:
        assert [process.spec.config.engine.gpu_share for process in workers.processes] == [0.7, 0.9]


APART = {"learner": {"devices": ("cpu",)}, "engine": {"devices": (0,)}}
TOO_MUCH = {"engine": {"gpu_memory_utilization": 0.6}, "learner": {"gpu_memory_utilization": 0.5}}
ONE_HUNDREDTH_TOO_MUCH = {"engine": {"gpu_memory_utilization": 0.8}, "learner": {"gpu_memory_utilization": 0.21}}
MOST = {"engine": {"gpu_memory_utilization": 0.9}}
TWO_AND_TOO_MUCH = {"engine": {"devices": (0, 0), "gpu_memory_utilization": 0.6}}
SERVER = {"engine": {"kind": "vllm-server", "urls": ("http://a:1",), "adapter_folder": Path("/tmp")}}
ON_BOTH = {"engine": {"devices": (0, 1)}, "learner": ON_0}
ON_1 = {"engine": {"devices": (1,)}, "learner": ON_0}
TWICE_ON_1 = {"engine": {"devices": (1, 1)}, "learner": ON_0}
TWICE_ON_1_TOO_MUCH = {"engine": {"devices": (1, 1), "gpu_memory_utilization": 0.6}, "learner": ON_0}
ON_CPU = {"engine": {"devices": ("cpu",)}, "learner": {"devices": ("cpu",)}}
VLLM_ON_CPU = {"engine": {"devices": ("cpu",), "kind": "vllm"}, "learner": {"devices": ("cpu",)}}


@pytest.mark.parametrize(
    ("count", "gib", "when_shared", "model", "sections", "says"),
    [
        (1, 24, "sleep", "Qwen/Qwen3-1.7B", APART, r"\(0\).*\(cpu\)"),
        (1, 24, "sleep", "Qwen/Qwen3-1.7B", SERVER, r"\(http://a:1\)"),
        (1, 24, "split", "Qwen/Qwen3-1.7B", TOO_MUCH, "GPU 0"),
        (1, 24, "split", "Qwen/Qwen3-1.7B", {"engine": {"gpu_memory_utilization": 0.96}}, "learner"),
        (1, 24, "split", "Qwen/Qwen3-1.7B", TWO_AND_TOO_MUCH, r"\(1\.2 "),
        (1, 24, "sleep", "Qwen/Qwen3-1.7B", TWO_AND_TOO_MUCH, r"\(1\.2 "),
        (1, 24, "split", "Qwen/Qwen3-8B", {}, r"engine.*GPU 0.* 12\.0 GiB.* 1\d\.\d"),
        (1, 24, "split", "Qwen/Qwen3-8B", {}, r"learner.*GPU 0.* 10\.8 GiB"),
        (1, 24, "sleep", "Qwen/Qwen3-8B", {}, r"learner.*GPU 0.* 6\.0 GiB"),
        (1, 24, "split", "Qwen/Qwen3-1.7B", ONE_HUNDREDTH_TOO_MUCH, "exceed the memory of GPU 0"),
        (1, 24, "sleep", "Qwen/Qwen3-4B", MOST, r"learner's share .*; lower engine.gpu_memory_utilization, or"),
        (1, 80, "split", "Qwen/Qwen3-8B", {}, None),
        (1, 80, "sleep", "Qwen/Qwen3-8B", {}, None),
        (2, 40, "split", "Qwen/Qwen3-8B", ON_1, None),
        (2, 40, "split", "Qwen/Qwen3-8B", ON_BOTH, None),
        (2, 30, "split", "Qwen/Qwen3-8B", ON_1, None),  # it may need more than an engine that shares its GPU
        (2, 30, "split", "Qwen/Qwen3-8B", ON_BOTH, r"(?s)^(?!.*GPU 1).*GPU 0"),
        (2, 24, "split", "Qwen/Qwen3-8B", TWICE_ON_1, r"engine's share of GPU 1 is 21\.6 GiB.*needs at least"),
        (2, 24, "split", "Qwen/Qwen3-1.7B", TWICE_ON_1, None),
        (2, 24, "split", "Qwen/Qwen3-1.7B", TWICE_ON_1_TOO_MUCH, r"1\.2 for all engines there"),
        (2, 16, "split", "Qwen/Qwen3-8B", {"engine": {"devices": (1,)}}, r"learner's share of GPU 0 is 15\.2 GiB"),
        (2, 80, "split", "Qwen/Qwen3-1.7B", PAIR | {"learner": ON_0}, "needs 2 GPUs for each engine"),
        (1, 24, "sleep", "builtin:tiny", VLLM_ON_CPU, r"vLLM.*engine\.kind"),
        (1, 24, "split", "builtin:tiny", VLLM_ON_CPU, None),
    ],
)
@pytest.mark.usefixtures("with_vllm")
def test_sharing_that_does_not_fit_is_refused(
    gpus: Any, count: int, gib: int, when_shared: str, model: str, sections: Any, says: str | None
) -> None:
    gpus(count, gib)
    with pytest.raises(ConfigError, match=says) if says else nullcontext():
        plan(when_shared, model, **sections)


def test_only_shares_are_checked_if_nvidia_smi_reports_no_memory(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1)
    monkeypatch.setattr(placement, "gpu_memory_bytes", lambda device: None)
    assert rows(plan("split", "Qwen/Qwen3-8B"))["memory of GPU 0"].startswith("engine 50%, learner 45%; ")


def test_memory_of_the_machine_is_the_limit_on_a_cpu(limit_memory: Any) -> None:
    assert rows(plan(model="builtin:tiny", **ON_CPU))["shared devices"].startswith("split: ")
    limit_memory(4)
    assert placement.memory_bytes("cpu") == 4 * GIB
    plan(model="builtin:tiny", **ON_CPU)
    with pytest.raises(ConfigError, match=r" 4\.0 GiB of memory"):
        plan(model="Qwen/Qwen3-1.7B", **ON_CPU)


def test_gpu_memory_is_queried_by_the_physical_gpu(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(4, 8)
    assert engines_devices.gpu_memory_bytes(1) == 8 * GIB
    smi = Path(shutil.which("nvidia-smi") or "")
    smi.write_text('#!/bin/sh\nwhile [ "$1" != "-i" ]; do shift; done; test "$2" = GPU-b && echo 1024\n')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    engines_devices.gpu_memory_bytes.cache_clear()
    assert (engines_devices.gpu_memory_bytes(0), engines_devices.gpu_memory_bytes(1)) == (None, GIB)


def evaluation_plan(directory: Path, model: str, when_shared: str = "split") -> Plan:
    config = directory / "trained.toml"
    config.write_text(
        f'model_name = "{model}"\n[engine]\nkind = "transformers"\nwhen_shared = "{when_shared}"\n'
        '[[train_envs]]\nenv_id = "TicTacToe-v0-train"\nnum_players = 2\nnum_actors = 2\nprompt_template = "tiny"\n'
    )
    return plan_evaluation(["base"], config=config, opponents=["scripted:random"]).plan


@pytest.mark.parametrize("when_shared", ["split", "sleep"])
def test_evaluation_has_the_gpu_to_itself(gpus: Any, tmp_path: Path, when_shared: str) -> None:
    gpus(1)
    made = evaluation_plan(tmp_path, "Qwen/Qwen3-8B", when_shared)
    assert made.engine_devices == (0,) and made.shared_devices == []
    assert made.divided_for((0,)).engine.gpu_memory_utilization is None


def test_evaluation_on_a_cpu_needs_no_memory_for_a_learner(
    limit_memory: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit_memory(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert evaluation_plan(tmp_path, "Qwen/Qwen3-1.7B")


@pytest.mark.nightly
async def test_engines_of_one_gpu_start_one_after_the_other(
    gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2)
    monkeypatch.setenv("STARTING", str(tmp_path))
    made = plan(
        model="builtin:tiny",
        engine={"kind": "fakes.stuck_engines:MeasuresTheWholeGPU", "devices": (0, 1, 0, 1)},
        learner={"devices": ("cpu",)},
    )
    async with started_engines(made, tmp_path, lambda text: None) as workers:
        assert [process.channel.is_up for process in workers.processes] == [True] * 4


def test_gpu_worker_gets_few_threads_and_numbers_gpus_by_bus(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    made = plan()
    assert (made.engine_threads, made.learner_threads) == (1, 4)
    given = plan(engine={"threads": 3}, learner={"threads": 2})
    assert (given.engine_threads, given.learner_threads) == (3, 2)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert environment((0,), 1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert environment((0,), 1)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


@pytest.mark.usefixtures("with_vllm")
def test_engine_on_several_gpus_divides_the_model(gpus: Any) -> None:
    gpus(5, 24)
    parallel = {"kind": "vllm", "devices": (1, 2, 3, 4), "tensor_parallel": 2, "max_generation_len": 1024}
    made = plan(model="Qwen/Qwen3-14B", engine=parallel, learner={"devices": ("cpu",)})
    assert made.devices_by_engine == [(1, 2), (3, 4)]
    assert rows(made)["engine-1"] == "vllm on GPU 3 and GPU 4"
    assert environment((1, 2), 1)["CUDA_VISIBLE_DEVICES"] == "1,2"
    with pytest.raises(ConfigError, match=r"engine's share of GPU 1"):
        plan(model="Qwen/Qwen3-14B", engine=parallel | {"tensor_parallel": 1}, learner={"devices": ("cpu",)})
    plan(
        model="Qwen/Qwen3-14B",
        engine={"kind": "vllm", "devices": (1,), "quantization": "fp8_per_channel"},
        learner={"devices": ("cpu",)},
    )


SHORT = {"max_model_len": 2048, "max_generation_len": 1024}
ONE_AT_A_TIME = {"learner": {"mini_batch_size": 1}}
SMALL_BATCH = {"engine": SHORT, "learner": {"batch_size": 2}}


@pytest.mark.parametrize(
    ("num_gpus", "gib", "when_shared", "sections", "is_on", "tokens"),
    [
        (2, 80, "split", {}, False, 16_384),
        (2, 48, "split", {}, False, 8192),
        (2, 24, "split", {}, True, 16_384),  # half a micro-batch would hold the longest sequence, and does not fit
        (2, 24, "split", {"engine": SHORT, "learner": {"max_tokens_per_micro_batch": 8192}}, False, 4096),
        (2, 24, "split", {"engine": SHORT}, True, 16_384),
        (2, 48, "split", ONE_AT_A_TIME, False, 16_384),  # of 8,192 tokens
        (2, 24, "split", SMALL_BATCH, False, 16_384),  # of 4,096 tokens
        (2, 24, "split", {**SMALL_BATCH, "algorithm": "a2c"}, True, 16_384),  # trajectories are not cut
        (1, 80, "split", {}, False, 8192),  # the learner has 45 %
        (1, 80, "sleep", {}, False, 16_384),
        (2, 80, "split", {"learner": {"activation_checkpointing": True}}, True, 16_384),
        (2, 24, "split", {"learner": {"activation_checkpointing": False}}, False, 16_384),
        (2, 80, "split", {"learner": {"dtype": "float32"}}, False, 8192),
    ],
)
def test_checkpointing_is_off_where_micro_batches_fit_without_it(
    gpus: Any, num_gpus: int, gib: float, when_shared: str, sections: Any, is_on: bool, tokens: int
) -> None:
    gpus(num_gpus, gib)
    made = plan(when_shared, **sections)
    learner = made.divided_for(made.learner_devices).learner
    assert (learner.activation_checkpointing, learner.max_tokens_per_micro_batch) == (is_on, tokens)
    assert rows(made)["checkpointing"].startswith("on: " if is_on else "off: ")


def test_resumed_run_keeps_its_checkpointing_which_is_on_if_the_memory_is_not_known(
    gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(2, 48)
    began = plan().config
    gpus(2, 16)
    assert make_plan(began).config.learner == began.learner
    assert plan().config.learner != began.learner
    gpus(2, 80)
    for model in ("unknown/model", "Qwen/Qwen3-1.7B"):
        made = plan(model=model)
        assert made.config.learner.activation_checkpointing is True
        assert "not known" in rows(made)["checkpointing"]
        monkeypatch.setattr(placement, "gpu_memory_bytes", lambda device: None)


def test_learner_on_the_cpu_goes_without_checkpointing_in_a_quarter_of_the_memory(limit_memory: Any) -> None:
    made = {}
    for gib, num_ranks in ((6, 1), (3, 1), (6, 2), (1, 1)):
        limit_memory(gib)
        learner = plan(model="builtin:tiny", **ON_CPU | {"learner": {"devices": ("cpu",) * num_ranks}}).config.learner
        made[gib, num_ranks] = learner.activation_checkpointing, learner.max_tokens_per_micro_batch
    assert made == {(6, 1): (False, 16_384), (3, 1): (False, 8192), (6, 2): (False, 8192), (1, 1): (True, 16_384)}


def test_fused_kernels_need_a_gpu_and_their_package(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else found(name))
    with pytest.raises(ConfigError, match=r"pip install 'unstable-lite\[liger\]'"):
        plan(learner={"kernels": "liger"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("json" if name == "liger_kernel" else name))
    assert plan(learner={"kernels": "liger"}).config.learner.kernels == "liger"
    with pytest.raises(ConfigError, match=r"learner\.kernels = 'liger' needs a GPU"):
        plan(model="builtin:tiny", learner={"kernels": "liger", "devices": ("cpu",)})


@pytest.mark.usefixtures("with_vllm")
def test_gpus_left_over_by_tensor_parallel_stay_idle(gpus: Any) -> None:
    for count, of_run, alone in ((4, [(1, 2)], [(0, 1), (2, 3)]), (3, [(1, 2)], [(0, 1)])):
        gpus(count, 80)
        made = plan(**PAIR)
        assert (made.devices_by_engine, made.learner_devices) == (of_run, (0,))
        assert make_engine_plan(made.config).devices_by_engine == alone


@pytest.mark.usefixtures("with_vllm")
def test_engine_whose_memory_is_not_known_is_not_refused_for_it(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(1, 24)
    monkeypatch.setattr(vllm_checks, "argument_names", lambda: ("cpu_offload_gb",))
    for engine in ({"kind": "vllm", "options": {"cpu_offload_gb": 16}}, {"kind": "fakes.sleeping_engines:KeepsADiary"}):
        plan(model="Qwen/Qwen3-14B", engine=engine, learner={"devices": ("cpu",)})
    with pytest.raises(ConfigError, match="engine's share of GPU 0"):
        plan(model="Qwen/Qwen3-14B", engine={"kind": "vllm"}, learner={"devices": ("cpu",)})


def test_check_says_whether_shared_prefixes_are_computed_once(tmp_path: Path) -> None:
    def text(model: Path | str, **sections: Any) -> str:
        return rows(plan(model=str(model), engine={"devices": ["cpu"]}, **sections))["shared prefixes"]

    assert text("builtin:tiny").startswith("computed once, if the learner's comparison")
    own = text("builtin:tiny", algorithm="fakes.failing_parts:Algorithm", lora={"lora_dropout": 0.1})
    assert "because lora.lora_dropout differs" in own
    shutil.copytree(resolve_model("builtin:tiny"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"alibi": True}))
    assert text(tmp_path / "model") == "computed for each step, because its attention depends on the index of a token"
