"""Choice of a run's engine, refused if that engine does not compute the model, and warned of if it is slow.

Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from unstable_lite.config import Config
from unstable_lite.engines.devices import choose_engine, vllm_usable
from unstable_lite.errors import ConfigError, ModelError
from unstable_lite.models import read_json, resolve_model
from unstable_lite.models.layers import check_layers


def engine_of(config: Config, devices: Sequence[int | str]) -> tuple[str, str]:
    """Return the engine kind for `devices`, and the reason; without devices no engine starts, and any kind will do.

    Raises ConfigError if vLLM is set but cannot serve, or if the embedded engine does not compute a local model.
    """
    kind, reason = choose_engine(config.engine.kind, devices)
    path = resolve_model(config.model_name)
    if devices and kind == "transformers" and (file := Path(path) / "config.json").is_file():
        try:
            check_layers(path, read_json(file), config.engine.max_model_len)
        except ModelError as error:
            raise ConfigError(str(error)) from error
    return kind, reason


def engine_warnings(kind: str, devices: Sequence[int | str]) -> Iterator[str]:
    """Yield a warning if the embedded engine serves on a GPU."""
    if kind == "transformers" and set(devices) - {"cpu"}:
        is_usable, why = vllm_usable(devices)
        remedy = "leave out engine.kind to use vLLM" if is_usable else why
        yield f"the embedded engine serves on a GPU; expect it to be many times slower than vLLM: {remedy}"
