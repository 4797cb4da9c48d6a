"""Blocks that no request owns any more, but a transfer or a tier copy still reads, or may still write to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..connector import TransferId


class Releases(Protocol):
    """One pool, or all of them (`BlockNumbers`)."""

    def release(self, blocks: Sequence[int], /) -> None: ...


class _Held(NamedTuple):
    request_id: str
    generation: int
    blocks: list[int]


class HeldBlocks:
    """Blocks on offer, held for the engines that read them."""

    def __init__(self, pool: Releases) -> None:
        self._pool = pool
        self._offers: dict[TransferId, _Held] = {}
        self._holders: Counter[int] = Counter()  # offers of each block: several, if requests share a prefix

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    def owned_blocks(self) -> list[list[int]]:
        """Return the blocks of each offer."""
        return [held.blocks for held in self._offers.values()]

    def hold(self, transfer_id: TransferId, request_id: str, generation: int, blocks: list[int]) -> None:
        self._offers[transfer_id] = _Held(request_id, generation, blocks)
        self._holders.update(blocks)

    def hold_more(self, transfer_id: TransferId, blocks: list[int]) -> None:
        """Add blocks to an offer."""
        self._offers[transfer_id].blocks.extend(blocks)
        self._holders.update(blocks)

    def release(self, transfer_id: TransferId) -> bool:
        """Release the blocks of an offer. Returns False if the offer is unknown."""
        held = self._offers.pop(transfer_id, None)
        if held is None:
            return False
        for block in held.blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
        self._pool.release(held.blocks)
        return True

    def offers_of(self, request_id: str, newest: float) -> list[TransferId]:
        """Return the request's offers, of generations up to `newest`."""
        return [
            transfer
            for transfer, held in self._offers.items()
            if held.request_id == request_id and held.generation <= newest
        ]


class Quarantine:
    """Blocks to which a cancelled transfer or copy may still write."""

    def __init__(self, pool: Releases) -> None:
        self._pool = pool
        self._blocks: dict[int, list[int]] = {}  # by the number of the transfer, or of the copy
        self.num_blocks = 0

    def __contains__(self, writer: int) -> bool:
        return writer in self._blocks

    def owned_blocks(self) -> list[list[int]]:
        """Return the blocks of each writer, a transfer or a copy."""
        return list(self._blocks.values())

    def admit(self, writer: int, blocks: list[int]) -> None:
        self._blocks[writer] = blocks
        self.num_blocks += len(blocks)

    def release(self, writer: int) -> bool:
        """Release the blocks of a writer that has ended. Returns False if it is unknown."""
        blocks = self._blocks.pop(writer, None)
        if blocks is None:
            return False
        self.num_blocks -= len(blocks)
        self._pool.release(blocks)
        return True
