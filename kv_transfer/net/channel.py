"""The control channel: small messages between engines.

    reader's DEALER, one a peer ──CURVE──> holder's ROUTER, bound at the engine's `kv_address`
    other ranks' DEALER         ──CURVE──> rank 0's ROUTER, for orders within a group (`crew.py`, `team.py`)

Whoever reads connects; answers go back over the connection on which the question came. Messages may be lost when a
connection breaks: the state machines ask again. One over which nothing comes any more breaks, too (`silence.py`). A
peer that restarts at the same address gets a new connection (its `kv_address` may be the same, its epoch is not).
"""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import Protocol

import zmq

from baton.engine.net.curve import ClusterKey
from baton.engine.net.endpoints import endpoint, is_ipv6, is_ipv6_url
from baton.engine.net.sockets import MAX_SOCKETS, SILENCE_S, enable_heartbeat

from ..errors import TransportError

Route = int | bytes  # a connection that we opened, or the one on which a peer's message came

MAX_MESSAGE_BYTES = 4 << 20
GROUP_SILENCE_S = 10.0  # within a group, where a connection that breaks is the end of all its ranks
LOOK_EVERY_S = 0.02  # for broken connections: who reads comes by every 100 us
CONNECT_MS = 1_000  # then anew: the kernel asks a host that was away ever more rarely
LINGER_MS = 200  # what was said last (Finish, Abort) still goes out when a socket is closed


class Channel(Protocol):
    """One thread uses a channel. No call blocks."""

    address: str

    def connect(self, address: str) -> Route:
        """Raises `TransportError` for an address that is none, or when there are too many connections."""
        ...

    def disconnect(self, route: Route) -> None: ...

    def send(self, route: Route, data: bytes) -> bool:
        """False: dropped, since the peer is gone or takes nothing."""
        ...

    def receive(self) -> list[tuple[Route, bytes]]:
        """Everything that has come."""
        ...

    def lost(self) -> list[Route]:
        """Connections that we opened and that broke since the last call. They are being made again."""
        ...

    def close(self) -> None: ...


