"""Counters of an engine's transfers."""

from __future__ import annotations

import msgspec

from baton.engine.core.pace import Line


class PeerLane(msgspec.Struct, frozen=True, kw_only=True):
    """The lane over which an engine reads a peer's memory."""

    engine_id: str  # of the peer
    transport: str
    bytes_per_s: float | None  # of reads on behalf of receives lately; before the first, as measured at pairing
    is_slow: bool  # a GPU's memory travels so slowly that it probably goes through TCP
    num_reads: int = 0  # that were measured
    read_s: Line | None = None  # the time of a read, by its blocks: of all ranks' shares of them; None: not known


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one engine, from its process's start on."""

    offers: dict[str, int] = {}  # that ended, by outcome: finished, withdrawn, expired
    receives: dict[str, int] = {}  # that ended, by outcome: see `ReceiveOutcome`
    leases_held: int = 0
    blocks_held: int = 0
    receives_active: int = 0  # that may still succeed
    blocks_quarantined: int = 0
    bytes_read: int = 0
    descriptors_read: int = 0
    blocks_read_early: int = 0  # while the holder was still writing others of the same prompt
    receive_seconds: float = 0.0  # summed over those that were received, from the engine's call to the commit
    messages_stale: int = 0  # of another epoch or generation, or after the end: dropped
    messages_malformed: int = 0
    messages_unsent: int = 0
    peers_ready: int = 0
    lanes: list[PeerLane] = []  # to those
    reads_fallen_back: int = 0  # failed in one way and were begun again in another
    buffer_blocks: int = 0  # staging slots in use, where blocks go by way of the host buffer
    buffer_refusals: int = 0  # prompts for which it had too few slots
