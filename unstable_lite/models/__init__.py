"""Resolve a `model_name` to a model directory, and read its small files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from unstable_lite.errors import ModelError, UnstableError, is_out_of_memory
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


class _Vocabulary(msgspec.Struct):
    vocab: dict[str, int] | list[Any] | None = None


class TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json that the package reads: the merges, most of its megabytes, are skipped."""

    model: _Vocabulary | None = None
    added_tokens: list[Any] | None = None
    post_processor: Any = None


def read_tokenizer(path: Path) -> TokenizerFile:
    """Return the vocabulary and the added tokens of a tokenizer.json. Raises ModelError if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenizerFile)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the model's download complete?") from error


def added_tokens(model: Path) -> set[str]:
    """Return the added tokens of a model's tokenizer, which no other text is part of; none without tokenizer.json.

    Raises ModelError if the file cannot be read.
    """
    file = model / "tokenizer.json"
    tokens = (read_tokenizer(file).added_tokens if file.is_file() else None) or []
    return {str(token.get("content")) for token in tokens if isinstance(token, dict)}


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a model's file. Raises ModelError if it cannot be read."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; is the model's download complete?") from error
    if not isinstance(table, dict):
        raise ModelError(f"{path} is not a JSON object")
    return table


@contextlib.contextmanager
def model_errors(path: str | Path, event: str = "cannot be loaded", advice: str = "") -> Iterator[None]:
    """Raise ModelError, which names `path` and `event`, for any exception except ours and memory that runs out."""
    try:
        yield
    except UnstableError:
        raise
    except Exception as error:  # these libraries, and the code of a remote model, may raise anything
        if is_out_of_memory(error):
            raise
        remedy = f"\n({advice})" if advice else ""
        raise ModelError(f"{path} {event}: {type(error).__name__}: {error}{remedy}") from error
