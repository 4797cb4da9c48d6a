"""News of the prefix cache: whoever follows them knows what is cached."""

from __future__ import annotations

import msgspec
import pytest
from core_harness import Harness, config, request
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.cached_blocks import CachedBlocks
from baton.engine.core.block_log import BlockLog, BlockNews, BlocksCached, BlocksChanged, pack_names, unpack_names
from baton.engine.core.blocks import BlockPool
from baton.engine.core.prefix import block_hashes

HASHES = [bytes([index]) * 16 for index in range(8)]


def names_in(pool: BlockPool) -> set[int]:
    return set(unpack_names(pack_names(pool._block_of)))


def test_what_was_stored_and_evicted_between_two_looks_is_no_news() -> None:
    log = BlockLog([])
    log.stored(HASHES[0])
    log.evicted(HASHES[0])
    assert log.take() is None
    log.stored(HASHES[1])
    assert log.take() == BlocksChanged(1, pack_names(HASHES[1:2]))
    log.evicted(HASHES[1])
    log.stored(HASHES[1])
    assert log.take() is None


def test_a_pool_that_nobody_asks_keeps_no_log() -> None:
    pool = BlockPool(2)
    pool.register(pool.allocate(1)[0], HASHES[0])
    assert pool._log is None
    assert pool.log().take() is None
    assert pool.log().snapshot() == BlocksCached(0, pack_names(HASHES[:1]))


def test_changes_must_be_taken_before_a_snapshot() -> None:
    log = BlockLog([])
    log.stored(HASHES[0])
    with pytest.raises(AssertionError, match="take changes"):
        log.snapshot()


def test_names_are_equal_in_every_process() -> None:
    assert unpack_names(pack_names([bytes(range(16))])) == (0x0706050403020100,)


@pytest.mark.parametrize("field", ["stored", "evicted"])
def test_news_of_torn_names_are_malformed(field: str) -> None:
    frame = msgspec.msgpack.encode({"type": "changed", "number": 1, field: b"1234567"})
    with pytest.raises(msgspec.ValidationError, match="8 bytes each"):
        msgspec.msgpack.decode(frame, type=BlockNews)


def test_a_missing_number_is_noticed_and_a_snapshot_heals_it() -> None:
    mirror, names = CachedBlocks(8), [pack_names([block_hash]) for block_hash in HASHES]
    assert mirror.apply(BlocksChanged(4, names[0])), "nothing is known yet: a snapshot is on its way"
    assert len(mirror) == 0
    assert mirror.apply(BlocksCached(4, names[0] + names[1]))
    assert mirror.apply(BlocksChanged(5, names[2], names[0]))
    assert not mirror.apply(BlocksChanged(7, names[3]))
    assert mirror.count_prefix(unpack_names(names[1] + names[2] + names[3])) == 2, "the old state is the best guess"
    assert mirror.apply(BlocksChanged(8, names[4])), "asked already"
    assert mirror.apply(BlocksCached(8, names[5]))
    assert mirror.count_prefix(unpack_names(names[5])) == 1
    assert len(mirror) == 1


def test_a_mirror_holds_no_more_than_the_engine_can() -> None:
    mirror = CachedBlocks(2)
    assert mirror.apply(BlocksCached(0, pack_names(HASHES)))
    assert len(mirror) == 2
    assert not mirror.apply(BlocksChanged(1, pack_names(HASHES)))
    assert len(mirror) == 0


def test_a_prefix_ends_at_the_first_block_that_is_missing() -> None:
    mirror = CachedBlocks(8)
    mirror.apply(BlocksCached(0, pack_names([HASHES[0], HASHES[2]])))
    assert mirror.count_prefix(unpack_names(pack_names(HASHES))) == 1


def test_a_salt_and_an_adapter_make_other_names() -> None:
    engine = Harness(config())
    log = engine.core.block_log()
    mirror = CachedBlocks(32)
    mirror.apply(log.snapshot())
    engine.add(request("a", list(range(12)), max_tokens=1, cache_salt="s", adapter_id="t"))
    engine.run()
    changes = log.take()
    assert changes is not None
    mirror.apply(changes)
    known = {
        ways: mirror.count_prefix(unpack_names(pack_names(block_hashes(list(range(12)), 4, *ways))))
        for ways in [("s", "t"), ("s", ""), ("", "t"), ("", "")]
    }
    assert known == {("s", "t"): 3, ("s", ""): 0, ("", "t"): 0, ("", ""): 0}


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(6, 16),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 12)), max_size=12),
    faults=st.lists(st.sampled_from(["take", "lose", "late", "step"]), max_size=60),
)
def test_after_any_run_a_mirror_is_the_truth(
    num_blocks: int, prompts: list[tuple[int, int, int]], faults: list[str]
) -> None:
    """News are taken at any time, some are lost, and one that begins late needs no more than a snapshot."""
    engine = Harness(config(num_blocks=num_blocks, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=70))
    log = engine.core.block_log()
    mirrors = [CachedBlocks(num_blocks)]
    mirrors[0].apply(log.snapshot())

    def tell(*, lose: bool = False) -> None:
        changes = log.take()
        if changes is None or lose:
            return
        for mirror in mirrors:
            if not mirror.apply(changes):
                mirror.apply(log.snapshot())

    for index, (stem, length, max_tokens) in enumerate(prompts):
        prompt = [(stem + 3) * position % 50 for position in range(length)]
        engine.add(request(f"r{index}", prompt, max_tokens=max_tokens))
    for fault in faults:
        if fault == "step" and engine.core.has_work():
            engine.step()
        elif fault == "late":
            tell()
            mirrors.append(CachedBlocks(num_blocks))
            mirrors[-1].apply(log.snapshot())
        else:
            tell(lose=fault == "lose")
    engine.run()
    engine.add(request("last", [49] * 8, max_tokens=1))  # changes something, so that what was lost is noticed
    engine.run()
    tell()
    hashes = names_in(engine.scheduler.pool)
    assert [mirror._number for mirror in mirrors] == [log._number] * len(mirrors)
    assert all(mirror._names == hashes for mirror in mirrors)
