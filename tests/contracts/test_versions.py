"""The bounds in pyproject.toml and the tested versions in constraints.txt agree."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent.parent
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


@pytest.mark.parametrize("requirement", WITH_EXTRAS, ids=str)
def test_tested_version_of_each_dependency_is_within_its_bounds(requirement):
    assert TESTED[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("requirement", BASE, ids=str)
def test_dependency_has_a_lower_and_an_upper_bound(requirement):
    operators = {specifier.operator for specifier in requirement.specifier}
    assert operators in ({">=", "<"}, {"=="})
