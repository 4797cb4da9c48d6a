"""Updates of several cache groups: a mirror finds the prefix hits that the engine itself finds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.cluster.cached_blocks import CachedBlocks, FoundPrefix
from baton.engine.core.block_log import (
    BlocksCached,
    BlocksChanged,
    BlockUpdate,
    GroupBlocks,
    HitRule,
    pack_names,
    unpack_names,
)
from baton.engine.core.messages import KVSource
from baton.engine.core.prefix import block_hashes
from baton.engine.core.requests.request import FinishRule, Request
from baton.engine.core.stages import Stages

from .core_connector import ticket_for
from .core_harness import BLOCK_SIZE, VOCAB_SIZE, Harness, config, request

WINDOW, EVERY = 6, 8  # tokens: a window ends inside a block, a checkpoint comes every second one
PROMPT = [(11 * position + 5) % VOCAB_SIZE for position in range(33)]  # eight full blocks and a token
NAMES = unpack_names(pack_names(block_hashes(PROMPT, BLOCK_SIZE)))
RULES = [HitRule(), HitRule(window_blocks=2), HitRule(checkpoint_blocks=2)]


def names_of(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return the names of the prompt's blocks that an engine may find in its cache."""
    return unpack_names(pack_names(block_hashes(prompt[: (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE], BLOCK_SIZE)))


def packed(*blocks: int) -> bytes:
    return b"".join(NAMES[block].to_bytes(8, "little") for block in blocks)


def asked(engine: Harness, prompt: list[int], **fields: object) -> Request:
    message = request("asked", prompt, **fields)
    return Request(message, FinishRule(message, engine.config), 0, Stages())


def has_copies_behind(engine: Harness, prompt: Sequence[int]) -> bool:
    """Return whether pools have blocks behind a gap: copies of these in tiers, which are not published, may count."""
    hashes = block_hashes(prompt, BLOCK_SIZE)
    groups = zip(engine.config.groups, engine.scheduler.groups, strict=True)
    full = [group.pool for each, group in groups if each.window is None and each.checkpoint_tokens is None]
    return any(pool.has(each) for pool in full for each in hashes[len(pool.find_prefix(hashes)) :])


def check_hits(engine: Harness, mirror: CachedBlocks, prompts: Sequence[list[int]]) -> None:
    """Check that the mirror finds what the engine would find for these prompts."""
    memory = engine.scheduler.memory
    for prompt in prompts:
        names = names_of(prompt)
        found = mirror.find(names)
        assert found.pool == memory.lookup(asked(engine, prompt)).num_blocks
        if engine.tiers is not None:
            whole = memory.find_restore(asked(engine, prompt), engine.tiers).prefix.num_blocks
            assert sum(found) <= whole
            if not has_copies_behind(engine, prompt):
                assert sum(found) == whole
        elif len(prompt) % BLOCK_SIZE:
            source = KVSource(ticket_for(prompt), len(prompt))
            moved = asked(engine, prompt, output_token_ids=[1], kv_source=source)
            brought = memory.lookup(moved).num_blocks
            widest = max((group.window or 0 for group in engine.config.groups), default=0)
            assert brought - widest // BLOCK_SIZE - 1 <= mirror.count_present(names) <= brought


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(14, 24), st.sampled_from([None, None, 1, 3, 5, 6, 9, 17])), min_size=1, max_size=3
    ),
    states=st.lists(st.tuples(st.integers(2, 5), st.sampled_from([4, 8, 12])), max_size=2),
    has_tiers=st.booleans(),
    budget=st.sampled_from([4, 8, 24]),
    prompts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 44), st.integers(1, 10)), min_size=1, max_size=10),
    faults=st.lists(
        st.sampled_from(["lose", "late", "step", "step", "step", "copy", "demote", "forget", "evict"]), max_size=60
    ),
)
@example([(20, None)], [(2, 8)], False, 24, [(0, 44, 1), (1, 44, 1), (0, 44, 1)], ["step"] * 40).via("lost checkpoints")
def test_a_mirror_finds_what_the_engine_finds(
    groups: list[tuple[int, int | None]],
    states: list[tuple[int, int]],
    has_tiers: bool,
    budget: int,
    prompts: list[tuple[int, int, int]],
    faults: list[str],
) -> None:
    """Any mix of groups, whatever comes and goes, also after lost messages and for mirrors that begin late."""
    sizes = config(groups=groups, states=states, max_num_seqs=2, max_num_batched_tokens=budget, max_model_len=56)
    engine = Harness(sizes, min_restored_tokens=1 if has_tiers else None)
    log = engine.core.block_log()

    def fresh() -> CachedBlocks:
        mirror = CachedBlocks(sizes.num_blocks, 1000)
        assert mirror.apply(log.snapshot())
        return mirror

    mirrors = [fresh()]
    probes = [[(stem + 3) * position % 50 for position in range(length)] for stem, length, _ in prompts]
    probes += [[*probe, 49, 49, 49, 49, 49] for probe in probes]

    def tell(*, lose: bool = False) -> None:
        changes = log.take()
        if lose:
            return
        for mirror in mirrors:
            if changes is not None and not mirror.apply(changes):
                mirror.apply(log.snapshot())
            if mirror.number == log.number:
                check_hits(engine, mirror, probes)

    for index, (probe, (_, _, max_tokens)) in enumerate(zip(probes, prompts, strict=False)):
        engine.add(request(f"r{index}", probe, max_tokens=max_tokens))
    for fault in faults:
        if fault == "step" and engine.core.has_work():
            engine.step()
        elif fault == "copy" and engine.tiers is not None:
            engine.tiers.finish_all()
        elif fault == "demote" and engine.tiers is not None and (kept := set(engine.tiers.kept) - engine.tiers.on_disk):
            engine.tiers.demote(min(kept))
        elif fault == "forget" and engine.tiers is not None and engine.tiers.kept and not engine.tiers.restores:
            engine.tiers.lose(next(iter(engine.tiers.kept)))
        elif fault == "evict":
            pool = engine.scheduler.groups[-1].pool
            pool.release(pool.allocate(pool.num_free))
        tell(lose=fault == "lose")
        if fault == "late":
            tell()
            mirrors.append(fresh())
    engine.run_to_the_end()
    for group in engine.scheduler.groups:
        tell()
        group.pool.release(group.pool.allocate(group.pool.num_blocks))
    if engine.tiers is not None:
        for name in reversed(list(engine.tiers.kept)):
            tell()
            engine.tiers.lose(name)
    engine.add(request("last", [48] * 8, max_tokens=1))  # changes something, so that lost updates are noticed
    engine.run_to_the_end()
    tell()
    assert all(mirror.number == log.number for mirror in mirrors)


