"""URL and key of an OpenAI-compatible endpoint. Keys come from the environment only."""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

SERVER_KEY = "VLLM_API_KEY"
"""Variable with the key of vLLM servers that are engines, if they ask for one; vLLM's own `--api-key` reads it."""
OPENROUTER_URL = "https://openrouter.ai/api/v1"


def endpoint_url(configured: str | None) -> str:
    return configured or os.environ.get("OPENAI_BASE_URL") or OPENROUTER_URL


def key_variable(url: str) -> str:
    """Return the variable that holds the endpoint's key. OpenRouter's key is sent only to OpenRouter."""
    host = urlsplit(url).hostname or ""
    return "OPENROUTER_API_KEY" if f".{host}".endswith(".openrouter.ai") else "OPENAI_API_KEY"


def api_key(url: str) -> str | None:
    """Return the endpoint's key, or None; for a local server without a key, "none"."""
    key = os.environ.get(key_variable(url))
    return key or ("none" if is_loopback(url) else None)


def is_loopback(url: str) -> bool:
    """Return whether the URL names this machine."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def is_in_clear(url: str) -> bool:
    """Return whether a request passes a network without encryption."""
    return urlsplit(url).scheme != "https" and not is_loopback(url)


def proxy_for(url: str) -> str | None:
    """Return a remark that names the environment's proxy for the URL, without its password; None if there is none."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or not parts.hostname or is_loopback(url) or proxy_bypass(parts.hostname):
        return None
    shown = proxy.rpartition("@")[2].rpartition("//")[2]
    return f"through the proxy {shown} of the environment; NO_PROXY={parts.hostname} goes past it"


def url_problem(url: str, example: str = OPENROUTER_URL, variable: str | None = None) -> str | None:
    """Return the problem with a URL, or None. The text never quotes the URL, which may contain a misplaced key."""
    not_a_url = f"not the URL of an endpoint, such as {example!r}"
    try:
        parts = urlsplit(url)
    except ValueError:
        return not_a_url
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return not_a_url
    if "@" in parts.netloc or parts.query or parts.fragment:
        return (
            f"a URL must not hold a key, name or password; set the environment variable {variable or key_variable(url)}"
        )
    return None
