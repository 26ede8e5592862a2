"""Base of the sections of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict


def _from_home(path: Path) -> Path:
    """Expand `~`, which TOML never does, nor a shell in `key=~/there`."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{error} Write the whole path") from None


UserPath = Annotated[Path, AfterValidator(_from_home)]
LastingPath = Annotated[UserPath, AfterValidator(Path.absolute)]
"""Absolute path, so that a resumed run finds it from any working directory."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        serialize_by_alias=True,
        ser_json_inf_nan="constants",  # an option of a custom class may be inf, and workers get JSON
    )

    def changed(self, **changes: Any) -> Self:
        """Return a copy with other values, not validated; for a section a dict with those of some of its keys."""
        for key, value in changes.items():
            if isinstance(section := getattr(self, key), Section) and isinstance(value, dict):
                changes[key] = section.changed(**value)
        return self.model_copy(update=changes)
