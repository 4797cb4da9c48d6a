"""Each peer is read over the faster of two transports, and over the other where that fails."""

from __future__ import annotations

import dataclasses
import logging
import random

import msgspec
import pytest

from baton.kv_transfer import codec
from baton.kv_transfer.errors import MalformedMessage, TransportError
from baton.kv_transfer.transports import ByteRange, Lane, PeerHandle, PeerState, ReadState
from baton.kv_transfer.transports.fastest import FIRST_PAUSE_S, FastestTransport

from ...helpers.fake_transport import FakeFabric, FakeTransport, TransportFaults
from ...helpers.virtual_clock import VirtualClock

SIZE = 64
WHOLE = [ByteRange(0, 0, SIZE)]
FAST, SLOW = 2e12, 0.4e9
PATIENCE_S = 5.0
NEVER = (1e6, 1e6)


class Named(FakeTransport):
    """A fake transport under another name, which counts its peers, and may refuse all."""

    def __init__(self, name: str, fabric: FakeFabric, agent: str, bytes_per_s: float | None, refusal: str = "") -> None:
        super().__init__(fabric, agent, bytes_per_s)
        self.name = name
        self.refusal = refusal
        self.num_added = 0

    def add_peer(self, metadata: bytes) -> PeerHandle:
        if self.refusal:
            raise TransportError(self.refusal)
        self.num_added += 1
        return super().add_peer(metadata)


@dataclasses.dataclass
class Machines:
    """A holder and a reader, with a network between them and, unless `apart`, a direct way."""

    direct_rate: float | None = FAST
    network_rate: float | None = SLOW
    apart: bool = False
    not_sharing: str = ""  # the end without a direct way
    on_gpu: bool = True
    direct_refusal: str = ""
    staged_rate: float | None = None  # of both ends; None: neither has it
    staged_refusal: str = ""
    only_reader_stages: bool = False

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.network = FakeFabric(self.clock, random.Random(1), TransportFaults())
        self.direct = FakeFabric(self.clock, random.Random(2), TransportFaults())
        self.staged = FakeFabric(self.clock, random.Random(3), TransportFaults())
        self.staged_of: dict[str, Named] = {}
        self.memories = {"holder": bytearray(b"h" * SIZE), "reader": bytearray(b"r" * SIZE)}
        self.holder, self.reader = self._end("holder"), self._end("reader")

    def _end(self, name: str) -> FastestTransport:
        memory = self.memories[name]
        self.network.attach(name, memory)
        network = Named("nixl/UCX", self.network, name, self.network_rate)
        direct = None
        if not self.apart and name != self.not_sharing:
            self.direct.attach(name, memory)
            direct = Named("cuda_ipc", self.direct, name, self.direct_rate, self.direct_refusal)
        staged = None
        if self.staged_rate is not None and (name == "reader" or not self.only_reader_stages):
            self.staged.attach(name, memory)
            staged = Named("nixl/UCX staged", self.staged, name, self.staged_rate, self.staged_refusal)
            self.staged_of[name] = staged
        return FastestTransport(
            network, direct, name, on_gpu=self.on_gpu, staged=staged, patience_s=PATIENCE_S, clock=self.clock
        )

    def meet(self) -> int:
        """Connect, and poll the peer's state as a transfer thread does."""
        peer = self.connect()
        for _ in range(100):
            if self.reader.peer_state(peer) is not PeerState.CONNECTING:
                return peer
            self.clock.advance(0.1)
        raise AssertionError("the peer is never connected")

    def connect(self) -> int:
        peer = self.reader.add_peer(self.holder.metadata())
        self.clock.advance(1.0)
        return peer

    def finish(self, read: int) -> ReadState:
        for _ in range(10):
            self.clock.advance(1.0)
            if (state := self.reader.poll(read)) is not ReadState.RUNNING:
                return state
        raise AssertionError("the read does not end")

    def read_for(self, peer: int, seconds: float) -> None:
        """Read every second, as an engine with hand-offs does. The reads must succeed, and the peer stay connected."""
        for _ in range(round(seconds)):
            read = self.reader.read(peer, WHOLE)
            self.clock.advance(0.5)
            assert self.reader.poll(read) is ReadState.DONE
            assert self.reader.release(read)
            assert self.reader.peer_state(peer) is PeerState.CONNECTED
            self.clock.advance(0.5)

    def break_staged(self, peer: int) -> int:
        """Let a read through host memory fail, which goes on over the network. Returns the read, which is not over."""
        self.staged.faults.fail = 1.0
        read = self.reader.read(peer, WHOLE)
        self.clock.advance(0.1)
        assert self.reader.poll(read) is ReadState.RUNNING
        self.staged.faults.fail = 0.0
        return read

    def end(self, read: int) -> None:
        assert self.finish(read) is ReadState.DONE
        assert self.reader.release(read)

    def accept_staged(self) -> None:
        self.staged_of["reader"].refusal = ""

    @property
    def num_staged(self) -> int:
        """The number of times that the reader has connected to a peer through host memory."""
        return self.staged_of["reader"].num_added

    @property
    def has_arrived(self) -> bool:
        return self.memories["reader"] == self.memories["holder"]


