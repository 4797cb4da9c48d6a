"""Batches of a receive on their way, over the fake transport."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from baton.engine.core.layout import CacheKind, CacheLayout, KVLayout, LayerCache, LayerState, StatePart
from baton.engine.core.pace import Line
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.group.rank_reader import RankReader
from baton.kv_transfer.group.tp_read_group import TpReadGroup
from baton.kv_transfer.handoff import reads
from baton.kv_transfer.handoff.reads import MEASURED_S, BlockReads, ReadEvent, ReadOutcome, ReadPace
from baton.kv_transfer.transports import Lane

from ...helpers.fake_transport import FakeFabric, TransportFaults
from ...helpers.virtual_clock import VirtualClock

LAYOUT = KVLayout(model="pulls", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
NUM_BLOCKS = 8
READ_S = 1.0
STALL_S = 5.0


class Reader:
    """Reads batches of one block, two at a time, of which each takes a second."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.faults = TransportFaults(read_s=(READ_S, READ_S))
        fabric = FakeFabric(self.clock, random.Random(0), self.faults)
        holder, self.group = (self._group(fabric, name) for name in ("holder", "reader"))
        self.peer = self.group.add_peer(holder.metadata)
        self.clock.advance(1.0)
        self.reads = BlockReads(self.group, LAYOUT.block_bytes, reads_in_flight=2, stall_s=STALL_S, clock=self.clock)

    def _group(self, fabric: FakeFabric, name: str) -> TpReadGroup:
        region = CacheRegion.of(ArenaRegion(0, NUM_BLOCKS, "cpu", LAYOUT, 0, 1))
        return TpReadGroup(RankReader(0, region, fabric.attach(name, bytearray(NUM_BLOCKS * LAYOUT.block_bytes))))

    def start(self, num_blocks: int) -> None:
        self.reads.start(1, self.peer, num_blocks)
        self.extend(1, range(num_blocks))

    def extend(self, receive: int, blocks: Sequence[int]) -> None:
        """Allow reads of more blocks, each into the block of the same number."""
        self.reads.extend(receive, np.array(blocks), np.array(blocks))

    def look(self, after_s: float = 0.0) -> list[ReadEvent]:
        self.clock.advance(after_s)
        return self.reads.poll(self.clock())

    @property
    def num_begun(self) -> int:
        return self.group.num_descriptors


@pytest.fixture
def reader() -> Reader:
    return Reader()


def test_no_more_batches_are_on_their_way_than_allowed(reader: Reader) -> None:
    reader.start(5)
    assert reader.look() == reader.look() == []
    assert reader.num_begun == 2


def test_what_has_ended_makes_room_for_the_next_batches_in_the_same_look(reader: Reader) -> None:
    """Otherwise the wire stands still until the thread looks again."""
    reader.start(5)
    reader.look()
    reader.clock.advance(READ_S)
    assert reader.look() == []
    assert reader.num_begun == 4


def test_an_order_names_no_more_blocks_than_a_message_takes(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "MAX_ORDER_BLOCKS", 3)
    reader.reads = BlockReads(reader.group, 1 << 40, reads_in_flight=9, stall_s=STALL_S, clock=reader.clock)
    reader.start(8)
    asked = []
    read = reader.group.read
    monkeypatch.setattr(reader.group, "read", lambda *blocks: asked.append(blocks[1:]) or read(*blocks))
    reader.look()
    assert [len(blocks) for _, blocks in asked] == [3, 3, 2]


