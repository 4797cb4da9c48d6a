"""Ranks of one group with fakes: how they join, answer each other, and end."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.codec import encode
from baton.kv_transfer.connector import TransferConnector
from baton.kv_transfer.errors import MalformedMessage, RankLost, TransferThreadDied, TransportError
from baton.kv_transfer.group.rank_reader import RankMemory, RankReader, group_metadata
from baton.kv_transfer.group.read_member import join_tp_read_group, read_member
from baton.kv_transfer.group.read_messages import READS, CompareBlocks, MakeDigests, ReadReport
from baton.kv_transfer.group.rpc import GiveUp, GroupMember, GroupRank, GroupSocket, MemberThread
from baton.kv_transfer.group.tp_read_group import ASK_ALIVE_EVERY_S, MAX_UNANSWERED, TpReadGroup, gather
from baton.kv_transfer.protocol.messages import MAX_METADATA_BYTES
from baton.kv_transfer.settings import LocalEngine
from baton.kv_transfer.transports import Lane, PeerState, ReadState

from ...helpers.fake_channel import FakeChannel, FakeNetwork
from ...helpers.fake_transport import FakeFabric
from ...helpers.virtual_clock import VirtualClock

LAYOUT = KVLayout(model="ours", num_layers=1, num_kv_heads=4, head_dim=1, dtype="float32", block_size=1)
OTHER = KVLayout(model="theirs", num_layers=1, num_kv_heads=4, head_dim=1, dtype="float32", block_size=1)
NUM_BLOCKS = 8
HEARTBEAT_TIMEOUT_S = ASK_ALIVE_EVERY_S * MAX_UNANSWERED


class Group:
    """Ranks 0 and 1 of a group, and a peer whose memory they can read."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.wires = FakeNetwork(self.clock, random.Random(0))
        self.fabric = FakeFabric(self.clock, random.Random(0))
        self.wire = self.wires.bind("rank 0")
        self.own = self.reader(0, range(2))
        self.members: list[GroupMember] = []
        self.member_wire: FakeChannel | None = None

    def reader(
        self,
        rank: int,
        heads: range,
        layout: KVLayout = LAYOUT,
        num_blocks: int = NUM_BLOCKS,
        *,
        staged: bool = False,
    ) -> RankReader:
        memory = bytearray(num_blocks * len(heads) * layout.head_bytes)
        region = CacheRegion.of(ArenaRegion(0, num_blocks, "cpu", layout, heads.start, len(heads)))
        return RankReader(rank, region, self.fabric.attach(f"{rank} {heads}", memory), staged=staged)

    def join(self, reader: RankReader) -> GroupMember:
        self.member_wire = self.wires.bind(f"member {len(self.members)}")
        self.to_leader = self.member_wire.connect("rank 0")
        member = read_member(reader, self.member_wire, self.to_leader, self.clock)
        self.members.append(member)
        return member

    def gather(self, size: int = 2) -> TpReadGroup:
        return gather(
            self.own, size, self.wire, clock=self.clock, wait=lambda _: self.clock.advance(0.1), timeout_s=2.0
        )

    def together(self) -> TpReadGroup:
        self.join(self.reader(1, range(2, 4)))
        return self.gather()

    def a_peer(self) -> bytes:
        """Return the metadata of a peer with one rank."""
        memory = bytearray(NUM_BLOCKS * LAYOUT.block_bytes)
        return group_metadata([RankMemory(0, 4, self.fabric.attach("peer", memory).metadata())])

    def pass_time(self, reads: TpReadGroup, seconds: float, *, following: bool = True) -> None:
        for _ in range(round(seconds / 0.1)):
            self.clock.advance(0.1)
            reads.pump()
            for member in self.members if following else ():
                member.pump()


@pytest.fixture
def group() -> Group:
    return Group()


