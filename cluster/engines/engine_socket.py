"""The socket of one engine, with the thread that owns it.

    I/O thread                                              step thread
      ROUTER (CURVE) ── Hello, Submit, Abort ──> received ──> take
             ^                                                  │
             └──────── Outputs, Status <── to_send <── send, flush

The two threads meet in two queues. Without work, both sleep in the kernel.
"""

from __future__ import annotations

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
from baton.engine.net.sockets import bind_to_free_port, enable_heartbeat
from baton.engine.net.wakeup import WakeupSocket

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1.0  # an idle engine still checks its leases and publishes statistics this often
LINGER_MS = 500  # in which the last messages are sent when the socket closes
MAX_RECEIVED_AT_ONCE = 1024  # after these, queued messages are sent first


class MessageCounters(msgspec.Struct):
    """Counts of an engine's lost or refused messages with gateways, since its process started."""

    malformed_messages: int = 0
    stale_messages: int = 0  # for another epoch, or about an older generation
    undeliverable_messages: int = 0  # to gateways that had disconnected


@dataclass(frozen=True)
class GatewayLost:
    """The connection to a gateway is gone."""


@dataclass(frozen=True)
class GatewayUnlisted:
    """A gateway that the directory no longer lists, although it may still be connected."""


@dataclass(frozen=True)
class Leave:
    """An order to give back all unfinished requests, which continue in other engines: this engine is about to end."""


@dataclass(frozen=True)
class Unreadable:
    """A message that could not be decoded. Its gateway waits for an answer about the request that it names."""

    name: RequestName | None  # None: not even the request's name could be decoded
    reason: str


@dataclass(frozen=True)
class Call:
    """A function to run between two steps, with a future for its end."""

    work: Callable[[], None]
    done: Future[None]


Event = ClientMessage | GatewayLost | GatewayUnlisted | Leave | Unreadable | Call


class ReceivedEvent(NamedTuple):
    """An event for the step thread."""

    gateway: bytes
    event: Event
    received_s: float  # arrival by `time.monotonic`; a long step may delay its handling


class EngineSocket:
    """The socket at which gateways reach one engine.

    Constructing it binds it (`address`); `run`, in its own thread, receives and sends.
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
        try:
            self.address = bind_to_free_port(self._socket, host)
        except zmq.ZMQError:
            self._context.destroy(linger=0)  # collecting a context with an open socket would block for ever
            raise
        self._wakeup = WakeupSocket(self._context)

    def _configure(self, key: ClusterKey, heartbeat_timeout_s: float) -> None:
        key.secure_server(self._socket)
        enable_heartbeat(self._socket, heartbeat_timeout_s)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a disconnected gateway raises instead of dropping
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a gateway that reconnects replaces its old connection
        # No limits: dropping one message would corrupt a stream, and slow gateways leave the directory.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)

    def close(self) -> None:
        """Close the socket once both threads have ended. Waits up to `LINGER_MS` until the last messages are sent."""
        self._context.destroy(linger=LINGER_MS)

    # ---- any thread ----

    def post(self, event: Event, gateway: bytes = b"") -> None:
        """Queue an event for the step thread and wake it."""
        self._put(gateway, event)
        self._work.set()

    def _put(self, gateway: bytes, event: Event) -> None:
        self._received.append(ReceivedEvent(gateway, event, time.monotonic()))

    def wake(self) -> None:
        """Wake the step thread because there is something to do."""
        self._work.set()

    @property
    def is_empty(self) -> bool:
        """Return whether no received event waits for the step thread."""
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
        """Yield received events until none is left. An event stays in the queue until the next one is requested."""
        while self._received:
            yield self._received[0]
            self._received.popleft()

    def send(self, gateway: bytes, message: EngineMessage) -> None:
        """Queue a message, which goes out after the next `flush`."""
        self._to_send.append((gateway, message))

    def flush(self) -> None:
        """Let the I/O thread send the queued messages, if there are any."""
        if self._to_send:
            self.wake_io()

    def wake_io(self) -> None:
        """Wake the I/O thread."""
        self._wakeup.wake()

    def rest(self, most_s: float) -> None:
        """Pause between two turns of the step loop, until something happens, for `most_s` at most."""
        if most_s:
            self._work.wait(most_s)
        self._work.clear()

    # ---- I/O thread ----

    def run(self, closing: threading.Event) -> None:
        """Receive and send until `closing` is set and `wake_io` was called."""
        codec = Codec()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.socket, zmq.POLLIN)
        while not closing.is_set():
            ready = dict(poller.poll(timeout=0 if self._to_send else int(IDLE_POLL_S * 1000)))
            # Sending comes first. Wake-ups can be drained later: poll does not wait while something is queued.
            self._send_queued(codec)
            if self._wakeup.socket in ready:
                self._wakeup.drain()
            if self._socket in ready:
                self._receive(codec)
        self._send_queued(codec)

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
        for _ in range(len(self._to_send)):  # not until the queue is empty: received messages must get their turn
            gateway, message = self._to_send.popleft()
            try:
                self._socket.send_multipart([gateway, codec.encode(message)], flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self.counters.undeliverable_messages += 1
                self.post(GatewayLost(), gateway)
