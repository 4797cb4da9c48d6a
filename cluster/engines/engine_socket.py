"""The socket of one engine, with the thread that owns it.

    I/O thread                                              step thread
      ROUTER (CURVE) ── Hello, Submit, Abort ──> received ──> take
             ^                                                  │
             └──────── Outputs, Status <── to_send <── send, flush

The two threads meet in two queues. With nothing to do both sleep in the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import zmq

from baton.cluster.wire import ClientMessage, Codec, EngineMessage, RequestName, Submit, WireError
from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import enable_heartbeat, endpoint, is_ipv6

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1.0  # an engine without work still looks after its leases and statistics this often
LINGER_MS = 500  # for the last messages to leave when the socket closes
MAX_RECEIVED_AT_ONCE = 1024  # then messages to send have their turn


class MessageCounters(msgspec.Struct):
    """Counts of an engine's messages with gateways that were lost or refused, since its process's start."""

    malformed_messages: int = 0
    stale_messages: int = 0  # meant for another epoch, or about an older generation
    undeliverable_messages: int = 0  # to gateways that were gone


@dataclass(frozen=True)
class GatewayLost:
    """The connection to a gateway is gone."""


@dataclass(frozen=True)
class GatewayUnlisted:
    """The directory does not list a gateway any more, though its connection may stand."""


@dataclass(frozen=True)
class Leave:
    """This engine is about to end: its unfinished requests continue in other engines."""


@dataclass(frozen=True)
class Unreadable:
    """A message that could not be decoded, and the request that it names: its gateway waits for an answer."""

    name: RequestName | None  # None: not even the name could be read
    reason: str


@dataclass(frozen=True)
class Call:
    """A function to run between two steps, and what it came to."""

    work: Callable[[], None]
    done: Future[None]


Event = ClientMessage | GatewayLost | GatewayUnlisted | Leave | Unreadable | Call


class ReceivedEvent(NamedTuple):
    """An event for the step thread."""

    gateway: bytes
    event: Event
    came_s: float  # by `time.monotonic`: a step that takes long may be under way


class EngineSocket:
    """The socket at which gateways reach one engine.

    Bound once constructed (`address`); `run`, in a thread of its own, receives and sends.
    """

    def __init__(self, *, host: str, key: ClusterKey, epoch: int, heartbeat_timeout_s: float) -> None:
        self.counters = MessageCounters()
        self._epoch = epoch
        self._received: deque[ReceivedEvent] = deque()
        self._to_send: deque[tuple[bytes, EngineMessage]] = deque()
        self._work = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._configure(key, heartbeat_timeout_s)
        self._socket.ipv6 = is_ipv6(host)
        try:
            self._socket.bind(f"tcp://{endpoint(host, '*')}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)  # a context that is collected with an open socket waits for it for ever
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._wakeup_in, self._wakeup_out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wakeup_in.bind("inproc://wakeup")
        self._wakeup_out.connect("inproc://wakeup")

    def _configure(self, key: ClusterKey, heartbeat_timeout_s: float) -> None:
        key.secure_server(self._socket)
        enable_heartbeat(self._socket, heartbeat_timeout_s)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a gateway that is gone is an error, not a silent loss
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a gateway that reconnects replaces its old connection
        # Dropping one message would corrupt a stream; slow gateways leave the directory.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)

    def close(self) -> None:
        """Close the socket once both threads have ended. Waits `LINGER_MS` for the last messages to go out."""
        self._context.destroy(linger=LINGER_MS)

    # ---- any thread ----

    def post(self, event: Event, gateway: bytes = b"") -> None:
        """Queue an event for the step thread and wake it."""
        self._put(gateway, event)
        self._work.set()

    def _put(self, gateway: bytes, event: Event) -> None:
        self._received.append(ReceivedEvent(gateway, event, time.monotonic()))

    def wake(self) -> None:
        """Wake the step thread: it has something to do."""
        self._work.set()

    @property
    def is_empty(self) -> bool:
        """Tell whether no received event waits for the step thread."""
        return not self._received

    @property
    def num_received(self) -> int:
        """Count the received events that the step thread has not taken yet."""
        return len(self._received)

    @property
    def num_submitted(self) -> int:
        """Count the submitted requests that the step thread has not taken yet."""
        return sum(isinstance(received.event, Submit) for received in list(self._received))

    # ---- step thread ----

    def take(self) -> Iterator[ReceivedEvent]:
        """Yield events until none is left. One counts in `num_submitted` until the next one is asked for."""
        while self._received:
            yield self._received[0]
            self._received.popleft()

    def send(self, gateway: bytes, message: EngineMessage) -> None:
        """Queue a message, which goes out after the next `flush`."""
        self._to_send.append((gateway, message))

    def flush(self) -> None:
        """Let the I/O thread send what is queued, if anything is."""
        if self._to_send:
            self.wake_io()

    def wake_io(self) -> None:
        """Wake the I/O thread."""
        with contextlib.suppress(zmq.Again):  # a thousand wake-ups wait for it already
            self._wakeup_out.send(b"", flags=zmq.NOBLOCK)

    def rest(self, *, idle: bool) -> None:
        """Pause between two turns of the step loop; an idle loop waits for work."""
        if idle:
            self._work.wait(IDLE_POLL_S)
        self._work.clear()

    # ---- I/O thread ----

    def run(self, closing: threading.Event) -> None:
        """Receive and send until `closing` is set and `wake_io` was called."""
        codec = Codec()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup_in, zmq.POLLIN)
        while not closing.is_set():
            ready = dict(poller.poll(timeout=0 if self._to_send else int(IDLE_POLL_S * 1000)))
            # Sending comes first: wake-ups can be drained later, since a poll does not wait while something is queued.
            self._send_queued(codec)
            if self._wakeup_in in ready:
                self._drain_wakeups()
            if self._socket in ready:
                self._receive(codec)
        self._send_queued(codec)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._wakeup_in.recv(zmq.NOBLOCK)

    def _receive(self, codec: Codec) -> None:
        for _ in range(MAX_RECEIVED_AT_ONCE):
            try:
                gateway, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames instead of one")
                message = codec.decode_from_client(frames[0])
            except WireError as error:
                self.counters.malformed_messages += 1
                logger.warning("a message of gateway %r cannot be read: %s", gateway, error)
                if error.header.epoch in (None, self._epoch):
                    self._put(gateway, Unreadable(error.header.name, str(error)))
                continue
            if message.epoch != self._epoch:
                self.counters.stale_messages += 1
                continue
            self._put(gateway, message)
        self._work.set()

    def _send_queued(self, codec: Codec) -> None:
        for _ in range(len(self._to_send)):  # not until it is empty: received messages must not wait for ever
            gateway, message = self._to_send.popleft()
            try:
                self._socket.send_multipart([gateway, codec.encode(message)], flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self.counters.undeliverable_messages += 1
                self.post(GatewayLost(), gateway)
