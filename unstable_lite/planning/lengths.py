"""Lengths of prompts and answers that contradict each other, and templates for which a budget for thinking is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.config.games import EnvSpec
from unstable_lite.config.training import EngineConfig
from unstable_lite.games.templates import ChatTemplate, known_templates
from unstable_lite.games.thinking import OPEN, leaves_thinking_open
from unstable_lite.models import chat_template, resolve_model


def length_problems(engine: EngineConfig) -> Iterator[str]:
    """Yield each reason why an answer cannot have these lengths."""
    if engine.max_generation_len >= engine.max_model_len:
        yield (
            f"engine.max_generation_len = {engine.max_generation_len} leaves no room for a prompt in "
            f"engine.max_model_len = {engine.max_model_len}"
        )
    if engine.thinking_tokens is not None and engine.thinking_tokens >= engine.max_generation_len:
        yield (
            f"engine.thinking_tokens = {engine.thinking_tokens} leaves no room for an answer in "
            f"engine.max_generation_len = {engine.max_generation_len}"
        )


def thinking_warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each template in use that does not open thinking, if there is a budget for it.

    config: one without problems.
    """
    if config.engine.thinking_tokens is None:
        return
    known = known_templates(config.templates)
    specs: list[EnvSpec] = [*config.train_envs, *config.eval_envs]
    for name in dict.fromkeys(spec.prompt_template for spec in specs):
        template = known[name]
        if isinstance(template, ChatTemplate):
            model = Path(resolve_model(config.model_name))
            # The template of a model from a hub is not here yet.
            opens = leaves_thinking_open(template.assistant) or (
                template.thinking and (not model.is_dir() or OPEN in chat_template(model))
            )
        else:
            opens = bool(template.opened_thinking)
        if not opens:
            yield (
                f"engine.thinking_tokens = {config.engine.thinking_tokens}: prompt_template {name!r} does not open "
                "<think>, so the budget ends only a thinking that the model opens by itself"
            )
