"""The config of vLLM servers, checked before any process starts and before any request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unstable_lite.config import Config
from unstable_lite.config.training import EngineConfig
from unstable_lite.engines.vllm_checks import server_keys, server_problems, server_url
from unstable_lite.errors import ConfigError
from unstable_lite.games.api_keys import SERVER_KEY
from unstable_lite.planning.plan import make_plan
from unstable_lite.planning.validation import find_problems

URLS = ("http://gpu-1:8000", "http://gpu-2:8000/v1")


def problems_of(**engine: Any) -> list[str]:
    return list(server_problems(EngineConfig(**engine)))


def test_urls_may_end_in_v1() -> None:
    assert [server_url(url) for url in URLS] == ["http://gpu-1:8000", "http://gpu-2:8000"]


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({}, "engine.urls is empty"),
        ({"urls": ("gpu-1:8000",)}, "engine.urls.0"),
        ({"urls": ("http://key@gpu-1:8000",)}, "VLLM_API_KEY"),
        ({"urls": ("http://a:1", "http://a:1/v1/")}, "http://a:1"),
        ({"urls": URLS, "devices": (0,)}, "engine.devices = [0]"),
        ({"urls": URLS, "adapter_folder": None}, "engine.adapter_folder"),
        ({"urls": URLS, "adapter_folder": Path("relative")}, "absolute path"),
        ({"urls": URLS, "adapter_folder": Path("/nonexistent/adapters")}, "/nonexistent/adapters"),
        ({"urls": URLS, "adapter_folder": Path("/" + "x" * 5000)}, "x" * 5000),
        ({"urls": URLS, "adapter_folder": Path("/x\0y")}, "writable directory"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_unusable_server_config_is_reported(tmp_path: Path, engine: dict[str, Any], says: str) -> None:
    problems = problems_of(**({"kind": "vllm-server", "adapter_folder": tmp_path} | engine))
    assert any(says in problem for problem in problems), problems


def test_server_keys_are_refused_for_other_engines(tmp_path: Path) -> None:
    problems = problems_of(kind="vllm", urls=URLS, adapter_folder=tmp_path)
    assert len(problems) == 2 and all("engine.kind = 'vllm-server'" in problem for problem in problems)
    assert problems_of(kind="vllm") == []


def config_of(**engine: Any) -> Config:
    return Config.model_validate(
        {
            "engine": {"kind": "vllm-server"} | engine,
            "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
        }
    )


def test_check_finds_problems_and_describes_the_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.urls is empty"):
        make_plan(config_of(adapter_folder=tmp_path))
    config = config_of(urls=URLS, adapter_folder=tmp_path)
    assert find_problems(config) == []
    plan = make_plan(config)
    rows = dict(plan.describe())
    assert (rows["engine-0"], rows["engine-1"]) == tuple(f"vllm-server on {url}" for url in URLS)
    assert str(tmp_path) in rows["adapters to the servers"]
    assert "engine memory" in rows
    assert rows["learner"].startswith("reinforce on ")
    assert plan.engine_devices == URLS


def test_only_configured_server_keys_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_KEY, "k")
    monkeypatch.setenv("OPENAI_API_KEY", "another's")
    assert server_keys() == {SERVER_KEY: "k"}
