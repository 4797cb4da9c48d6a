"""Engines with verification never use blocks that differ from the holder's digests, alone and in groups, over NIXL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received, ReceiveFailed
from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion, CacheRegion
from baton.engine.net.curve import ClusterKey
from baton.kv_transfer.group.rank_reader import DIGEST_BYTES, digests_of, region_bytes
from baton.kv_transfer.protocol.messages import DigestMode
from baton.kv_transfer.settings import TransferSettings

from .engine_process import EngineProcess

pytestmark = pytest.mark.timeout(120)

LAYOUT = KVLayout(model="small", num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16")
VERIFYING = TransferSettings(digest=DigestMode.VERIFY)

Start = Callable[..., EngineProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    key, running = ClusterKey.generate(), []

    def start_one(name: str, size: int = 1, settings: TransferSettings = VERIFYING) -> EngineProcess:
        running.append(EngineProcess(name, key, LAYOUT, size=size, settings=settings))
        return running[-1]

    yield start_one
    for engine in running:
        engine.kill()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("holders", "readers"), [(1, 1), (1, 2), (2, 1)])
def test_only_unchanged_blocks_are_received(start: Start, holders: int, readers: int) -> None:
    prefill, decode = start("prefill", holders), start("decode", readers)
    prefill.fill(1)
    decode.peers_changed([prefill.info])
    changed, intact = prefill.offer("changed", [3, 4, 9]), prefill.offer("intact", [3, 4, 9])
    received = decode.receive(intact.ticket, 1, [7, 5])
    assert decode.events(1, 30.0) == [Received(received)]
    assert decode.content([7, 5]) == prefill.content([4, 9])
    assert prefill.events(1, 30.0) == [OfferEnded(intact.transfer_id, OfferOutcome.FINISHED)]

    prefill.ranks[-1].order("spoil", 9)  # like a bug that reuses offered blocks; the digests were made before
    failing = decode.receive(changed.ticket, 0, [7, 5, 6])
    failed, released = decode.events(2, 30.0)
    assert isinstance(failed, ReceiveFailed)
    assert "the digests differ: " in failed.reason
    assert "KV head 1 is not what the holder's rank" in failed.reason
    assert released == BlocksReleased(failing)
    assert decode.stats().receives == {"received": 1, "corrupt": 1}
    assert prefill.events(1, 30.0) == [OfferEnded(changed.transfer_id, OfferOutcome.WITHDRAWN)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("theirs", list(DigestMode))
def test_engines_with_different_digest_modes_are_not_paired_and_name_them(start: Start, theirs: DigestMode) -> None:
    ours = DigestMode.OFF if theirs is DigestMode.VERIFY else DigestMode.VERIFY
    prefill = start("prefill", settings=VERIFYING.model_copy(update={"digest": theirs}))
    decode = start("decode", settings=VERIFYING.model_copy(update={"digest": ours}))
    decode.peers_changed([prefill.info])
    decode.receive(prefill.offer("request", [1]).ticket, 0, [1])
    failed, _ = decode.events(2, 30.0)
    assert failed.reason == f"the ticket's holder has transfer.digest {theirs.value!r}, here it is {ours.value!r}"
    assert decode.stats().peers_ready == 0


def test_a_digest_covers_one_head_of_one_block_in_any_place() -> None:
    content = [bytes([block, head]) * (LAYOUT.head_bytes // 2) for block in range(3) for head in range(2)]
    memory = ctypes.create_string_buffer(b"".join(content), len(content) * LAYOUT.head_bytes)
    whole = CacheRegion.of(ArenaRegion(ctypes.addressof(memory), 3, "cpu", LAYOUT, 0, 2))
    read, heads = region_bytes(whole), [LAYOUT.pieces(range(2), range(head, head + 1)) for head in range(2)]
    both = digests_of(read(2), heads) + digests_of(read(0), heads)
    assert len(both) == 4 * DIGEST_BYTES
    alone = [LAYOUT.pieces(range(1, 2), range(1, 2))]
    of_one_head = digests_of(content[5], alone) + digests_of(content[1], alone)
    assert both[DIGEST_BYTES : 2 * DIGEST_BYTES] + both[3 * DIGEST_BYTES :] == of_one_head
    assert len({both[at : at + DIGEST_BYTES] for at in range(0, len(both), DIGEST_BYTES)}) == 4
