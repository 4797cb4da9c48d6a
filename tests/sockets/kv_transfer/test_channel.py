"""The control channel over TCP."""

from __future__ import annotations

import gc
import itertools
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import split_endpoint
from baton.kv_transfer import channel as channels_of_zmq
from baton.kv_transfer.channel import MAX_MESSAGE_BYTES, Route, ZmqChannel
from baton.kv_transfer.errors import TransportError

from ...helpers.foreign_peers import GARBAGE, say
from ...helpers.ipv6 import needs_ipv6
from ...helpers.silent_proxy import SilentProxy

KEY = ClusterKey.generate()


@pytest.fixture
def channels() -> Iterator[list[ZmqChannel]]:
    opened: list[ZmqChannel] = []
    yield opened
    for channel in opened:
        channel.close()


def next_message(channel: ZmqChannel, timeout_s: float = 30.0) -> tuple[Route, bytes]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        channel.wait(0.05)
        if arrived := channel.receive():
            return arrived[0]
    raise AssertionError("no message came")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_an_answer_arrives_over_the_connection_of_the_question(channels: list[ZmqChannel], host: str) -> None:
    channels += [ZmqChannel(host, KEY), ZmqChannel(host, KEY)]
    holder, reader = channels
    assert split_endpoint(holder.address.removeprefix("tcp://"))[0] == host
    link = reader.connect(holder.address)
    assert reader.send(link, b"claim")
    route, data = next_message(holder)
    assert data == b"claim"
    assert holder.send(route, b"granted")
    assert next_message(reader) == (link, b"granted")


def test_an_address_where_it_cannot_listen_is_named() -> None:
    with pytest.raises(TransportError, match=r"^cannot listen at 192\.0\.2\.7:\*: "):
        ZmqChannel("192.0.2.7", KEY)
    gc.collect()  # this would hang if a socket had been left open


@pytest.mark.parametrize("stays", [False, True], ids=["goes", "stays"])
def test_data_from_foreign_peers_does_not_disturb_a_channel(channels: list[ZmqChannel], stays: bool) -> None:
    channels += [ZmqChannel("127.0.0.1", KEY), ZmqChannel("127.0.0.1", KEY)]
    holder, reader = channels
    link = reader.connect(holder.address)
    with ExitStack() as foreign_peers:
        for what in GARBAGE.values():
            stranger = foreign_peers.enter_context(say(split_endpoint(holder.address.removeprefix("tcp://")), what))
            if not stays:
                stranger.close()
        assert reader.send(link, b"claim")
        assert next_message(holder)[1] == b"claim"
        late = reader.connect(holder.address)
        assert reader.send(late, b"another claim")
        assert next_message(holder)[1] == b"another claim"
    assert reader.lost() == []


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


def lost_routes(channel: ZmqChannel, timeout_s: float = 30.0) -> list[Route]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        channel.wait(0.05)
        if routes := channel.lost():
            return routes
    raise AssertionError("no connection broke")


def test_only_the_connection_of_an_ended_peer_is_lost(channels: list[ZmqChannel]) -> None:
    reader, holder, other = (ZmqChannel("127.0.0.1", KEY) for _ in range(3))
    channels += [reader, other]
    links = [reader.connect(peer.address) for peer in (holder, other)]
    for link, peer in zip(links, (holder, other), strict=True):
        reader.send(link, b"claim")
        next_message(peer)
    assert reader.lost() == []
    holder.close()
    assert lost_routes(reader) == [links[0]]


def test_a_message_that_is_too_long_closes_its_connection_and_no_other(channels: list[ZmqChannel]) -> None:
    """`test_message_sizes.py` checks that no message is too long."""
    long = MAX_MESSAGE_BYTES - 64  # CURVE adds some bytes
    reader, holder, other = (ZmqChannel("127.0.0.1", KEY) for _ in range(3))
    channels += [reader, holder, other]
    links = [reader.connect(peer.address) for peer in (holder, other)]
    for link, peer in zip(links, (holder, other), strict=True):
        reader.send(link, b"what should it be?")
        route, _ = next_message(peer)
        peer.send(route, bytes(long))
        assert next_message(reader) == (link, bytes(long))
    reader.send(links[0], b"and the next?")
    route, _ = next_message(holder)
    holder.send(route, bytes(MAX_MESSAGE_BYTES + 1))
    assert lost_routes(reader) == [links[0]]
    assert reader.receive() == []


def test_a_silent_connection_is_lost_and_reconnects(
    channels: list[ZmqChannel],
) -> None:
    holder, reader = (ZmqChannel("127.0.0.1", KEY, heartbeat_timeout_s=0.6) for _ in range(2))
    channels += [holder, reader]
    with SilentProxy(holder.address) as proxy:
        link = reader.connect(proxy.address)
        reader.send(link, b"before")
        next_message(holder)
        proxy.silence()
        assert lost_routes(reader) == [link]
        reader.send(link, b"meanwhile")
        proxy.speak()
        assert next_message(holder)[1] == b"meanwhile"


