"""Prompts of turns that were not trained on, made from the run's config, because a run keeps only the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from unstable_lite.config.games import TemplateConfig
from unstable_lite.games.templates import Template, known_templates


def templates_by_env(config: Mapping[str, Any]) -> dict[tuple[str, str], Template]:
    """Return the templates by kind of game and env id. `config`: a run's config.toml.

    Chat templates, which a tokenizer lays out, are left out, and so are envs with several templates.
    """
    try:
        own = {name: TemplateConfig.model_validate(made) for name, made in config.get("templates", {}).items()}
    except ValidationError:  # of another version
        own = {}
    known, names = known_templates(own), defaultdict(set)
    for kind in ("train", "eval"):
        for env in config.get(f"{kind}_envs", ()):
            names[kind, env["env_id"]].add(env.get("prompt_template", "default"))
    found = {key: known.get(one) for key, (one, *others) in names.items() if not others}
    return {key: template for key, template in found.items() if isinstance(template, Template)}
