"""Parts of a run that are no subclasses of the package's parts."""

from collections.abc import Collection
from typing import Any


class OwnPart:
    """Object that has only the interface of a part, and records which of its names are used."""

    def __init__(self, part: Any, names: Collection[str]) -> None:
        self.__dict__.update(_part=part, _names=set(names), used=set())

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(name)
        self.used.add(name)
        return getattr(self._part, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._names.add(name)
        setattr(self._part, name, value)
