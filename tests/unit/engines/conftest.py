"""Fixtures of this folder; see fakes/engine_fixtures.py."""

from fakes.engine_fixtures import adapter_dirs, model_dir

__all__ = ["adapter_dirs", "model_dir"]
