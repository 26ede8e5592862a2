"""A random model, random adapters, and a way to start workers that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from random_models import make_adapter, make_model
from remote_engine import RemoteEngine


@pytest.fixture
def start_engine() -> Iterator[Callable[..., RemoteEngine]]:
    """Starts workers that end with the test."""
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
def adapter_dirs(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_adapter(model_dir, tmp_path_factory.mktemp(f"adapter-{seed}"), seed) for seed in (1, 2)]
