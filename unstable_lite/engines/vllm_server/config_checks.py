"""Checks of a config's vLLM servers, keys and delivery of adapters, without a request.

Loads no HTTP library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from unstable_lite.config.training import EngineConfig
from unstable_lite.games.api_keys import RECEIVER_KEY, SERVER_KEY, url_problem

KIND = "vllm-server"
EXAMPLE_URL = "http://gpu-node-7:8000"


def server_url(url: str) -> str:
    """Return the URL without `/v1`, which some users write."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def server_keys() -> dict[str, str]:
    """Return the keys for an engine worker that talks to a server; other workers get none."""
    return {name: key for name in (SERVER_KEY, RECEIVER_KEY) if (key := os.environ.get(name))}


def delivery(engine: EngineConfig) -> str:
    """Return a readable description of the way adapters reach the servers."""
    if engine.adapter_folder is not None:
        return f"through the folder {engine.adapter_folder}, which the servers must see under the same path"
    return f"uploaded to {', '.join(engine.adapter_receivers)}"


def server_problems(engine: EngineConfig, environment: Mapping[str, str] = os.environ) -> Iterable[str]:
    """Yield the problems of the keys that are for `engine.kind = "vllm-server"`, if it is set or not."""
    if engine.kind != KIND:
        for key in ("urls", "adapter_folder", "adapter_receivers"):
            if getattr(engine, key):
                yield f"engine.{key} is for engine.kind = {KIND!r}, but the kind is {engine.kind!r}"
        return
    if not engine.urls:
        yield f"engine.urls is empty: name the servers, as in urls = [{EXAMPLE_URL!r}]"
    if engine.devices != "auto":
        yield f"engine.devices = {list(engine.devices)}: the servers have their own devices; leave it out"
    for index, url in enumerate(engine.urls):
        if (problem := url_problem(url, EXAMPLE_URL, SERVER_KEY)) is not None:
            yield f"engine.urls.{index}: {problem}"
    bare = [server_url(url) for url in engine.urls]
    if twice := {url for url in bare if bare.count(url) > 1}:
        yield f"engine.urls: {', '.join(sorted(twice))} is listed twice; one worker serves one server"
    yield from _delivery_problems(engine, environment)


def _delivery_problems(engine: EngineConfig, environment: Mapping[str, str]) -> Iterable[str]:
    folder, receivers = engine.adapter_folder, engine.adapter_receivers
    if bool(folder) == bool(receivers):
        yield (
            f"engine.kind = {KIND!r} needs either engine.adapter_folder, a folder that this machine and the servers "
            "share, or engine.adapter_receivers, a side-car for each of engine.urls"
        )
    if folder is not None:
        if not folder.is_absolute():
            yield f"engine.adapter_folder = {str(folder)!r}: the servers need it as an absolute path"
        elif "\0" in str(folder) or not os.access(f"{folder}/.", os.W_OK | os.X_OK):
            yield f"engine.adapter_folder = {str(folder)!r} is not a writable directory; is it mounted?"
    if not receivers:
        return
    if len(receivers) != len(engine.urls):
        yield (
            f"engine.adapter_receivers lists {len(receivers)}, engine.urls {len(engine.urls)}: list one for each, in "
            "the same order"
        )
    for index, url in enumerate(receivers):
        if (problem := url_problem(url, "http://gpu-node-7:8001", RECEIVER_KEY)) is not None:
            yield f"engine.adapter_receivers.{index}: {problem}"
    if shared := {_address(url) for url in receivers} & {_address(url) for url in engine.urls}:
        yield f"engine.adapter_receivers: {', '.join(sorted(shared))} is a server's own address and port"
    if not environment.get(RECEIVER_KEY):
        yield f"engine.adapter_receivers: set the environment variable {RECEIVER_KEY} to their common secret"


def _address(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return url
