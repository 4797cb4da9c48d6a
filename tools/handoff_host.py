"""Measure the host's part of hand-offs: CPU time from the engine's call to committed blocks, without copies.

    python tools/handoff_host.py            # prompts of 32, 512 and 2048 blocks that all lie apart
    python tools/handoff_host.py --cold     # ... with caches that hold nothing of the last hand-off

Two engines of an 8B model are in one thread. Messages between them are encoded and decoded, but pass through lists in
place of sockets; a stand-in for the transport checks the byte ranges that it is to read, and reads nothing. So what is
missing of a real hand-off are sockets, threads that wake up, and calls of the device. With `--cold`, 48 MB are written
between the stages, as a copy or a step of the model would.

The result is a table of medians in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from baton.engine.core.connector import ConnectorEvent, OfferEnded, Received
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.kv_transfer.channel import Route
from baton.kv_transfer.group.rank_reader import RankReader
from baton.kv_transfer.group.tp_read_group import TpReadGroup
from baton.kv_transfer.handoff.coordinator import HandoffCoordinator
from baton.kv_transfer.lease_clock import lease_now
from baton.kv_transfer.protocol.block_runs import encode_runs
from baton.kv_transfer.protocol.messages import DigestMode, EngineKey, LeaseKey
from baton.kv_transfer.protocol.ticket import TICKET_VERSION, Ticket
from baton.kv_transfer.settings import PeerInfo, TransferSettings
from baton.kv_transfer.transports import Lane, PeerHandle, PeerState, Ranges, ReadHandle, ReadState
from baton.kv_transfer.transports.common import check_ranges
from baton.kv_transfer.transports.fastest import FastestTransport

LAYOUT = KVLayout(model="8b", num_layers=36, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 2.36 MB a block
NUM_BLOCKS = 8192
H200_BYTES_PER_S = 1.7e12  # measured between two engines of one GPU; it determines how many blocks a batch has
NAME = "none"
HOLDER, READER = EngineKey("holder", 1), EngineKey("reader", 1)
CACHE_BYTES = 48 << 20
WARM_UPS = 50
Stamps = dict[str, float]  # CPU time, in seconds


class Failed(Exception):
    """A hand-off has not been committed."""


class NoCopies:
    """A `Transport` whose reads have ended when they are posted, and have moved nothing."""

    name = NAME
    num_fallbacks = 0

    def __init__(self, region: CacheRegion, stamps: Stamps) -> None:
        self._num_bytes = region.num_bytes
        self._stamps = stamps

    def metadata(self) -> bytes:
        return b""

    def add_peer(self, metadata: bytes) -> PeerHandle:
        return 1

    def peer_state(self, peer: PeerHandle) -> PeerState:
        return PeerState.CONNECTED

    def lane(self, peer: PeerHandle) -> Lane:
        return Lane(NAME, H200_BYTES_PER_S)

    def remove_peer(self, peer: PeerHandle) -> None: ...

    def read(self, peer: PeerHandle, ranges: Ranges) -> ReadHandle:
        check_ranges(ranges, self._num_bytes, self._num_bytes, "holder")
        self._stamps["read posted"] = time.process_time()
        return 1

    def poll(self, read: ReadHandle) -> ReadState:
        return ReadState.DONE

    def release(self, read: ReadHandle) -> bool:
        return True

    def progress(self) -> None: ...

    def close(self) -> None: ...


class ListChannel:
    """A `Channel` to one other, which it stamps when it sends for the first time."""

    def __init__(self, key: EngineKey, stamps: Stamps) -> None:
        self.address = f"tcp://{key.engine_id}"
        self._stamps = stamps
        self._arrived: list[tuple[Route, bytes]] = []
        self._other = self
        self._route: Route = 1 if key == HOLDER else b"reader"  # by which the other end knows this one

    def pair(self, other: ListChannel) -> None:
        self._other, other._other = other, self

    def connect(self, address: str) -> Route:
        return 1

    def disconnect(self, route: Route) -> None: ...

    def send(self, route: Route, data: bytes) -> bool:
        self._stamps.setdefault("sent", time.process_time())
        self._other._arrived.append((self._route, data))
        return True

    def receive(self) -> list[tuple[Route, bytes]]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def lost(self) -> list[Route]:
        return []

    def close(self) -> None: ...


class Engine:
    """One side of the hand-offs."""

    def __init__(self, key: EngineKey) -> None:
        self.key = key
        self.stamps: Stamps = {}
        self.events: list[ConnectorEvent] = []
        region = CacheRegion.of(ArenaRegion(1 << 40, NUM_BLOCKS, "cuda:0", LAYOUT, 0, LAYOUT.num_kv_heads))
        transport = FastestTransport(NoCopies(region, self.stamps), None, key.engine_id, on_gpu=True)
        self.channel = ListChannel(key, self.stamps)
        group = TpReadGroup(RankReader(0, region, transport))
        self.handoff = HandoffCoordinator(key, self.channel, group, TransferSettings(), lease_now, self.events.append)

    def ticket(self, number: int, blocks: Sequence[int]) -> bytes:
        """Make the ticket of an offer, as `TransferConnector.offer` does."""
        return Ticket(
            version=TICKET_VERSION,
            lease=LeaseKey(self.key, "bench", 0, number),
            kv_address=self.channel.address,
            fingerprint=LAYOUT.fingerprint,
            transport=NAME,
            num_tokens=len(blocks) * LAYOUT.block_size,
            lease_s=30.0,
            digest=DigestMode.OFF,
            num_ready=len(blocks),
            runs=encode_runs(blocks),
        ).encode()


class Pair:
    """Two paired engines."""

    def __init__(self, *, cold: bool) -> None:
        self._cold = cold
        self._other_data = np.zeros(CACHE_BYTES, dtype=np.uint8)
        self._number = 0
        self.holder, self.reader = Engine(HOLDER), Engine(READER)
        self.holder.channel.pair(self.reader.channel)
        self.reader.handoff.peers_changed([PeerInfo("holder", 1, self.holder.channel.address, LAYOUT.fingerprint)])
        while not self.reader.handoff.stats().peers_ready:
            self._pump()

    def hand_over(self, sources: Sequence[int], targets: Sequence[int]) -> dict[str, float]:
        """Return the seconds of each stage of a hand-off. Raises `Failed`."""
        clock, holder, reader = time.process_time, self.holder, self.reader
        self._number += 1
        for engine in (holder, reader):
            engine.events.clear()
        self._forget_caches()
        begin = clock()
        ticket = holder.ticket(self._number, sources)
        offered = clock()
        holder.handoff.offer(LeaseKey(HOLDER, "bench", 0, self._number), sources, len(sources))
        self._pump()

        self._forget_caches()
        reader.stamps.clear()
        asked = clock()
        reader.handoff.receive(self._number, ticket, 0, targets)
        reader.handoff.pump()
        round_over = clock()

        self._forget_caches()
        holder.stamps.clear()
        claim_here = clock()
        holder.handoff.pump()

        self._forget_caches()
        grant_here = clock()
        reader.handoff.pump()
        told = clock()
        self._pump()
        if [type(event) for event in reader.events + holder.events] != [Received, OfferEnded]:
            raise Failed(f"the reader got {reader.events}, the holder {holder.events}")
        claimed, posted = reader.stamps["sent"], reader.stamps["read posted"]
        stages = {
            "holder: ticket made": offered - begin,
            "asked, claim sent": claimed - asked,
            "read posted": posted - claimed,
            "round over": round_over - posted,
            "holder: claim here, grant sent": holder.stamps["sent"] - claim_here,
            "grant here, engine told": told - grant_here,
        }
        return {**stages, "all, at the reader": round_over - asked + told - grant_here}

    def _pump(self) -> None:
        self.holder.handoff.pump()
        self.reader.handoff.pump()

    def _forget_caches(self) -> None:
        if self._cold:
            self._other_data += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the host's part of hand-offs.")
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 512, 2048], help="blocks of a prompt")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--cold", action="store_true", help="empty the caches between the stages")
    arguments = parser.parse_args()
    pair, rng = Pair(cold=arguments.cold), random.Random(0)
    medians: list[dict[str, float]] = []
    gc.freeze()  # modules and the pair, through which each collection would go otherwise
    for count in arguments.blocks:
        prompts = [
            [rng.sample(range(NUM_BLOCKS), count) for _ in range(2)] for _ in range(arguments.repeats + WARM_UPS)
        ]
        found = [pair.hand_over(*prompt) for prompt in prompts][WARM_UPS:]
        medians.append({stage: statistics.median(each[stage] for each in found) for stage in found[0]})
    print(f"{'us of CPU time':<32}" + "".join(f"{count:>8}" for count in arguments.blocks))
    for stage in medians[0]:
        print(f"{stage:<32}" + "".join(f"{of_count[stage] * 1e6:8.0f}" for of_count in medians))


if __name__ == "__main__":
    main()
