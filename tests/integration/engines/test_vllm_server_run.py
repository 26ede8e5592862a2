"""Whole runs on a real vLLM server: the example, and a server that dies while games are in flight."""

import json
import urllib.request
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from fakes import run_files, runs
from fakes.random_models import make_adapter
from fakes.remote_engine import engine_spec, finish, request
from fakes.vllm_serving import LORA, WHOLE_PROMPTS, VLLMServer
from unstable_lite.engines.base import load_engine
from unstable_lite.games.templates import TEMPLATES
from unstable_lite.types import Generation

pytestmark = [pytest.mark.vllm, pytest.mark.nightly, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).parents[3] / "examples" / "cluster" / "vllm_server.toml"


def example(tmp_path: Path, server: VLLMServer, model: Path) -> Path:
    """Write a smaller copy of the example with this test's server and model."""
    changes = {
        '"builtin:tiny"': f'"{model}"',
        '"http://127.0.0.1:8000"': f'"{server.url}"',
        'adapter_folder = "/tmp"': f'adapter_folder = "{tmp_path / "folder"}"',
        "num_collection_workers = 48": f'num_collection_workers = 12\noutput_dir = "{tmp_path / "outputs"}"',
        "batch_size = 48": "batch_size = 12",
    }
    (tmp_path / "folder").mkdir()
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


def test_example_learns_and_another_server_serves_its_checkpoint(
    vllm_server: VLLMServer, model_dir: Path, tmp_path: Path
) -> None:
    config = example(tmp_path, vllm_server, model_dir)
    # Two updates may learn nothing (the untrained model loses every game alike), so the run starts from an adapter.
    initial = make_adapter(model_dir, tmp_path / "initial", 1, r=16, lora_alpha=32)
    code, out, err = runs.run("run", config, "run.learning_steps=2", f"lora.initial_lora_path={initial}")
    assert code == 0, out + err
    directory = runs.run_directory(tmp_path)
    mismatches = [row["canary/mismatch"] for row in run_files.metrics(directory) if "canary/mismatch" in row]
    assert runs.num_updates(tmp_path) == 2
    assert len(mismatches) == 2 and max(mismatches) < 0.1
    assert f"device {vllm_server.url}" in (directory / "logs" / "orchestrator.log").read_text()
    assert list((tmp_path / "folder").iterdir()) == [] and adapters_on(vllm_server) == []

    # As docs/share.md shows it: the checkpoint is a LoRA module of vLLM's server.
    checkpoint = directory / "checkpoints" / "ckpt-2"
    shown = VLLMServer(model_dir, tmp_path / "log", *LORA, *WHOLE_PROMPTS, "--lora-modules", f"nim={checkpoint}")
    shown.start()
    try:
        generation = _generated(model_dir, checkpoint)
        assert np.abs(_logprobs(shown, "nim", generation) - generation.logprobs).max() < 1e-3
        assert np.abs(_logprobs(shown, str(model_dir), generation) - generation.logprobs).max() > 1e-2
    finally:
        shown.kill()


def _generated(model: Path, checkpoint: Path) -> Generation:
    """Return the embedded engine's answer, with the adapter of a checkpoint, to a prompt of the run."""
    engine = load_engine(engine_spec(model=str(model), kind="transformers", dtype="float32", max_model_len=512))
    engine.load_adapter(1, checkpoint)
    prompt = TEMPLATES["tiny"].prompt("Current Pile:\n  pile 0: 3\n  pile 1: 4", 2)
    engine.add_request(request(5, version=1, prompt=prompt, max_tokens=20, temperature=1.0))
    return finish(engine)[0]


def _logprobs(server: VLLMServer, model: str, generation: Generation) -> npt.NDArray[np.float64]:
    """Return the log-probabilities that a server gives the tokens of an answer, asked as anyone would."""
    prompt, answer = generation.prompt_ids.tolist(), generation.completion_ids.tolist()
    body = {"model": model, "prompt": prompt + answer, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
    post = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=60) as reply:
        given = json.load(reply)["choices"][0]["prompt_logprobs"][len(prompt) :]
    return np.array([one[str(token)]["logprob"] for one, token in zip(given, answer, strict=True)])


def test_restarted_server_gets_its_adapters_and_the_run_continues(
    vllm_server: VLLMServer, model_dir: Path, tmp_path: Path
) -> None:
    config = example(tmp_path, vllm_server, model_dir)
    process = runs.start("run", config, "run.learning_steps=4")
    runs.wait_for(lambda: runs.num_updates(tmp_path) >= 1 or process.poll() is not None, timeout_s=400)
    vllm_server.kill()
    vllm_server.start()
    code, out, err = runs.finish(process, timeout_s=700)
    assert code == 0, out + err
    assert runs.num_updates(tmp_path) == 4
    assert f"ConnectionError: {vllm_server.url}" in out + err
    assert "0 void" in out, out
    assert list((tmp_path / "folder").iterdir()) == [] and adapters_on(vllm_server) == []
