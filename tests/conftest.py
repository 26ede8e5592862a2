"""Fixtures and settings for every test: markers for hardware and vLLM, and the modules whose warnings are errors."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from fakes.shared_runs import finished_run, sync_run  # noqa: F401
from unstable_lite.engines.devices import count_gpus, vllm_usable

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# No test asserts a duration.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

NUM_GPUS = count_gpus()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOT = Path(__file__).parent.parent
OWN_MODULES = {"unstable_lite", "bench", "fakes"}
OWN_MODULES |= {path.stem for top in ("tests", "examples") for path in (ROOT / top).rglob("*.py")}
"""Modules whose warnings are errors."""


def pytest_configure(config: pytest.Config) -> None:
    # Each xdist worker has one core; two threads of torch on it would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The directory of the secret that seals configs, also for the processes that tests start.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="unstable-lite-tests-")
    config.addinivalue_line("filterwarnings", rf"error:::({'|'.join(sorted(OWN_MODULES))})(\.|$)")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_STATE_HOME"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gc.freeze()  # the collected tests and modules stay; searching them for garbage was a fifth of the unit tests
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # the longest of all begins first
    for item in items:
        needed = 2 if item.get_closest_marker("two_gpus") else 1 if item.get_closest_marker("gpu") else 0
        if needed > NUM_GPUS:
            item.add_marker(pytest.mark.skip(reason=f"CUDA devices needed: {needed}, visible: {NUM_GPUS}"))
        if item.get_closest_marker("vllm"):
            is_usable, reason = vllm_usable([0] if needed else ["cpu"])
            if not is_usable:
                item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("verifiers") and importlib.util.find_spec("verifiers") is None:
            item.add_marker(pytest.mark.skip(reason="no verifiers on this machine (the extra `verifiers`)"))
        if item.get_closest_marker("browser") and CHROMIUM is None:
            item.add_marker(pytest.mark.skip(reason="no Chromium on this machine (apt-get install chromium)"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield Chromium, for tests marked `browser`."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)
    with sync_playwright() as made, made.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]) as opened:
        yield opened