@pytest.mark.slow
def test_an_idle_connection_is_not_lost(channels: list[ZmqChannel]) -> None:
    holder, reader = (ZmqChannel("127.0.0.1", KEY, heartbeat_timeout_s=1.0) for _ in range(2))
    channels += [holder, reader]
    link = reader.connect(holder.address)
    reader.send(link, b"before")
    next_message(holder)
    time.sleep(2.5)
    assert reader.lost() == []


def test_a_message_to_a_peer_that_left_is_reported_as_dropped(channels: list[ZmqChannel]) -> None:
    channels.append(ZmqChannel("127.0.0.1", KEY))
    assert not channels[0].send(b"nobody", b"granted")


def test_wake_ends_a_wait_from_another_thread(channels: list[ZmqChannel]) -> None:
    channels.append(ZmqChannel("127.0.0.1", None))
    threading.Timer(0.1, channels[0].wake).start()
    begin = time.monotonic()
    channels[0].wait(30.0)
    assert time.monotonic() - begin < 10.0


def test_one_receive_returns_messages_of_all_connections_in_order(channels: list[ZmqChannel]) -> None:
    hub, *others = channels[:] = [ZmqChannel("127.0.0.1", KEY) for _ in range(4)]
    links = {hub.connect(other.address): other for other in others[:2]}
    routes = {}
    for link, other in links.items():
        hub.send(link, b"hello")
        routes[link] = next_message(other)[0]
    asking = others[2].connect(hub.address)
    numbers, looks = itertools.count(), []
    deadline = time.monotonic() + 30.0
    while not any(len({route for route, _ in look}) == 3 for look in looks):
        assert time.monotonic() < deadline, "no call of receive returned messages of three connections"
        number = next(numbers)
        for link, other in links.items():
            other.send(routes[link], b"%d" % number)
        others[2].send(asking, b"%d" % number)
        time.sleep(0.01 * number)  # longer each time, as a busy machine may deliver late
        looks.append(hub.receive())
    sent = [b"%d" % number for number in range(next(numbers))]
    arrived = [message for look in looks for message in look]
    while len(arrived) < 3 * len(sent) and time.monotonic() < deadline:
        hub.wait(0.05)
        arrived += hub.receive()
    for link in links:
        assert [data for route, data in arrived if route == link] == sent
    assert [data for route, data in arrived if isinstance(route, bytes)] == sent
    assert hub.receive() == []


def test_a_wake_during_a_short_sleep_ends_the_next_wait(channels: list[ZmqChannel]) -> None:
    channels.append(ZmqChannel("127.0.0.1", None))
    channels[0].wake()
    channels[0].wait(1e-4)
    begin = time.monotonic()
    channels[0].wait(30.0)
    assert time.monotonic() - begin < 10.0


def test_a_wake_ends_one_wait_and_not_the_next(channels: list[ZmqChannel]) -> None:
    channels.append(ZmqChannel("127.0.0.1", None))
    channels[0].wake()
    channels[0].wait(30.0)
    begin = time.monotonic()
    channels[0].wait(0.1)
    assert time.monotonic() - begin >= 0.09


def connected(channel: ZmqChannel, address: str, timeout_s: float = 30.0) -> Route:
    """Connect, and try again until libzmq has released a closed socket."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return channel.connect(address)
        except TransportError:
            assert time.monotonic() < deadline, "no socket was released"
            time.sleep(0.01)


def test_without_free_sockets_a_connection_is_refused_and_existing_ones_go_on(
    channels: list[ZmqChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit may be reached at any socket of a connection. One peer too many must not end the engine."""
    for limit in (20, 21, 22):
        monkeypatch.setattr(channels_of_zmq, "MAX_SOCKETS", limit)
        holder, reader = ZmqChannel("127.0.0.1", None), ZmqChannel("127.0.0.1", None)
        channels += [holder, reader]
        links = [reader.connect(holder.address)]
        while len(links) < (limit - 1) // 3:  # one more socket is bound
            links.append(reader.connect(holder.address))
        with pytest.raises(TransportError, match="cannot connect to 'tcp://127"):
            reader.connect(holder.address)
        assert reader.send(links[0], b"claim")
        assert next_message(holder)[1] == b"claim"
        reader.disconnect(links[-1])
        assert reader.send(connected(reader, holder.address), b"renew"), (
            "the sockets of the failed connection must be free again"
        )
        assert next_message(holder)[1] == b"renew"


def test_one_engine_reaches_hundreds_of_peers(channels: list[ZmqChannel]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    holder, reader = ZmqChannel("127.0.0.1", None), ZmqChannel("127.0.0.1", None)
    channels += [holder, reader]
    links = [reader.connect(holder.address) for _ in range(500)]
    assert reader.send(links[-1], b"claim")
    assert next_message(holder)[1] == b"claim"
