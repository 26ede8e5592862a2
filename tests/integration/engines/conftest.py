"""Fixtures of this folder; see fakes/engine_fixtures.py."""

from fakes.engine_fixtures import adapter_dirs, model_dir, start_engine, vllm_server

__all__ = ["adapter_dirs", "model_dir", "start_engine", "vllm_server"]
