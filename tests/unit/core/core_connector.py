"""A fake connector between engines over `core_memory`: tests decide when a transfer ends, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.connector import (
    BlocksReleased,
    ConnectorEvent,
    GrowingConnector,
    Offer,
    OfferEnded,
    OfferOutcome,
    Received,
    ReceiveFailed,
    TransferId,
)

from .core_memory import GARBAGE, KVMemory, StateMemory, kv_of
from .core_runner import FakeRunner


@dataclass
class OpenOffer:
    request_id: str
    generation: int
    blocks: list[int]
    content: list[int]  # the KV values that the prefill engine writes
    num_tokens: int
    num_ready: int = 0  # leading blocks that are written
    withdrawn: bool = False


@dataclass
class Pull:
    request_id: str
    ticket: bytes
    first_block: int
    blocks: list[int]
    cancelled: bool = False
    failed: bool = False


class Arenas:
    """The memories of all cache groups, with blocks numbered from the first arena on to the last."""

    def __init__(self, config: EngineCoreConfig, runner: FakeRunner) -> None:
        self._config = config
        self._memories: list[KVMemory | StateMemory] = [*runner.memories, *runner.states.values()]
        self._firsts = [
            sum(group.num_blocks for group in config.groups[:number]) for number in range(len(config.groups))
        ]

    @property
    def num_groups(self) -> int:
        return len(self._memories)

    def group_of(self, block: int) -> int:
        return max(number for number, first in enumerate(self._firsts) if first <= block)

    def content(self, block: int) -> list[int]:
        """Return all values of a block, or the state in a slot."""
        return list(self.read(block, self._config.block_size))

    def handed_over(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return ranges of positions, one for each block of a hand-off: the positions that later tokens read.

        For a state, the range is its last position.
        """
        found = []
        for number, group in enumerate(self._config.groups):
            if group.checkpoint_tokens is not None:
                found.append((num_tokens, number, num_tokens - 1))
                continue
            size = self._config.block_size
            first = 0 if group.window is None else max(0, num_tokens - group.window + 1)
            starts = range(first // size * size, num_tokens, size)
            found += [(min(start + size, num_tokens), number, start) for start in starts]
        return [(start, end) for end, _, start in sorted(found)]

    def num_complete(self, num_tokens: int, num_computed: int) -> int:
        return sum(end <= num_computed for _, end in self.handed_over(num_tokens))

    def read(self, block: int, num_values: int) -> list[int]:
        memory, own = self._at(block)
        return [memory.slots[own]] if isinstance(memory, StateMemory) else memory.blocks[own][:num_values]

    def write(self, block: int, values: Sequence[int]) -> None:
        memory, own = self._at(block)
        if isinstance(memory, StateMemory):
            (memory.slots[own],) = values
        else:
            memory.blocks[own][: len(values)] = values

    def spoil(self, block: int) -> None:
        memory, own = self._at(block)
        if isinstance(memory, StateMemory):
            memory.slots[own] = GARBAGE
        else:
            memory.blocks[own] = [GARBAGE] * memory.block_size

    def _at(self, block: int) -> tuple[KVMemory | StateMemory, int]:
        number = self.group_of(block)
        return self._memories[number], block - self._firsts[number]


class FakeConnector(GrowingConnector):
    """A `KVConnector` whose transfers end when the test says so, in any order, well or badly.

    `fetch` returns the KV values that belong to a ticket. Between a failure and the release of the blocks, `scribble`
    writes into them as a late transfer would.
    """

    def __init__(
        self, runner: FakeRunner, fetch: Callable[[bytes], Sequence[int]], *, offers_early: bool = False
    ) -> None:
        self.offers_early = offers_early
        self._arenas = Arenas(runner.config, runner)
        self._fetch = fetch
        self._next_id = 0
        self.events: list[ConnectorEvent] = []
        self.offers: dict[TransferId, OpenOffer] = {}
        self.pulls: dict[TransferId, Pull] = {}

    # ---- KVConnector

    def offer(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        offer = self.offer_growing(request_id, generation, block_ids, num_tokens)
        self.advance(offer.transfer_id, len(block_ids))
        return offer

    def offer_growing(self, request_id: str, generation: int, block_ids: Sequence[int], num_tokens: int) -> Offer:
        transfer_id = self._new_id()
        assert len(block_ids) == len(self._arenas.handed_over(num_tokens)), "exactly the prompt's blocks are offered"
        self.offers[transfer_id] = OpenOffer(request_id, generation, list(block_ids), [], num_tokens)
        return Offer(transfer_id, str(transfer_id).encode())

    def advance(self, transfer_id: TransferId, num_ready: int, last_blocks: Sequence[int] = ()) -> None:
        offer = self.offers.get(transfer_id)
        if offer is None:
            return
        assert not offer.withdrawn, "what was given up grows no more"
        if last_blocks:
            assert num_ready == len(offer.blocks), "the last blocks are named before all are written"
            offer.blocks[-len(last_blocks) :] = last_blocks
        content = self._read(offer, num_ready)
        assert GARBAGE not in content, "blocks that were not written are said to be"
        assert content[: len(offer.content)] == offer.content, "what was written before is something else now"
        offer.content, offer.num_ready = content, num_ready

    def withdraw(self, transfer_id: TransferId) -> None:
        if transfer_id in self.offers:
            self.offers[transfer_id].withdrawn = True

    def receive(
        self, request_id: str, generation: int, ticket: bytes, first_block: int, block_ids: Sequence[int]
    ) -> TransferId:
        transfer_id = self._new_id()
        self.pulls[transfer_id] = Pull(request_id, ticket, first_block, list(block_ids))
        return transfer_id

    def cancel(self, transfer_id: TransferId) -> None:
        if transfer_id in self.pulls:
            self.pulls[transfer_id].cancelled = True

    def poll(self) -> list[ConnectorEvent]:
        events, self.events = self.events, []
        return events

    # ---- called by tests

    def end_offer(self, transfer_id: TransferId, outcome: OfferOutcome = OfferOutcome.FINISHED) -> None:
        self.check_offers()
        del self.offers[transfer_id]
        self.events.append(OfferEnded(transfer_id, outcome))

    def complete(self, transfer_id: TransferId) -> None:
        pull = self.pulls.pop(transfer_id)
        assert not pull.cancelled
        assert not pull.failed
        values = list(self._fetch(pull.ticket))
        wanted = self._arenas.handed_over(len(values))[pull.first_block :]
        for block, (start, end) in zip(
            pull.blocks, wanted, strict=True
        ):  # the engine asks for exactly the missing blocks
            self._arenas.write(block, values[start:end])
        self.events.append(Received(transfer_id))

    def fail(self, transfer_id: TransferId, reason: str = "the peer is gone", *, offer_ended: bool = False) -> None:
        self.pulls[transfer_id].failed = True
        self.events.append(ReceiveFailed(transfer_id, reason, offer_ended))

    def scribble(self, transfer_id: TransferId) -> None:
        for block in self.pulls[transfer_id].blocks:
            self._arenas.spoil(block)

    def release(self, transfer_id: TransferId) -> None:
        assert self.pulls[transfer_id].failed
        del self.pulls[transfer_id]
        self.events.append(BlocksReleased(transfer_id))

    def check_offers(self) -> None:
        """Check that the content of offered blocks is unchanged."""
        for offer in self.offers.values():
            assert self._read(offer, offer.num_ready) == offer.content, "an offered block changed"

    def check_content(self, offer: OpenOffer, token_ids: Sequence[int]) -> None:
        """Check that the written part of an offer is the KV of these tokens."""
        values = kv_of(token_ids)[: offer.num_tokens]
        places = self._arenas.handed_over(offer.num_tokens)[: offer.num_ready]
        expected = [value for start, end in places for value in values[start:end]]
        assert offer.content == expected, f"{offer.request_id} offers what is not of its prompt"

    def _read(self, offer: OpenOffer, num_blocks: int) -> list[int]:
        """Return the values of an offer's leading blocks."""
        places = self._arenas.handed_over(offer.num_tokens)
        pairs = zip(offer.blocks[:num_blocks], places[:num_blocks], strict=True)
        return [value for block, (start, end) in pairs for value in self._arenas.read(block, end - start)]

    def _new_id(self) -> TransferId:
        self._next_id += 1
        return self._next_id


def ticket_for(request_tokens: Sequence[int]) -> bytes:
    """Return a ticket whose KV is known without a peer; see `fetch_from_ticket`."""
    return msgspec.json.encode(list(request_tokens))


def fetch_from_ticket(ticket: bytes) -> list[int]:
    return kv_of(msgspec.json.decode(ticket, type=list[int]))
