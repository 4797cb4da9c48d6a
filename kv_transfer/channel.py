"""The control channel: small messages between engines.

    reader's DEALER, one for each peer ──CURVE──> holder's ROUTER, bound at the engine's `kv_address`
    other ranks' DEALER                ──CURVE──> rank 0's ROUTER, for orders within a group (`group/rpc.py`)

The reader connects, and the holder answers over the same connection. A connection that breaks may lose messages; the
state machines send theirs again. Heartbeats break a connection whose other end is lost (`engine/net/sockets.py`). A
peer that restarts gets a new connection even if its `kv_address` is the same, since its epoch differs.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import Protocol

import zmq

from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import HEARTBEAT_TIMEOUT_S, MAX_SOCKETS, enable_heartbeat, endpoint, is_ipv6, is_ipv6_url

from .errors import TransportError

Route = int | bytes  # int: a connection that we opened; bytes: one on which a peer sent us a message

MAX_MESSAGE_BYTES = 4 << 20
LOOK_EVERY_S = 0.02  # look for broken connections so often; the transfer thread calls `lost` every 100 us
CONNECT_MS = 1_000  # then connect anew, because the kernel retries at ever longer intervals
LINGER_MS = 200  # time for a closed socket to send its last messages (Finish, AbortRead)


class Channel(Protocol):
    """Sends and receives messages over connections. Only one thread may use a channel. No call blocks."""

    address: str

    def connect(self, address: str) -> Route:
        """Connect to a peer. Raises `TransportError` for an invalid address, and for too many connections."""
        ...

    def disconnect(self, route: Route) -> None: ...

    def send(self, route: Route, data: bytes) -> bool:
        """Send, or return False if the message was dropped because the peer is gone or its queue is full."""
        ...

    def receive(self) -> list[tuple[Route, bytes]]:
        """Return all messages that have arrived, each with its connection."""
        ...

    def lost(self) -> list[Route]:
        """Return the connections of ours that broke since the last call. ZeroMQ is already reconnecting them."""
        ...

    def close(self) -> None: ...


class ZmqChannel:
    """A `Channel` over TCP. Its thread sleeps in `wait`, and other threads end that with `wake`."""

    def __init__(
        self,
        host: str | None,
        key: ClusterKey | None,
        port: int = 0,
        *,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        """Bind `host` (None: only connect to others) and `port` (0: any free one). Raises `TransportError`.

        Without a `key` any process that reaches the port may connect: for tests only.
        """
        self._key = key
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._context = zmq.Context()
        self._context.max_sockets = MAX_SOCKETS
        self._numbers = itertools.count(1)
        self._dealers: dict[int, zmq.Socket[bytes]] = {}
        self._links: dict[zmq.Socket[bytes], int] = {}  # and the number of each dealer
        self._monitors: dict[int, zmq.Socket[bytes]] = {}  # sockets that report the end of a dealer's connection
        self._broken: set[int] = set()
        self._looked_at_s = 0.0
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()  # all sockets that end a `wait`
        self._poller.register(self._wakeup, zmq.POLLIN)
        self._inbox = zmq.Poller()  # sockets with messages only
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
        for socket, _ in self._inbox.poll(0):  # with many peers, asking each socket takes ten times as long
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
        """Let `wait` also return when a message arrives at the address of `other`."""
        assert other._server is not None, "only what is bound can be watched"
        self._poller.register(other._server, zmq.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Return when a message arrives, after `wake`, or after the timeout.

        A timeout below 1 ms, even 0, is one uninterrupted sleep (`pacing.sleep_precisely`), which releases the GIL.
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
        """End a `wait`, from any thread."""
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
        server.router_mandatory = True  # a reply to a peer that left raises an error instead of being dropped
        if self._key is not None:
            self._key.secure_server(server)
        try:
            server.bind(f"tcp://{endpoint(host, port or '*')}")
        except zmq.ZMQError as error:
            server.close()  # garbage collection of a context with an open socket would hang
            raise TransportError(f"cannot listen at {endpoint(host, port or '*')}: {error}") from error
        return server

    def _dial(self, address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Connect, and return the socket and a monitor socket that reports the end of its connection."""
        if not address.startswith("tcp://"):
            raise TransportError(f"{address!r} is not the address of a control channel, such as tcp://10.0.0.1:7000")
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
        enable_heartbeat(socket, self._heartbeat_timeout_s)
        return socket


def _close(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Close both sockets, since terminating a context waits for all of its sockets."""
    dealer.disable_monitor()
    monitor.close()
    dealer.close()


def _drain(socket: zmq.Socket[bytes]) -> list[list[bytes]]:
    """Return all messages that have arrived. Asking first takes half as long as trying and catching `zmq.Again`."""
    messages = []
    try:
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:  # the message went with its connection
        pass
    return messages
