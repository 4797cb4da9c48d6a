"""Holders keep little for readers that ask for more of their memory, through pinned memory, than they can read."""

from __future__ import annotations

import random
from typing import cast

import numpy as np

from baton.kv_transfer import codec
from baton.kv_transfer.transports import PeerState, ReadState
from baton.kv_transfer.transports.fastest import FastestTransport
from baton.kv_transfer.transports.staged_holder import MOST_WAITING, MOST_WAITING_OF_READER
from baton.kv_transfer.transports.staged_messages import (
    KEPT_S,
    Close,
    Fill,
    Filled,
    Free,
    Open,
    Refused,
    decode,
    encode_ranges,
)

from ...helpers.fake_transport import FakeFabric
from .staged_engines import BUFFER, NUM_BUFFERS, WHOLE, Gpu, Machines


def ask(reader: Gpu, numbers: range) -> None:
    for number in numbers:
        reader.network.send("holder", codec.encode(Fill(number, encode_ranges(np.array([(0, BUFFER)])))))


def answers(reader: Gpu) -> list[Filled | Refused]:
    found = [decode(data) for _, data in reader.network.messages()]
    assert all(isinstance(each, Filled | Refused) for each in found)
    return found


def test_a_reader_that_asks_without_end_is_refused_and_others_are_served() -> None:
    machines = Machines()
    machines.connect()
    other = Gpu(machines, "other")
    peer = machines.connect(other)
    ask(machines.reader, range(1000, 11_000))
    machines.holder.transport.progress()
    refused = answers(machines.reader)
    assert len(refused) == 10_000 - MOST_WAITING_OF_READER
    assert {type(each) for each in refused} == {Refused}
    assert f"at most {MOST_WAITING_OF_READER} and {MOST_WAITING} may" in refused[0].reason
    for number in range(1000, 11_000):
        machines.reader.network.send("holder", codec.encode(Free(number)))
    read = other.transport.read(peer, WHOLE)
    for _ in range(200):
        machines.pass_time(0.01)
        other.transport.progress()
    assert other.transport.poll(read) is ReadState.DONE
    assert machines.holder.num_free[0] == NUM_BUFFERS


def test_many_readers_together_are_refused_too_and_closing_makes_room() -> None:
    machines = Machines()
    readers = [Gpu(machines, f"{number} reader") for number in range(MOST_WAITING // MOST_WAITING_OF_READER + 1)]
    for reader in readers:
        reader.network.add_agent(machines.holder.network.metadata())
        reader.network.send("holder", codec.encode(Open(reader.network.metadata())))
        ask(reader, range(MOST_WAITING_OF_READER))
    machines.holder.transport.progress()
    assert [len(answers(reader)) for reader in readers] == [0] * (len(readers) - 1) + [MOST_WAITING_OF_READER]
    readers[1].network.send("holder", codec.encode(Close()))
    ask(readers[-1], range(100, 100 + MOST_WAITING_OF_READER))
    machines.holder.transport.progress()
    assert not any(isinstance(each, Refused) for each in answers(readers[-1]))


def test_a_number_that_is_asked_for_twice_takes_one_buffer() -> None:
    machines = Machines()
    machines.connect()
    for _ in range(3):
        ask(machines.reader, range(1000, 1001))
        ask(machines.reader, range(1000, 1001))
        machines.pass_time(0.01)
    assert machines.holder.num_free[0] >= NUM_BUFFERS - 1
    machines.clock.advance(KEPT_S)
    machines.holder.transport.progress()
    assert machines.holder.num_free[0] == NUM_BUFFERS


def test_a_refused_reader_reads_over_another_lane_which_is_counted() -> None:
    machines = Machines()
    network = FakeFabric(machines.clock, random.Random(0))
    holder, reader = (
        FastestTransport(
            network.attach(name, cast(bytearray, memoryview(gpu.bytes)), bytes_per_s=1.0),
            *(None, name),
            on_gpu=True,
            staged=gpu.transport,
            clock=machines.clock,
        )
        for name, gpu in (("holder", machines.holder), ("reader", machines.reader))
    )

    def pass_time() -> None:
        machines.clock.advance(0.01)
        holder.progress()

    peer = reader.add_peer(holder.metadata())
    while reader.peer_state(peer) is PeerState.CONNECTING:
        pass_time()
    assert reader.lane(peer).is_staged
    ask(machines.reader, range(10_000, 11_000))
    read = reader.read(peer, WHOLE)
    while reader.poll(read) is ReadState.RUNNING:
        pass_time()
    assert reader.poll(read) is ReadState.DONE
    assert np.array_equal(machines.reader.bytes, machines.holder.bytes)
    assert reader.num_fallbacks == 1
