"""A rank of the group that is another process, as rank 0's reads see it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from ..errors import RankLost
from ..transports import PeerHandle, PeerState, ReadHandle, ReadState
from .rank_reader import RankMemory
from .read_messages import (
    AddPeer,
    CheckHandle,
    CheckReport,
    CompareBlocks,
    MakeDigests,
    MakeProgress,
    PeerReport,
    ReadReport,
    RemovePeer,
    Report,
    StartRead,
)

logger = logging.getLogger(__name__)

ASK_ALIVE_EVERY_S = 0.5
SERVE_FOR_S = 2 * ASK_ALIVE_EVERY_S
MAX_UNANSWERED = 20  # a rank that leaves so many `MakeProgress` in a row without a word is lost


class RemoteRank:
    """Used like a `RankReader`.

    Orders go out at once; answers are what the rank has reported so far. Calls raise `RankLost` once it cannot be
    reached.
    """

    def __init__(
        self, rank: int, memory: RankMemory, send: Callable[[msgspec.Struct], None], clock: Callable[[], float]
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.num_bytes = 0
        self.num_descriptors = 0
        self._send = send
        self._clock = clock
        self._peers: dict[PeerHandle, PeerState] = {}
        self._reads: dict[ReadHandle, ReadReport] = {}
        self._checks: dict[CheckHandle, CheckReport | None] = {}
        self._ask_alive_at = 0.0
        self._unanswered = 0

    def add_peer(self, peer: PeerHandle, metadata: bytes) -> None:
        self._peers[peer] = PeerState.CONNECTING
        self._send(AddPeer(peer, metadata))

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return self._peers[peer]

    def remove_peer(self, peer: PeerHandle) -> None:
        del self._peers[peer]
        self._send(RemovePeer(peer))

    def read(self, read: ReadHandle, peer: PeerHandle, source_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        self._reads[read] = ReadReport(read, ReadState.RUNNING, "", False, 0, 0)
        self._send(StartRead(read, peer, list(source_blocks), list(blocks)))

    def poll(self, read: ReadHandle) -> ReadState:
        return self._reads[read].state

    def reason(self, read: ReadHandle) -> str:
        return f"rank {self.rank}: {self._reads[read].reason}"

    def release(self, read: ReadHandle) -> bool:
        if not self._reads[read].released:
            return False
        del self._reads[read]
        return True

    def digest(self, check: CheckHandle, blocks: Sequence[int]) -> None:
        self._checks[check] = None
        self._send(MakeDigests(check, list(blocks)))

    def compare(self, check: CheckHandle, peer: PeerHandle, blocks: Sequence[int], by_rank: Sequence[bytes]) -> None:
        self._checks[check] = None
        self._send(CompareBlocks(check, peer, list(blocks), tuple(by_rank)))

    def report_of(self, check: CheckHandle) -> CheckReport | None:
        return self._checks[check]

    def forget(self, check: CheckHandle) -> None:
        del self._checks[check]

    def progress(self) -> None:
        """Ask the rank to serve its readers and to answer with `Alive`, twice a second at most."""
        if self._clock() < self._ask_alive_at:
            return
        if self._unanswered == MAX_UNANSWERED:
            raise RankLost(f"rank {self.rank} has not answered for {MAX_UNANSWERED * ASK_ALIVE_EVERY_S:g} s")
        self._unanswered += 1
        self._ask_alive_at = self._clock() + ASK_ALIVE_EVERY_S
        self._send(MakeProgress(SERVE_FOR_S))

    def watch(self) -> None:
        """Ask for a sign of life while answers are pending, so that the loss of the rank raises `RankLost`."""
        if self._reads or self._checks or PeerState.CONNECTING in self._peers.values():
            self.progress()

    def on_report(self, report: Report) -> None:
        self._unanswered = 0
        match report:
            case PeerReport():
                if report.peer in self._peers:  # it may be removed meanwhile
                    self._peers[report.peer] = report.state
                if report.reason:
                    logger.warning("rank %d cannot reach a peer's memory: %s", self.rank, report.reason)
            case ReadReport():
                if report.read not in self._reads:
                    raise RankLost(f"rank {self.rank} reports of a read that it was not asked for")
                self._reads[report.read] = report
                self.num_bytes, self.num_descriptors = report.num_bytes, report.num_descriptors
            case CheckReport():
                if report.check not in self._checks:
                    raise RankLost(f"rank {self.rank} reports of digests that it was not asked for")
                self._checks[report.check] = report