@pytest.mark.parametrize(("direct", "network", "name"), [(FAST, SLOW, "cuda_ipc"), (SLOW, FAST, "nixl/UCX")])
def test_a_peer_is_read_over_the_way_that_was_faster_when_it_was_connected(
    direct: float, network: float, name: str
) -> None:
    machines = Machines(direct_rate=direct, network_rate=network)
    peer = machines.connect()
    assert machines.reader.peer_state(peer) is PeerState.CONNECTED
    assert machines.reader.lane(peer) == Lane(name, FAST)
    other = machines.network if name == "cuda_ipc" else machines.direct
    other.faults.fail = 1.0  # which it would notice
    read = machines.reader.read(peer, WHOLE)
    assert machines.finish(read) is ReadState.DONE
    assert machines.reader.release(read)
    assert machines.has_arrived
    assert machines.reader.num_fallbacks == 0


@pytest.mark.parametrize(("end", "who"), [("holder", "it"), ("reader", "this engine")])
def test_where_one_end_has_no_direct_way_the_network_is_used_and_the_reason_told(
    end: str, who: str, caplog: pytest.LogCaptureFixture
) -> None:
    machines = Machines(not_sharing=end)
    peer = machines.connect()
    assert machines.reader.lane(peer) == Lane("nixl/UCX", SLOW, is_slow=True)
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "is read slowly, probably through TCP: nixl/UCX 0.4 GB/s" in told
    assert f"not directly: {who} shares no memory with other processes" in told
    assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE


def test_where_neither_end_has_a_direct_way_the_network_is_used() -> None:
    machines = Machines(apart=True)
    peer = machines.connect()
    assert machines.reader.lane(peer) == Lane("nixl/UCX", SLOW, is_slow=True)
    assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE


def test_a_direct_way_that_cannot_be_opened_leaves_the_network_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(direct_refusal="its memory cannot be mapped: CUDA_ERROR_INVALID_VALUE")
    with caplog.at_level(logging.INFO):
        peer = machines.connect()
    assert machines.reader.lane(peer) == Lane("nixl/UCX", SLOW, is_slow=True)
    assert "holder is not read directly, but over nixl/UCX: its memory cannot be mapped" in caplog.text
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "not directly: its memory cannot be mapped: CUDA_ERROR_INVALID_VALUE" in told


def test_a_peer_whose_mapping_turns_out_wrong_is_read_over_the_network() -> None:
    machines = Machines()
    machines.direct.faults.break_peer = 1.0
    peer = machines.connect()
    assert machines.reader.peer_state(peer) is PeerState.CONNECTED
    assert machines.reader.lane(peer) == Lane("nixl/UCX", SLOW, is_slow=True)


def test_a_network_that_cannot_connect_does_not_keep_the_direct_way_from_serving() -> None:
    machines = Machines()
    machines.network.faults.break_peer = 1.0
    peer = machines.connect()
    assert machines.reader.peer_state(peer) is PeerState.CONNECTED
    assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE
    assert machines.has_arrived


def test_a_peer_that_no_way_reaches_is_broken_and_reads_of_it_are_refused() -> None:
    machines = Machines()
    machines.network.faults.break_peer = machines.direct.faults.break_peer = 1.0
    peer = machines.connect()
    assert machines.reader.peer_state(peer) is PeerState.BROKEN
    assert machines.reader.lane(peer) is None
    with pytest.raises(TransportError, match="the connection to holder is broken"):
        machines.reader.read(peer, WHOLE)


