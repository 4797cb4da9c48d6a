"""The index of blocks in tiers: moves that are carried out late, restores that overtake, losses at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from baton.engine.core.tiers import Tier
from baton.kv_transfer.tiers.slot_lru import SlotLru
from baton.kv_transfer.tiers.tier_index import Loss, Move, TierIndex


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def names(*numbers: int) -> list[bytes]:
    return [name(number) for number in numbers]


def store(index: TierIndex, *numbers: int, loss: Loss | None = None) -> list[Move]:
    """At once; block n of the pool holds n."""
    moves = index.store(names(*numbers), numbers)
    for move in moves:
        index.stored(move, loss)
    return moves


class TestOrder:
    def test_the_host_is_filled_first_and_its_oldest_go_on_to_the_disk(self) -> None:
        index = TierIndex(2, 2)
        store(index, 1, 2)
        demotion, move = store(index, 3)
        assert demotion == Move(name(1), Tier.HOST, move.target_slot, Tier.DISK, demotion.target_slot)
        assert move[:4] == (name(3), Tier.POOL, 3, Tier.HOST)
        assert index.num_kept() == {"host": 2, "disk": 1}
        assert index.evictions == 0

    def test_what_the_last_tier_has_no_room_for_is_gone_and_counted(self) -> None:
        index = TierIndex(1, 1)
        store(index, 1)
        store(index, 2)
        store(index, 3)
        assert [index.knows(name(n)) for n in (1, 2, 3)] == [False, True, True]
        assert index.evictions == 1

    def test_without_a_host_tier_blocks_go_to_the_disk(self) -> None:
        index = TierIndex(0, 2)
        (move,) = store(index, 1)
        assert (move.source, move.target) == (Tier.POOL, Tier.DISK)
        assert index.num_kept() == {"disk": 1}

    def test_what_was_used_last_stays_longest_and_the_start_of_a_prefix_longer_than_its_end(self) -> None:
        index = TierIndex(3, 0)
        store(index, 1, 2, 3)
        index.touch(names(1, 2))
        store(index, 4)
        store(index, 5)
        assert [index.knows(name(n)) for n in (1, 2, 3)] == [True, False, False]

    def test_what_an_earlier_process_left_is_found_and_evicted_oldest_first(self) -> None:
        index = TierIndex(0, 3, [(name(7), 2), (name(8), 0)])
        assert index.find(names(7, 8, 9)) == 2
        store(index, 1)
        store(index, 2)
        assert [index.knows(name(n)) for n in (7, 8)] == [False, True]

    def test_what_is_known_is_not_stored_again(self) -> None:
        index = TierIndex(2, 2)
        store(index, 1)
        assert store(index, 1) == []


class TestUse:
    def test_a_block_that_is_on_its_way_cannot_be_restored_yet(self) -> None:
        index = TierIndex(2, 0)
        (move,) = index.store(names(1), [1])
        assert index.knows(name(1))
        assert index.find(names(1)) == 0
        index.stored(move, None)
        assert index.find(names(1)) == 1

    def test_a_chain_is_found_up_to_its_first_gap(self) -> None:
        index = TierIndex(4, 0)
        store(index, 1, 2, 4)
        assert index.find(names(1, 2, 3, 4)) == 2

    def test_where_every_slot_is_in_use_a_block_is_not_stored_and_that_is_counted(self) -> None:
        index = TierIndex(1, 0)
        store(index, 1)
        (fetch,) = index.restore(names(1), [0])
        assert index.store(names(2), [2]) == []
        assert index.losses == {Loss.BUSY: 1}
        index.restored(fetch, None)
        assert len(store(index, 2)) == 1

    def test_a_block_that_could_not_be_written_is_not_found(self) -> None:
        index = TierIndex(0, 1)
        store(index, 1, loss=Loss.DISK_WRITE)
        assert not index.knows(name(1))
        assert index.losses == {Loss.DISK_WRITE: 1}
        assert len(store(index, 2)) == 1, "its slot is free again"

    def test_a_corrupt_block_is_forgotten_when_its_last_reader_is_done(self) -> None:
        index = TierIndex(0, 1)
        store(index, 1)
        first, second = (index.restore(names(1), [block])[0] for block in (0, 1))
        index.restored(first, Loss.CORRUPT)
        assert index.find(names(1)) == 0
        assert index.store(names(2), [2]) == [], "the other reader still reads the slot"
        index.restored(second, Loss.CORRUPT)
        assert len(store(index, 2)) == 1
        index.check()

    def test_a_disk_that_failed_is_empty_for_good_and_the_host_goes_on(self) -> None:
        index = TierIndex(1, 2)
        store(index, 1)
        store(index, 2)
        (fetch,) = index.restore(names(1), [0])
        index.close_disk()
        assert index.find(names(1)) == 0
        index.restored(fetch, Loss.DISK_READ)
        store(index, 3)
        assert index.num_kept() == {"host": 1, "disk": 0}
        assert index.evictions == 1


class Following:
    """Knows of blocks what index tell."""

    def __init__(self, index: TierIndex) -> None:
        self._index = index
        self.where = {each: tier for tier in (Tier.HOST, Tier.DISK) for each in index.kept_in(tier)}
        index.watch(self)

    def kept(self, block_hash: bytes, tier: Tier) -> None:
        assert block_hash not in self.where, "a block is in one tier"
        self.where[block_hash] = tier

    def lost(self, block_hash: bytes, tier: Tier) -> None:
        assert self.where.pop(block_hash) is tier

    def check(self) -> None:
        for tier in (Tier.HOST, Tier.DISK):
            kept = {each for each, place in self.where.items() if place is tier}
            assert kept == set(self._index.kept_in(tier))
            assert all(self._index.tier_of(each) is tier for each in kept)


class TestNews:
    def test_a_block_is_told_when_it_can_be_restored_and_when_it_no_longer_can(self) -> None:
        index = TierIndex(1, 1, [(name(9), 0)])
        told = Following(index)
        assert told.where == {name(9): Tier.DISK}, "what is there from before is there"
        (move,) = index.store(names(1), [1])
        assert name(1) not in told.where, "it is on its way"
        index.stored(move, None)
        assert told.where == {name(9): Tier.DISK, name(1): Tier.HOST}
        demotion, move = index.store(names(2), [2])
        assert told.where == {}, "the one on its way to the disk took the place of the other"
        index.stored(demotion, None)
        index.stored(move, None)
        assert told.where == {name(1): Tier.DISK, name(2): Tier.HOST}
        index.close_disk()
        assert told.where == {name(2): Tier.HOST}

    def test_a_block_that_was_not_written_or_holds_other_bytes_is_not_there(self) -> None:
        index = TierIndex(0, 2)
        told = Following(index)
        store(index, 1, loss=Loss.DISK_WRITE)
        assert told.where == {}
        store(index, 2)
        (fetch,) = index.restore(names(2), [0])
        index.restored(fetch, Loss.CORRUPT)
        assert told.where == {}


class BooksMachine(RuleBasedStateMachine):
    """Books over memory in which a misplaced or early move shows: every slot holds the name of what is in it."""

    @initialize(host=st.integers(0, 4), disk=st.integers(0, 5))
    def start(self, host: int, disk: int) -> None:
        self.index = TierIndex(host, disk)
        self.told = Following(self.index)
        self.slots: dict[tuple[Tier, int], bytes] = {}
        self.stores: deque[list[Move]] = deque()
        self.restores: deque[list[Move]] = deque()

    @rule(first=st.integers(0, 12), count=st.integers(1, 4))
    def store(self, first: int, count: int) -> None:
        numbers = range(first, first + count)
        for number in numbers:
            self.slots[Tier.POOL, number] = name(number)
        self.stores.append(self.index.store(names(*numbers), numbers))

    @rule(first=st.integers(0, 12), count=st.integers(1, 4))
    def restore(self, first: int, count: int) -> None:
        chain = names(*range(first, first + count))
        found = self.index.find(chain)
        self.restores.append(self.index.restore(chain[:found], range(100, 100 + found)))

    @rule(fails=st.booleans())
    def carry_out_a_store(self, fails: bool) -> None:
        for move in self.stores.popleft() if self.stores else ():
            if not fails:
                self.slots[move.target, move.target_slot] = self.slots[move.source, move.source_slot]
            elif move.target is Tier.DISK:
                self.slots[move.target, move.target_slot] = b"torn"
            else:
                self.slots[move.target, move.target_slot] = self.slots[move.source, move.source_slot]
            lost = Loss.DISK_WRITE if fails and move.target is Tier.DISK else None
            if lost is None:
                assert self.slots[move.target, move.target_slot] == move.block_hash, "the wrong block went down"
            self.index.stored(move, lost)

    @rule(corrupt=st.booleans())
    def carry_out_a_restore(self, corrupt: bool) -> None:
        for move in self.restores.popleft() if self.restores else ():
            assert self.slots[move.source, move.source_slot] == move.block_hash, "the wrong block came up"
            self.index.restored(move, Loss.CORRUPT if corrupt and move.source is Tier.DISK else None)

    @rule(number=st.integers(0, 12))
    def touch(self, number: int) -> None:
        self.index.touch(names(number, number + 1))

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.stores:
            self.carry_out_a_store(False)
        while self.restores:
            self.carry_out_a_restore(False)
        self.index.check()

    @invariant()
    def what_was_told_is_true(self) -> None:
        if hasattr(self, "told"):
            self.told.check()


SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# What hypothesis tries depends on the constants of all modules that are loaded: a fault may take it longer to find.
TO_THE_FIRST_FAULT = settings(SETTINGS, max_examples=2_000, phases=[Phase.generate], report_multiple_bugs=False)


@pytest.mark.slow
def test_no_restore_ever_brings_another_block_than_the_one_that_was_asked_for() -> None:
    run_state_machine_as_test(BooksMachine, settings=SETTINGS)


def _first_of_all(lru: SlotLru) -> Iterator[bytes]:
    return (block_hash for block_hash, entry in lru._entries.items() if entry.state.value == "kept")  # noqa: SLF001


class TestPlantedBugs:
    """The machine above is able to fail."""

    @pytest.mark.slow
    def test_evicting_what_is_being_read_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SlotLru, "victim", lambda lru: next(_first_of_all(lru), None))
        with pytest.raises((AssertionError, KeyError)):
            run_state_machine_as_test(BooksMachine, settings=TO_THE_FIRST_FAULT)

    def test_finding_what_is_still_being_written_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SlotLru, "keeps", lambda lru, block_hash: block_hash in lru)
        with pytest.raises((AssertionError, KeyError)):
            run_state_machine_as_test(BooksMachine, settings=TO_THE_FIRST_FAULT)

    def test_a_demotion_behind_the_block_that_takes_its_slot_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        in_order = TierIndex.store
        monkeypatch.setattr(TierIndex, "store", lambda *arguments: in_order(*arguments)[::-1])
        with pytest.raises(AssertionError):
            run_state_machine_as_test(BooksMachine, settings=TO_THE_FIRST_FAULT)