def test_batches_grow_with_the_rate_of_the_lane(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """To begin one takes the CPU as long as a fast lane needs for many blocks."""
    blocks_in_time = 3
    lane = Lane("fast", bytes_per_s=blocks_in_time * LAYOUT.block_bytes / reads.BATCH_S)
    monkeypatch.setattr(reader.group, "lane", lambda peer: lane)
    reader.start(4)
    assert reader.look() == []
    assert reader.look(after_s=READ_S) == [ReadEvent(1, ReadOutcome.FINISHED)]  # two batches: of three blocks, and one


def test_it_is_finished_with_the_last_batch(reader: Reader) -> None:
    reader.start(3)
    found: list[ReadEvent] = []
    for _ in range(3):
        assert found == []
        found = reader.look()
        reader.clock.advance(READ_S)
    assert found == [ReadEvent(1, ReadOutcome.FINISHED)]
    assert len(reader.reads) == 0


def test_whoever_gives_up_begins_no_further_batch_though_there_is_room(reader: Reader) -> None:
    reader.start(5)
    reader.look()
    reader.reads.stop(1)
    reader.clock.advance(READ_S)
    assert reader.look() == [ReadEvent(1, ReadOutcome.RELEASED)]
    assert reader.num_begun == 2


def test_a_batch_that_failed_lets_no_other_begin(reader: Reader) -> None:
    reader.faults.fail = 1.0
    reader.start(5)
    reader.look()
    reader.clock.advance(READ_S)
    failed, *_ = reader.look()
    assert failed.outcome is ReadOutcome.FAILED
    reader.clock.advance(60.0)
    reader.look()
    assert reader.num_begun == 2
    assert len(reader.reads) == 0


def test_a_read_that_neither_ends_nor_fails_is_given_up_and_its_blocks_wait_for_its_end(reader: Reader) -> None:
    reader.faults.read_s = (100.0, 100.0)
    reader.start(5)
    assert reader.look() == reader.look(STALL_S - 0.1) == []
    failed = ReadEvent(1, ReadOutcome.FAILED, "no part of it has come for 5 s (transfer.stall_s)")
    assert reader.look(0.2) == [failed]
    assert reader.look(50.0) == []
    assert len(reader.reads) == 1
    assert reader.look(50.0) == [ReadEvent(1, ReadOutcome.RELEASED)]
    assert reader.num_begun == 2


def test_a_read_that_is_slow_goes_on_for_as_long_as_batches_of_it_end(reader: Reader) -> None:
    reader.faults.read_s = (STALL_S - 0.1, STALL_S - 0.1)
    reader.start(6)
    assert reader.look() == reader.look(STALL_S) == reader.look(STALL_S) == []
    assert reader.look(STALL_S) == [ReadEvent(1, ReadOutcome.FINISHED)]


def test_what_ended_while_nobody_looked_is_no_stall(reader: Reader) -> None:
    reader.start(2)
    reader.look()
    assert reader.look(10 * STALL_S) == [ReadEvent(1, ReadOutcome.FINISHED)]


def test_waiting_for_what_the_holder_writes_is_no_stall(reader: Reader) -> None:
    reader.reads.start(1, reader.peer, 3)
    reader.extend(1, [0])
    assert reader.look() == reader.look(READ_S) == reader.look(10 * STALL_S) == []
    reader.extend(1, [1, 2])
    assert reader.look() == []
    assert reader.look(READ_S) == [ReadEvent(1, ReadOutcome.FINISHED)]


def test_a_read_that_failed_and_is_not_let_go_fails_once(reader: Reader) -> None:
    reader.faults.fail, reader.faults.late_s = 1.0, (100.0, 100.0)
    reader.start(1)
    reader.look()
    (failed,) = reader.look(READ_S)
    assert failed.outcome is ReadOutcome.FAILED
    assert reader.look(2 * STALL_S) == []
    assert reader.look(100.0) == [ReadEvent(1, ReadOutcome.RELEASED)]


def line_of(reader: Reader) -> Line:
    line = reader.reads.pace(reader.peer).line()
    assert line is not None
    return line


def test_what_reading_takes_is_measured_for_the_peer_however_many_receives_share_it(reader: Reader) -> None:
    """Two receives of two blocks each, at once: four blocks came in the time of a read."""
    for receive, blocks in ((1, range(2)), (2, range(2, 4))):
        reader.reads.start(receive, reader.peer, 2)
        reader.extend(receive, blocks)
    reader.look()
    assert len(reader.look(READ_S)) == 2
    assert reader.reads.pace(reader.peer).num_reads == 1
    assert line_of(reader).at(4) == pytest.approx(READ_S, rel=0.5)


def test_blocks_that_came_before_a_read_began_do_not_make_it_look_fast(reader: Reader) -> None:
    """Four reads that overlap with a measured one end just after the fifth has begun, which then reads alone."""

    def start(receive: int) -> None:
        reader.reads.start(receive, reader.peer, 1)
        reader.extend(receive, [receive])

    short_s = MEASURED_S / 2
    reader.faults.read_s = (short_s, short_s)
    start(0)
    reader.look()
    reader.clock.advance(0.9 * short_s)
    for receive in range(1, 5):
        start(receive)
    reader.look()
    reader.look(0.11 * short_s)
    assert reader.reads.pace(reader.peer).num_reads == 1
    reader.clock.advance(0.85 * short_s)
    start(5)
    reader.look()
    for _ in range(20):
        reader.look(0.1 * short_s)
    assert not len(reader.reads)
    assert reader.reads.pace(reader.peer).num_reads == 2
    assert line_of(reader).at(5) == pytest.approx(5 * short_s, rel=0.3)


def test_reads_that_take_turns_all_the_time_are_measured_together(reader: Reader) -> None:
    """One begins whenever another is half done: two blocks come in the time of a read."""
    for receive in range(12):
        block = receive % NUM_BLOCKS
        reader.reads.start(receive, reader.peer, 1)
        reader.extend(receive, [block])
        reader.look()
        reader.look(0.5 * READ_S)
    assert line_of(reader).at(2) == pytest.approx(READ_S, rel=0.1)


def test_one_delay_that_holds_up_many_reads_counts_once(reader: Reader) -> None:
    for receive in range(1, 6):
        reader.reads.start(receive, reader.peer, 1)
        reader.extend(receive, [receive])
    reader.look()
    reader.look(100 * READ_S)
    assert not len(reader.reads)
    assert reader.reads.pace(reader.peer).num_reads == 1
    for receive in (6, 7):
        reader.reads.start(receive, reader.peer, 1)
        reader.extend(receive, [receive])
        reader.look()
        reader.look(READ_S)
    assert reader.reads.pace(reader.peer).num_reads == 3
    assert line_of(reader).at(1) == pytest.approx(READ_S, rel=0.5), "two of three were fast"


def test_a_long_read_is_measured_before_its_end(reader: Reader) -> None:
    reader.start(8)
    reader.look()
    assert reader.look(READ_S) == []
    assert reader.reads.pace(reader.peer).num_reads == 1
    assert line_of(reader).at(2) == pytest.approx(READ_S)


def test_waiting_for_the_holder_is_no_part_of_what_reading_takes(reader: Reader) -> None:
    reader.reads.start(1, reader.peer, 3)
    reader.extend(1, [0])
    reader.look()
    reader.look(READ_S)
    reader.extend(1, [1, 2])
    reader.look(100 * READ_S)
    reader.look(READ_S)
    assert line_of(reader).at(2) == pytest.approx(READ_S, rel=0.5)


def test_reads_that_failed_tell_nothing_and_a_peer_that_is_gone_is_forgotten(reader: Reader) -> None:
    reader.faults.fail = 1.0
    reader.start(2)
    reader.look()
    reader.look(READ_S)
    pace = reader.reads.pace(reader.peer)
    assert pace.num_reads == 0
    reader.reads.forget_paces([reader.peer])
    assert reader.reads.pace(reader.peer) is pace
    reader.reads.forget_paces([])
    assert reader.reads.pace(reader.peer) is not pace


def test_it_begins_with_the_rate_that_was_measured_at_pairing(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 1000.0 * LAYOUT.block_bytes
    monkeypatch.setattr(reader.group, "lane", lambda peer: Lane("fake", bytes_per_s=rate))
    assert line_of(reader).at(1000) == pytest.approx(1.0)


def test_what_every_hand_off_brings_is_the_beginning_of_the_line() -> None:
    """A state of 8 MB at 1 GB/s, before anything was read."""
    line = ReadPace(1 << 10, 1e9, 0.0, constant_bytes=8_000_000).line()
    assert line is not None
    assert (line.base_s, line.unit_s) == (pytest.approx(8e-3), pytest.approx(1.024e-6))


def test_of_several_cache_groups_states_and_windows_are_what_does_not_grow() -> None:
    layers = [
        (LayerCache(kind=CacheKind.FULL, num_kv_heads=1, head_dim=8, dtype="bfloat16"),),
        (LayerCache(kind=CacheKind.WINDOW, num_kv_heads=1, head_dim=8, dtype="bfloat16", window=40),),
        (LayerState((StatePart((4, 16), "float32"),)),),
    ]
    caches = CacheLayout.of_layers("m", layers)
    arenas = tuple(ArenaRegion(0, 4, "cpu", group.blocks, 0, 1) for group in caches.groups[:2])
    state = ArenaRegion(0, 4, "cpu", caches.groups[2].blocks, 0, 4)
    region = CacheRegion(caches, (*arenas, state))
    assert region.constant_bytes == 3 * 2 * 16 * 8 * 2 + 4 * 16 * 4
    assert CacheRegion.of(arenas[0]).constant_bytes == 0
