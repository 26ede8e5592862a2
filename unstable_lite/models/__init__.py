"""Where a `model_name` points to."""

from __future__ import annotations

from pathlib import Path

from unstable_lite.errors import ModelError

BUILTIN = {"builtin:tiny": Path(__file__).parent / "tiny" / "weights"}


def resolve_model(model_name: str) -> str:
    """A local directory for built-in names; local paths and hub names as they are.

    Raises ModelError for an unknown built-in name and for a path that is not a model directory.
    """
    if model_name.startswith("builtin:"):
        if model_name not in BUILTIN:
            raise ModelError(f"model_name = {model_name!r}: built-in models are {', '.join(BUILTIN)}")
        return str(BUILTIN[model_name])
    path = Path(model_name).expanduser()
    looks_like_path = model_name.startswith((".", "/", "~")) or path.exists()
    if looks_like_path and not (path / "config.json").is_file():
        raise ModelError(f"model_name = {model_name!r}: no config.json in {path.resolve()}")
    return str(path) if looks_like_path else model_name
