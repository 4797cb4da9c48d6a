"""One engine on the network: a step loop and a socket, each with its own thread.

    I/O thread                                         step thread
      ROUTER (CURVE) ── Hello, Submit, Abort ──> inbox ──> EngineCore.add / abort
             ^                                                 │ step()
             └──────── one Outputs a gateway <── outbox <──────┘

The step thread owns the EngineCore, the I/O thread owns the socket; they meet in two queues. With nothing to do both
sleep in the kernel. A gateway whose connection is gone is noticed when something is sent to it, and its requests are
aborted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from baton.cluster.contracts import EnginePulse
from baton.cluster.wire import Abort, AskBlocks, Begin, ClientMessage, Codec, Hello, Outputs, Submit, WireError
from baton.engine.core.block_log import BlockLog, BlockNews
from baton.engine.core.engine import EngineFailed
from baton.engine.core.messages import EngineError, EngineOutput, EngineRequest, EngineStats, ErrorKind, FinishReason
from baton.kv_transfer.curve import ClusterKey
from baton.kv_transfer.handoff import TransferStats

logger = logging.getLogger(__name__)

IDLE_POLL_S = 1.0  # an engine without work still looks after its leases and statistics this often
STATS_PERIOD_S = 0.25  # a busy engine tells its state also to gateways that have no request in it
LEAVING = EngineError(ErrorKind.LEAVING, "The engine ends: the request goes on elsewhere.")
MAX_RECEIVED_AT_ONCE = 1024  # then the outbox has its turn
HEARTBEAT_MS = 2_000  # lost machines send no FIN; libzmq's own pings notice them
HEARTBEAT_TIMEOUT_MS = 8_000


class Engine(Protocol):
    """What the server needs of an `EngineCore`."""

    def add(self, request: EngineRequest) -> None: ...
    def begin(self, request_id: str, generation: int, token_id: int) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[EngineOutput]: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def block_log(self) -> BlockLog: ...


@dataclass(frozen=True)
class GatewayLost:
    """The connection to a gateway is gone."""


@dataclass(frozen=True)
class Leave:
    """This engine is about to end: what it has not finished goes on elsewhere."""


@dataclass(frozen=True)
class Owner:
    gateway: bytes
    generation: int


@dataclass
class ServerCounters:
    """From the start of the process."""

    malformed_messages: int = 0
    stale_messages: int = 0  # meant for another epoch, or about an older generation
    undeliverable_messages: int = 0  # their gateway was gone


class EngineServer:
    """Serves one engine to all gateways.

    Bound once constructed (`address`); `start` serves; `close` ends it. `ended` is resolved when it has ended, with the
    error that ended it, if one did. Gateways are told `transfers()` along with the engine's statistics.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        engine_id: str,
        epoch: int,
        key: ClusterKey,
        host: str,
        transfers: Callable[[], TransferStats | None] = lambda: None,
    ) -> None:
        self.counters = ServerCounters()
        self._engine = engine
        self._transfers = transfers
        self._engine_id = engine_id
        self._epoch = epoch
        self._inbox: deque[tuple[bytes, ClientMessage | GatewayLost | Leave]] = deque()
        self._outbox: deque[tuple[bytes, Outputs]] = deque()
        self._work = threading.Event()
        self._closing = threading.Event()
        self.ended: Future[None] = Future()

        self._owners: dict[str, Owner] = {}  # step thread only, but for their number
        self._leaves = False  # step thread only: nothing more is taken
        self._gateways: dict[bytes, None] = {}  # step thread only: those that said hello, in order
        self._blocks = engine.block_log()  # step thread only, from `start` on
        self._told: Outputs | None = None  # step thread only: what every gateway knows, but for blocks
        self._told_at_s = 0.0
        self._turn_began_s = time.monotonic()
        self._busy_s = 0.0
        self._alive: set[bytes] = set()  # gateways in the newest snapshot

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._configure(key)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._bell = self._context.socket(zmq.PAIR)  # rung by the step thread, heard by the I/O thread
        self._bell.bind("inproc://outbox")
        self._threads = [
            threading.Thread(target=self._guard, args=(self._step_loop,), name="baton-step", daemon=True),
            threading.Thread(target=self._guard, args=(self._io_loop,), name="baton-io", daemon=True),
        ]

    def _configure(self, key: ClusterKey) -> None:
        key.secure_server(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a gateway that is gone is an error, not a silent loss
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a gateway that reconnects replaces its old connection
        self._socket.setsockopt(
            zmq.SNDHWM, 0
        )  # dropping one message would corrupt a stream; slow gateways leave the directory
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        self._work.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        if not self.ended.done():
            self.ended.set_result(None)
        self._context.destroy(linger=0)

    def stalled_s(self) -> float:
        """For how long the step loop has been in one turn. An idle one begins another every `IDLE_POLL_S`."""
        return time.monotonic() - self._turn_began_s

    def pulse(self) -> EnginePulse:
        """How the engine does. Any thread may call it; what it tells of hand-offs is at most `STATS_PERIOD_S` old where
        the engine works, and new where it does not.
        """
        waiting = sum(isinstance(message, Submit) for _, message in list(self._inbox))
        told = self._told
        transfers = told.transfers if told else None
        return EnginePulse(
            stalled_s=self.stalled_s(),
            num_requests=len(self._owners) + waiting,
            leases_held=transfers.leases_held if transfers else 0,
            receives_active=transfers.receives_active if transfers else 0,
            busy_s=self._busy_s,
            stats=told.stats if told else None,
        )

    def hand_over(self) -> None:
        """Gives all requests back to their gateways, which go on with them elsewhere, and takes no more."""
        self._inbox.append((b"", Leave()))
        self._work.set()

    def wake(self) -> None:
        """There is news for the step loop. Any thread may call it."""
        self._work.set()

    def keep_gateways(self, alive: Iterable[str]) -> None:
        """Aborts the requests of gateways that left since the last call. One thread, any, calls it.

        Only those that were there once: a new gateway may say hello here before the directory's news of it arrives.
        """
        alive_now = {identity.encode() for identity in alive}
        for gateway in self._alive - alive_now:
            self._inbox.append((gateway, GatewayLost()))
        self._alive = alive_now
        self._work.set()

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            logger.exception("engine %s ends: its %s thread failed", self._engine_id, threading.current_thread().name)
            if not self.ended.done():
                self.ended.set_exception(error)
            self._closing.set()
            self._work.set()

    # ---- step thread ----

    def _step_loop(self) -> None:
        bell = self._context.socket(zmq.PAIR)
        bell.connect("inproc://outbox")
        try:
            while not self._closing.is_set():
                self._turn(bell)
        finally:
            self._closing.set()
            self._ring(bell)

    def _turn(self, bell: zmq.Socket[bytes]) -> None:
        self._turn_began_s = time.monotonic()
        while self._inbox:
            gateway, message = self._inbox.popleft()
            self._take(gateway, message)
        has_work = self._engine.has_work()
        self._publish(self._step(bell))
        if has_work:
            self._busy_s += time.monotonic() - self._turn_began_s
        idle = not self._engine.has_work() and not self._inbox
        if idle or time.monotonic() - self._told_at_s >= STATS_PERIOD_S:
            self._tell_all_gateways()
        if self._outbox:
            self._ring(bell)
        if idle:
            self._work.wait(IDLE_POLL_S)
        self._work.clear()

    def _step(self, bell: zmq.Socket[bytes]) -> list[EngineOutput]:
        try:
            return self._engine.step()
        except EngineFailed as failure:
            self._publish(failure.outputs)  # every live request hears that it failed
            self._ring(bell)
            raise

    @staticmethod
    def _ring(bell: zmq.Socket[bytes]) -> None:
        with contextlib.suppress(zmq.Again):  # rung a thousand times already, and nobody came: it rings
            bell.send(b"", flags=zmq.NOBLOCK)

    def _take(self, gateway: bytes, message: ClientMessage | GatewayLost | Leave) -> None:
        match message:
            case Hello():
                self._abort_all_of(gateway)
                self._gateways[gateway] = None
                self._tell_blocks(gateway)
            case GatewayLost():
                self._gateways.pop(gateway, None)
                self._give_up_all_of(gateway)
            case Submit(request=request):
                self._gateways[gateway] = None  # one that the directory lost for a while is back
                self._add(gateway, request)
            case Begin(request_id=request_id, generation=generation, token_id=token_id):
                if self._owners.get(request_id) == Owner(gateway, generation):
                    self._engine.begin(request_id, generation, token_id)
                else:
                    self.counters.stale_messages += 1
            case AskBlocks():
                self._tell_blocks(gateway)
            case Abort(request_id=request_id, generation=generation):
                self._abort(request_id, generation)
            case Leave():
                self._leaves = True
                for request_id, owner in list(self._owners.items()):
                    self._abort(request_id, owner.generation)
                    self._refuse(owner.gateway, request_id, owner.generation, LEAVING)

    def _add(self, gateway: bytes, request: EngineRequest) -> None:
        if self._leaves:
            self._refuse(gateway, request.request_id, request.generation, LEAVING)
            return
        owner = self._owners.get(request.request_id)
        if owner is not None and (owner.gateway != gateway or owner.generation >= request.generation):
            error = EngineError(ErrorKind.INVALID, f"request id {request.request_id!r} is in use: ids must be unique")
            self._refuse(gateway, request.request_id, request.generation, error)
            return
        if owner is not None:  # a newer generation takes the place of the older one
            self._engine.abort(request.request_id)
        self._owners[request.request_id] = Owner(gateway, request.generation)
        self._engine.add(request)

    def _refuse(self, gateway: bytes, request_id: str, generation: int, error: EngineError) -> None:
        refusal = EngineOutput(
            request_id=request_id, generation=generation, finish_reason=FinishReason.ERROR, error=error
        )
        self._outbox.append((gateway, self._message([refusal], self._engine.stats())))

    def _abort(self, request_id: str, generation: int) -> None:
        owner = self._owners.get(request_id)
        if owner is not None and owner.generation > generation:
            self.counters.stale_messages += 1
            return
        self._owners.pop(request_id, None)
        self._engine.abort(request_id)  # also a request that has ended here: it may hold blocks for a reader

    def _abort_all_of(self, gateway: bytes) -> list[EngineOutput]:
        """Returns the last words about the requests."""
        its_own = [(request_id, owner) for request_id, owner in self._owners.items() if owner.gateway == gateway]
        for request_id, owner in its_own:
            self._abort(request_id, owner.generation)
        return [
            EngineOutput(request_id=request_id, generation=owner.generation, finish_reason=FinishReason.ABORT)
            for request_id, owner in its_own
        ]

    def _give_up_all_of(self, gateway: bytes) -> None:
        """Says so: a gateway that only the directory lost (it was stopped, or cut off) still waits for its tokens."""
        if last_words := self._abort_all_of(gateway):
            self._outbox.append((gateway, self._message(last_words, self._engine.stats())))

    def _publish(self, outputs: Sequence[EngineOutput]) -> None:
        if not outputs:
            return
        of_gateway: dict[bytes, list[EngineOutput]] = defaultdict(list)
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None or owner.generation != output.generation:
                continue  # aborted: nobody waits for it
            of_gateway[owner.gateway].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        stats = self._engine.stats()
        for gateway, its_outputs in of_gateway.items():
            self._outbox.append((gateway, self._message(its_outputs, stats)))

    def _tell_all_gateways(self) -> None:
        news, changes = self._news(), self._blocks.take() if self._gateways else None
        self._told_at_s = time.monotonic()
        if news == self._told and changes is None:
            return
        self._told = news
        told = msgspec.structs.replace(news, blocks=changes)
        self._outbox.extend((gateway, told) for gateway in self._gateways)

    def _tell_blocks(self, gateway: bytes) -> None:
        """All that is cached, to one gateway; what changed until now, to the others."""
        if (changes := self._blocks.take()) is not None:
            told = self._news(changes)
            self._outbox.extend((other, told) for other in self._gateways if other != gateway)
        self._outbox.append((gateway, self._news(self._blocks.snapshot())))

    def _news(self, blocks: BlockNews | None = None) -> Outputs:
        return Outputs(self._engine_id, self._epoch, [], self._engine.stats(), self._transfers(), blocks)

    def _message(self, outputs: list[EngineOutput], stats: EngineStats) -> Outputs:
        return Outputs(self._engine_id, self._epoch, outputs, stats)

    # ---- I/O thread ----

    def _io_loop(self) -> None:
        codec = Codec()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(timeout=0 if self._outbox else int(IDLE_POLL_S * 1000)))
            if self._bell in ready:
                while self._bell.poll(0):
                    self._bell.recv()
            self._send_outbox(codec)
            if self._socket in ready:
                self._receive(codec)
        self._send_outbox(codec)

    def _receive(self, codec: Codec) -> None:
        for _ in range(MAX_RECEIVED_AT_ONCE):
            if not self._socket.poll(0):
                break
            gateway, *frames = self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames instead of one")
                message = codec.decode_from_client(frames[0])
            except WireError as error:
                self.counters.malformed_messages += 1
                logger.warning("engine %s dropped a message of %r: %s", self._engine_id, gateway, error)
                continue
            if message.epoch != self._epoch:
                self.counters.stale_messages += 1
                continue
            self._inbox.append((gateway, message))
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
                self._inbox.append((gateway, GatewayLost()))
                self._work.set()
