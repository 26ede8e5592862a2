"""The part of a run's config that is published: keys that differ from the defaults, without places on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unstable_lite.adapters.frozen import ADAPTER, RUN
from unstable_lite.config import Config
from unstable_lite.config.env_ids import QUESTIONS

PRIVATE = {
    "run.output_dir",
    "engine.urls",
    "engine.adapter_folder",
    "engine.adapter_receivers",
    "learner.rendezvous",
    "lora.initial_lora_path",
    "lora.initial_critic_path",
    "opponents.base_url",
    "tracker.wandb_project",
    "sft.data",
    "sft.output",
}
"""Keys that name directories, servers or accounts of the author."""


def public_config(config: Config, model_name: str) -> dict[str, Any]:
    """Return the keys to publish. `model_name`: name of the base for others."""
    table = config.model_dump(mode="json", exclude_defaults=True)
    public: dict[str, Any] = _public("", table)
    public.pop("model_name", None)
    return {"model_name": model_name, **public}


def without_directories(text: str) -> str:
    """Return a value without the directories of a path in it: the last part of a local path, or two parts of a run's.

    The path may follow `adapter:`, `run:` or `questions:`.
    """
    for prefix in (ADAPTER, RUN, QUESTIONS):
        if text.startswith(prefix):
            parts = Path(text.removeprefix(prefix)).parts[-2 if prefix == RUN else -1 :]
            return prefix + "/".join(parts)
    return Path(text).name if text.startswith(("/", "~", "./", "../")) and "\n" not in text else text


def _public(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        inner = ((name, f"{key}.{name}" if key else name) for name in value)
        return {name: _public(inside, value[name]) for name, inside in inner if inside not in PRIVATE}
    if isinstance(value, list):
        return [_public(key, item) for item in value]
    return without_directories(value) if isinstance(value, str) else value
