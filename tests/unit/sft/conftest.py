"""Fixtures of this folder; see fakes/sft_fixtures.py."""

from fakes.sft_fixtures import make_config, one_thread

__all__ = ["make_config", "one_thread"]
