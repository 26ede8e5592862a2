"""Fixtures of this folder; see fakes/engine_fixtures.py."""

from fakes.engine_fixtures import model_dir

__all__ = ["model_dir"]