def test_a_mirror_knows_that_an_engine_has_lost_its_checkpoints() -> None:
    engine = Harness(config(groups=[(40, None)], states=[(4, EVERY)]))
    log, mirror = engine.core.block_log(), CachedBlocks(44)
    mirror.apply(log.snapshot())
    engine.add(request("a", PROMPT, max_tokens=1))
    engine.run_to_the_end()
    changes = log.take()
    assert changes is not None
    assert mirror.apply(changes)
    assert mirror.find(NAMES) == FoundPrefix(8)
    states = engine.scheduler.groups[1].pool
    states.release(states.allocate(4))
    changes = log.take()
    assert changes is not None
    assert (changes.stored, changes.evicted) == (b"", b""), "the blocks are where they were"
    assert mirror.apply(changes)
    assert mirror.find(NAMES) == FoundPrefix()
    assert mirror.count_prefix(NAMES) == mirror.count_present(NAMES) == 8, "a hand-off brings the state"


class TestLookup:
    """Mirrors of a group that keeps everything, one with a window of two blocks, and one with checkpoints every two."""

    def setup_method(self) -> None:
        self.mirror = CachedBlocks(100, 100)

    def show(self, first: GroupBlocks, windows: GroupBlocks, checkpoints: GroupBlocks) -> None:
        others = [windows, checkpoints]
        assert self.mirror.apply(BlocksCached(0, first.stored, first.host, first.disk, RULES, others))

    def test_a_hit_ends_where_every_group_has_what_it_needs(self) -> None:
        everything = GroupBlocks(packed(*range(8)))
        self.show(everything, everything, GroupBlocks(packed(1, 5)))
        assert self.mirror.find(NAMES) == FoundPrefix(6)
        self.show(everything, GroupBlocks(packed(0, 1, 2, 3, 5)), GroupBlocks(packed(1, 5)))
        assert self.mirror.find(NAMES) == FoundPrefix(2), "at 6 the window lacks a block, at 4 there is no checkpoint"
        self.show(GroupBlocks(packed(0, 2, 3)), everything, everything)
        assert self.mirror.find(NAMES) == FoundPrefix()

    def test_tiers_count_for_every_group(self) -> None:
        first = GroupBlocks(packed(0, 1, 2, 3), host=packed(4, 5), disk=packed(6, 7))
        states = GroupBlocks(packed(3), host=packed(7))
        self.show(first, GroupBlocks(packed(2, 3), host=packed(6), disk=packed(7)), states)
        assert self.mirror.find(NAMES) == FoundPrefix(4, 2, 2)
        self.show(first, GroupBlocks(packed(2, 3), host=packed(7)), states)
        assert self.mirror.find(NAMES) == FoundPrefix(4), "block 6 of the window is nowhere"
        everything = GroupBlocks(packed(*range(8)))
        self.show(everything, everything, GroupBlocks(packed(3), disk=packed(7)))
        assert self.mirror.find(NAMES) == FoundPrefix(4, 4), "only a state has to be restored"

    def test_expected_blocks_count_in_all_groups_until_the_engine_reports_them(self) -> None:
        nothing = GroupBlocks()
        self.show(nothing, nothing, nothing)
        assert self.mirror.find(NAMES, set(NAMES)) == FoundPrefix(8)
        everything = GroupBlocks(packed(*range(8)))
        self.show(everything, everything, GroupBlocks(packed(3)))
        assert self.mirror.find(NAMES, set(NAMES)) == FoundPrefix(4), "it has reported which checkpoints it kept"

    def test_a_hand_off_begins_at_the_first_block_that_its_next_token_lacks(self) -> None:
        everything = GroupBlocks(packed(*range(8)))
        self.show(everything, GroupBlocks(packed(0, 6, 7)), GroupBlocks())
        assert self.mirror.count_present(NAMES) == 8
        self.show(everything, GroupBlocks(packed(0, 6)), GroupBlocks())
        assert self.mirror.count_present(NAMES) == 7

    def test_a_model_of_windows_alone_needs_nothing_before_them(self) -> None:
        self.mirror.apply(BlocksCached(0, packed(2, 3, 7), rules=[HitRule(window_blocks=2)]))
        assert self.mirror.find(NAMES) == FoundPrefix(4)
        assert self.mirror.count_present(NAMES) == 6, "of blocks 6 and 7, the first is missing"