def test_a_read_of_a_group_is_done_when_all_its_ranks_are(group: Group) -> None:
    reads = group.together()
    peer = reads.add_peer(group.a_peer())
    assert reads.peer_state(peer) is PeerState.CONNECTING
    group.pass_time(reads, 0.5)
    assert reads.peer_state(peer) is PeerState.CONNECTED
    read = reads.read(peer, np.array([1, 2, 3]), np.array([4, 5, 7]))
    group.clock.advance(0.1)
    assert group.own.poll(read) is ReadState.DONE
    assert reads.poll(read) is ReadState.RUNNING
    group.pass_time(reads, 0.5)
    assert reads.poll(read) is ReadState.DONE
    assert reads.release(read)
    assert reads.num_bytes == 3 * LAYOUT.block_bytes
    assert reads.num_descriptors == 2 * 3


@pytest.mark.parametrize(("rates", "slow"), [((40e9, 0.4e9), 0.4e9), ((0.4e9, 40e9), 0.4e9), ((40e9, 30e9), 30e9)])
def test_the_lane_of_a_peer_is_that_of_the_slowest_rank(
    group: Group, rates: tuple[float, float], slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lane(reader: RankReader, peer: int) -> Lane:
        return Lane("t", rates[reader.rank], is_slow=rates[reader.rank] < 1e9)

    monkeypatch.setattr(RankReader, "lane", lane)
    reads = group.together()
    peer = reads.add_peer(group.a_peer())
    group.pass_time(reads, 0.5)
    assert reads.lane(peer) == Lane("t", slow, is_slow=slow < 1e9)


def test_reads_that_fall_back_on_another_rank_are_counted(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's GPU may have lost its direct way to the peer, and all ranks wait for it."""
    monkeypatch.setattr(RankReader, "num_fallbacks", property(lambda reader: 3 * reader.rank))
    reads = group.together()
    peer = reads.add_peer(group.a_peer())
    group.pass_time(reads, 0.5)
    read = reads.read(peer, np.array([1]), np.array([4]))
    group.pass_time(reads, 0.5)
    assert reads.release(read)
    assert reads.num_fallbacks == 3


def test_a_read_that_one_rank_refuses_fails_and_names_the_rank(group: Group) -> None:
    """The peer's rank 1 has one block too few."""
    reads = group.together()
    halves = []
    for first, blocks in ((0, NUM_BLOCKS), (2, NUM_BLOCKS - 1)):
        memory = bytearray(blocks * LAYOUT.block_bytes // 2)
        halves.append(RankMemory(first, 2, group.fabric.attach(f"half {first}", memory).metadata()))
    peer = reads.add_peer(group_metadata(halves))
    group.pass_time(reads, 0.5)
    read = reads.read(peer, np.array([NUM_BLOCKS - 1]), np.array([0]))
    group.pass_time(reads, 0.5)
    assert reads.poll(read) is ReadState.FAILED
    assert reads.reason(read).startswith("rank 1: ")
    assert "is outside the" in reads.reason(read)
    assert reads.release(read)


def test_ranks_that_do_not_join_are_named(group: Group) -> None:
    group.join(group.reader(1, range(1, 2)))
    with pytest.raises(TransportError, match=r"of 4 ranks these did not join within 2 s: \[2, 3\]"):
        group.gather(size=4)


@pytest.mark.parametrize(
    ("rank", "heads", "layout", "num_blocks", "complaint"),
    [
        (1, range(2, 4), OTHER, NUM_BLOCKS, "rank 1 keeps blocks of layout .*, rank 0 of"),
        (1, range(2, 4), LAYOUT, NUM_BLOCKS + 1, "rank 1 keeps other blocks"),
        (1, range(0, 2), LAYOUT, NUM_BLOCKS, "rank 1 of 2 keeps .* and should keep"),
        (2, range(2, 4), LAYOUT, NUM_BLOCKS, "rank 2 joined a group of 2 ranks that has no place for it"),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(
    rank: int, heads: range, layout: KVLayout, num_blocks: int, complaint: str, group: Group
) -> None:
    group.join(group.reader(rank, heads, layout, num_blocks))
    with pytest.raises(TransportError, match=complaint):
        group.gather()


def test_heads_that_do_not_divide_are_refused(group: Group) -> None:
    for rank in (1, 2):
        group.join(group.reader(rank, range(2, 4)))
    with pytest.raises(TransportError, match="4 KV heads cannot be shared out over 3 ranks"):
        group.gather(size=3)


def test_a_rank_with_a_host_buffer_is_refused_if_rank_0_has_none() -> None:
    group = Group()
    group.join(group.reader(1, range(2, 4), staged=True))
    with pytest.raises(TransportError, match=r"rank 1 hands over from a buffer in host memory.*set transfer\.buffer"):
        group.gather()


def test_messages_from_outside_of_the_group_are_ignored(group: Group) -> None:
    stranger = group.wires.bind("stranger")
    link = stranger.connect("rank 0")
    stranger.send(link, b"\xc1 nonsense")
    reads = group.together()
    stranger.send(link, encode(GiveUp(1, "I am not of this group")))
    stranger.send(link, b"\xc1 nonsense")
    group.pass_time(reads, 0.5)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (encode(GiveUp(1, "no memory")), "rank 1 cannot go on: no memory"),
        (encode(ReadReport(77, ReadState.DONE, "", True, 0, 0)), "rank 1 reports a read that it was not asked for"),
        (b"\xc1 nonsense", "rank 1 sends malformed bytes"),
    ],
)
def test_a_rank_that_ends_or_sends_invalid_messages_is_lost(message: bytes, complaint: str, group: Group) -> None:
    reads = group.together()
    assert group.member_wire is not None
    group.member_wire.send(group.to_leader, message)
    with pytest.raises(RankLost, match=complaint):
        group.pass_time(reads, 0.5)


def test_a_rank_that_cannot_send_a_report_ends(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = group.together()
    reads.add_peer(group.a_peer())
    assert group.member_wire is not None
    monkeypatch.setattr(group.member_wire, "send", lambda route, data: False)
    with pytest.raises(RankLost, match="rank 0 takes no reports any more"):
        group.pass_time(reads, 1.0)


def test_metadata_that_are_too_long_for_a_handshake_are_refused(group: Group) -> None:
    group.join(RankReader(1, group.reader(1, range(2, 4)).region, _WithManyDevices()))
    with pytest.raises(TransportError, match=r"memory of 2 ranks peers need 10\d\d\d\d\d bytes, .*UCX_NET_DEVICES"):
        group.gather()


class _WithManyDevices:
    """A fake transport with metadata as large as allowed, as on a machine with very many devices."""

    name = "fake"

    def metadata(self) -> bytes:
        return bytes(MAX_METADATA_BYTES)


def test_a_rank_that_does_not_answer_is_lost(group: Group) -> None:
    reads = group.together()
    reads.add_peer(group.a_peer())
    group.pass_time(reads, HEARTBEAT_TIMEOUT_S - 1, following=False)
    with pytest.raises(RankLost, match="rank 1 has not answered for 10 s"):
        group.pass_time(reads, HEARTBEAT_TIMEOUT_S, following=False)


def test_a_slow_rank_that_answers_is_not_lost(group: Group) -> None:
    reads = group.together()
    peer = reads.add_peer(group.a_peer())
    group.pass_time(reads, 0.5)
    group.fabric.faults.read_s = (5 * HEARTBEAT_TIMEOUT_S, 5 * HEARTBEAT_TIMEOUT_S)
    read = reads.read(peer, np.array([1]), np.array([1]))
    group.pass_time(reads, 4 * HEARTBEAT_TIMEOUT_S)
    assert reads.poll(read) is ReadState.RUNNING
    group.pass_time(reads, 2 * HEARTBEAT_TIMEOUT_S)
    assert reads.poll(read) is ReadState.DONE


def test_a_leader_that_was_stopped_does_not_consider_others_lost(group: Group) -> None:
    reads = group.together()
    reads.add_peer(group.a_peer())
    group.pass_time(reads, 0.2, following=False)
    group.clock.advance(10 * HEARTBEAT_TIMEOUT_S)
    group.pass_time(reads, 1)


def test_idle_ranks_send_no_messages(group: Group) -> None:
    reads = group.together()
    group.pass_time(reads, 1)
    before = group.wires.num_sent
    group.pass_time(reads, 5 * HEARTBEAT_TIMEOUT_S)
    assert group.wires.num_sent == before


def test_a_block_outside_of_the_region_is_never_read(group: Group) -> None:
    """Orders of rank 0 are checked, as memory after the region may be used otherwise or not exist."""
    group.together()
    assert group.member_wire is not None
    for order in (MakeDigests(1, [0, NUM_BLOCKS]), CompareBlocks(1, 1, [NUM_BLOCKS], ())):
        group.member_wire.arrive(b"rank 0", encode(order))
        with pytest.raises(MalformedMessage, match="are to be digested, and there are 8"):
            group.members[0].pump()


def test_a_peer_that_another_rank_cannot_reach_is_broken(group: Group) -> None:
    """Rank 1 needs heads of a peer's rank whose metadata cannot be read."""
    reads = group.together()
    memory = bytearray(NUM_BLOCKS * LAYOUT.block_bytes // 2)
    whole = RankMemory(0, 2, group.fabric.attach("half a peer", memory).metadata())
    peer = reads.add_peer(group_metadata([whole, RankMemory(2, 2, b"\xc1")]))
    group.pass_time(reads, 0.5)
    assert reads.peer_state(peer) is PeerState.BROKEN
    reads.remove_peer(peer)
    group.pass_time(reads, 0.5)


@pytest.mark.parametrize("metadata", [b"", b"\xff" * 9, group_metadata([]), group_metadata([RankMemory(9, 1, b"")])])
def test_invalid_metadata_are_refused(metadata: bytes, group: Group) -> None:
    with pytest.raises((MalformedMessage, TransportError)):
        group.together().add_peer(metadata)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_raise_malformed_message_only(data: bytes) -> None:
    for decode in READS:
        try:
            decode(data)
        except MalformedMessage:
            continue


# ---------------------------------------------------------------------- real sockets, two ranks in one process


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros((2, NUM_BLOCKS, LAYOUT.block_bytes // 2), dtype=np.uint8)


def half(memory: np.ndarray, rank: int) -> CacheRegion:
    return CacheRegion.of(ArenaRegion(memory[rank].ctypes.data, NUM_BLOCKS, "cpu", LAYOUT, 2 * rank, 2))


@contextlib.contextmanager
def a_member(memory: np.ndarray, socket: GroupSocket, key: ClusterKey) -> Iterator[MemberThread]:
    member = join_tp_read_group(half(memory, 1), GroupRank(1, 2, key), leader=socket.address, engine_id="group")
    yield member
    member.close()


def a_leader(memory: np.ndarray, socket: GroupSocket, key: ClusterKey) -> TransferConnector:
    region = half(memory, 0)
    return TransferConnector(region, LocalEngine("group", 1, "127.0.0.1", key), read_socket=socket)


def poll_until_it_raises(connector: TransferConnector) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        connector.poll()
        time.sleep(0.01)


def test_a_connector_is_ready_when_all_ranks_are_and_ends_when_one_cannot_go_on(
    memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ClusterKey.generate()
    socket = GroupSocket(2, "127.0.0.1", key)
    fails, pump = threading.Event(), GroupMember.pump

    def pump_until_it_fails(member: GroupMember) -> float:
        if fails.is_set():
            raise ZeroDivisionError
        return min(pump(member), 0.01)

    monkeypatch.setattr(GroupMember, "pump", pump_until_it_fails)
    with a_member(memory, socket, key):
        connector = a_leader(memory, socket, key)
        fails.set()
        with pytest.raises(TransferThreadDied, match="rank 1 cannot go on: ZeroDivisionError"):
            poll_until_it_raises(connector)
        connector.close()
    assert "baton-transfer" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_with_another_clusters_key_does_not_join(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gather.__kwdefaults__, "timeout_s", 1.0)
    key = ClusterKey.generate()
    socket = GroupSocket(2, "127.0.0.1", key)
    refusal = pytest.raises(TransportError, match=r"did not join within 1 s: \[1\]")
    with a_member(memory, socket, ClusterKey.generate()), refusal:
        a_leader(memory, socket, key)
    socket.close()
    assert "baton-transfer" not in {thread.name for thread in threading.enumerate()}
