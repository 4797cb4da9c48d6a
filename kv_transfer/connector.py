"""The engine's `KVConnector`, which runs hand-offs in a transfer thread.

step loop ──calls──> queue ──> transfer thread: sockets, transport, state machines  ──events──> poll()
                                  │                                                └──> wake()
                                  └──orders──> other ranks' ReadHandler
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from baton.engine.core.connector import ConnectorEvent, GrowingConnector, Offer, Received, TransferId
from baton.engine.core.regions import CacheRegion

from .channel import Channel, ZmqChannel
from .errors import RankLost, TransferThreadDied, TransportError
from .group.rank_reader import RankReader
from .group.rpc import GroupSocket
from .group.tp_read_group import TpReadGroup, gather
from .handoff.coordinator import HandoffCoordinator
from .lease_clock import ahead_of_monotonic_s, lease_now
from .protocol.block_runs import encode_runs
from .protocol.messages import LeaseKey
from .protocol.stats import TransferStats
from .protocol.ticket import TICKET_VERSION, Ticket
from .settings import LocalEngine, PeerInfo, TransferSettings
from .threads import ChannelThread
from .transports import Transport
from .transports.opening import START_TIMEOUT_S, open_transport

__all__ = ["PeerInfo", "TransferConnector", "TransferSettings", "TransferStats"]

logger = logging.getLogger(__name__)

STATS_EVERY_S = 5e-3
CLOSE_TIMEOUT_S = 5.0  # for running reads: ours, and those that peers do of our memory


class TransferConnector(GrowingConnector):
    """Implements `engine.core.connector.KVConnector`, whose docstrings explain offers and receives.

    One transfer thread owns the sockets and the transport. The step loop's calls only enqueue commands for it. It
    calls `wake` whenever `poll` has something new. Raises `TransportError` if the region cannot be registered.
    """

    def __init__(
        self,
        region: CacheRegion,
        me: LocalEngine,
        *,
        settings: TransferSettings | None = None,
        wake: Callable[[], None] = lambda: None,
        read_socket: GroupSocket | None = None,
        staged: bool = False,
    ) -> None:
        """`read_socket` is where the other ranks of a tensor-parallel group join rank 0, which this is. The call waits
        until all have joined, or raises `TransportError`. `close` closes the socket too; if the constructor raises, it
        stays open. `staged`: the region holds staging slots, not the engine's blocks.
        """
        self._staged = staged
        self._me = me.name
        self._region = region
        self._settings = settings or TransferSettings()
        self.offers_early = self._settings.progressive
        self._fingerprint = region.fingerprint
        self._wake = wake
        self._ids = itertools.count(1)
        self._commands: collections.deque[Callable[[HandoffCoordinator], None]] = collections.deque()
        self._events: collections.deque[ConnectorEvent] = collections.deque()
        self._stats = TransferStats()
        self._stats_due = 0.0
        self._has_emitted = False  # an event, in this round
        self._failure: Exception | None = None
        self._gate = threading.Lock()  # nothing is enqueued after `close` began
        self._read_socket = read_socket
        self._channel = ZmqChannel(me.host, me.key, heartbeat_timeout_s=self._settings.heartbeat_timeout_s)
        if read_socket is not None:
            self._channel.watch(read_socket.channel)
        self.address = self._channel.address  # this engine's `kv_address`
        self._thread = ChannelThread("baton-transfer", self._channel, self._run)
        self._thread.open(START_TIMEOUT_S)

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        return self._offer(request_id, generation, block_ids, num_tokens, num_ready=len(block_ids))

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        return self._offer(request_id, generation, block_ids, num_tokens, num_ready=0)

    def _offer(
        self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int, num_ready: int
    ) -> Offer:
        transfer_id = next(self._ids)
        lease = LeaseKey(self._me, request_id, generation, transfer_id)
        ticket = Ticket(
            version=TICKET_VERSION,
            lease=lease,
            kv_address=self.address,
            fingerprint=self._fingerprint,
            transport=self._settings.transport_name,
            num_tokens=num_tokens,
            lease_s=self._settings.lease_s,
            digest=self._settings.digest,
            num_ready=num_ready,
            runs=encode_runs(block_ids),
        )
        blocks = list(block_ids)
        self._enqueue(lambda handoff: handoff.offer(lease, blocks, num_ready))
        return Offer(transfer_id, ticket.encode())

    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        last = tuple(last_blocks)
        self._enqueue(lambda handoff: handoff.advance(transfer_id, num_ready, last))

    def withdraw(self, transfer_id: TransferId) -> None:
        self._enqueue(lambda handoff: handoff.withdraw(transfer_id))

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        transfer_id = next(self._ids)
        blocks = list(block_ids)
        self._enqueue(lambda handoff: handoff.receive(transfer_id, ticket, first_block, blocks))
        return transfer_id

    def cancel(self, transfer_id: TransferId) -> None:
        self._enqueue(lambda handoff: handoff.cancel(transfer_id))

    def poll(self) -> list[ConnectorEvent]:
        """Return the events since the last call, in order. Raises `TransferThreadDied` once there can be no more."""
        failure = self._failure  # read before the events, so that all events of a thread that died are returned first
        events = []
        while self._events:
            events.append(self._events.popleft())
        if not events and failure is not None:
            raise TransferThreadDied(f"KV transfers of {self._me.engine_id} stopped: {failure}") from failure
        return events

    def peers_changed(self, live: Collection[PeerInfo]) -> None:
        """Connect to the live engines that have our KV layout, and forget peers that are no longer alive."""
        snapshot = list(live)
        self._enqueue(lambda handoff: handoff.peers_changed(snapshot))

    def stats(self) -> TransferStats:
        """Return the counters, which are at most some milliseconds old and include the last event."""
        return self._stats

    def close(self) -> bool:
        """End all receives and offers, wait up to `CLOSE_TIMEOUT_S` for running reads, and deregister the memory.

        Returns False if the transfer thread has not ended within `threads.CLOSE_TIMEOUT_S`, as when a library hangs.
        It is left running then: the sockets stay open, and the memory registered.
        """
        with self._gate:
            self._thread.end()
        if not self._thread.close():
            return False
        if self._read_socket is not None:
            self._read_socket.close()
        return True

    def _enqueue(self, command: Callable[[HandoffCoordinator], None]) -> None:
        with self._gate:
            if self._thread.is_closing or self._failure is not None:
                return
            self._commands.append(command)
            self._channel.wake()

    # ------------------------------------------------------------------ in the transfer thread

    def _run(self, ready: Callable[[], None]) -> None:
        group = self._make_group()
        handoff = self._make_handoff(self._channel, group)
        ready()
        try:
            while not self._thread.is_closing:
                self._channel.wait(self._round(handoff))
            self._end_transfers(handoff)
        except RankLost as error:
            logger.error("KV transfers of %s stopped: %s", self._me.engine_id, error)
            self._fail_all(handoff, error)
        except Exception as error:
            logger.exception("the transfer thread of %s died", self._me.engine_id)
            self._fail_all(handoff, error)
        group.close()

    def _round(self, handoff: HandoffCoordinator) -> float:
        self._has_emitted = False
        pause_s = handoff.pump(self._commands_given)
        now = time.monotonic()
        # A thread that polls has too many rounds to do this in each.
        if pause_s >= STATS_EVERY_S or self._has_emitted or now >= self._stats_due:
            lanes = self._stats.lanes
            self._stats, self._stats_due = handoff.stats(), now + STATS_EVERY_S
            if self._stats.lanes != lanes and not self._has_emitted:
                self._wake()  # an engine that only waits for blocks must publish the new rates, too
        return pause_s

    def _commands_given(self) -> Iterator[Callable[[HandoffCoordinator], None]]:
        while self._commands:
            yield self._commands.popleft()

    def _emit(self, event: ConnectorEvent) -> None:
        self._events.append(_by_monotonic(event) if isinstance(event, Received) else event)
        self._wake()
        if not self._has_emitted:
            self._has_emitted = True
            time.sleep(0)  # release the GIL: the step loop would otherwise wait for the end of this round, 100 us

    def _end_transfers(self, handoff: HandoffCoordinator) -> None:
        for command in self._commands_given():
            command(handoff)
        handoff.abandon("the engine is closing")
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while handoff.any_access and time.monotonic() < deadline:
            self._channel.wait(self._round(handoff))

    def _fail_all(self, handoff: HandoffCoordinator, error: Exception) -> None:
        """Fail all receives after an error, so that no request waits forever; then `poll` raises."""
        try:
            handoff.abandon(f"KV transfers stopped: {error}")
        except Exception:
            logger.exception("receives could not be failed one by one")
        self._failure = error
        self._wake()

    def _make_handoff(self, channel: Channel, group: TpReadGroup) -> HandoffCoordinator:
        return HandoffCoordinator(self._me, channel, group, self._settings, lease_now, self._emit)

    def _open_transport(self) -> Transport:
        return open_transport(self._settings, self._region, f"{self._me.engine_id}:{self._me.epoch}")

    def _make_group(self) -> TpReadGroup:
        reader = RankReader(0, self._region, self._open_transport(), staged=self._staged)
        try:
            if self._read_socket is None:
                return TpReadGroup(reader)
            channel = self._read_socket.channel
            return gather(reader, self._read_socket.size, channel, clock=time.monotonic, wait=channel.wait)
        except TransportError:
            reader.close()
            raise


def _by_monotonic(event: Received) -> Received:
    """Convert an event's times from the lease clock to `time.monotonic`, the engine's clock."""
    if event.claimed_s is None or event.pulled_s is None:
        return event
    ahead_s = ahead_of_monotonic_s()
    return msgspec.structs.replace(event, claimed_s=event.claimed_s - ahead_s, pulled_s=event.pulled_s - ahead_s)