class TestVersions:
    def test_with_one_group_messages_are_as_short_as_ever(self) -> None:
        engine = Harness(config())
        log = engine.core.block_log()
        snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(log.snapshot()))
        assert snapshot == {"type": "cached", "number": 0, "stored": b""}
        engine.add(request("a", 5, max_tokens=1))
        engine.run_to_the_end()
        changes = msgspec.msgpack.decode(msgspec.msgpack.encode(log.take()))
        assert set(changes) == {"type", "number", "stored"}

    def test_an_engine_that_publishes_only_its_first_group_counts_as_if_it_had_no_others(self) -> None:
        mirror = CachedBlocks(100)
        frame = msgspec.msgpack.encode({"type": "cached", "number": 3, "stored": packed(0, 1, 2)})
        assert mirror.apply(msgspec.msgpack.decode(frame, type=BlockUpdate))
        frame = msgspec.msgpack.encode({"type": "changed", "number": 4, "stored": packed(3)})
        assert mirror.apply(msgspec.msgpack.decode(frame, type=BlockUpdate))
        assert mirror.find(NAMES) == FoundPrefix(4)

    @pytest.mark.parametrize(
        ("message", "error"),
        [
            ({"rules": [{}, {}], "groups": []}, "2 rules do not fit 0 groups"),
            ({"groups": [{}]}, "0 rules do not fit 1 groups"),
            ({"rules": [{"checkpoint_blocks": 0}]}, "no cache group can have"),
            ({"rules": [{"window_blocks": -1}]}, "no cache group can have"),
            ({"rules": [{"window_blocks": 1, "checkpoint_blocks": 1}]}, "either a window or checkpoints"),
            ({"rules": [{}, {}], "groups": [{"stored": b"1234567"}]}, "8 bytes each"),
        ],
    )
    def test_what_no_engine_can_mean_is_malformed(self, message: dict[str, object], error: str) -> None:
        frame = msgspec.msgpack.encode({"type": "cached", "number": 1, "stored": b"", **message})
        with pytest.raises(msgspec.ValidationError, match=error):
            msgspec.msgpack.decode(frame, type=BlockUpdate)

    def test_changes_of_other_groups_than_the_snapshot_described_need_a_snapshot(self) -> None:
        mirror = CachedBlocks(100)
        assert mirror.apply(BlocksCached(0, packed(0), rules=RULES[:2], groups=[GroupBlocks(packed(0))]))
        assert mirror.apply(BlocksChanged(1, packed(1))), "only the first group has changed"
        assert not mirror.apply(BlocksChanged(2, packed(2), groups=[GroupBlocks(), GroupBlocks()]))
        assert len(mirror) == 0
        assert mirror.apply(BlocksCached(2, packed(0, 1, 2)))
        assert mirror.find(NAMES) == FoundPrefix(3)

    def test_all_groups_together_hold_no_more_than_the_engine_can(self) -> None:
        mirror = CachedBlocks(4, 1)
        groups = [GroupBlocks(packed(0, 1), host=packed(2)), GroupBlocks(packed(1), host=packed(3))]
        assert mirror.apply(BlocksCached(0, packed(0, 1), rules=RULES, groups=groups))
        assert [tuple(map(len, places)) for places in mirror.places] == [(2, 0, 0), (2, 1, 0), (0, 0, 0)]
        assert not mirror.apply(BlocksChanged(1, groups=[GroupBlocks(packed(3)), GroupBlocks()]))
        assert len(mirror) == 0
