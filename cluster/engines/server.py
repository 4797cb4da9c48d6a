"""One engine on the network: a step loop that serves what its mailbox brings.

    mailbox ── Hello, Submit, Abort ──> EngineCore.add / abort
       ^                                     │ step()
       └────── one Outputs a gateway ────────┘

The step thread owns the EngineCore; the mailbox has a thread of its own. A gateway whose connection is gone, or silent
for too long, is noticed when something is sent to it, and its requests are aborted.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Protocol

from baton.cluster.contracts import EnginePulse
from baton.cluster.counted import counted
from baton.cluster.gateway.settings import QueueLimits
from baton.cluster.wire import Abort, AskBlocks, Begin, Hello, RequestName, Submit
from baton.engine.core.engine import EngineFailed
from baton.engine.core.messages import EngineError, EngineOutput, EngineRequest, EngineStats, ErrorKind, FinishReason
from baton.engine.net.curve import ClusterKey
from baton.engine.net.sockets import SILENCE_S
from baton.kv_transfer.protocol.stats import TransferStats

from .mailbox import GatewayLost, GatewayUnlisted, Leave, Letter, Mailbox, Unreadable
from .news import News, Reported
from .owners import Owner, Owners

logger = logging.getLogger(__name__)

LEAVING = EngineError(ErrorKind.LEAVING, "The engine ends: the request goes on elsewhere.")


class Engine(Reported, Protocol):
    """What the server needs of an `EngineCore`."""

    def add(self, request: EngineRequest, came_s: float | None = None) -> None: ...
    def begin(self, request_id: str, generation: int, token_id: int) -> None: ...
    def abort(self, request_id: str, generation: int | None = None) -> None: ...
    def step(self) -> list[EngineOutput]: ...


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
        silence_s: float = SILENCE_S,
        queue_limits: QueueLimits = QueueLimits(),
    ) -> None:
        self._engine = engine
        self._engine_id = engine_id
        self._queue_limits = queue_limits
        self._mail = Mailbox(host=host, key=key, epoch=epoch, silence_s=silence_s)
        self.address, self.counters = self._mail.address, self._mail.counters
        self._closing = threading.Event()
        self._has_spoken = threading.Event()  # the step thread has said its last word
        self.ended: Future[None] = Future()

        self._owners = Owners()  # step thread only, but for their number
        self._leaves = False  # step thread only: nothing more is taken
        self._news = News(self._mail, engine, engine_id, epoch, transfers)  # step thread only, from `start` on
        self._turn_began_s = time.monotonic()
        self._busy_s = 0.0
        self._alive: set[bytes] = set()  # gateways in the newest snapshot

        self._threads = [
            threading.Thread(target=self._guard, args=(self._step_loop,), name="baton-step", daemon=True),
            threading.Thread(target=self._guard, args=(self._carry_mail,), name="baton-io", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        self._mail.wake()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        if not self.ended.done():
            self.ended.set_result(None)
        self._mail.close()

    def stalled_s(self) -> float:
        """For how long the step loop has been in one turn. An idle one begins another every `mailbox.IDLE_POLL_S`."""
        return time.monotonic() - self._turn_began_s

    def pulse(self) -> EnginePulse:
        """How the engine does. Any thread may call it; what it tells of hand-offs is at most `STATS_PERIOD_S` old where
        the engine works, and new where it does not.
        """
        told = self._news.told
        transfers = told.transfers if told else None
        return EnginePulse(
            stalled_s=self.stalled_s(),
            num_requests=len(self._owners) + self._mail.num_submitted,
            leases_held=transfers.leases_held if transfers else 0,
            receives_active=transfers.receives_active if transfers else 0,
            busy_s=self._busy_s,
            stats=told.stats if told else None,
        )

    def hand_over(self) -> None:
        """Gives all requests back to their gateways, which go on with them elsewhere, and takes no more."""
        self._mail.post(Leave())

    def wake(self) -> None:
        """There is news for the step loop. Any thread may call it."""
        self._mail.wake()

    def keep_gateways(self, alive: Iterable[str]) -> None:
        """Aborts the requests of gateways that left since the last call. One thread, any, calls it.

        Only those that were there once: a new gateway may say hello here before the directory's news of it arrives.
        """
        alive_now = {identity.encode() for identity in alive}
        for gateway in self._alive - alive_now:
            logger.warning("gateway %s is gone: the directory does not list it any more", gateway.decode())
            self._mail.post(GatewayUnlisted(), gateway)
        self._alive = alive_now

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            logger.exception("engine %s ends: its %s thread failed", self._engine_id, threading.current_thread().name)
            with contextlib.suppress(InvalidStateError):  # the other thread's error came first
                self.ended.set_exception(error)
            self._closing.set()
            self._mail.wake()

    def _carry_mail(self) -> None:
        self._mail.run(self._has_spoken)

    # ---- step thread ----

    def _step_loop(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
        finally:
            self._closing.set()
            self._has_spoken.set()
            self._mail.wake_carrier()

    def _turn(self) -> None:
        self._turn_began_s = time.monotonic()
        for gateway, letter, came_s in self._mail.take():
            self._take(gateway, letter, came_s)
        has_work = self._engine.has_work()
        if has_work and self._news.says_idle:
            self._news.tell_all()  # or those that have nothing in it would all take it for idle
        self._mail.ring()  # before a step that may be long
        self._publish(self._step())
        if has_work:
            self._busy_s += time.monotonic() - self._turn_began_s
        idle = not self._engine.has_work() and self._mail.is_empty
        # Not where what was just begun waits for blocks: to tell so would keep the thread that fetches them from it.
        fetches = idle and has_work and bool(self._owners)
        if not fetches and (idle or self._news.is_old):
            self._news.tell_all()
        self._mail.ring()
        self._mail.rest(idle=idle)

    def _step(self) -> list[EngineOutput]:
        try:
            return self._engine.step()
        except EngineFailed as failure:
            self._publish(failure.outputs)  # every live request hears that it failed
            self._mail.ring()
            raise

    def _take(self, gateway: bytes, letter: Letter, came_s: float) -> None:
        match letter:
            case Hello():
                self._abort_all_of(gateway)
                self._news.hears(gateway)
                self._news.tell_blocks(gateway)
            case GatewayLost():
                logger.warning("gateway %r is gone: the connection to it broke, or it fell silent", gateway)
                self._news.is_gone(gateway)
                self._give_up_all_of(gateway)
            case GatewayUnlisted():  # it hears on: one that knows of a full queue only would never ask again
                self._give_up_all_of(gateway)
            case Submit(request=request):
                self._news.hears(gateway)  # who asks is there, whatever could not be sent to it before
                self._add(gateway, request, came_s)
            case Begin(request_id=request_id, generation=generation, token_id=token_id):
                if self._owners.of(request_id) == Owner(gateway, generation):
                    self._engine.begin(request_id, generation, token_id)
                else:
                    self.counters.stale_messages += 1
            case AskBlocks():
                self._news.tell_blocks(gateway)
            case Abort(request_id=request_id, generation=generation):
                self._abort(request_id, generation)
            case Unreadable(name=name, reason=reason):
                self._end_unreadable(gateway, name, reason)
            case Leave():
                self._leaves = True
                for request_id, owner in self._owners.all():
                    self._abort(request_id, owner.generation)
                    self._refuse(owner.gateway, request_id, owner.generation, LEAVING)

    def _add(self, gateway: bytes, request: EngineRequest, came_s: float) -> None:
        if self._leaves:
            self._refuse(gateway, request.request_id, request.generation, LEAVING)
            return
        owner = self._owners.of(request.request_id)
        if owner is not None and (owner.gateway != gateway or owner.generation >= request.generation):
            error = EngineError(ErrorKind.INVALID, f"request id {request.request_id!r} is in use: ids must be unique")
            self._refuse(gateway, request.request_id, request.generation, error)
            return
        if owner is not None:  # a newer generation takes the place of the older one
            self._owners.remove(request.request_id)
            self._engine.abort(request.request_id, owner.generation)
        if not _brings_work(request) and self._queue_limits.reached(stats := self._engine.stats()):
            self._refuse(gateway, request.request_id, request.generation, _full(stats, self._queue_limits))
            return
        self._owners.add(request, gateway)
        self._engine.add(request, came_s)

    def _end_unreadable(self, gateway: bytes, name: RequestName | None, reason: str) -> None:
        """What was to be done is not: the request goes on elsewhere, or all of the gateway's where it is not known."""
        if name is None:
            self._abort_all_of(gateway)
            self._news.tell(gateway, [], lost_a_message=True)
            return
        request_id, generation = name.request_id, name.generation
        owner = self._owners.of(request_id)
        if owner is not None and owner.gateway == gateway:
            self._abort(request_id, generation)
        error = EngineError(ErrorKind.INTERNAL, f"The engine cannot read what this gateway sent: {reason}")
        self._refuse(gateway, request_id, generation, error)

    def _refuse(self, gateway: bytes, request_id: str, generation: int, error: EngineError) -> None:
        refusal = EngineOutput(
            request_id=request_id, generation=generation, finish_reason=FinishReason.ERROR, error=error
        )
        self._news.tell(gateway, [refusal])

    def _abort(self, request_id: str, generation: int) -> None:
        owner = self._owners.of(request_id)
        if owner is not None and owner.generation > generation:
            self.counters.stale_messages += 1
        else:
            self._owners.remove(request_id)
        # Also where it has ended here, or a newer one has taken its place: it may hold blocks for a reader.
        self._engine.abort(request_id, generation)

    def _abort_all_of(self, gateway: bytes) -> list[EngineOutput]:
        """Returns the last words about the requests."""
        its_own = self._owners.all_of(gateway)
        for request_id, owner in its_own:
            self._abort(request_id, owner.generation)
        return [
            EngineOutput(request_id=request_id, generation=owner.generation, finish_reason=FinishReason.ABORT)
            for request_id, owner in its_own
        ]

    def _give_up_all_of(self, gateway: bytes) -> None:
        """Says so: a gateway that only the directory lost (it was stopped, or cut off) still waits for its tokens."""
        if last_words := self._abort_all_of(gateway):
            self._news.tell(gateway, last_words)

    def _publish(self, outputs: Sequence[EngineOutput]) -> None:
        if outputs:
            self._news.tell_each(self._owners.address(outputs))


def _brings_work(request: EngineRequest) -> bool:
    """What others have done for it would be lost. There are no more of these than other engines can have."""
    return bool(request.output_token_ids) or request.kv_source is not None


def _full(stats: EngineStats, limits: QueueLimits) -> EngineError:
    requests, tokens = counted(stats.num_requests_waiting, "request"), counted(stats.num_waiting_tokens, "token")
    message = (
        f"What waits in this engine: {requests}, with {tokens} to compute. "
        f"gateway.queue_limits are {limits.requests} and {limits.tokens}."
    )
    return EngineError(ErrorKind.OVERLOADED, message)
