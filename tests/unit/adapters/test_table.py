"""The life of adapters: any order of calls that the async code can make keeps the table's guarantees."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from unstable_lite.adapters.table import BASE_ORIGIN, SLOTTED, AdapterState, AdapterTable, Origin
from unstable_lite.orchestrator.checkpoint_pool import FIRST_RETURNED_VERSION

NUM_SLOTS = 4


class AdapterLives(RuleBasedStateMachine):
    """Updates, opponents that leave and return, games, copies on disk; a set of loaded ids stands for the engines."""

    def __init__(self) -> None:
        super().__init__()
        self.table = AdapterTable(NUM_SLOTS)
        self.table.on_change = self._count_change
        self.num_changes = 0
        self.updates = 0
        self.returned = FIRST_RETURNED_VERSION
        self.pinned: list[int] = []
        """Ids of the checkpoint pool, the current policy last."""
        self.games: list[int] = []
        self.copying: list[int] = []
        self.gone: set[int] = set()

    def _count_change(self) -> None:
        self.num_changes += 1

    def _of_state(self, *states: AdapterState) -> list[int]:
        return [id for id, adapter in self.table.adapters.items() if adapter.state in states]

    @precondition(lambda self: not self._of_state(AdapterState.WRITTEN))
    @rule()
    def write(self) -> None:
        self.updates += 1
        self.table.add(self.updates, Origin("update", str(self.updates)), f"digest {self.updates}")

    @precondition(lambda self: self._of_state(AdapterState.WRITTEN) and self.table.has_free_slot)
    @rule()
    def load(self) -> None:
        (version,) = self._of_state(AdapterState.WRITTEN)
        self.table.load(version)

    @precondition(lambda self: self._of_state(AdapterState.LOADING))
    @rule(keeps_copy=st.booleans(), data=st.data())
    def offer(self, keeps_copy: bool, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self._of_state(AdapterState.LOADING)))
        self.table.check(id)
        if keeps_copy and id < FIRST_RETURNED_VERSION:
            self.table.pin(id)
            self.copying.append(id)
        self.table.offer(id)
        self.pinned.append(id)

    @precondition(lambda self: self.copying)
    @rule(succeeds=st.booleans())
    def copy(self, succeeds: bool) -> None:
        id = self.copying.pop(0)
        if succeeds:
            self.table.store(self.table.origin(id), f"ckpt-{id}")
        self.table.unpin(id)

    @precondition(lambda self: self.table.stored() and self.table.has_spare_slot)
    @rule(data=st.data(), is_intact=st.booleans())
    def return_(self, data: st.DataObject, is_intact: bool) -> None:
        stored = self.table.stored()
        origin = stored[data.draw(st.sampled_from(sorted(stored)))]
        self.returned += 1
        self.table.reserve(self.returned, origin)
        self.table.load(self.returned)
        if not is_intact:
            self.table.discard(origin)
            self.table.remove(self.returned)
            self.gone.add(self.returned)

    @precondition(lambda self: self.table.stored())
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        stored = self.table.stored()
        self.table.discard(stored[data.draw(st.sampled_from(sorted(stored)))])

    @precondition(lambda self: len(self.pinned) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.pinned[:-1]))
        self.pinned.remove(id)
        self.table.unpin(id)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def begin_game(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from([0, *self.pinned]))
        self.table.lease(id)
        self.games.append(id)

    @precondition(lambda self: self.games)
    @rule(data=st.data())
    def end_game(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.games))
        self.games.remove(id)
        self.table.end_lease(id)

    @precondition(lambda self: self.table.retiring())
    @rule()
    def unload(self) -> None:
        before, id = self.num_changes, self.table.retiring()[0]
        self.table.remove(id)
        self.gone.add(id)
        assert self.num_changes > before, "a waiting adapter must be notified of the free slot"

    @invariant()
    def slots_are_never_overdrawn(self) -> None:
        assert self.table.num_used_slots == len(self._of_state(*SLOTTED)) <= NUM_SLOTS

    @invariant()
    def adapters_in_use_stay_and_others_retire(self) -> None:
        for id in {*self.pinned, *self.games, *self.copying} - {0}:
            assert self.table.adapters[id].state is AdapterState.OFFERED
        for id in self._of_state(AdapterState.OFFERED):
            users = [*self.pinned, *self.games, *self.copying].count(id)
            assert users == self.table.adapters[id].num_users > 0
        for id in self.table.retiring():
            assert self.table.adapters[id].num_users == 0

    @invariant()
    def weights_are_known_exactly_as_long_as_they_can_be_asked_for(self) -> None:
        loaded = {adapter.origin for adapter in self.table.adapters.values()}
        assert set(self.table.weights) == {BASE_ORIGIN} | loaded | set(self.table.stored().values())

    @invariant()
    def gone_adapters_are_held_by_no_engine(self) -> None:
        assert not self.gone & set(self.table.held)


TestAdapterLives = AdapterLives.TestCase


def test_base_needs_no_entry():
    table = AdapterTable(1)
    with table.leased(0):
        table.pin(0)
    table.unpin(0)
    assert table.adapters == {}
    assert table.origin(0) == BASE_ORIGIN


def test_misuse_is_named():
    table = AdapterTable(1)
    table.add(1, Origin("update", "1"), "digest")
    with pytest.raises(AssertionError, match="adapter 1 exists"):
        table.add(1, Origin("update", "1"), "digest")
    with pytest.raises(AssertionError, match="adapter 1 is written, so it cannot be checked"):
        table.check(1)
    table.load(1)
    table.add(2, Origin("update", "2"), "digest")
    with pytest.raises(AssertionError, match="adapter 2 has no slot"):
        table.load(2)
    table.check(1)
    table.offer(1)
    with pytest.raises(AssertionError, match="a lease of adapter 1 ended twice"):
        table.end_lease(1)
