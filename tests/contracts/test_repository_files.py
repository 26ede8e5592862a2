"""The files for GitHub and for citations are valid, and the workflows have few rights."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import unstable_lite

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
WRITERS = {"release.yml": {"publish": {"id-token"}}, "docs.yml": {"deploy": {"pages", "id-token"}}}
"""Jobs that may write, and the rights that they have."""
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def read(path: Path) -> dict[Any, Any]:
    return dict(yaml.safe_load(path.read_text()))


@pytest.mark.nightly
@pytest.mark.parametrize("schema", SCHEMAS)
def test_file_is_valid_by_its_schema(schema):
    command = [sys.executable, "-m", "uv", "tool", "run", "check-jsonschema@0.39.0", "--builtin-schema", schema]
    done = subprocess.run([*command, *SCHEMAS[schema]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_reads_only_and_its_actions_have_a_version(path):
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job
        assert {*job.get("permissions", {})} == WRITERS.get(path.name, {}).get(name, set())
        for step in job["steps"]:
            uses, command = step.get("uses", "@v1"), step.get("run", "")
            assert re.search(r"@v\d|^docker://.*:\d", uses), uses
            assert "checkout" not in uses or step["with"]["persist-credentials"] is False
            if command.startswith(".ci/"):
                assert os.access(ROOT / command, os.X_OK)


def test_every_python_version_of_the_package_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)'", str(project["classifiers"]))
    assert len(named) > 1
    assert read(GITHUB / "workflows" / "ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize(("tag", "code"), [(f"v{unstable_lite.__version__}", 0), ("v999.0", 1)])
def test_release_refuses_a_tag_that_is_not_the_version(tag, code):
    steps = read(GITHUB / "workflows" / "release.yml")["jobs"]["build"]["steps"]
    (check,) = (step["run"] for step in steps if "tag" in step.get("name", ""))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", check], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PATH": path, "GITHUB_REF_NAME": tag},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert ("v999.0 is not v" in done.stdout) == bool(code)


def test_citation_has_the_version_of_the_package():
    assert str(read(ROOT / "CITATION.cff")["version"]) == unstable_lite.__version__


def test_bug_report_must_have_the_versions_and_the_check():
    fields = [field for field in read(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"] if "validations" in field]
    needed = " ".join(field["attributes"]["label"] for field in fields if field["validations"]["required"])
    assert "unstable-lite --version" in needed and "unstable-lite check" in needed