def test_a_read_that_fails_directly_is_begun_again_over_the_network_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machines = Machines()
    peer = machines.connect()
    machines.direct.faults.fail = 1.0
    read = machines.reader.read(peer, WHOLE)
    assert machines.finish(read) is ReadState.DONE
    assert machines.reader.release(read)
    assert machines.has_arrived
    assert machines.reader.num_fallbacks == 1
    assert "holder is now read over nixl/UCX instead of cuda_ipc: the read failed" in caplog.text


def test_a_read_is_not_done_before_nothing_of_its_failed_first_try_can_write() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.direct.faults.fail = 1.0
    machines.direct.faults.late_s = (3.0, 3.0)
    read = machines.reader.read(peer, WHOLE)
    machines.clock.advance(0.5)
    assert machines.reader.poll(read) is ReadState.RUNNING
    machines.clock.advance(0.5)
    assert machines.reader.poll(read) is ReadState.RUNNING
    assert machines.finish(read) is ReadState.DONE
    assert machines.reader.release(read)


def test_a_read_that_the_direct_way_refuses_goes_over_the_network() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.direct.faults.refuse = 1.0
    assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE
    assert machines.reader.num_fallbacks == 1


def test_a_read_that_fails_twice_has_failed() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.direct.faults.fail = machines.network.faults.fail = 1.0
    read = machines.reader.read(peer, WHOLE)
    assert machines.finish(read) is ReadState.FAILED
    assert machines.reader.release(read)


