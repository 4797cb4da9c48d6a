"""The contract of all transports between processes, tested with two ends in one process."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion
from baton.kv_transfer.errors import MalformedMessage, TransportError
from baton.kv_transfer.transports import ByteRange, PeerState, ReadState, Transport, nixl
from baton.kv_transfer.transports.common import NUM_PROBES, LaneRate
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.ucx import UcxTransport

LAYOUT = KVLayout(model="small", num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
NUM_BLOCKS = 4
UCX_SETTINGS = {name for name in os.environ if name.startswith("UCX_")}  # before any transport

TRANSPORTS: dict[str, type] = {"nixl": NixlTransport, "ucx": UcxTransport}

End = tuple[Any, np.ndarray]


def an_end(transport: str, name: str) -> End:
    memory = np.full((NUM_BLOCKS, LAYOUT.block_bytes), ord(name[0]), dtype=np.uint8)
    region = ArenaRegion(memory.ctypes.data, NUM_BLOCKS, "cpu", LAYOUT, 0, LAYOUT.num_kv_heads)
    return TRANSPORTS[transport](region, name), memory


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ends(transport: str) -> Iterator[tuple[End, End]]:
    """Return a holder and a reader."""
    holder, reader = an_end(transport, "holder"), an_end(transport, "reader")
    yield holder, reader
    reader[0].close()
    holder[0].close()


def connect(holder: Transport, reader: Transport) -> int:
    peer = reader.add_peer(holder.metadata())
    deadline = time.monotonic() + 10
    while reader.peer_state(peer) is PeerState.CONNECTING:
        holder.progress()
        assert time.monotonic() < deadline
    assert reader.peer_state(peer) is PeerState.CONNECTED
    return peer


def test_a_read_brings_the_range_and_no_byte_more(ends: tuple[End, End]) -> None:
    (holder, _), (reader, memory) = ends
    peer = connect(holder, reader)
    read = reader.read(peer, [ByteRange(remote=100, local=8, num_bytes=50), ByteRange(0, 200, 1)])
    while reader.poll(read) is ReadState.RUNNING:
        holder.progress()
    assert reader.poll(read) is ReadState.DONE
    assert reader.release(read)
    expected = np.full(memory.size, ord("r"), dtype=np.uint8)
    expected[8:58] = expected[200] = ord("h")
    assert (memory.reshape(-1) == expected).all()


def test_the_lanes_of_ucx_are_reported(ends: tuple[End, End]) -> None:
    (holder, _), (reader, _) = ends
    connect(holder, reader)
    assert any("cfg#" in lane for lane in reader.lanes)


def test_one_delayed_read_does_not_make_a_lane_look_slow(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    (holder, _), (reader, memory) = ends
    begin, delay_s = LaneRate.begin, 20.0

    def begin_delayed(rate: LaneRate, now_s: float) -> None:
        begin(rate, now_s - (0.0 if rate.num_ended else delay_s))

    monkeypatch.setattr(LaneRate, "begin", begin_delayed)
    rate = reader.lane(connect(holder, reader)).bytes_per_s
    assert rate is not None
    assert rate > 2 * memory.size / delay_s


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "piece",
    [
        ByteRange(NUM_BLOCKS * LAYOUT.block_bytes - 1, 0, 2),
        ByteRange(0, NUM_BLOCKS * LAYOUT.block_bytes, 1),
        ByteRange(-1, 0, 1),
        ByteRange(0, 0, 0),
    ],
)
def test_a_range_outside_the_regions_is_refused(piece: ByteRange, ends: tuple[End, End]) -> None:
    (holder, _), (reader, _) = ends
    peer = connect(holder, reader)
    with pytest.raises(TransportError, match="are outside the"):
        reader.read(peer, [piece])


def test_a_read_works_after_the_same_peer_was_removed_and_added(ends: tuple[End, End]) -> None:
    (holder, _), (reader, memory) = ends
    reader.remove_peer(reader.add_peer(holder.metadata()))  # while it is connecting
    reader.remove_peer(connect(holder, reader))
    read = reader.read(connect(holder, reader), [ByteRange(0, 0, memory.size)])
    while reader.poll(read) is ReadState.RUNNING:
        holder.progress()
    assert reader.release(read)
    assert (memory == ord("h")).all()


class Crash:
    """A wrapper of an agent or a worker, of which one method raises while `is_on`."""

    def __init__(self, target: Any, call: str, error: Exception) -> None:
        self._target, self._call, self._error = target, call, error
        self.is_on = False

    def __getattr__(self, name: str) -> Any:
        if name == self._call and self.is_on:
            return self._raise
        return getattr(self._target, name)

    def _raise(self, *arguments: object) -> None:
        raise self._error


def crash_in(end: Any) -> Crash:
    if isinstance(end, NixlTransport):
        from nixl import _bindings

        end.agent = Crash(end.agent, "get_new_notifs", _bindings.nixlBackendError("NIXL_ERR_BACKEND"))
        return end.agent
    from ucxx._lib.libucxx import UCXError

    end.worker = Crash(end.worker, "progress_once", UCXError("Endpoint timeout"))
    return end.worker


@pytest.mark.parametrize("whose", [0, 1], ids=["holder", "reader"])
def test_an_agent_that_crashes_raises_nothing_is_logged_once_and_goes_on_when_it_can(
    whose: int, ends: tuple[End, End], caplog: pytest.LogCaptureFixture
) -> None:
    (holder, _), (reader, memory) = ends
    peer = connect(holder, reader)
    crash = crash_in(ends[whose][0])
    with caplog.at_level(logging.ERROR, logger="baton.kv_transfer.transports.common"):
        crash.is_on = True
        for _ in range(3):
            ends[whose][0].progress()
        crash.is_on = False
        ends[whose][0].progress()
    (record,) = caplog.records
    assert "fails, and hand-offs may until it works again" in record.getMessage()
    read = reader.read(peer, [ByteRange(0, 0, memory.size)])
    while reader.poll(read) is ReadState.RUNNING:
        holder.progress()
    assert reader.release(read)
    assert (memory == ord("h")).all()


@pytest.mark.parametrize("transport", ["nixl"])
def test_a_read_that_failed_is_not_released_before_its_siblings_had_time_to_end(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nixl import _bindings

    (holder, _), (reader, _) = ends
    peer = connect(holder, reader)
    reader.agent = crash = Crash(reader.agent, "transfer", _bindings.nixlRemoteDisconnectError("gone"))
    crash.is_on = True
    monkeypatch.setattr(nixl, "SETTLE_S", 3600.0)
    read = reader.read(peer, [ByteRange(0, 0, 16)])
    assert (reader.poll(read), reader.peer_state(peer)) == (ReadState.FAILED, PeerState.BROKEN)
    assert not reader.release(read)
    monkeypatch.setattr(nixl, "SETTLE_S", 0.0)
    assert reader.release(read)


@pytest.mark.parametrize("transport", ["nixl"])
def test_time_without_progress_ends_no_sibling_of_a_failed_read(ends: tuple[End, End]) -> None:
    """Such as that in which the process is stopped: the library cancels the others as it makes progress."""
    from nixl import _bindings

    (holder, _), (reader, _) = ends
    peer = connect(holder, reader)
    reader.agent = crash = Crash(reader.agent, "transfer", _bindings.nixlRemoteDisconnectError("gone"))
    crash.is_on = True
    read = reader.read(peer, [ByteRange(0, 0, 16)])
    for _ in range(3):
        time.sleep(1.1 * nixl.SETTLE_S)
        assert not reader.release(read)
    deadline = time.monotonic() + 10
    while not reader.release(read):
        assert time.monotonic() < deadline


def altered(metadata: bytes, field: int, value: object) -> bytes:
    fields = msgspec.msgpack.decode(metadata)
    fields[field] = value
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("transport", "field", "value"),
    [
        ("nixl", 1, -1),  # address
        ("nixl", 2, 0),  # bytes
        ("nixl", 3, "CORE"),  # memory
        ("ucx", 0, ""),  # version
        ("ucx", 2, b""),  # worker
        ("ucx", 3, b""),  # key
        ("ucx", 4, -1),  # address
        ("ucx", 5, 0),  # bytes
    ],
)
def test_metadata_with_an_impossible_field_are_refused(field: int, value: object, ends: tuple[End, End]) -> None:
    (holder, _), (reader, _) = ends
    with pytest.raises(MalformedMessage, match=r"cannot be read as metadata of a (NIXL|UCX) peer"):
        reader.add_peer(altered(holder.metadata(), field, value))


@pytest.mark.parametrize("metadata", [b"", b"\xff" * 30, msgspec.msgpack.encode(["short"])])
def test_invalid_metadata_are_refused(metadata: bytes, ends: tuple[End, End]) -> None:
    with pytest.raises(MalformedMessage, match=r"cannot be read as metadata of a (NIXL|UCX) peer"):
        ends[1][0].add_peer(metadata)


@pytest.mark.parametrize("transport", ["ucx"])
def test_a_peer_with_another_version_of_ucx_is_refused_by_name(ends: tuple[End, End]) -> None:
    (holder, _), (reader, _) = ends
    with pytest.raises(TransportError, match=r"holder has UCX 1\.2, here is 1\.\d\d: install the same"):
        reader.add_peer(altered(holder.metadata(), 0, "1.2"))


def test_a_transport_leaves_the_environment_unchanged(ends: tuple[End, End]) -> None:
    given = {name for name in os.environ if name.startswith("UCX_")}
    assert given <= UCX_SETTINGS


def test_a_backend_that_is_missing_is_named() -> None:
    memory = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
    with pytest.raises(TransportError, match=r"no backend CARRIER_PIGEON here; available: .*UCX"):
        NixlTransport(
            ArenaRegion(memory.ctypes.data, 1, "cpu", LAYOUT, 0, LAYOUT.num_kv_heads),
            "agent",
            ["UCX", "CARRIER_PIGEON"],
        )


def test_a_read_that_nixl_does_not_release_at_once_is_released_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the reads that connected to peers that are gone would stay until the engine ends."""
    (holder, _), (reader, _) = an_end("nixl", "holder"), an_end("nixl", "reader")
    bindings, api = nixl.import_nixl()
    busy, released, release = [True], [], api.nixl_xfer_handle.release

    def release_later(handle: Any) -> None:
        if busy[0]:
            raise nixl.errors_of(bindings)[0]("busy")
        release(handle)
        released.append(handle)

    monkeypatch.setattr(api.nixl_xfer_handle, "release", release_later)
    reader.remove_peer(connect(holder, reader))
    assert not released
    busy[0] = False
    reader.progress()
    assert len(released) == 1 + NUM_PROBES  # the first read, and those that were timed
    reader.close()
    holder.close()
