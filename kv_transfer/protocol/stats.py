"""Counters of an engine's transfers."""

from __future__ import annotations

import msgspec

from baton.engine.core.pace import Line


class PeerLane(msgspec.Struct, frozen=True, kw_only=True):
    """The lane over which an engine reads a peer's memory."""

    engine_id: str  # of the peer
    transport: str
    bytes_per_s: float | None  # rate of recent receives; before the first one, as measured at pairing
    is_slow: bool  # GPU memory comes so slowly that it probably goes through TCP
    is_staged: bool = False  # GPU memory goes through pinned memory of both hosts
    num_reads: int = 0  # number of reads that were measured
    read_s: Line | None = None  # the time of a read by its number of blocks, on all ranks; None: not known


class TransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one engine since its process started."""

    offers: dict[str, int] = {}  # ended ones by outcome: finished, withdrawn, expired
    receives: dict[str, int] = {}  # ended ones by outcome: see `ReceiveOutcome`
    leases_held: int = 0
    blocks_held: int = 0
    receives_active: int = 0  # receives that can still be committed
    blocks_quarantined: int = 0
    bytes_read: int = 0
    descriptors_read: int = 0
    blocks_read_early: int = 0  # read while the holder was still writing other blocks of the prompt
    receive_seconds: float = 0.0  # sum over committed receives, from the engine's call to the commit
    messages_stale: int = 0  # dropped: of another epoch or generation, or too late
    messages_malformed: int = 0
    messages_unsent: int = 0
    peers_ready: int = 0
    lanes: list[PeerLane] = []  # to the ready peers
    reads_fallen_back: int = 0  # reads that failed over one transport and began again over another
    buffer_blocks: int = 0  # staging slots in use, if there is a host buffer
    buffer_refusals: int = 0  # prompts for which the host buffer had too few slots
