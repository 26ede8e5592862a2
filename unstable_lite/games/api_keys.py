"""Where an OpenAI-compatible endpoint is, and where its key comes from: the environment, and nowhere else."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

SERVER_KEY = "VLLM_API_KEY"
"""Of vLLM servers that are engines; the variable that their own `--api-key` reads. Only where they ask for a key."""
RECEIVER_KEY = "ADAPTER_RECEIVER_API_KEY"
"""Of the side-cars that take adapters for them."""
OPENROUTER_URL = "https://openrouter.ai/api/v1"


def endpoint_url(configured: str | None) -> str:
    return configured or os.environ.get("OPENAI_BASE_URL") or OPENROUTER_URL


def key_variable(url: str) -> str:
    """OpenRouter's key goes to OpenRouter alone."""
    host = urlsplit(url).hostname or ""
    return "OPENROUTER_API_KEY" if f".{host}".endswith(".openrouter.ai") else "OPENAI_API_KEY"


def api_key(url: str) -> str | None:
    """The key for this endpoint; a server on this machine may do without one."""
    key = os.environ.get(key_variable(url))
    is_local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    return key or ("none" if is_local else None)


def url_problem(url: str, example: str = OPENROUTER_URL, variable: str | None = None) -> str | None:
    """What is wrong is not repeated: it may be a key that stands in the wrong place."""
    not_one = f"not the URL of an endpoint, such as {example!r}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return not_one
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return not_one
    if "@" in parts.netloc or parts.query or parts.fragment:
        return f"a URL holds no key, name or password; set the environment variable {variable or key_variable(url)}"
    return None