def test_gpu_memory_that_travels_slowly_is_a_warning_and_the_rates_are_in_it(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(apart=True)
    peer = machines.connect()
    for _ in range(3):
        machines.reader.peer_state(peer)
    told = [record for record in caplog.records if "is read slowly" in record.message]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "nixl/UCX 0.4 GB/s" in told[0].message


def test_the_lane_of_other_memory_is_told_once_and_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines(apart=True, on_gpu=False)
    with caplog.at_level(logging.INFO):
        peer = machines.connect()
        for _ in range(3):
            machines.reader.peer_state(peer)
    told = [record.message for record in caplog.records if "is read over" in record.message]
    assert told == ["memory of holder is read over nixl/UCX (nixl/UCX 0.4 GB/s)"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_lane_of_a_peer_whose_network_was_measured_later_is_told_then(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines()
    machines.network.faults.connect_s = (5.0, 5.0)
    with caplog.at_level(logging.INFO):
        peer = machines.meet()
        assert "is read over" not in caplog.text
        machines.clock.advance(5.0)
        assert machines.reader.lane(peer) == Lane("cuda_ipc", FAST)
    assert "memory of holder is read over cuda_ipc (cuda_ipc 2000.0 GB/s, nixl/UCX 0.4 GB/s)" in caplog.text


def test_a_removed_peer_is_removed_from_both() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.reader.remove_peer(peer)
    with pytest.raises(KeyError):
        machines.reader.peer_state(peer)
    assert machines.finish(machines.reader.read(machines.connect(), WHOLE)) is ReadState.DONE


def test_metadata_that_make_no_sense_are_refused() -> None:
    with pytest.raises(MalformedMessage):
        Machines().reader.add_peer(b"\xff")


def test_a_peer_that_the_direct_way_cannot_take_leaves_nothing_behind_in_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handshake is repeated every few seconds, and each would leave another connection."""
    machines = Machines()
    added, removed = [], []

    def add_peer(self: Named, metadata: bytes) -> PeerHandle:
        if self.name == "cuda_ipc":
            raise RuntimeError("CUDA error")
        added.append(FakeTransport.add_peer(self, metadata))
        return added[-1]

    monkeypatch.setattr(Named, "add_peer", add_peer)
    monkeypatch.setattr(Named, "remove_peer", lambda self, peer: removed.append(peer))
    with pytest.raises(RuntimeError):
        machines.reader.add_peer(machines.holder.metadata())
    assert len(added) == 1
    assert removed == added


def test_a_direct_way_whose_description_makes_no_sense_leaves_the_network(caplog: pytest.LogCaptureFixture) -> None:
    machines = Machines()
    name, network, _, staged = msgspec.msgpack.decode(machines.holder.metadata())
    with caplog.at_level(logging.INFO):
        peer = machines.reader.add_peer(codec.encode((name, network, b"\xff", staged)))
    machines.clock.advance(1.0)
    assert (
        "holder is not read directly, but over nixl/UCX: 1 bytes cannot be read as metadata of a fake peer"
        in caplog.text
    )
    assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE


class TestALaneThatNeverConnects:
    """Its end accepted the connection and hangs."""

    def test_gpu_memory_is_read_through_host_memory_instead(self, caplog: pytest.LogCaptureFixture) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        machines.network.faults.connect_s = NEVER
        with caplog.at_level(logging.INFO):
            peer = machines.meet()
        assert machines.reader.lane(peer) == Lane("nixl/UCX staged", 11e9, is_staged=True)
        assert "nixl/UCX not connected within 5 s, nixl/UCX staged 11.0 GB/s" in caplog.text
        assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE

    def test_the_direct_way_is_used_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        machines = Machines()
        machines.network.faults.connect_s = NEVER
        with caplog.at_level(logging.INFO):
            peer = machines.meet()
            machines.clock.advance(PATIENCE_S)
            assert machines.reader.lane(peer) == Lane("cuda_ipc", FAST)
        assert "read over cuda_ipc (cuda_ipc 2000.0 GB/s, nixl/UCX not connected within 5 s)" in caplog.text

    def test_a_direct_way_that_breaks_breaks_the_peer_at_once_so_that_it_is_connected_anew(self) -> None:
        machines = Machines()
        machines.network.faults.connect_s = NEVER
        peer = machines.meet()
        machines.direct.faults.fail = 1.0
        assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.FAILED
        assert machines.reader.peer_state(peer) is PeerState.BROKEN

    def test_it_is_used_if_it_connects_after_all(self) -> None:
        machines = Machines(direct_rate=SLOW, network_rate=FAST)
        machines.network.faults.connect_s = (2 * PATIENCE_S, 2 * PATIENCE_S)
        peer = machines.meet()
        machines.clock.advance(PATIENCE_S)
        assert machines.reader.lane(peer) == Lane("cuda_ipc", SLOW, is_slow=True)
        machines.clock.advance(PATIENCE_S)
        assert machines.reader.lane(peer) == Lane("nixl/UCX", FAST)

    def test_if_it_is_the_only_one_the_peer_is_not_connected(self) -> None:
        machines = Machines(apart=True)
        machines.network.faults.connect_s = NEVER
        peer = machines.connect()
        machines.clock.advance(10 * PATIENCE_S)
        assert machines.reader.peer_state(peer) is PeerState.CONNECTING


class TestStaged:
    """Pinned memory of both hosts is a way for GPU memory that the others reach only slowly."""

    def test_it_is_chosen_at_pairing_where_it_measures_faster_and_said(self, caplog: pytest.LogCaptureFixture) -> None:
        machines = Machines(apart=True, staged_rate=1.1e9)
        machines.staged.faults.connect_s = (0.5, 0.5)
        with caplog.at_level(logging.INFO):
            peer = machines.meet()
        assert machines.reader.lane(peer) == Lane("nixl/UCX staged", 1.1e9, is_slow=True, is_staged=True)
        (said,) = [record.message for record in caplog.records if "through pinned memory" in record.message]
        assert "nixl/UCX 0.4 GB/s, nixl/UCX staged 1.1 GB/s" in said
        machines.network.faults.fail = 1.0  # which it would notice
        assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE
        assert machines.has_arrived

    def test_at_a_good_rate_it_is_not_slow(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        assert machines.reader.lane(machines.meet()) == Lane("nixl/UCX staged", 11e9, is_staged=True)

    def test_where_it_is_no_faster_the_network_is_kept(self, caplog: pytest.LogCaptureFixture) -> None:
        machines = Machines(apart=True, staged_rate=SLOW / 2)
        assert machines.reader.lane(machines.meet()) == Lane("nixl/UCX", SLOW, is_slow=True)
        assert "nixl/UCX 0.4 GB/s, nixl/UCX staged 0.2 GB/s" in caplog.text

    @pytest.mark.parametrize("machines", [{}, {"apart": True, "network_rate": FAST}, {"apart": True, "on_gpu": False}])
    def test_where_another_way_is_fast_it_is_not_even_measured(self, machines: dict[str, object]) -> None:
        there = Machines(staged_rate=9e12, **machines)  # type: ignore[arg-type]
        lane = there.reader.lane(there.meet())
        assert lane is not None
        assert not lane.is_staged

    def test_it_takes_both_ends(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9, only_reader_stages=True)
        assert machines.reader.lane(machines.meet()) == Lane("nixl/UCX", SLOW, is_slow=True)

    def test_it_is_used_where_nothing_else_works(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        machines.network.faults.break_peer = 1.0
        peer = machines.meet()
        assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE

    def test_where_it_cannot_be_connected_the_network_is_kept(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        machines.staged.faults.break_peer = 1.0
        assert machines.reader.lane(machines.meet()) == Lane("nixl/UCX", SLOW, is_slow=True)

    def test_a_read_that_fails_there_is_begun_again_over_the_network(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        peer = machines.meet()
        machines.staged.faults.fail = 1.0
        assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE
        assert machines.reader.num_fallbacks == 1
        assert machines.reader.lane(peer) == Lane("nixl/UCX", SLOW, is_slow=True)

    def test_once_broken_it_is_tried_again_after_a_while(self, caplog: pytest.LogCaptureFixture) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        peer = machines.meet()
        machines.end(machines.break_staged(peer))
        machines.read_for(peer, FIRST_PAUSE_S - 5)
        assert machines.reader.lane(peer) == Lane("nixl/UCX", SLOW, is_slow=True)
        with caplog.at_level(logging.INFO):
            machines.read_for(peer, 10.0)
        assert machines.reader.lane(peer) == Lane("nixl/UCX staged", 11e9, is_staged=True)
        assert [record for record in caplog.records if "through pinned memory" in record.message]
        assert machines.reader.num_fallbacks == 1
        machines.network.faults.fail = 1.0  # which it would notice
        assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.DONE

    def test_while_it_is_tried_again_the_peer_is_connected(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        peer = machines.meet()
        machines.end(machines.break_staged(peer))
        machines.staged.faults.connect_s = (1.0, 1.0)
        machines.read_for(peer, 2 * FIRST_PAUSE_S)  # which looks at the state in every round
        assert machines.reader.num_fallbacks == 1

    def test_a_peer_that_is_lost_while_it_is_tried_again_is_broken(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        peer = machines.meet()
        machines.end(machines.break_staged(peer))
        machines.clock.advance(FIRST_PAUSE_S + 1)
        machines.staged.faults.connect_s = (5.0, 5.0)
        machines.network.faults.fail = 1.0
        assert machines.finish(machines.reader.read(peer, WHOLE)) is ReadState.FAILED
        assert machines.reader.peer_state(peer) is PeerState.BROKEN

    def test_it_is_not_connected_again_while_a_read_of_it_may_still_write(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        peer = machines.meet()
        machines.staged.faults.late_s = (10 * FIRST_PAUSE_S, 10 * FIRST_PAUSE_S)
        read = machines.break_staged(peer)
        machines.read_for(peer, 9 * FIRST_PAUSE_S)
        assert machines.num_staged == 1
        machines.clock.advance(2 * FIRST_PAUSE_S)
        machines.end(read)
        machines.read_for(peer, 3 * FIRST_PAUSE_S)
        assert machines.num_staged == 2

    def test_the_longer_it_does_not_work_the_more_rarely_it_is_tried(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9)
        peer = machines.meet()
        machines.end(machines.break_staged(peer))
        machines.staged.faults.break_peer = 1.0
        machines.read_for(peer, 35.0)
        assert machines.num_staged == 2
        machines.read_for(peer, 165.0)
        assert machines.num_staged == 3
        machines.staged.faults.break_peer = 0.0
        machines.read_for(peer, 130.0)
        assert machines.reader.lane(peer) == Lane("nixl/UCX staged", 11e9, is_staged=True)

    def test_where_it_is_refused_it_is_tried_again_too(self) -> None:
        machines = Machines(apart=True, staged_rate=11e9, staged_refusal="cannot load a peer's metadata")
        peer = machines.meet()
        assert machines.reader.lane(peer) == Lane("nixl/UCX", SLOW, is_slow=True)
        machines.accept_staged()
        machines.read_for(peer, FIRST_PAUSE_S + 5)
        assert machines.reader.lane(peer) == Lane("nixl/UCX staged", 11e9, is_staged=True)

    def test_where_it_is_slower_it_is_not_tried_again(self) -> None:
        machines = Machines(apart=True, staged_rate=SLOW / 2)
        peer = machines.meet()
        machines.read_for(peer, 10 * FIRST_PAUSE_S)
        assert machines.num_staged == 1
