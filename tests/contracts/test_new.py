"""`new` writes the files of each example as they are in the clone; `--version` prints the versions."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import unstable_lite
from unstable_lite.cli.app import app
from unstable_lite.cli.runs import EXAMPLES, describe

ROOT = Path(__file__).parents[2]
SCRIPT = "import sys\nfrom unstable_lite.cli.app import main\nsys.exit(main())\n"
"""The script `unstable-lite` as an installer writes it."""


def new(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["new", *map(str, arguments)], catch_exceptions=False)
    return done.exit_code, done.output


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def test_every_example_is_written_as_it_is_in_the_clone():
    for name, files in EXAMPLES.items():
        code, output = new(name, name)
        assert code == 0, output
        assert {path.name for path in Path(name).iterdir()} == {*files}
        commands = [line.partition("#")[0].split() for line in output.splitlines()]
        assert any(words[:3] == ["unstable-lite", "run", files[0]] for words in commands) or "--exact" in commands[-1]
        for file in files:
            assert (Path(name) / file).read_bytes() == (ROOT / "examples" / file).read_bytes()
    assert {file for files in EXAMPLES.values() for file in files} >= {
        path.name for path in (ROOT / "examples").glob("*.toml")
    }


def test_commands_before_the_run_are_named():
    code, output = new("warm-start")
    sft = "unstable-lite sft warm_start.toml\nunstable-lite run warm_start.toml lora.initial_lora_path=warm_start\n"
    assert code == 0 and f"wrote warm_start.toml\n{sft}" in output
    for name in ("kuhn", "verifiers"):
        assert re.search(r"\npip install 'unstable-lite\[\w+\]'\nunstable-lite check ", new(name)[1])


def test_list_has_a_line_for_each_example():
    code, output = new()
    assert code == 0
    for name in EXAMPLES:
        line = describe(name)
        assert line.endswith(".") and len(line) < 120
        assert f"{name} " in output and line in output


def test_script_finds_a_module_of_the_working_directory(tmp_path):
    """Python puts the directory of the script first in the path, and not the working directory."""
    (tmp_path / "unstable-lite").write_text(SCRIPT)
    assert new("opponent")[0] == 0
    command = [sys.executable, tmp_path / "unstable-lite", "check", "custom_opponent.toml"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_example_or_an_existing_file_is_refused_and_nothing_is_written():
    code, output = new("warm_start")
    assert code == 1
    assert all(name in output for name in ("'warm_start'", *EXAMPLES))
    Path("arithmetic.jsonl").write_text("mine")
    code, output = new("questions")
    assert (code, output) == (
        1,
        "error: arithmetic.jsonl exists already, so nothing was written; name another directory\n",
    )
    assert [path.name for path in Path().iterdir()] == ["arithmetic.jsonl"]
    assert Path("arithmetic.jsonl").read_text() == "mine"


def test_directory_is_made_and_its_name_is_quoted_for_the_shell():
    code, output = new("quickstart", Path("my runs") / "first")
    assert code == 0 and "cd 'my runs/first'" in output
    assert Path("my runs/first/quickstart.toml").is_file()


@pytest.mark.parametrize(("directory", "why"), [("notes", "it is a file"), ("/proc/runs", "No such file")])
def test_directory_that_cannot_be_written_gives_one_message(directory, why):
    Path("notes").write_text("")
    code, output = new("quickstart", directory)
    assert code == 1
    assert output.startswith(f"error: cannot write to {directory}: {why}") and output.count("\n") == 1
    assert "name another directory" in output


def test_version_is_printed_without_loading_any_of_the_packages():
    code = "import sys\ntry:\n    from unstable_lite.cli.app import main; main()\nfinally:\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    *lines, modules = done.stdout.splitlines()
    assert lines[0].startswith(f"unstable-lite {unstable_lite.__version__}")
    assert lines[1].startswith(f"python {sys.version.split()[0]} on ")
    assert {"torch", "transformers", "peft", "textarena"} <= {line.split()[0] for line in lines}
    assert not {"torch", "transformers", "peft", "textarena", "pydantic"} & set(modules.split())
    (torch,) = (line for line in lines if line.startswith("torch "))
    assert "CUDA" in torch


def test_version_names_the_commit_of_the_clone_and_of_no_repository_around_it(tmp_path):
    """An environment often lies within the user's repository, whose commit would mislead."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run(["git", "-C", tmp_path, *who, "commit", "-q", "--allow-empty", "-m", "mine"], check=True)
    shutil.copytree(ROOT / "unstable_lite", tmp_path / "installed" / "unstable_lite")
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:10]
    lines = []
    for place in (ROOT, tmp_path / "installed"):
        command = [sys.executable, "-P", "-m", "unstable_lite", "--version"]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(place)})
        lines.append(done.stdout.splitlines()[0])
    commit = f" (commit {head})" if head else ""  # the tests may run from an sdist
    assert lines == [f"unstable-lite {unstable_lite.__version__}{commit}", f"unstable-lite {unstable_lite.__version__}"]
