"""A GGUF file is converted into a model directory once; if that fails, there is one clear message and no file left."""

import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fakes import runs
from fakes.random_models import write_gguf
from unstable_lite.errors import ModelError
from unstable_lite.models import chat_template, gguf_cache, resolve_model
from unstable_lite.models.local_tokenizer import find_tokenizer
from unstable_lite.planning.memory import shape_of

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="module")
def filled_cache(whole_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache directory in which two processes converted `whole_file` at the same time."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        first, second = threads.map(resolve_model, [str(whole_file)] * 2)
    assert first == second
    return cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_in(cache: Path) -> list[Path]:
    return [*cache.glob("unstable_lite/gguf/*"), *cache.glob("unstable_lite/gguf/.*")]


def test_converted_model_is_the_one_in_the_file(
    whole_file: Path, filled_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(filled_cache))
    directory = Path(resolve_model(str(whole_file)))
    assert capfd.readouterr().err == ""  # already converted
    assert left_in(filled_cache) == [directory]  # neither process left anything else
    shape = shape_of(str(whole_file))
    assert shape is not None and (shape.hidden, shape.layers, shape.vocab_size) == (32, 2, 260)
    assert chat_template(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer("Play [3]!", add_special_tokens=False).input_ids) == "Play [3]!"
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert (model.dtype, model.config.architectures) == (torch.bfloat16, ["LlamaForCausalLM"])
    assert getattr(model.config, "quantization_config", None) is None
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(whole_file).tensors}
    for name, weight in (
        ("token_embd.weight", model.get_input_embeddings().weight),
        ("blk.1.ffn_down.weight", model.model.layers[1].mlp.down_proj.weight),
    ):
        assert torch.equal(weight, torch.from_numpy(tensors[name].copy()).to(torch.bfloat16))


@pytest.mark.timeout(900)
def test_every_command_accepts_the_file_as_any_model(
    whole_file: Path, filled_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(filled_cache))
    config, tuned, evaluated = runs.write_small(tmp_path), tmp_path / "sft", tmp_path / "eval"
    model, short = f'model_name="{whole_file}"', "engine.max_generation_len=16"
    assert str(whole_file) in runs.output_of(runs.invoke("check", config, model))
    runs.output_of(runs.run("run", config, model, "run.learning_steps=1", "run.eval_games=0"))
    directory = runs.run_directory(tmp_path)
    assert str(whole_file) in (directory / "config.toml").read_text()
    runs.output_of(runs.run("run", "--resume", directory, "run.learning_steps=2"))
    assert (directory / "checkpoints" / "ckpt-2").is_dir()

    of_pairs = ('sft.players=["scripted:random"]', "sft.pairs=8", "sft.epochs=1", f'sft.output="{tuned}"')
    runs.output_of(runs.run("sft", config, model, short, *of_pairs))
    base = ("base", "--config", config, "--set", model, "--set", short)
    runs.output_of(runs.run("eval", *base, "--output", evaluated, "--games", "2"))
    assert list(tuned.rglob("adapter_model.safetensors"))
    assert list(evaluated.rglob("table.csv"))
    command = runs.command("play", *base, "--seat", "0")
    played = subprocess.run(command, input="[0 9]\n[0 9]\n", capture_output=True, text=True, timeout=240)
    assert played.returncode == 0, played.stdout + played.stderr
    assert "player 0, you: loss by an invalid move (-1)" in played.stdout
    assert find_tokenizer(str(whole_file)) is not None
    assert len(left_in(filled_cache)) == 1


def test_changed_file_is_another_model_and_a_report_converts_nothing(
    whole_file: Path, filled_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(filled_cache))
    path = tmp_path / "small.gguf"
    shutil.copy(whole_file, path)
    assert resolve_model(str(path)) == resolve_model(str(whole_file))  # the content counts
    with path.open("ab") as file:
        file.write(b"\0")
    assert find_tokenizer(str(path)) is None
    assert len(left_in(filled_cache)) == 1


def test_leftovers_of_a_killed_conversion_are_removed_by_the_next(
    whole_file: Path, cache: Path, tmp_path: Path
) -> None:
    old, new = (cache / "unstable_lite" / "gguf" / f".small-{name}" for name in ("old", "new"))
    for left_behind in (old, new):
        left_behind.mkdir(parents=True)
        (left_behind / "model.safetensors").write_bytes(b"half")
    os.utime(old, (0, 0))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_file.read_bytes()[:100])
    with pytest.raises(ModelError):
        resolve_model(str(path))
    assert set(left_in(cache)) == {new}  # another process may be using it


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _header(num_tensors: int, num_keys: int, rest: bytes) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_keys) + rest


@pytest.mark.parametrize(
    "content",
    [
        0.0,
        0.9,
        _header(0, 1, _string("k") + struct.pack("<IIQ", 9, 8, 1 << 40)),
        _header(0, 1, _string("k") + struct.pack("<IIQ", 9, 4, 1 << 62)),
        _header(0, 1, _string("k") + struct.pack("<IQ", 8, 1 << 63)),
        _header(0, 1, _string("k") + struct.pack("<IIQIQ", 9, 9, 1 << 40, 9, 1 << 40)),
        _header(0, 1, struct.pack("<Q", 1 << 50)),
        _header(0, 1, _string("k") + struct.pack("<I", 77)),
        _header(0, 1 << 40, b""),
        _header(1 << 40, 0, b""),
        _header(1, 0, _string("t") + struct.pack("<I", (1 << 32) - 1)),
    ],
    ids=[
        *("empty", "cut", "strings", "numbers", "text", "arrays", "key", "unknown type", "keys", "tensors"),
        "dimensions",
    ],
)
def test_truncated_file_and_lengths_beyond_the_file_give_one_message(
    whole_file: Path, cache: Path, tmp_path: Path, content: float | bytes
) -> None:
    """Numbers are the share of the whole file that is left."""
    path, whole = tmp_path / "endless.gguf", whole_file.read_bytes()
    is_cut = isinstance(content, float)
    path.write_bytes(whole[: int(content * len(whole))] if is_cut else content)
    with pytest.raises(ModelError, match=r"endless\.gguf" if is_cut else r"endless\.gguf is damaged"):
        resolve_model(str(path))
    assert left_in(cache) == []


def test_missing_weight_is_named(cache: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "holes.gguf", without="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"missing.*layers\.1\.mlp\.up_proj"):
        resolve_model(str(tmp_path / "holes.gguf"))
    assert left_in(cache) == []


def test_unsupported_architecture_gives_one_message_in_check(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    write_gguf(path, architecture="oddly")
    code, _, err = runs.invoke("check", runs.write_small(tmp_path), f'model_name="{path}"')
    assert code != 0
    problems = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(problems) == 1 and "odd.gguf" in problems[0] and "oddly" in problems[0], err
    assert "Traceback" not in err
    assert left_in(cache) == []


def test_missing_file_and_missing_package_give_one_message(
    whole_file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="No such file"):
        resolve_model(str(tmp_path / "none.gguf"))
    monkeypatch.setattr(gguf_cache.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip install 'unstable-lite\[gguf\]'"):
        resolve_model(str(whole_file))
    assert not cache.exists()


def test_resolving_loads_no_torch(whole_file: Path, filled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(filled_cache))
    code = f"import sys\nfrom unstable_lite.models import resolve_model\nresolve_model({str(whole_file)!r})\n"
    code += "print({'torch', 'transformers', 'gguf'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\n"
