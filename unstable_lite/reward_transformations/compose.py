"""A list of transforms that can be extended, shown, saved and restored; kinds differ only in their call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from unstable_lite.by_name import lasting
from unstable_lite.errors import ConfigError

T = TypeVar("T")


@runtime_checkable
class Stateful(Protocol):
    """A transform whose memory must survive a restart; the state is JSON-able."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Compose(Generic[T]):
    def __init__(self, transforms: Iterable[T] = ()) -> None:
        self.transforms = list(transforms)

    def register(self, transform: T) -> None:
        """Append; it is applied last."""
        self.transforms.append(transform)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transforms!r})"

    def state_dict(self) -> dict[str, Any]:
        states = [lasting(_name(t), t.state_dict()) if isinstance(t, Stateful) else {} for t in self.transforms]
        return {"names": [_name(t) for t in self.transforms], "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = [_name(t) for t in self.transforms]
        if state["names"] != names:
            raise ConfigError(f"saved reward transforms are {state['names']}, configured ones {names}")
        for transform, saved in zip(self.transforms, state["states"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)


def _name(transform: object) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
