"""What a config says of vLLM's servers, checked before anything is started or asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unstable_lite.config import Config, EngineConfig
from unstable_lite.engines.servers import server_keys, server_problems, server_url
from unstable_lite.errors import ConfigError
from unstable_lite.games.api_keys import RECEIVER_KEY, SERVER_KEY
from unstable_lite.plan import find_problems, make_plan

URLS = ("http://gpu-1:8000", "http://gpu-2:8000/v1")


def problems_of(environment: dict[str, str] | None = None, **engine: Any) -> list[str]:
    return list(server_problems(EngineConfig(**engine), environment or {}))


def test_servers_with_a_shared_folder_or_with_a_side_car_each_are_a_plan(tmp_path: Path) -> None:
    assert problems_of(kind="vllm-server", urls=URLS, adapter_folder=tmp_path) == []
    receivers = ("http://gpu-1:8001", "http://gpu-2:8001")
    assert problems_of({RECEIVER_KEY: "s"}, kind="vllm-server", urls=URLS, adapter_receivers=receivers) == []
    assert [server_url(url) for url in URLS] == ["http://gpu-1:8000", "http://gpu-2:8000"]


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({}, "engine.urls is empty"),
        ({"urls": ("gpu-1:8000",)}, "engine.urls.0: not the URL of an endpoint, such as 'http://gpu-node-7:8000'"),
        ({"urls": ("http://key@gpu-1:8000",)}, "set the environment variable VLLM_API_KEY"),
        ({"urls": ("http://a:1", "http://a:1/v1/")}, "http://a:1 stands there twice"),
        ({"urls": URLS, "devices": (0,)}, "engine.devices = [0]: the devices are the servers' own"),
        ({"urls": URLS, "adapter_folder": None}, "needs either engine.adapter_folder"),
        ({"urls": URLS, "adapter_receivers": ("http://a:1", "http://b:1")}, "needs either engine.adapter_folder"),
        ({"urls": URLS, "adapter_folder": Path("relative")}, "as an absolute path"),
        ({"urls": URLS, "adapter_folder": Path("/nonexistent/adapters")}, "is not a directory that can be written to"),
        ({"urls": URLS, "adapter_folder": Path("/" + "x" * 5000)}, "is not a directory that can be written to"),
        ({"urls": URLS, "adapter_folder": None, "adapter_receivers": ("http://a:1",)}, "names 1, engine.urls 2"),
        ({"urls": URLS, "adapter_folder": None, "adapter_receivers": ("ftp://a",) * 2}, "engine.adapter_receivers.0"),
        ({"urls": URLS, "adapter_folder": None, "adapter_receivers": URLS}, "a server's own address and port"),
        ({"urls": URLS, "adapter_folder": None, "adapter_receivers": ("http://a:1", "http://b:1")}, RECEIVER_KEY),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_be_served_is_told(tmp_path: Path, engine: dict[str, Any], says: str) -> None:
    problems = problems_of(**({"kind": "vllm-server", "adapter_folder": tmp_path} | engine))
    assert any(says in problem for problem in problems), problems


def test_keys_of_servers_mean_nothing_to_other_engines(tmp_path: Path) -> None:
    problems = problems_of(kind="vllm", urls=URLS, adapter_folder=tmp_path, adapter_receivers=URLS)
    assert len(problems) == 3 and all("is for engine.kind = 'vllm-server'" in problem for problem in problems)
    assert problems_of(kind="vllm") == []


def config_of(**engine: Any) -> Config:
    return Config.model_validate(
        {
            "engine": {"kind": "vllm-server"} | engine,
            "train_envs": [{"env_id": "TicTacToe-v0-train", "num_players": 2, "num_actors": 2}],
        }
    )


def test_check_finds_them_and_says_what_goes_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.urls is empty"):
        make_plan(config_of(adapter_folder=tmp_path))
    config = config_of(urls=URLS, adapter_folder=tmp_path)
    assert find_problems(config) == []
    plan = make_plan(config)
    rows = dict(plan.describe())
    assert (rows["engine-0"], rows["engine-1"]) == tuple(f"vllm-server on {url}" for url in URLS)
    assert str(tmp_path) in rows["adapters to the servers"]
    assert rows["engine memory"] == "the servers' own"
    assert rows["learner"].startswith("reinforce on ")
    assert plan.engine_devices == URLS


def test_only_the_keys_that_are_there_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RECEIVER_KEY, raising=False)
    monkeypatch.setenv(SERVER_KEY, "k")
    monkeypatch.setenv("OPENAI_API_KEY", "another's")
    assert server_keys() == {SERVER_KEY: "k"}
