"""A model whose weights are not those of its architecture ends `check --model` and a run at once, with the names."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fakes import runs
from unstable_lite.models import BUILTIN


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model whose layers all lack a weight, so that only the architecture shows it."""
    path = Path(shutil.copytree(BUILTIN["builtin:tiny"], tmp_path / "model")) / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if "up_proj" not in name}
    save_file(kept, path, {"format": "pt"})
    return path.parent


def test_check_model_compares_names_without_weights(model: Path, tmp_path: Path) -> None:
    code, out, err = runs.run("check", runs.write_small(tmp_path), "--model", f"model_name={model}")
    assert (code, "can run" in out) == (1, False)
    assert f"error: {model}: its weights are not those of" in err
    assert "missing: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight" in err


@pytest.mark.nightly
def test_run_ends_at_the_first_worker_that_misses_weights(model: Path, tmp_path: Path) -> None:
    code, out, err = runs.run("run", runs.write_small(tmp_path), f"model_name={model}")
    assert code == 1
    assert (out + err).count("missing: model.layers.0.mlp.up_proj.weight") == 1
    assert "restart" not in out + err
    assert "Traceback" not in err
