"""Updates of the prefix cache and of tiers: a mirror that applies them knows which blocks are where."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.cached_blocks import CachedBlocks, FoundPrefix
from baton.engine.core.block_log import (
    BlockLog,
    BlocksCached,
    BlocksChanged,
    BlockUpdate,
    GroupLog,
    pack_names,
    unpack_names,
)
from baton.engine.core.kv.blocks import BlockPool
from baton.engine.core.prefix import block_hashes
from baton.engine.core.tiers import Tier

from .core_connector import Arenas
from .core_harness import Harness, config, request
from .core_runner import FakeRunner
from .core_tiers import FakeTiers

HASHES = [bytes([index]) * 16 for index in range(8)]


def names_of(hashes: Collection[bytes]) -> set[int]:
    return set(unpack_names(pack_names(hashes)))


def true_places(engine: Harness) -> tuple[set[int], set[int], set[int]]:
    assert engine.tiers is not None
    pool = engine.scheduler.groups[0].pool
    below = ({each for each in engine.tiers.kept_in(tier) if not pool.has(each)} for tier in Tier)
    _, host, disk = below
    return names_of(pool.findable), names_of(host), names_of(disk)


def test_what_was_stored_and_evicted_between_two_looks_is_no_news() -> None:
    group = GroupLog([])
    log = BlockLog([group])
    group.stored(HASHES[0])
    group.evicted(HASHES[0])
    assert log.take() is None
    group.stored(HASHES[1])
    assert log.take() == BlocksChanged(1, pack_names(HASHES[1:2]))
    group.evicted(HASHES[1])
    group.stored(HASHES[1])
    assert log.take() is None


def test_an_engine_that_nobody_asks_keeps_no_log() -> None:
    engine = Harness(config(), min_restored_tokens=1)
    assert engine.tiers is not None
    engine.scheduler.groups[0].pool.register(engine.scheduler.groups[0].pool.allocate(1)[0], HASHES[0])
    engine.tiers.keep({HASHES[0]: [], HASHES[1]: []})
    assert not any(engine.tiers.watchers.values())
    log = engine.core.block_log()
    assert log is engine.core.block_log()
    assert log.take() is None
    assert log.snapshot() == BlocksCached(0, stored=pack_names(HASHES[:1]), host=pack_names(HASHES[1:2]))


class TestMoves:
    """Moves of one block, which is reported in the fastest place that has it."""

    def setup_method(self) -> None:
        self.pool = BlockPool(2)
        small = config(num_blocks=2)
        self.tiers = FakeTiers(Arenas(small, FakeRunner(small)))
        group = GroupLog(self.pool.findable, self.tiers)
        self.log = BlockLog([group])
        self.pool.watch(group)
        self.tiers.watch(group)
        self.packed = pack_names(HASHES[:1])

    def store(self) -> None:
        blocks = self.pool.allocate(1)
        self.pool.register(blocks[0], HASHES[0])
        self.pool.release(blocks)

    def evict(self) -> None:
        self.pool.release(self.pool.allocate(2))

    def test_a_copy_in_a_tier_is_no_news_while_the_pool_has_the_block(self) -> None:
        self.store()
        assert self.log.take() == BlocksChanged(1, stored=self.packed)
        self.tiers.keep({HASHES[0]: []})
        self.tiers.demote(HASHES[0])
        assert self.log.take() is None

    def test_a_block_that_leaves_the_pool_has_moved_to_where_its_copy_is(self) -> None:
        self.store()
        self.tiers.keep({HASHES[0]: []})
        self.log.take()
        self.evict()
        assert self.log.take() == BlocksChanged(2, host=self.packed)
        self.tiers.demote(HASHES[0])
        assert self.log.take() == BlocksChanged(3, disk=self.packed)
        self.store()
        assert self.log.take() == BlocksChanged(4, stored=self.packed)
        self.evict()
        self.tiers.lose(HASHES[0])
        assert self.log.take() == BlocksChanged(5, evicted=self.packed)

    def test_only_the_way_from_the_first_place_to_the_last_is_told(self) -> None:
        self.tiers.keep({HASHES[0]: []})
        self.store()
        self.evict()
        self.tiers.demote(HASHES[0])
        assert self.log.take() == BlocksChanged(1, disk=self.packed)
        self.store()
        self.tiers.lose(HASHES[0])
        self.tiers.keep({HASHES[0]: []})
        self.tiers.demote(HASHES[0])
        self.evict()
        assert self.log.take() is None, "it is where it was"

    def test_what_an_earlier_process_left_is_in_the_first_snapshot(self) -> None:
        self.tiers.keep({HASHES[0]: [], HASHES[1]: []})
        self.tiers.demote(HASHES[1])
        log = BlockLog([GroupLog(self.pool.findable, self.tiers)])
        assert log.snapshot() == BlocksCached(0, b"", host=self.packed, disk=pack_names(HASHES[1:2]))


def test_changes_must_be_taken_before_a_snapshot() -> None:
    group = GroupLog([])
    log = BlockLog([group])
    group.stored(HASHES[0])
    with pytest.raises(AssertionError, match="take changes"):
        log.snapshot()


def test_names_are_equal_in_every_process() -> None:
    assert unpack_names(pack_names([bytes(range(16))])) == (0x0706050403020100,)


@pytest.mark.parametrize("field", ["stored", "evicted", "host", "disk"])
def test_news_of_torn_names_are_malformed(field: str) -> None:
    frame = msgspec.msgpack.encode({"type": "changed", "number": 1, field: b"1234567"})
    with pytest.raises(msgspec.ValidationError, match="8 bytes each"):
        msgspec.msgpack.decode(frame, type=BlockUpdate)


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


def test_a_mirror_holds_no_more_of_tiers_than_the_engine_has_slots() -> None:
    mirror, names = CachedBlocks(2, 3), [pack_names([block_hash]) for block_hash in HASHES]
    assert mirror.apply(BlocksCached(0, b"", host=names[0] + names[1], disk=names[2] + names[3]))
    assert [len(place) for place in mirror.places[0]] == [0, 2, 1]
    assert mirror.apply(BlocksChanged(1, stored=names[0], disk=names[3]))
    assert not mirror.apply(BlocksChanged(2, host=names[4]))
    assert len(mirror) == 0
    assert mirror.apply(BlocksCached(2, b"", host=names[4])), "a snapshot heals that, too"
    assert mirror.find(unpack_names(names[4])) == FoundPrefix(0, 1, 0)


@pytest.mark.parametrize("before", ["stored", "host", "disk"])
@pytest.mark.parametrize("after", ["stored", "host", "disk", "evicted"])
def test_a_block_that_moves_is_in_one_place_of_a_mirror(before: str, after: str) -> None:
    (block,), packed = names_of(HASHES[:1]), pack_names(HASHES[:1])
    mirror = CachedBlocks(1, 1)
    assert mirror.apply(BlocksCached(0, **{"stored": b"", before: packed}))
    assert mirror.apply(BlocksChanged(1, **{after: packed}))
    where = dict(zip(("stored", "host", "disk"), mirror.places[0], strict=True))
    assert where == {"stored": set(), "host": set(), "disk": set()} | ({} if after == "evicted" else {after: {block}})


def test_behind_the_pool_a_prefix_goes_on_in_tiers_up_to_the_first_gap() -> None:
    mirror, names = CachedBlocks(8, 8), [pack_names([block_hash]) for block_hash in HASHES]
    mirror.apply(BlocksCached(0, names[0] + names[1], names[2] + names[4], names[3] + names[6]))
    prompt = unpack_names(b"".join(names))
    assert mirror.count_prefix(prompt) == 2
    assert mirror.find(prompt) == FoundPrefix(2, 2, 1)
    assert mirror.find(prompt[5:]) == FoundPrefix()
    assert mirror.count_present(prompt) == 2, "a hand-off ignores tiers"


def test_a_prefix_ends_at_the_first_block_that_is_missing() -> None:
    mirror = CachedBlocks(8)
    mirror.apply(BlocksCached(0, pack_names([HASHES[0], HASHES[2]])))
    assert mirror.count_prefix(unpack_names(pack_names(HASHES))) == 1


def test_a_salt_makes_other_names() -> None:
    engine = Harness(config())
    log = engine.core.block_log()
    mirror = CachedBlocks(32)
    mirror.apply(log.snapshot())
    engine.add(request("a", list(range(12)), max_tokens=1, cache_salt="s"))
    engine.run()
    changes = log.take()
    assert changes is not None
    mirror.apply(changes)
    known = {
        salt: mirror.count_prefix(unpack_names(pack_names(block_hashes(list(range(12)), 4, salt))))
        for salt in ("s", "t", "")
    }
    assert known == {"s": 3, "t": 0, "": 0}


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(6, 16),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 12)), max_size=12),
    faults=st.lists(
        st.sampled_from(["take", "lose", "late", "step", "step", "copy", "copy", "demote", "forget"]), max_size=80
    ),
)
def test_after_any_run_a_mirror_is_the_truth(
    num_blocks: int, prompts: list[tuple[int, int, int]], faults: list[str]
) -> None:
    """Updates are taken at any time, and some are lost; a mirror that begins late needs only a snapshot.

    Meanwhile blocks go down to tiers, further down, come back, and are lost.
    """
    sizes = config(num_blocks=num_blocks, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=70)
    engine = Harness(sizes, min_restored_tokens=1)
    tiers = engine.tiers
    assert tiers is not None
    log = engine.core.block_log()
    mirrors = [CachedBlocks(num_blocks, 1000)]
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
            mirrors.append(CachedBlocks(num_blocks, 1000))
            mirrors[-1].apply(log.snapshot())
        elif fault == "copy":
            tiers.finish_all()
        elif fault == "demote" and (in_memory := list(tiers.kept_in(Tier.HOST))):
            tiers.demote(in_memory[0])
        elif fault == "forget" and tiers.kept and not tiers.restores:
            tiers.lose(next(iter(tiers.kept)))
        elif fault in ("take", "lose"):
            tell(lose=fault == "lose")
    engine.run_to_the_end()
    engine.add(request("last", [49] * 8, max_tokens=1))  # changes something, so that lost updates are noticed
    engine.run_to_the_end()
    tell()
    assert [mirror.number for mirror in mirrors] == [log.number] * len(mirrors)
    assert all(mirror.places == [true_places(engine)] for mirror in mirrors)
