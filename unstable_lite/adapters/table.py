"""Life cycle of every adapter of a run: its state, users and slot, and its weights' digest and canary answers.

    WRITTEN ─┐
             ├→ LOADING → CHECKED → OFFERED → RETIRING → gone
    RESERVED ┘

A new adapter is WRITTEN and waits for a slot. A returning adapter is RESERVED while its files are copied back; if it
cannot be loaded, it is removed at once.

Pure and synchronous: orchestrator/adapter_sync.py performs the transitions on the engines, adapters/store.py keeps the
files. An adapter is identified by its id, which is never reused; the base is id 0 and has no entry. Weights are
identified by their origin, because an adapter that was unloaded can return under a new id.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from unstable_lite.adapters.canary import Evidence
from unstable_lite.adapters.frozen import FIRST_FROZEN_VERSION
from unstable_lite.types import Logprobs, TokenIds

IDS_OF_POLICY = 1 << 24
"""Number of adapter ids of one policy. The versions 1, 2, … of policy number k have the ids k * IDS_OF_POLICY + 1, …,
so that the differences of a policy's ids are numbers of its updates."""


def number_of_policy(id: int) -> int:
    """Return the number of the policy that made an adapter; 0 for the base, frozen adapters and those that return."""
    return id // IDS_OF_POLICY if id < FIRST_FROZEN_VERSION else 0


class AdapterState(Enum):
    WRITTEN = "written"
    """Files exist; no slot yet."""
    RESERVED = "reserved"
    """Slot taken; files are being copied back."""
    LOADING = "loading"
    """Files exist and a slot is taken; engines load the adapter and it is checked."""
    CHECKED = "checked"
    """Loaded on every engine; the canary passed."""
    OFFERED = "offered"
    """Available to games."""
    RETIRING = "retiring"
    """No users left; engines unload the adapter."""


HELD = (AdapterState.LOADING, AdapterState.CHECKED, AdapterState.OFFERED, AdapterState.RETIRING)
"""States in which every engine holds an adapter, or is loading it."""
SLOTTED = (AdapterState.RESERVED, *HELD)
"""States in which an adapter occupies a slot of each engine."""
REMOVABLE = (AdapterState.RESERVED, AdapterState.LOADING, AdapterState.RETIRING)
"""States after which an adapter may be gone. None of them can have users."""


class Origin(NamedTuple):
    """Source of an adapter's weights."""

    kind: Literal["base", "update", "file"]
    name: str = ""
    """Number of the learner's version, or the name of a frozen player."""


BASE_ORIGIN = Origin("base")


@dataclass(slots=True, kw_only=True)
class CanaryAnswer:
    """One completion of an adapter, whose tokens the learner scored with the same weights."""

    prompt: int
    """Number of the prompt among those of the canary checks."""
    seed: int
    completion_ids: TokenIds
    logprobs: Logprobs
    """Log-probabilities by the engine."""
    base_logprobs: Logprobs | None = None
    """Log-probabilities by the learner without the adapter; None if they were not requested."""


@dataclass(slots=True, kw_only=True)
class Weights:
    """Records of one set of weights, kept while it is loaded or can return."""

    digest: str = ""
    """Digest of the files that the learner wrote, or of a frozen player's copy; empty for the base."""
    answers: dict[str, list[CanaryAnswer]] = field(default_factory=dict)
    """Canary answers by engine."""
    evidence: dict[str, Evidence] = field(default_factory=dict)
    """Evidence against each engine from returning adapters of these weights."""
    stored_as: str | None = None
    """Name of the copy on disk from which the weights can return."""


@dataclass(slots=True, kw_only=True)
class Adapter:
    id: int
    origin: Origin
    state: AdapterState
    pins: int = 0
    """Number of long-lived users: the current policy, the checkpoint pool, a copy to disk."""
    leases: int = 0
    """Number of games, turns and evaluations that use the adapter."""

    @property
    def num_users(self) -> int:
        return self.pins + self.leases


