"""Resolve a `model_name` to a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unstable_lite.errors import ModelError
from unstable_lite.models.gguf_cache import SUFFIX, converted

BUILTIN = {
    "builtin:tiny": Path(__file__).parent / "tiny" / "weights",
    "builtin:tiny-games": Path(__file__).parent / "tiny_games" / "weights",
}


def resolve_model(model_name: str, may_convert: bool = True) -> str:
    """Return a local directory for built-in names and GGUF files; return local paths and hub names as they are.

    Converts a GGUF file that is not in the cache yet, unless `may_convert` is false (see gguf_cache.py).

    Raises ModelError for an unknown built-in name, for a path that is not a model directory, and for a GGUF file that
    cannot be converted.
    """
    if model_name.startswith("builtin:"):
        if model_name not in BUILTIN:
            raise ModelError(f"model_name = {model_name!r}: built-in models are {', '.join(BUILTIN)}")
        return str(BUILTIN[model_name])
    try:
        path = Path(model_name).expanduser()
        looks_like_path = model_name.startswith((".", "/", "~")) or path.exists()
        is_gguf = path.suffix == SUFFIX and not path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, or a home that does not exist
        raise ModelError(f"model_name = {model_name[:100]!r}: {error}") from error
    if is_gguf:
        return str(converted(path, may_convert))
    if looks_like_path and not (path / "config.json").is_file():
        raise ModelError(f"model_name = {model_name!r}: no config.json in {path.resolve()}")
    return str(path) if looks_like_path else model_name


def chat_template(model: Path) -> str:
    """Return the chat templates of a model's tokenizer, which transformers keeps in three places; "" if it has none.

    Raises ModelError if tokenizer_config.json cannot be read.
    """
    files = [model / "chat_template.jinja", *(model / "additional_chat_templates").glob("*.jinja")]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    config = model / "tokenizer_config.json"
    return "".join([*texts, str((config.is_file() and read_json(config).get("chat_template")) or "")])


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a model's file. Raises ModelError if it cannot be read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the model's download complete?") from error
    if not isinstance(table, dict):
        raise ModelError(f"{path} is not a JSON object")
    return table