class ZmqChannel:
    """A `Channel` over TCP. `wait` and `wake` let the thread that uses it sleep."""

    def __init__(
        self, host: str | None, key: ClusterKey | None, port: int = 0, *, silence_s: float = SILENCE_S
    ) -> None:
        """Binds `host` at once (None: it only connects); port 0 is a free one. Raises `TransportError`.

        Without a key anyone who reaches the port may talk: for tests.
        """
        self._key = key
        self._silence_s = silence_s
        self._context = zmq.Context()
        self._context.max_sockets = MAX_SOCKETS
        self._numbers = itertools.count(1)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._links: dict[zmq.Socket[bytes], int] = {}  # the dealers' numbers
        self._monitors: dict[int, zmq.Socket[bytes]] = {}  # of the dealers' connections
        self._broken: set[int] = set()
        self._looked_at_s = 0.0
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()  # all that ends a wait
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._inbox = zmq.Poller()  # messages alone
        self._server: zmq.Socket[bytes] | None = None
        self.address = ""
        if host is not None:
            try:
                self._server = self._bind(host, port)
            except TransportError:
                self.close()
                raise
            self.address = self._server.getsockopt_string(zmq.LAST_ENDPOINT)
            self._poller.register(self._server, zmq.POLLIN)
            self._inbox.register(self._server, zmq.POLLIN)

    def connect(self, address: str) -> Route:
        dealer, monitor = self._dial(address)
        number = next(self._numbers)
        self._dealers[number], self._links[dealer], self._monitors[number] = dealer, number, monitor
        for socket in (dealer, monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._inbox.register(dealer, zmq.POLLIN)
        return number

    def disconnect(self, route: Route) -> None:
        if isinstance(route, int) and (dealer := self._dealers.pop(route, None)) is not None:
            monitor = self._monitors.pop(route)
            del self._links[dealer]
            self._inbox.unregister(dealer)
            self._poller.unregister(dealer)
            self._poller.unregister(monitor)
            _close(dealer, monitor)

    def send(self, route: Route, data: bytes) -> bool:
        try:
            if isinstance(route, bytes):
                assert self._server is not None, "a message came over it"
                self._server.send_multipart([route, data], zmq.NOBLOCK)
            else:
                self._dealers[route].send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def receive(self) -> list[tuple[Route, bytes]]:
        arrived: list[tuple[Route, bytes]] = []
        for socket, _ in self._inbox.poll(0):  # of many peers: to try each takes ten times as long
            link = self._links.get(socket)
            for frames in _drain(socket):
                route: Route = frames.pop(0) if link is None else link
                arrived.append((route, b"".join(frames)))
        return arrived

    def lost(self) -> list[Route]:
        if time.monotonic() - self._looked_at_s >= LOOK_EVERY_S:
            self._look_at_connections()
        broken: list[Route] = [number for number in self._dealers if number in self._broken]
        self._broken.clear()
        return broken

    def watch(self, other: ZmqChannel) -> None:
        """From now on `wait` also returns when a message has come to where `other` is bound."""
        assert other._server is not None, "only what is bound can be watched"
        self._poller.register(other._server, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Returns when a message is there, after `wake`, or after the timeout; below 1 ms it sleeps through.

        It sleeps even for 0 s, and other threads of Python run meanwhile (`pacing.sleep_precisely`).
        """
        if timeout_s < 1e-3:
            time.sleep(timeout_s)
            return
        woken_by = {socket for socket, _ in self._poller.poll(math.ceil(timeout_s * 1e3))}
        if self._wakeup in woken_by:
            os.eventfd_read(self._wakeup)
        if not woken_by.isdisjoint(self._monitors.values()):
            self._look_at_connections()

    def wake(self) -> None:
        """Ends a `wait`, from any thread."""
        os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        for route in list(self._dealers):
            self.disconnect(route)
        if self._server is not None:
            self._server.close()
        self._context.term()
        os.close(self._wakeup)

    def _look_at_connections(self) -> None:
        self._looked_at_s = time.monotonic()
        self._broken.update(number for number, monitor in self._monitors.items() if _drain(monitor))

    def _bind(self, host: str, port: int) -> zmq.Socket[bytes]:
        server = self._socket(zmq.ROUTER, ipv6=is_ipv6(host))
        server.router_mandatory = True  # a reply to a peer that left is an error, not silence
        if self._key is not None:
            self._key.secure_server(server)
        try:
            server.bind(f"tcp://{endpoint(host, port or '*')}")
        except zmq.ZMQError as error:
            server.close()  # a context that is collected with an open socket waits for it for ever
            raise TransportError(f"cannot listen at {endpoint(host, port or '*')}: {error}") from error
        return server

    def _dial(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """And what tells when its connection breaks."""
        if not address.startswith("tcp://"):
            raise TransportError(f"{address!r} is no address of a control channel, such as tcp://10.0.0.1:7000")
        opened: list[zmq.Socket[bytes]] = []
        try:
            opened.append(dealer := self._socket(zmq.DEALER, ipv6=is_ipv6_url(address)))
            if self._key is not None:
                self._key.secure_client(dealer)
            opened.append(monitor := dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED))
            dealer.connect(address)
        except zmq.ZMQError as error:
            for socket in opened:
                socket.close(linger=0)
            raise TransportError(f"cannot connect to {address!r}: {error}") from error
        return dealer, monitor

    def _socket(self, kind: int, *, ipv6: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = LINGER_MS
        socket.ipv6 = ipv6
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        socket.connect_timeout = CONNECT_MS
        enable_heartbeat(socket, self._silence_s)
        return socket


class RankSocket:
    """Where the other ranks of a group reach rank 0. Bound when made, so that `address` can be told to them early.

    Without a `key` anyone may join: for tests only.
    """

    def __init__(self, size: int, host: str, key: ClusterKey | None) -> None:
        self.size = size
        self.channel = ZmqChannel(host, key, silence_s=GROUP_SILENCE_S)
        self.address = self.channel.address
        self._closed = False

    def close(self) -> None:
        """Closing twice changes nothing. Must be called: a context that is collected with open sockets may hang."""
        if not self._closed:
            self._closed = True
            self.channel.close()


def join_ranks(leader: str, key: ClusterKey | None) -> tuple[ZmqChannel, Route]:
    """How another rank reaches rank 0's `RankSocket`, at `leader`. Raises `TransportError` where that is no address."""
    channel = ZmqChannel(None, key, silence_s=GROUP_SILENCE_S)
    try:
        return channel, channel.connect(leader)
    except TransportError:
        channel.close()
        raise


def _close(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Both: a context waits for all its sockets to be closed."""
    dealer.disable_monitor()
    monitor.close()
    dealer.close()


def _drain(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """All that is there. Asked for: to try, and to catch what is raised in the end, takes twice as long."""
    messages = []
    try:
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:  # the message went with its connection
        pass
    return messages