class AdapterTable:
    """Table of all adapters from WRITTEN or RESERVED until they are removed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.adapters: dict[int, Adapter] = {}
        self.weights: dict[Origin, Weights] = {BASE_ORIGIN: Weights()}
        self.on_change: Callable[[], None] = lambda: None
        """Callback after every state change."""

    @property
    def num_used_slots(self) -> int:
        return sum(adapter.state in SLOTTED for adapter in self.adapters.values())

    @property
    def has_free_slot(self) -> bool:
        return self.num_used_slots < self.num_slots

    @property
    def has_spare_slot(self) -> bool:
        """Whether a slot is free besides the one that the next new adapter needs."""
        return self.num_used_slots + 1 < self.num_slots

    def add(self, id: int, origin: Origin, digest: str) -> None:
        """Add a new adapter whose files were written. `digest`: of its weights."""
        self.weights.setdefault(origin, Weights()).digest = digest
        self._enter(id, origin, AdapterState.WRITTEN)

    def reserve(self, id: int, origin: Origin) -> None:
        """Take a slot for weights that return as `id`."""
        assert self.has_free_slot, f"adapter {id} has no slot"
        self._enter(id, origin, AdapterState.RESERVED)

    def load(self, id: int) -> None:
        """Mark an adapter, whose files exist, as loading."""
        assert self.adapters[id].state in SLOTTED or self.has_free_slot, f"adapter {id} has no slot"
        self._move(id, (AdapterState.WRITTEN, AdapterState.RESERVED), AdapterState.LOADING)

    def check(self, id: int) -> None:
        self._move(id, (AdapterState.LOADING,), AdapterState.CHECKED)

    def offer(self, id: int) -> None:
        """Make an adapter available to games, with a pin, because an unused adapter retires."""
        self._move(id, (AdapterState.CHECKED,), AdapterState.OFFERED)
        self.pin(id)

    def remove(self, id: int) -> None:
        """Free the slot of an adapter that every engine has unloaded, or that could not be loaded."""
        adapter = self.adapters[id]
        assert adapter.state in REMOVABLE and not adapter.num_users, adapter
        del self.adapters[id]
        self._forget_unused()
        self.on_change()

    def _enter(self, id: int, origin: Origin, state: AdapterState) -> None:
        assert id > 0 and id not in self.adapters, f"adapter {id} exists"
        assert origin in self.weights, f"origin {origin} is unknown"
        self.adapters[id] = Adapter(id=id, origin=origin, state=state)
        self.on_change()

    def _move(self, id: int, before: tuple[AdapterState, ...], after: AdapterState) -> None:
        adapter = self.adapters[id]
        assert adapter.state in before, f"adapter {id} is {adapter.state.value}, so it cannot be {after.value}"
        adapter.state = after
        self.on_change()

    def pin(self, id: int) -> None:
        if id:
            adapter = self.adapters[id]
            assert adapter.state in (AdapterState.CHECKED, AdapterState.OFFERED), adapter
            adapter.pins += 1

    def unpin(self, id: int) -> None:
        if id:
            self.adapters[id].pins -= 1
            assert self.adapters[id].pins >= 0, f"adapter {id} was unpinned more often than pinned"
            self._retire_if_unused(id)

    def lease(self, id: int) -> None:
        if id:
            assert self.adapters[id].state is AdapterState.OFFERED, self.adapters[id]
            self.adapters[id].leases += 1

    def end_lease(self, id: int) -> None:
        if id:
            self.adapters[id].leases -= 1
            assert self.adapters[id].leases >= 0, f"a lease of adapter {id} ended twice"
            self._retire_if_unused(id)

    @contextlib.contextmanager
    def leased(self, *ids: int | None) -> Iterator[None]:
        """Lease adapters for a `with` block; None is the id of a model that no engine serves."""
        with contextlib.ExitStack() as leases:
            for id in filter(None, ids):
                self.lease(id)
                leases.callback(self.end_lease, id)
            yield

    def _retire_if_unused(self, id: int) -> None:
        adapter = self.adapters[id]
        if adapter.state is AdapterState.OFFERED and not adapter.num_users:
            self._move(id, (AdapterState.OFFERED,), AdapterState.RETIRING)

    def retiring(self) -> list[int]:
        return [id for id, adapter in self.adapters.items() if adapter.state is AdapterState.RETIRING]

    @property
    def held(self) -> set[int]:
        """Ids that every engine must hold, including a restarted engine: the base and the loaded adapters."""
        return {0} | {id for id, adapter in self.adapters.items() if adapter.state in HELD}

    def origin(self, id: int) -> Origin:
        return self.adapters[id].origin if id else BASE_ORIGIN

    def describe(self, id: int) -> str:
        """Return a readable name of an adapter, or of the base."""
        origin = self.origin(id)
        policy, number = divmod(id, IDS_OF_POLICY) if id < FIRST_FROZEN_VERSION else (0, id)
        of = f" of policy number {policy + 1}" * bool(policy) + f" ({origin.name})" * (origin.kind == "file")
        return f"adapter {number}{of}" if id else "the base model"

    def weights_of(self, id: int) -> Weights:
        return self.weights[self.origin(id)]

    def is_answered(self, id: int) -> bool:
        """Return whether its weights have canary answers to compare an engine with."""
        return bool(self.weights_of(id).answers)

    def store(self, origin: Origin, name: str) -> None:
        """Record that weights have a copy on disk from which they can return."""
        self.weights[origin].stored_as = name

    def stored(self) -> dict[str, Origin]:
        """Return the origins of weights that can return, by the name of their copy."""
        return {known.stored_as: origin for origin, known in self.weights.items() if known.stored_as is not None}

    def discard(self, origin: Origin) -> None:
        """Record that weights will not return."""
        self.weights[origin].stored_as = None
        self._forget_unused()

    def _forget_unused(self) -> None:
        """Drop the records of weights that are neither loaded nor stored."""
        loaded = {BASE_ORIGIN} | {adapter.origin for adapter in self.adapters.values()}
        for origin in [o for o, known in self.weights.items() if o not in loaded and known.stored_as is None]:
            del self.weights[origin]
