"""The control channel over TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from baton.kv_transfer.channel import Route, ZmqChannel
from baton.kv_transfer.curve import ClusterKey

KEY = ClusterKey.generate()


@pytest.fixture
def channels() -> Iterator[list[ZmqChannel]]:
    opened: list[ZmqChannel] = []
    yield opened
    for channel in opened:
        channel.close()


def next_message(channel: ZmqChannel, timeout_s: float = 10.0) -> tuple[Route, bytes]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        channel.wait(0.05)
        if arrived := channel.receive():
            return arrived[0]
    raise AssertionError("no message came")


def test_an_answer_comes_back_over_the_connection_of_the_question(channels: list[ZmqChannel]) -> None:
    channels += [ZmqChannel("127.0.0.1", KEY), ZmqChannel("127.0.0.1", KEY)]
    holder, reader = channels
    link = reader.connect(holder.address)
    assert reader.send(link, b"claim")
    route, data = next_message(holder)
    assert data == b"claim"
    assert holder.send(route, b"granted")
    assert next_message(reader) == (link, b"granted")


def test_a_peer_that_restarts_at_the_same_address_is_reached_again(channels: list[ZmqChannel]) -> None:
    holder, reader = ZmqChannel("127.0.0.1", KEY), ZmqChannel("127.0.0.1", KEY)
    channels.append(reader)
    link = reader.connect(holder.address)
    reader.send(link, b"before")
    next_message(holder)
    port = int(holder.address.rpartition(":")[2])
    holder.close()
    again = ZmqChannel("127.0.0.1", KEY, port)
    channels.append(again)
    reader.send(link, b"over the old connection")
    assert next_message(again)[1] == b"over the old connection"
    new_link = reader.connect(again.address)
    reader.send(new_link, b"over a new one")
    assert next_message(again)[1] == b"over a new one"


def test_a_message_to_a_peer_that_left_is_reported_as_dropped(channels: list[ZmqChannel]) -> None:
    channels.append(ZmqChannel("127.0.0.1", KEY))
    assert not channels[0].send(b"nobody", b"granted")


def test_wake_ends_a_wait_from_another_thread(channels: list[ZmqChannel]) -> None:
    channels.append(ZmqChannel("127.0.0.1", None))
    threading.Timer(0.1, channels[0].wake).start()
    begin = time.monotonic()
    channels[0].wait(30.0)
    assert time.monotonic() - begin < 10.0
