"""Blocks that belong to a transfer instead of a request, and requests that wait for a transfer.

    held            offer ──────────────────────────────────────── OfferEnded ──> released
    growing         the request and the offer each hold a reference; the block is free when both are dropped
    pulling         receive ── Received ──> the request's again
                            └─ ReceiveFailed, abort ──> quarantined ── BlocksReleased ──> released

A reference has exactly one owner at any time, and is released exactly once. Events with unknown ids change nothing.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from ..connector import (
    BlocksReleased,
    ConnectorEvent,
    GrowingConnector,
    KVConnector,
    OfferEnded,
    Received,
    ReceiveFailed,
    TransferId,
)
from ..messages import KVSource
from ..requests.request import Request
from ..stages import Stage
from .block_numbers import BlockNumbers
from .held_blocks import HeldBlocks, Quarantine

logger = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """The end of a receive: the request's KV is in its blocks, or `failure` says why it is not."""

    request: Request
    failure: str | None
    offer_ended: bool = False  # the offer ended before it was claimed


class GrowingOffer(NamedTuple):
    """A prompt that is on offer while it is still being computed."""

    transfer_id: TransferId
    source: KVSource


class Transfers:
    """All transfers of an engine; without a connector there are none."""

    def __init__(self, connector: KVConnector | None, numbers: BlockNumbers) -> None:
        self._connector = connector
        self._numbers = numbers
        self.held = HeldBlocks(numbers)
        self.quarantine = Quarantine(numbers)
        self._pulling: dict[TransferId, tuple[Request, list[int]]] = {}  # with the blocks to fill
        self._transfer_of: dict[Request, TransferId] = {}
        self._early = connector if isinstance(connector, GrowingConnector) and connector.offers_early else None
        self._growing: dict[Request, GrowingOffer] = {}
        self._withdrawn: set[TransferId] = set()  # growing offers that were withdrawn and have not ended

    @property
    def has_connector(self) -> bool:
        return self._connector is not None

    @property
    def num_pulling(self) -> int:
        return len(self._pulling)

    @property
    def has_withdrawn_offers(self) -> bool:
        """True while withdrawn offers still hold blocks that their requests gave up: their readers have not ended."""
        return bool(self._withdrawn)

    def pulls(self, request: Request) -> bool:
        """Return whether the request waits for a receive."""
        return request in self._transfer_of

    def grows(self, request: Request) -> bool:
        return request in self._growing

    def offer_early(self, request: Request) -> KVSource | None:
        """Offer a prompt before it is computed. Returns None if that is not possible.

        The offer holds its own reference to each block, so no block is reused before the reader has ended, whatever
        becomes of the request. Slots of states are added when the prompt is computed, since they are known only then.
        """
        if self._early is None or request.is_constrained or request in self._growing:
            return None
        num_tokens = len(request.token_ids)
        blocks = self._numbers.handed_over(request.block_tables, num_tokens)
        offer = self._early.offer_growing(request.request_id, request.generation, blocks, num_tokens)
        known = blocks[: len(blocks) - self._numbers.num_states]
        self._numbers.reference(known)
        self.held.hold(offer.transfer_id, request.request_id, request.generation, known)
        source = KVSource(offer.ticket, num_tokens)
        self._growing[request] = GrowingOffer(offer.transfer_id, source)
        return source

    def advance(self, request: Request, num_tokens: int) -> None:
        """Note that the KV of the first `num_tokens` tokens is written: the step that wrote it is settled."""
        growing = self._growing.get(request)
        if growing is not None and self._early is not None:
            self._early.advance(growing.transfer_id, self._numbers.num_complete(growing.source.num_tokens, num_tokens))

    def give_up_early(self, request: Request) -> None:
        """Withdraw an early offer, because the request gives up its blocks before its prompt is computed."""
        growing = self._growing.pop(request, None)
        if growing is not None:
            assert self._connector is not None
            self._withdrawn.add(growing.transfer_id)
            self._connector.withdraw(growing.transfer_id)

    def offer(self, request: Request) -> KVSource:
        """Move the blocks of a computed prompt to an offer. Returns where a decode engine finds them."""
        assert self._connector is not None
        growing = self._growing.pop(request, None)
        if growing is not None and self._early is not None:
            num_tokens, states = growing.source.num_tokens, self._numbers.states(request.block_tables)
            self._numbers.reference(states)
            self.held.hold_more(growing.transfer_id, states)
            self._early.advance(growing.transfer_id, self._numbers.num_complete(num_tokens, num_tokens), states)
            return growing.source
        num_tokens = request.num_computed
        blocks = self._numbers.handed_over(request.block_tables, num_tokens)  # these belong to the offer from here on
        owned = self._numbers.of_groups(request.give_up_blocks())
        if len(owned) > len(blocks):
            kept = set(blocks)
            self._numbers.release([block for block in owned if block not in kept])
        offer = self._connector.offer(request.request_id, request.generation, blocks, num_tokens)
        self.held.hold(offer.transfer_id, request.request_id, request.generation, blocks)
        return KVSource(offer.ticket, num_tokens)

    def withdraw(self, request_id: str, newest: float) -> None:
        """Withdraw the request's offers, of generations up to `newest`."""
        for transfer_id in self.held.offers_of(request_id, newest):
            assert self._connector is not None
            self._connector.withdraw(transfer_id)

    def receive(self, request: Request) -> None:
        """Start to fill the request's blocks behind its prefix hits.

        The transfer is started even if no block is missing, so that the other engine may release its blocks.
        """
        source = request.message.kv_source
        assert self._connector is not None
        assert source is not None
        num_present = self._numbers.num_complete(source.num_tokens, request.num_computed)
        wanted = self._numbers.handed_over(request.block_tables, source.num_tokens)[num_present:]
        transfer_id = self._connector.receive(
            request.request_id, request.generation, source.ticket, num_present, wanted
        )
        request.has_requested_kv = True
        self._pulling[transfer_id] = (request, wanted)
        self._transfer_of[request] = transfer_id

    def cancel(self, request: Request) -> None:
        """Give up a receive. No `Arrival` follows."""
        assert self._connector is not None
        transfer_id = self._transfer_of[request]
        self._isolate(transfer_id)
        self._connector.cancel(transfer_id)

    def poll(self) -> list[Arrival]:
        if self._connector is None:
            return []
        arrivals = []
        for event in self._connector.poll():
            arrival = self._handle(event)
            if arrival is not None:
                arrivals.append(arrival)
        return arrivals

    def _handle(self, event: ConnectorEvent) -> Arrival | None:
        transfer_id = event.transfer_id
        match event:
            case Received() if transfer_id in self._pulling:
                request, _ = self._pulling.pop(transfer_id)
                del self._transfer_of[request]
                _note_stages(request, event)
                return Arrival(request, None)
            case ReceiveFailed() if transfer_id in self._pulling:
                return Arrival(self._isolate(transfer_id), event.reason, event.offer_ended)
            case ReceiveFailed() if transfer_id in self.quarantine:
                return None  # the end of a cancelled receive
            case Received() | BlocksReleased() if self.quarantine.release(transfer_id):
                return None  # a Received that crossed with the cancel: no write can be in flight any more
            case OfferEnded() if self.held.release(transfer_id):
                self._withdrawn.discard(transfer_id)
                self._growing = {of: offer for of, offer in self._growing.items() if offer.transfer_id != transfer_id}
                return None
        logger.warning("ignored %s: no transfer of this engine is in that state", event)
        return None

    def _isolate(self, transfer_id: TransferId) -> Request:
        """Take a request's blocks from it, and quarantine those that the transfer may still write."""
        request, wanted = self._pulling.pop(transfer_id)
        del self._transfer_of[request]
        _, owned = request.give_up_memory()
        written = set(wanted)
        self._numbers.release([block for block in self._numbers.of_groups(owned) if block not in written])
        self.quarantine.admit(transfer_id, wanted)
        return request


def _note_stages(request: Request, received: Received) -> None:
    if received.claimed_s is not None:
        request.stages.reach(Stage.CLAIMED, received.claimed_s)
    if received.pulled_s is not None:
        request.stages.reach(Stage.PULLED, received.pulled_s)
    request.stages.reach(Stage.COMMITTED)
