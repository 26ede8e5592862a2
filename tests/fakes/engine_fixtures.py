"""A random model, random adapters, and a way to start workers that end with their test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes.random_models import make_adapter, make_model
from fakes.remote_engine import RemoteEngine
from fakes.vllm_serving import LORA, WHOLE_PROMPTS, VLLMServer


@pytest.fixture
def start_engine() -> Iterator[Callable[..., RemoteEngine]]:
    engines: list[RemoteEngine] = []

    def start(**engine: Any) -> RemoteEngine:
        engines.append(RemoteEngine(**engine))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def vllm_server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    """Yield vLLM's own server with the random model. A test that ends the server starts it again."""
    log = tmp_path_factory.mktemp("vllm-server") / "log"
    limits = ("--max-model-len", "640", "--max-num-seqs", "16")
    server = VLLMServer(model_dir, log, *limits, *LORA, *WHOLE_PROMPTS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def adapter_dirs(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_adapter(model_dir, tmp_path_factory.mktemp(f"adapter-{seed}"), seed) for seed in (1, 2)]
