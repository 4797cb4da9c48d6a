"""One engine on the network: a step loop that handles the messages of its socket.

    EngineSocket ── Hello, Submit, Abort ──> EngineCore.add / abort
         ^                                        │ step()
     └──── one Outputs a gateway, Status ─────┘

The step thread owns the EngineCore; the socket has its own thread. That a gateway's connection broke or missed
heartbeats is noticed when something is sent to it; then its requests are aborted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Protocol

from baton.cluster.contracts import EnginePulse, QueueBound
from baton.cluster.pluralize import pluralize
from baton.cluster.wire import Abort, AskBlocks, Begin, Hello, RequestName, Status, Submit
from baton.engine.core.engine import EngineFailed
from baton.engine.core.messages import EngineError, EngineOutput, EngineRequest, EngineStats, ErrorKind, FinishReason
from baton.engine.net.sockets import HEARTBEAT_TIMEOUT_S
from baton.kv_transfer.protocol.stats import TransferStats
from baton.kv_transfer.settings import LocalEngine

from .engine_socket import IDLE_POLL_S, Call, EngineSocket, Event, GatewayLost, GatewayUnlisted, Leave, Unreadable
from .status_publisher import StatusPublisher, StatusSource

logger = logging.getLogger(__name__)

LEAVING = EngineError(ErrorKind.LEAVING, "The engine is shutting down: the request continues in another one.")


class ServedEngine(StatusSource, Protocol):
    """The part of `EngineCore` that the server uses."""

    def add(self, request: EngineRequest, received_s: float | None = None) -> None: ...
    def begin(self, request_id: str, generation: int, token_id: int) -> None: ...
    def abort(self, request_id: str, generation: int | None = None) -> None: ...
    def wait_s(self) -> float: ...
    def step(self) -> list[EngineOutput]: ...


class EngineServer:
    """Serves one engine to all gateways.

    Constructing it binds its socket (`address`), `start` begins to serve, `close` ends. The future `ended` is resolved
    at the end, with the error that caused it, if any. The result of `transfers()` is sent along with the statistics.
    """

    def __init__(
        self,
        engine: ServedEngine,
        me: LocalEngine,
        *,
        transfers: Callable[[], TransferStats | None] = lambda: None,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self._engine = engine
        self._engine_id = me.engine_id
        assert me.key is not None, "gateways connect only with the cluster's key"
        self.socket = EngineSocket(host=me.host, key=me.key, epoch=me.epoch, heartbeat_timeout_s=heartbeat_timeout_s)
        self.address, self.counters = self.socket.address, self.socket.counters
        self._closing = threading.Event()
        self._step_loop_ended = threading.Event()  # nothing more will be sent
        self.ended: Future[None] = Future()

        self._requests = RequestRegistry()  # used by the step thread only, except its length
        self._leaves = False  # used by the step thread only: no request is accepted any more
        # Used by the step thread only, from `start` on:
        self._publisher = StatusPublisher(self.socket, engine, me.epoch, transfers)
        self._turn_began_s = time.monotonic()
        self._busy_s = 0.0
        self._listed: set[bytes] = set()  # gateways in the newest snapshot

        self._threads = [
            threading.Thread(target=self._guard, args=(self._step_loop,), name="baton-step", daemon=True),
            threading.Thread(target=self._guard, args=(self._socket_loop,), name="baton-io", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        self.socket.wake()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        if not self.ended.done():
            self.ended.set_result(None)
        self.socket.close()

    def stalled_s(self) -> float:
        """Return how long the present turn of the step loop has taken. An idle loop begins one every `IDLE_POLL_S`."""
        return time.monotonic() - self._turn_began_s

    @property
    def status(self) -> Status | None:
        """Return the newest published status; None before the first. Any thread may ask."""
        return self._publisher.published

    def pulse(self) -> EnginePulse:
        """Return the state of the engine for health checks and the autoscaler. Any thread may call it.

        Its counts of hand-offs are at most `STATUS_PERIOD_S` old while the engine works, and current while it is idle.
        """
        status = self.status
        transfers = status.transfers if status else None
        return EnginePulse(
            stalled_s=self.stalled_s(),
            num_requests=len(self._requests) + self.socket.num_submitted,
            leases_held=transfers.leases_held if transfers else 0,
            receives_active=transfers.receives_active if transfers else 0,
            busy_s=self._busy_s,
            stats=status.stats if status else None,
        )

    def return_requests(self) -> None:
        """Give all requests back to their gateways, which continue them in other engines, and accept no more."""
        self.socket.post(Leave())

    def run_between_steps(self, work: Callable[[], None]) -> Future[None]:
        """Run a function in the step thread; the future is resolved when it has ended. Any thread may call this."""
        call = Call(work, Future())
        self.socket.post(call)
        return call.done

    def wake(self) -> None:
        """Wake the step loop because something has happened. Any thread may call it."""
        self.socket.wake()

    def keep_gateways(self, alive: Iterable[str]) -> None:
        """Abort the requests of gateways that have left since the last call. Always called by the same thread.

        A gateway that was never listed is left alone: its `Hello` may arrive before the directory's snapshot with it.
        """
        alive_now = {identity.encode() for identity in alive}
        for gateway in self._listed - alive_now:
            logger.warning("gateway %s is gone: the directory does not list it any more", gateway.decode())
            self.socket.post(GatewayUnlisted(), gateway)
        self._listed = alive_now

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            logger.exception("engine %s ends: its %s thread failed", self._engine_id, threading.current_thread().name)
            with contextlib.suppress(InvalidStateError):  # the other thread has reported its error first
                self.ended.set_exception(error)
            self._closing.set()
            self.socket.wake()

    def _socket_loop(self) -> None:
        self.socket.run(self._step_loop_ended)

    # ---- step thread ----

    def _step_loop(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        finally:
            self._closing.set()
            self._step_loop_ended.set()
            self.socket.wake_io()

    def _turn(self) -> None:
        self._turn_began_s = time.monotonic()
        for gateway, event, received_s in self.socket.take():
            self._handle(gateway, event, received_s)
        has_work = self._engine.has_work()
        if has_work and self._publisher.looks_idle:
            self._publisher.publish()  # otherwise all gateways without requests in it would take it for idle
        self.socket.flush()  # before a step that may be long
        self._send(self._step())
        if has_work:
            self._busy_s += time.monotonic() - self._turn_began_s
        idle = not self._engine.has_work() and self.socket.is_empty
        # If the only requests wait for blocks, publish later: it would delay the thread that fetches the blocks.
        fetches = idle and has_work and bool(self._requests)
        if not fetches and (idle or self._publisher.is_old):
            self._publisher.publish()
        self.socket.flush()
        self.socket.rest(IDLE_POLL_S if idle else self._engine.wait_s())

    def _step(self) -> list[EngineOutput]:
        try:
            return self._engine.step()
        except EngineFailed as failure:
            self._send(failure.outputs)  # every live request ends with an error
            self.socket.flush()
            raise

    def _handle(self, gateway: bytes, event: Event, received_s: float) -> None:
        match event:
            case Hello():
                self._abort_all_of(gateway)
                self._publisher.publish(gateway)
            case GatewayLost():
                name = gateway.decode(errors="backslashreplace")
                logger.warning("gateway %s is gone: the connection to it broke, or missed heartbeats", name)
                self._publisher.unsubscribe(gateway)
                self._end_all_of(gateway)
            case GatewayUnlisted():  # it stays subscribed: if it knew only of a full queue, it would never send again
                self._end_all_of(gateway)
            case Submit(request=request, queue=queue):
                self._publisher.subscribe(gateway)  # it is connected again, even if a message to it was lost before
                self._add(gateway, request, queue, received_s)
            case Begin(request_id=request_id, generation=generation, token_id=token_id):
                if self._requests.owner_of(request_id) == RequestOwner(gateway, generation):
                    self._engine.begin(request_id, generation, token_id)
                else:
                    self.counters.stale_messages += 1
            case AskBlocks():
                self._publisher.publish(gateway)
            case Abort(request_id=request_id, generation=generation):
                self._abort(request_id, generation)
            case Unreadable(name=name, reason=reason):
                self._end_unreadable(gateway, name, reason)
            case Call(work=work, done=done) if done.set_running_or_notify_cancel():
                try:
                    work()
                    done.set_result(None)
                except Exception as error:  # passed on to the caller
                    done.set_exception(error)
            case Leave():
                self._leaves = True
                for request_id, owner in self._requests.all():
                    self._abort(request_id, owner.generation)
                    self._refuse(owner.gateway, request_id, owner.generation, LEAVING)

    def _add(self, gateway: bytes, request: EngineRequest, queue: QueueBound | None, received_s: float) -> None:
        if self._leaves:
            self._refuse(gateway, request.request_id, request.generation, LEAVING)
            return
        owner = self._requests.owner_of(request.request_id)
        if owner is not None and (owner.gateway != gateway or owner.generation >= request.generation):
            error = EngineError(ErrorKind.INVALID, f"request id {request.request_id!r} is in use: ids must be unique")
            self._refuse(gateway, request.request_id, request.generation, error)
            return
        if owner is not None:  # the newer generation replaces the older one
            self._requests.remove(request.request_id)
            self._engine.abort(request.request_id, owner.generation)
        if queue is not None and not _brings_work(request) and queue.is_reached(stats := self._engine.stats()):
            self._refuse(gateway, request.request_id, request.generation, _full(stats, queue))
            return
        self._requests.add(request, gateway)
        self._engine.add(request, received_s)

    def _end_unreadable(self, gateway: bytes, name: RequestName | None, reason: str) -> None:
        """End the request that an undecodable message names, or all requests of the gateway if it names none."""
        if name is None:
            self._abort_all_of(gateway)
            self._publisher.send_outputs({gateway: []}, lost_a_message=True)
            return
        request_id, generation = name.request_id, name.generation
        owner = self._requests.owner_of(request_id)
        if owner is not None and owner.gateway == gateway:
            self._abort(request_id, generation)
        error = EngineError(ErrorKind.INTERNAL, f"The engine cannot read what this gateway sent: {reason}")
        self._refuse(gateway, request_id, generation, error)

    def _refuse(self, gateway: bytes, request_id: str, generation: int, error: EngineError) -> None:
        refusal = EngineOutput(
            request_id=request_id, generation=generation, finish_reason=FinishReason.ERROR, error=error
        )
        self._publisher.send_outputs({gateway: [refusal]})

    def _abort(self, request_id: str, generation: int) -> None:
        owner = self._requests.owner_of(request_id)
        if owner is not None and owner.generation > generation:
            self.counters.stale_messages += 1
        else:
            self._requests.remove(request_id)
        # Also if the request has ended here or a newer generation runs: this one may still hold blocks for a reader.
        self._engine.abort(request_id, generation)

    def _abort_all_of(self, gateway: bytes) -> list[EngineOutput]:
        """Abort all requests of a gateway, and return the final output of each."""
        its_own = self._requests.all_of(gateway)
        for request_id, owner in its_own:
            self._abort(request_id, owner.generation)
        return [
            EngineOutput(request_id=request_id, generation=owner.generation, finish_reason=FinishReason.ABORT)
            for request_id, owner in its_own
        ]

    def _end_all_of(self, gateway: bytes) -> None:
        """Abort all requests of a gateway and send it their last outputs: if only cut off, it still waits for them."""
        if last_outputs := self._abort_all_of(gateway):
            self._publisher.send_outputs({gateway: last_outputs})

    def _send(self, outputs: Sequence[EngineOutput]) -> None:
        if outputs:
            self._publisher.send_outputs(self._requests.by_gateway(outputs))


def _brings_work(request: EngineRequest) -> bool:
    """Return whether another engine has done work for this request, which would be lost if it were refused.

    Their number is limited by what other engines can run, so accepting all of them cannot overload this one.
    """
    return bool(request.output_token_ids) or request.kv_source is not None


def _full(stats: EngineStats, queue: QueueBound) -> EngineError:
    requests, tokens = pluralize(stats.num_requests_waiting, "request"), pluralize(stats.num_waiting_tokens, "token")
    message = (
        f"The queue of this engine is full: {requests} waiting, with {tokens} to compute. "
        f"gateway.queue_limits are {queue.requests} and {queue.tokens}."
    )
    return EngineError(ErrorKind.OVERLOADED, message)


@dataclass(frozen=True)
class RequestOwner:
    gateway: bytes
    generation: int


class RequestRegistry:
    """The owner of each request by its id. Only the step thread uses it, but any thread may ask for its length."""

    def __init__(self) -> None:
        self._owners: dict[str, RequestOwner] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def owner_of(self, request_id: str) -> RequestOwner | None:
        return self._owners.get(request_id)

    def add(self, request: EngineRequest, gateway: bytes) -> None:
        self._owners[request.request_id] = RequestOwner(gateway, request.generation)

    def remove(self, request_id: str) -> None:
        """Forget a request. An id that is not registered is ignored."""
        self._owners.pop(request_id, None)

    def all(self) -> list[tuple[str, RequestOwner]]:
        return list(self._owners.items())

    def all_of(self, gateway: bytes) -> list[tuple[str, RequestOwner]]:
        return [(request_id, owner) for request_id, owner in self._owners.items() if owner.gateway == gateway]

    def by_gateway(self, outputs: Sequence[EngineOutput]) -> dict[bytes, list[EngineOutput]]:
        """Group outputs by the gateway that waits for them, dropping those of aborted requests.

        The last output of a request removes it from the registry.
        """
        grouped: dict[bytes, list[EngineOutput]] = defaultdict(list)
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None or owner.generation != output.generation:
                continue
            grouped[owner.gateway].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        return grouped
