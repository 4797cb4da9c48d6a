"""The socket of one engine, with the thread that owns it.

    I/O thread                                        step thread
      ROUTER (CURVE) ── Hello, Submit, Abort ──> inbox ──> take
             ^                                               │
             └──────── Outputs, one a gateway <── outbox <── send, ring

The two meet in two queues. With nothing to do both sleep in the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from baton.cluster.contracts import MailCounters
from baton.cluster.wire import ClientMessage, Codec, Outputs, RequestName, Submit, WireError
from baton.engine.net.curve import ClusterKey
from baton.engine.net.endpoints import endpoint, is_ipv6
from baton.engine.net.sockets import enable_heartbeat

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1.0  # an engine without work still looks after its leases and statistics this often
LAST_WORDS_MS = 500
MAX_RECEIVED_AT_ONCE = 1024  # then the outbox has its turn


@dataclass(frozen=True)
class GatewayLost:
    """The connection to a gateway is gone."""


@dataclass(frozen=True)
class GatewayUnlisted:
    """The directory has lost a gateway, whose connection may stand."""


@dataclass(frozen=True)
class Leave:
    """This engine is about to end: what it has not finished goes on elsewhere."""


@dataclass(frozen=True)
class Unreadable:
    """A gateway waits for what follows from a message that is none, about this request."""

    name: RequestName | None  # None: not even that could be read
    reason: str


Letter = ClientMessage | GatewayLost | GatewayUnlisted | Leave | Unreadable


class Delivery(NamedTuple):
    gateway: bytes
    letter: Letter
    came_s: float  # by `time.monotonic`: a step may be under way that takes long


class Mailbox:
    """Of one engine's process. Bound once constructed (`address`); `run` in a thread of its own carries the mail."""

    def __init__(self, *, host: str, key: ClusterKey, epoch: int, silence_s: float) -> None:
        self.counters = MailCounters()
        self._epoch = epoch
        self._inbox: deque[Delivery] = deque()
        self._outbox: deque[tuple[bytes, Outputs]] = deque()
        self._work = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._configure(key, silence_s)
        self._socket.ipv6 = is_ipv6(host)
        try:
            self._socket.bind(f"tcp://{endpoint(host, '*')}")
        except zmq.ZMQError:
            self._context.destroy(linger=0)  # one that is collected with an open socket waits for it for ever
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._heard, self._rung = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._heard.bind("inproc://bell")
        self._rung.connect("inproc://bell")

    def _configure(self, key: ClusterKey, silence_s: float) -> None:
        key.secure_server(self._socket)
        enable_heartbeat(self._socket, silence_s)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a gateway that is gone is an error, not a silent loss
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a gateway that reconnects replaces its old connection
        # Dropping one message would corrupt a stream; slow gateways leave the directory.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)

    def close(self) -> None:
        """Once both threads have ended. Waits a little for last words to go out."""
        self._context.destroy(linger=LAST_WORDS_MS)

    # ---- any thread ----

    def post(self, letter: Letter, gateway: bytes = b"") -> None:
        self._put(gateway, letter)
        self._work.set()

    def _put(self, gateway: bytes, letter: Letter) -> None:
        self._inbox.append(Delivery(gateway, letter, time.monotonic()))

    def wake(self) -> None:
        """The step thread has something to do."""
        self._work.set()

    @property
    def is_empty(self) -> bool:
        """Nobody has sent anything that was not taken."""
        return not self._inbox

    @property
    def num_submitted(self) -> int:
        """Requests that nobody has looked at."""
        return sum(isinstance(delivery.letter, Submit) for delivery in list(self._inbox))

    # ---- step thread ----

    def take(self) -> Iterator[Delivery]:
        """Until nothing is left. A letter counts (`num_submitted`) until the next one is asked for."""
        while self._inbox:
            yield self._inbox[0]
            self._inbox.popleft()

    def send(self, gateway: bytes, message: Outputs) -> None:
        """Goes out after the next `ring`."""
        self._outbox.append((gateway, message))

    def ring(self) -> None:
        if self._outbox:
            self.wake_carrier()

    def wake_carrier(self) -> None:
        """The I/O thread looks around."""
        with contextlib.suppress(zmq.Again):  # rung a thousand times already, and nobody came: it rings
            self._rung.send(b"", flags=zmq.NOBLOCK)

    def rest(self, *, idle: bool) -> None:
        """Between two turns; an idle one waits for work."""
        if idle:
            self._work.wait(IDLE_POLL_S)
        self._work.clear()

    # ---- I/O thread ----

    def run(self, closing: threading.Event) -> None:
        """Until `closing` is set and the bell has rung."""
        codec = Codec()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._heard, zmq.POLLIN)
        while not closing.is_set():
            ready = dict(poller.poll(timeout=0 if self._outbox else int(IDLE_POLL_S * 1000)))
            # First: the bell can fall silent later, since a poll does not wait while something is left.
            self._send_outbox(codec)
            if self._heard in ready:
                self._silence_bell()
            if self._socket in ready:
                self._receive(codec)
        self._send_outbox(codec)

    def _silence_bell(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._heard.recv(zmq.NOBLOCK)

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
                if error.about.epoch in (None, self._epoch):
                    self._put(gateway, Unreadable(error.about.name, str(error)))
                continue
            if message.epoch != self._epoch:
                self.counters.stale_messages += 1
                continue
            self._put(gateway, message)
        self._work.set()

    def _send_outbox(self, codec: Codec) -> None:
        for _ in range(len(self._outbox)):  # not until it is empty: what arrives meanwhile must not wait for ever
            gateway, message = self._outbox.popleft()
            try:
                self._socket.send_multipart([gateway, codec.encode(message)], flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self.counters.undeliverable_messages += 1
                self.post(GatewayLost(), gateway)
