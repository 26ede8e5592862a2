"""List of transforms that can be extended, printed, saved and restored; kinds differ only in `__call__`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, Self, TypeVar, runtime_checkable

from unstable_lite.errors import ConfigError
from unstable_lite.plugins import lasting

T = TypeVar("T", bound=Callable[..., Any])


@runtime_checkable
class Stateful(Protocol):
    """Transform whose memory must survive a restart; its state must fit in JSON."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Compose(Generic[T]):
    def __init__(self, transforms: Iterable[T] = ()) -> None:
        self.transforms: list[T] = []
        self._calls: list[tuple[T, bool]] = []
        """Each transform, and whether it takes the context."""
        for transform in transforms:
            self.register(transform)

    @classmethod
    def of(cls, transform: T | Self | None) -> Self:
        """Return `transform` if it is a composition, else a composition of it; an empty one for None."""
        if isinstance(transform, cls):
            return transform
        return cls(() if transform is None else (transform,))  # type: ignore[arg-type]

    def register(self, transform: T) -> None:
        """Append a transform, which is applied last."""
        self.transforms.append(transform)
        self._calls.append((transform, takes_context(transform)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.transforms!r})"

    def state_dict(self) -> dict[str, Any]:
        states: list[dict[str, Any]] = []
        for transform in self.transforms:
            states.append(lasting(_name(transform), transform.state_dict()) if isinstance(transform, Stateful) else {})
        return {"names": [_name(t) for t in self.transforms], "states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        names = [_name(t) for t in self.transforms]
        if state["names"] != names:
            raise ConfigError(f"the saved reward transforms are {state['names']}, but the config has {names}")
        for transform, saved in zip(self.transforms, state["states"], strict=True):
            if isinstance(transform, Stateful):
                transform.load_state_dict(saved)


def takes_context(transform: Callable[..., Any]) -> bool:
    """Return whether `transform` has a parameter named `context`, for the turn's `StepContext`."""
    try:
        return "context" in inspect.signature(transform).parameters
    except ValueError:  # some callables written in C have no signature
        return False


def _name(transform: object) -> str:
    return getattr(transform, "__name__", type(transform).__name__)
