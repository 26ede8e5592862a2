"""Fixtures of this folder; see fakes/learner_fixtures.py."""

from fakes.learner_fixtures import make_config, make_items, make_learner, model_path, one_thread

__all__ = ["make_config", "make_items", "make_learner", "model_path", "one_thread"]
