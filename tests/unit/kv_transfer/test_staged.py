"""Reads through pinned memory of both hosts, with stand-ins for GPUs and for the network between the hosts."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer import codec
from baton.kv_transfer.errors import TransportError
from baton.kv_transfer.settings import TransferSettings
from baton.kv_transfer.transports import PeerState, ReadState
from baton.kv_transfer.transports.fastest import FastestTransport
from baton.kv_transfer.transports.staged import CONNECT_S
from baton.kv_transfer.transports.staged_messages import KEPT_S, Close, Fill, Open, Refused, decode, encode_ranges
from baton.kv_transfer.transports.staged_reads import ASK_AGAIN_S, PATIENCE_S

from ...helpers.fake_transport import FakeFabric, FakeHostNetwork
from .staged_engines import BUFFER, NUM_BUFFERS, SIZE, WHOLE, Gpu, Machines

RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(1, 300)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(RANGES, st.integers(0, 1000), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.05]))
def test_bytes_arrive_in_their_places_however_ranges_are_cut(
    wanted: list[tuple[int, int]], seed: int, copy_s: float, read_s: float
) -> None:
    machines = Machines(seed)
    machines.holder.down.seconds = machines.reader.up.seconds = copy_s
    machines.fabric.faults.read_s = (0.0, read_s)
    peer = machines.connect()
    expected, ranges, at = machines.reader.bytes.copy(), [], 0
    for start, length in wanted:
        length = min(length, SIZE - start, SIZE - at)
        if length > 0:
            ranges.append((start, at, length))
            expected[at : at + length] = machines.holder.bytes[start : start + length]
            at += length + 1
    read = machines.reader.transport.read(peer, ranges)
    assert machines.finish(read) is ReadState.DONE
    assert machines.reader.transport.release(read)
    assert np.array_equal(machines.reader.bytes, expected)
    machines.check_all_free()


def test_a_peer_is_measured_when_it_is_connected() -> None:
    machines = Machines()
    machines.fabric.faults.read_s = (0.05, 0.05)
    peer = machines.connect()
    lane = machines.reader.transport.lane(peer)
    assert (lane.transport, lane.is_staged) == ("fake staged", True)
    assert lane.bytes_per_s == pytest.approx(4 * BUFFER / 0.06, rel=0.35)


def test_one_delayed_read_does_not_make_a_peer_look_slow() -> None:
    machines = Machines()
    machines.fabric.faults.read_s = (0.4, 0.4)
    peer = machines.reader.transport.add_peer(machines.holder.transport.metadata())
    machines.clock.after(1.0, lambda: setattr(machines.fabric.faults, "read_s", (0.05, 0.05)))
    while machines.reader.transport.peer_state(peer) is PeerState.CONNECTING:
        machines.pass_time(0.01)
    assert machines.reader.transport.lane(peer).bytes_per_s == pytest.approx(4 * BUFFER / 0.06, rel=0.35)


def test_a_peer_that_is_read_slowly_is_connected_after_the_first_measurement() -> None:
    machines = Machines()
    machines.fabric.faults.read_s = (0.8, 0.8)
    peer = machines.connect()
    assert machines.reader.transport.peer_state(peer) is PeerState.CONNECTED
    assert machines.reader.transport.lane(peer).bytes_per_s == pytest.approx(4 * BUFFER / 0.8, rel=0.35)


def test_copies_on_both_sides_and_the_network_work_at_the_same_time() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.holder.down.seconds = machines.reader.up.seconds = 0.1
    machines.fabric.faults.read_s = (0.1, 0.1)
    read = machines.reader.transport.read(peer, [(0, 0, 16 * BUFFER)])
    busy = 0
    for _ in range(200):
        machines.pass_time(0.01)
        busy += machines.holder.down.num_running > 0 and machines.reader.up.num_running > 0
        if machines.reader.transport.poll(read) is ReadState.DONE:
            break
    assert machines.reader.transport.poll(read) is ReadState.DONE
    assert busy > 0


def test_several_reads_and_readers_share_the_buffers() -> None:
    machines = Machines()
    other = Gpu(machines, "other")
    peers = machines.connect(), machines.connect(other)
    reads = [machines.reader.transport.read(peers[0], WHOLE) for _ in range(2)]
    elsewhere = other.transport.read(peers[1], WHOLE)
    for _ in range(200):
        machines.pass_time(0.01)
        other.transport.progress()
    assert [machines.reader.transport.poll(read) for read in reads] == [ReadState.DONE] * 2
    assert other.transport.poll(elsewhere) is ReadState.DONE
    assert np.array_equal(machines.reader.bytes, machines.holder.bytes)
    assert np.array_equal(other.bytes, machines.holder.bytes)
    machines.check_all_free()


def test_a_holder_that_does_not_answer_is_not_read_in_this_way() -> None:
    machines = Machines()
    machines.fabric.faults.lose = 1.0
    peer = machines.reader.transport.add_peer(machines.holder.transport.metadata())
    machines.pass_time(CONNECT_S / 2)
    assert machines.reader.transport.peer_state(peer) is PeerState.CONNECTING
    machines.pass_time(CONNECT_S)
    assert machines.reader.transport.peer_state(peer) is PeerState.BROKEN
    machines.reader.transport.remove_peer(peer)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_whatever_messages_are_lost_a_read_asks_again_and_gets_its_bytes(seed: int) -> None:
    machines = Machines(seed)
    peer = machines.connect()
    machines.fabric.faults.lose = 0.05
    read = machines.reader.transport.read(peer, WHOLE)
    assert machines.finish(read) is ReadState.DONE
    assert np.array_equal(machines.reader.bytes, machines.holder.bytes)
    machines.fabric.faults.lose = 0.0
    assert machines.reader.transport.release(read)
    machines.pass_time(KEPT_S)
    machines.check_all_free()


def test_a_reader_whom_the_holder_could_not_take_introduces_itself_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines()
    peer = machines.connect()
    machines.pass_time(2 * KEPT_S, 0.1)  # then the holder has forgotten it
    add_agent, refusals = machines.holder.network.add_agent, [TransportError("cannot load a peer's metadata")]

    def refuse_once(metadata: bytes) -> str:
        if refusals:
            raise refusals.pop()
        return add_agent(metadata)

    monkeypatch.setattr(machines.holder.network, "add_agent", refuse_once)
    read = machines.reader.transport.read(peer, WHOLE)
    assert machines.finish(read) is ReadState.DONE
    assert machines.reader.transport.peer_state(peer) is PeerState.CONNECTED


def test_a_holder_that_falls_silent_costs_its_reader_the_lane_before_the_read_stalls() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.fabric.faults.lose = 1.0
    reads = [machines.reader.transport.read(peer, [(0, 0, BUFFER)]) for _ in range(3 * NUM_BUFFERS)]
    assert machines.finish(reads[-1], TransferSettings().stall_s - 1) is ReadState.FAILED
    assert {machines.reader.transport.poll(read) for read in reads} == {ReadState.FAILED}
    assert machines.reader.transport.peer_state(peer) is PeerState.BROKEN
    machines.check_all_free()


def test_readers_that_die_with_all_buffers_of_a_holder_cost_others_time_but_not_the_lane() -> None:
    machines = Machines()
    dying = [Gpu(machines, f"dying {number}") for number in range(3)]
    peers, peer = [machines.connect(gpu) for gpu in dying], machines.connect()
    machines.fabric.faults.read_s = (0.1, 0.1)
    for gpu, its_peer in zip(dying, peers, strict=True):
        gpu.transport.read(its_peer, WHOLE)
    machines.pass_time(0.05)
    assert machines.holder.num_free[0] == 0
    for number in range(3):
        machines.fabric.kill(f"dying {number}")
    read = machines.reader.transport.read(peer, [(0, 0, BUFFER)])
    assert machines.finish(read, KEPT_S + 1) is ReadState.DONE
    assert machines.reader.transport.peer_state(peer) is PeerState.CONNECTED


def test_a_holder_that_dies_takes_no_buffers_from_reads_of_others() -> None:
    machines = Machines()
    other = Gpu(machines, "other")
    peer, dead = machines.connect(), machines.connect(holder=other)
    machines.fabric.kill("other")
    lost = machines.reader.transport.read(dead, WHOLE)
    read = machines.reader.transport.read(peer, WHOLE)
    assert machines.finish(read, ASK_AGAIN_S + 2) is ReadState.DONE
    assert machines.reader.transport.poll(lost) is ReadState.RUNNING
    assert machines.finish(lost) is ReadState.FAILED
    assert machines.reader.transport.peer_state(peer) is PeerState.CONNECTED


def test_a_read_that_waits_for_buffers_of_ours_does_not_count_that_time_against_its_holder() -> None:
    machines = Machines()
    other = Gpu(machines, "other")
    peer, slow = machines.connect(), machines.connect(holder=other)
    machines.fabric.faults.read_s = (PATIENCE_S + 1, PATIENCE_S + 1)
    lost = machines.reader.transport.read(slow, [(0, 0, NUM_BUFFERS * BUFFER)])
    for _ in range(10):
        machines.pass_time(0.01)
        other.transport.progress()
    assert machines.reader.num_free[1] == 0
    machines.fabric.faults.read_s = (0.0, 0.0)
    read = machines.reader.transport.read(peer, WHOLE)
    assert machines.finish(read) is ReadState.DONE
    assert machines.reader.transport.poll(lost) is ReadState.FAILED
    assert machines.reader.transport.peer_state(peer) is PeerState.CONNECTED


def test_the_network_forgets_a_peer_only_when_it_writes_into_no_buffer_of_ours_any_more() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.fabric.faults.fail, machines.fabric.faults.late_s = 1.0, (5.0, 5.0)
    read = machines.reader.transport.read(peer, [(0, 0, 2 * BUFFER)])
    assert machines.finish(read) is ReadState.FAILED
    assert machines.reader.transport.release(read)
    machines.reader.transport.remove_peer(peer)  # which the fake network would refuse
    assert machines.reader.network.num_peers == 1
    machines.pass_time(6.0)
    assert machines.reader.network.num_peers == 0
    machines.check_all_free()


def test_all_reads_of_a_holder_fail_with_the_first() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.holder.down.seconds = 1.0
    machines.fabric.faults.fail = 1.0
    reads = [machines.reader.transport.read(peer, [(0, 0, BUFFER)]) for _ in range(2 * NUM_BUFFERS)]
    assert machines.finish(reads[0]) is ReadState.FAILED
    assert {machines.reader.transport.poll(read) for read in reads} == {ReadState.FAILED}


def test_a_holder_that_cannot_be_sent_to_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines()
    peer = machines.connect()

    def refuse(name: str, message: bytes) -> None:
        raise TransportError("the endpoint has failed")

    monkeypatch.setattr(machines.reader.network, "send", refuse)
    read = machines.reader.transport.read(peer, [(0, 0, BUFFER)])
    assert machines.reader.transport.poll(read) is ReadState.FAILED
    assert machines.reader.transport.peer_state(peer) is PeerState.BROKEN


def test_buffers_of_a_reader_that_is_gone_are_used_for_others() -> None:
    machines = Machines()
    machines.connect()
    fill = codec.encode(Fill(1000, encode_ranges(np.array([(0, BUFFER)]))))
    machines.reader.network.send("holder", fill)
    machines.holder.transport.progress()
    machines.clock.advance(0.01)
    machines.holder.transport.progress()
    assert machines.holder.num_free[0] == NUM_BUFFERS - 1
    machines.clock.advance(KEPT_S)
    machines.holder.transport.progress()
    assert machines.holder.num_free[0] == NUM_BUFFERS


@pytest.mark.parametrize("pause_s", [KEPT_S / 2, KEPT_S - 0.01, KEPT_S, 100 * KEPT_S])
def test_a_reader_may_pause_for_as_long_as_it_likes(pause_s: float) -> None:
    machines = Machines()
    peer = machines.connect()
    machines.clock.advance(pause_s - 0.1)
    machines.pass_time(0.1)
    read = machines.reader.transport.read(peer, WHOLE)
    assert machines.finish(read, 5.0) is ReadState.DONE
    assert np.array_equal(machines.reader.bytes, machines.holder.bytes)


def test_a_buffer_that_the_holder_may_use_for_others_is_not_used() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.fabric.faults.read_s = (KEPT_S, KEPT_S)
    read = machines.reader.transport.read(peer, [(0, 0, BUFFER)])
    assert machines.finish(read) is ReadState.FAILED
    assert not np.array_equal(machines.reader.bytes[:BUFFER], machines.holder.bytes[:BUFFER])


def test_a_failed_read_writes_nothing_later_and_its_buffers_wait_for_the_network() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.fabric.faults.fail, machines.fabric.faults.late_s = 1.0, (5.0, 5.0)
    read = machines.reader.transport.read(peer, [(0, 0, BUFFER)])
    assert machines.finish(read) is ReadState.FAILED
    assert machines.reader.transport.release(read)
    assert machines.reader.transport.peer_state(peer) is PeerState.BROKEN
    assert machines.reader.num_free[1] == NUM_BUFFERS - 1
    machines.pass_time(6.0)
    assert machines.reader.num_free[1] == NUM_BUFFERS
    assert (machines.reader.bytes == ord("r")).all()


def test_a_failed_read_is_not_released_while_a_part_of_it_is_copied_to_its_blocks() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.holder.down.seconds, machines.reader.up.seconds = 0.1, 5.0
    read = machines.reader.transport.read(peer, [(0, 0, 2 * BUFFER)])
    machines.pass_time(0.15)
    machines.fabric.faults.fail = 1.0  # the second part
    assert machines.finish(read, 1.0) is ReadState.FAILED
    assert not machines.reader.transport.release(read)
    machines.pass_time(6.0)
    assert machines.reader.transport.release(read)


def test_a_buffer_that_is_filled_for_a_read_that_has_failed_is_freed() -> None:
    machines = Machines()
    peer = machines.connect()
    machines.holder.down.seconds, machines.fabric.faults.fail = 0.1, 1.0
    read = machines.reader.transport.read(peer, [(0, 0, 2 * BUFFER)])
    assert machines.finish(read) is ReadState.FAILED
    machines.check_all_free()


@pytest.mark.parametrize("ranges", [[(SIZE, 1)], [(0, BUFFER + 1)], [(-1, 4)], [(0, 0)], [(0, BUFFER), (0, 1)]])
def test_a_holder_copies_no_ranges_outside_its_memory_or_a_buffer(ranges: list[tuple[int, int]]) -> None:
    machines = Machines()
    machines.connect()
    machines.reader.network.send("holder", codec.encode(Fill(1000, encode_ranges(np.array(ranges)))))
    machines.holder.transport.progress()
    ((sender, answer),) = machines.reader.network.messages()
    assert sender == "holder"
    assert isinstance(decode(answer), Refused)


def test_messages_of_strangers_and_bytes_that_are_none_change_nothing() -> None:
    machines = Machines()
    machines.connect()
    machines.fabric.attach("stranger", bytearray(1))
    stranger = FakeHostNetwork(machines.fabric, "stranger")
    stranger.add_agent(machines.holder.network.metadata())
    known = codec.encode(Open(machines.reader.network.metadata()))  # of another than the sender
    fill = codec.encode(Fill(1, encode_ranges(np.array([(0, BUFFER)]))))
    for message in (fill, known, fill, codec.encode(Close()), b"\xff"):
        stranger.send("holder", message)
        machines.pass_time(1.0)
    assert stranger.messages() == []
    machines.check_all_free()


@pytest.mark.parametrize("side", ["holder", "reader"])
def test_a_device_that_fails_fails_the_read(side: str) -> None:
    machines = Machines()
    peer = machines.connect()
    copies = machines.holder.down if side == "holder" else machines.reader.up
    copies.fails = True
    read = machines.reader.transport.read(peer, [(0, 0, BUFFER)])
    assert machines.finish(read) is ReadState.FAILED
    assert machines.reader.transport.release(read)


def test_a_lane_that_broke_is_connected_again_with_a_new_endpoint_during_reads_over_another() -> None:
    machines = Machines()
    network = FakeFabric(machines.clock, random.Random(0))
    ends = []
    for name, gpu in (("holder", machines.holder), ("reader", machines.reader)):
        memory = cast(bytearray, memoryview(gpu.bytes))
        slow = network.attach(name, memory, bytes_per_s=1.0)
        ends.append(FastestTransport(slow, None, name, on_gpu=True, staged=gpu.transport, clock=machines.clock))
    holder, reader = ends

    def pass_time(seconds: float) -> None:
        for _ in range(round(seconds / 0.01)):
            machines.clock.advance(0.01)
            holder.progress()  # the reader does what is asked of it

    def read_all() -> None:
        read = reader.read(peer, WHOLE)
        while reader.poll(read) is ReadState.RUNNING:
            pass_time(0.01)
        assert reader.poll(read) is ReadState.DONE
        assert reader.release(read)

    peer = reader.add_peer(holder.metadata())
    while reader.peer_state(peer) is PeerState.CONNECTING:
        pass_time(0.01)
    assert reader.lane(peer).is_staged
    machines.fabric.faults.fail, machines.fabric.faults.late_s = 1.0, (5.0, 5.0)
    read_all()
    machines.fabric.faults.fail = 0.0
    assert not reader.lane(peer).is_staged
    for _ in range(35):
        pass_time(0.9)
        for _ in range(10):
            read_all()
            pass_time(0.01)
    assert reader.num_fallbacks == 1
    assert reader.lane(peer).is_staged
