"""Where the key of an OpenAI-compatible endpoint comes from: the environment, and nowhere else."""

from __future__ import annotations

import os

API_KEY_VARIABLES = ("OPENROUTER_API_KEY", "OPENAI_API_KEY")


def api_key() -> str | None:
    return next((key for name in API_KEY_VARIABLES if (key := os.environ.get(name))), None)
