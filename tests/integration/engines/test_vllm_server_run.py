"""Whole runs on a real vLLM server: the example, and a server that dies while games are in flight."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import runs
from fakes.vllm_serving import VLLMServer

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "cluster" / "vllm_server.toml"
SECRET = "secret of the side-car"


@pytest.fixture
def receiver_url(tmp_path: Path) -> Iterator[str]:
    """Start the side-car as a person would and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "adapters").mkdir()
    command = [sys.executable, "-m", "unstable_lite.engines.vllm_server.sidecar"]
    with (tmp_path / "receiver.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--folder", tmp_path / "adapters", "--port", str(port)],
            env=os.environ | {"ADAPTER_RECEIVER_API_KEY": SECRET},
            stderr=log,
        )
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


def example(tmp_path: Path, server: VLLMServer, model: Path, delivery: str) -> Path:
    """Write a smaller copy of the example with this test's server and model."""
    changes = {
        '"builtin:tiny"': f'"{model}"',
        '"http://127.0.0.1:8000"': f'"{server.url}"',
        'adapter_folder = "/tmp"': delivery,
        "num_collection_workers = 48": f'num_collection_workers = 12\noutput_dir = "{tmp_path / "outputs"}"',
        "batch_size = 48": "batch_size = 12",
    }
    text = EXAMPLE.read_text()
    for ours, theirs in changes.items():
        assert ours in text
        text = text.replace(ours, theirs)
    path = tmp_path / "vllm_server.toml"
    path.write_text(text)
    return path


def adapters_on(server: VLLMServer) -> list[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as answer:
        return [card["id"] for card in json.load(answer)["data"] if card["parent"] is not None]


def test_example_learns_with_adapters_uploaded_to_a_sidecar(
    vllm_server: VLLMServer, model_dir: Path, receiver_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAPTER_RECEIVER_API_KEY", SECRET)
    config = example(tmp_path, vllm_server, model_dir, f'adapter_receivers = ["{receiver_url}"]')
    code, out, err = runs.run("run", config, "run.learning_steps=2")
    assert code == 0, out + err
    directory = runs.run_directory(tmp_path)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    mismatches = [row["canary/mismatch"] for row in rows if "canary/mismatch" in row]
    assert runs.num_updates(tmp_path) == 2
    assert len(mismatches) == 2 and max(mismatches) < 0.1
    assert f"device {vllm_server.url}" in out + err
    assert list((tmp_path / "adapters").iterdir()) == [] and adapters_on(vllm_server) == []
    assert "PUT /adapters/" in (tmp_path / "receiver.log").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_restarted_server_gets_its_adapters_and_the_run_continues(
    vllm_server: VLLMServer, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    config = example(tmp_path, vllm_server, model_dir, f'adapter_folder = "{tmp_path / "folder"}"')
    process = runs.start("run", config, "run.learning_steps=4", "run.restart_backoff_s=0.1")
    runs.wait_for(lambda: runs.num_updates(tmp_path) >= 1 or process.poll() is not None, timeout_s=400)
    vllm_server.kill()
    vllm_server.start()
    code, out, err = runs.finish(process, timeout_s=700)
    assert code == 0, out + err
    assert runs.num_updates(tmp_path) == 4
    assert f"ConnectionError: {vllm_server.url}" in out + err
    assert "0 void" in out, out
    assert list((tmp_path / "folder").iterdir()) == [] and adapters_on(vllm_server) == []
