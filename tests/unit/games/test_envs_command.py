"""`envs` lists what can be named."""

from __future__ import annotations

from typer.testing import CliRunner

from unstable_lite.cli.app import app


def test_pattern_that_no_env_id_contains_is_refused_with_a_similar_one() -> None:
    refused = CliRunner().invoke(app, ["envs", "Nimm"])
    assert refused.exit_code == 1
    assert refused.output == "error: no env id contains 'Nimm'; did you mean 'Nim'?\n"
    listed = CliRunner().invoke(app, ["envs", "Nim-v0"])
    assert listed.exit_code == 0 and "scripted:optimal" in listed.output
