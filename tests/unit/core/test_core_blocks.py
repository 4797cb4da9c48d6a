"""The block pool and the names of prefixes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.core.kv.blocks import BlockPool, BlockPoolCorrupted
from baton.engine.core.prefix import block_hashes

TOKENS = list(range(100, 112))


def take_and_register(pool: BlockPool, hashes: list[bytes], num_blocks: int | None = None) -> list[int]:
    """Return a table whose leading blocks have these hashes, as if a request had computed them."""
    num_blocks = len(hashes) if num_blocks is None else num_blocks
    table = pool.take(pool.find_prefix(hashes), num_blocks)
    for block, block_hash in zip(table, hashes, strict=False):
        pool.register(block, block_hash)
    return table


class TestHashes:
    def test_a_hash_stands_for_everything_before_it(self) -> None:
        changed_start = block_hashes([0, *TOKENS[1:]], 4)
        assert all(a != b for a, b in zip(block_hashes(TOKENS, 4), changed_start, strict=True))

    def test_equal_beginnings_have_equal_hashes(self) -> None:
        assert block_hashes(TOKENS, 4)[:2] == block_hashes([*TOKENS[:8], 1, 2, 3, 4], 4)[:2]

    def test_only_full_blocks_are_hashed(self) -> None:
        assert len(block_hashes(TOKENS[:11], 4)) == 2

    def test_salts_share_nothing(self) -> None:
        salts = ["", "a", "b", "ab"]
        assert len({block_hashes(TOKENS, 4, salt)[0] for salt in salts}) == len(salts)

    def test_another_process_computes_the_same(self) -> None:
        program = (
            f"from baton.engine.core.prefix import block_hashes; print(block_hashes({TOKENS}, 4, 'salt')[-1].hex())"
        )
        other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert other.stdout.strip() == block_hashes(TOKENS, 4, "salt")[-1].hex()


class TestBlockPool:
    def test_fresh_blocks_come_as_one_ascending_run(self) -> None:
        assert BlockPool(8).allocate(5) == [0, 1, 2, 3, 4]

    def test_a_run_grows_over_what_two_owners_gave_back(self) -> None:
        pool = BlockPool(8)
        first, second = pool.allocate(3), pool.allocate(3)
        pool.release(second)
        pool.release(first)
        assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]

    def test_a_table_grows_behind_its_last_block_where_that_one_is_worth_nothing(self) -> None:
        pool = BlockPool(8)
        table, other = pool.allocate(2), pool.allocate(2)
        pool.release(other)
        assert pool.allocate(1, after=7) == [2]
        assert pool.allocate(1, after=table[-1] + 2) == [4]

    def test_freed_blocks_keep_their_content_until_they_are_needed(self) -> None:
        pool = BlockPool(4)
        hashes = block_hashes(TOKENS, 4)
        table = take_and_register(pool, hashes)
        pool.release(table)
        assert pool.num_free == 4
        assert pool.find_prefix(hashes) == table
        pool.allocate(4)
        assert pool.find_prefix(hashes) == []

    def test_blocks_without_content_are_taken_before_cached_ones(self) -> None:
        pool = BlockPool(4)
        hashes = block_hashes(TOKENS, 4)
        pool.release(take_and_register(pool, hashes, num_blocks=4))
        assert pool.allocate(1) == [3]
        assert len(pool.find_prefix(hashes)) == 3

    def test_the_tail_of_a_prefix_is_evicted_first(self) -> None:
        pool = BlockPool(3)
        hashes = block_hashes(TOKENS, 4)
        table = take_and_register(pool, hashes)
        pool.release(table)
        pool.allocate(1)
        assert pool.find_prefix(hashes) == table[:2]

    def test_the_least_recently_released_prefix_is_evicted_first(self) -> None:
        pool = BlockPool(6)
        old, new = block_hashes(TOKENS, 4), block_hashes(TOKENS[::-1], 4)
        tables = [take_and_register(pool, old), take_and_register(pool, new)]
        pool.release(tables[0])
        pool.release(tables[1])
        pool.release(pool.take(pool.find_prefix(old), 3))  # used again: now the other one is older
        pool.allocate(3)
        assert pool.find_prefix(old) == tables[0]
        assert pool.find_prefix(new) == []

    def test_dispensable_blocks_are_evicted_first_in_the_order_of_their_release(self) -> None:
        pool = BlockPool(5)
        pool.rank_blocks()
        hashes = block_hashes([*range(20)], 4)
        table = take_and_register(pool, hashes)
        pool.make_dispensable(table[1])
        for block in (0, 1, 2, 3):
            pool.release([table[block]])
        assert pool.has_dispensable
        pool.make_dispensable(table[0])
        evicted = []
        for _ in range(4):
            pool.allocate(1)
            evicted += [number for number, each in enumerate(hashes) if not pool.has(each) and number not in evicted]
        assert evicted == [1, 0, 2, 3]

    def test_a_new_block_that_was_evicted_is_not_told(self) -> None:
        pool = BlockPool(3)
        pool.track_new_blocks()
        hashes = block_hashes(TOKENS, 4)
        table = take_and_register(pool, hashes)
        pool.release(table)
        pool.allocate(1)
        told = [pool.take_new_block(before=pool.num_registered) for _ in range(3)]
        assert told == [(table[0], hashes[0]), (table[1], hashes[1]), None]

    def test_only_a_free_block_loses_its_content_when_it_is_to_be_forgotten(self) -> None:
        pool = BlockPool(2)
        (block_hash,) = hashes = block_hashes(TOKENS[:4], 4)
        table = take_and_register(pool, hashes)
        pool.forget_free(block_hash)
        assert pool.has(block_hash)
        pool.check()
        pool.release(table)
        pool.rank_blocks()
        pool.forget_free(block_hash)
        assert not pool.has(block_hash)
        pool.check()

    def test_a_block_that_a_hit_has_taken_does_not_become_dispensable(self) -> None:
        pool = BlockPool(2)
        pool.rank_blocks()
        hashes = block_hashes(TOKENS[:8], 4)
        table = take_and_register(pool, hashes)
        pool.make_dispensable(table[0])
        pool.release(pool.take(table[:1], 1))
        pool.make_dispensable(table[0])
        pool.release(table)
        pool.allocate(1)
        assert (pool.has(hashes[0]), pool.has(hashes[1])) == (True, False)

    def test_a_hit_counts_references_and_takes_blocks_off_the_free_list(self) -> None:
        pool = BlockPool(4)
        hashes = block_hashes(TOKENS, 4)
        table = take_and_register(pool, hashes)
        assert pool.take(pool.find_prefix(hashes), 3) == table
        assert [pool.references(block) for block in table] == [2, 2, 2]
        pool.release(table)
        assert pool.num_free == 1
        pool.release(table)
        assert pool.num_free == 4

    def test_free_prefix_blocks_are_not_counted_twice_when_looking_for_room(self) -> None:
        pool = BlockPool(4)
        hashes = block_hashes(TOKENS, 4)
        pool.release(take_and_register(pool, hashes))
        assert pool.fits(pool.find_prefix(hashes), 4)
        assert not pool.fits(pool.find_prefix(hashes), 5)

    def test_the_same_content_twice_keeps_the_first_block_findable(self) -> None:
        pool = BlockPool(4)
        (block_hash,) = block_hashes(TOKENS[:4], 4)
        first, second = pool.allocate(1), pool.allocate(1)
        pool.register(first[0], block_hash)
        pool.register(second[0], block_hash)
        pool.release(second)
        assert pool.find_prefix([block_hash]) == first
        pool.check()

    def test_releasing_too_often_is_noticed(self) -> None:
        pool = BlockPool(2)
        blocks = pool.allocate(1)
        pool.release(blocks)
        with pytest.raises(BlockPoolCorrupted, match="more often"):
            pool.release(blocks)

    def test_asking_for_more_than_is_free_is_noticed(self) -> None:
        with pytest.raises(BlockPoolCorrupted, match="callers look first"):
            BlockPool(2).allocate(3)

    @pytest.mark.parametrize(
        ("damage", "rule_name"),
        [
            (lambda pool: pool._refs.__setitem__(0, 1), "free and referenced"),  # noqa: SLF001  as a bug would leave it
            (lambda pool: setattr(pool, "num_free", 3), "count of free blocks"),
            (lambda pool: pool._next.__setitem__(1, 3), "list is broken"),  # noqa: SLF001  as a bug would leave it
            (lambda pool: pool._block_of.__setitem__(b"x", 1), "one to one"),  # noqa: SLF001  as a bug would leave it
            (lambda pool: pool.register(0, b"x"), "worthless blocks go first"),
        ],
    )
    def test_the_check_names_the_broken_rule(self, damage: object, rule_name: str) -> None:
        pool = BlockPool(4)
        pool.check()
        damage(pool)  # type: ignore[operator]
        with pytest.raises(BlockPoolCorrupted, match=rule_name):
            pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocating, filling and releasing keeps the counts right and never loses referenced blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10)
        self.pool.rank_blocks()
        self.tables: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of referenced blocks with a hash

    @rule(stem=st.integers(0, 2), num_blocks=st.integers(1, 6), filled=st.integers(0, 6))
    def take(self, stem: int, num_blocks: int, filled: int) -> None:
        hashes = block_hashes([stem] * 24, 4)[: min(filled, num_blocks)]
        prefix = self.pool.find_prefix(hashes)
        for block, block_hash in zip(prefix, hashes, strict=False):
            assert self.content.get(block, block_hash) == block_hash
        if not self.pool.fits(prefix, num_blocks):
            return
        table = self.pool.take(prefix, num_blocks)
        assert table[: len(prefix)] == prefix
        assert len(set(table)) == num_blocks
        assert not set(table[len(prefix) :]) & {block for other in self.tables for block in other}
        self.tables.append(table)
        for block, block_hash in zip(table, hashes, strict=False):
            self.pool.register(block, block_hash)
            self.content.setdefault(block, block_hash)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))
        referenced = {block for table in self.tables for block in table}
        self.content = {block: value for block, value in self.content.items() if block in referenced}

    @rule(stem=st.integers(0, 2), index=st.integers(0, 5), drop=st.booleans())
    def demote(self, stem: int, index: int, drop: bool) -> None:
        block_hash = block_hashes([stem] * 24, 4)[index]
        block = self.pool.find_block(block_hash, -1)
        if drop:
            self.pool.forget_free(block_hash)
            assert self.pool.has(block_hash) == (block >= 0 and self.pool.references(block) > 0)
        elif block >= 0:
            self.pool.make_dispensable(block)

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check()
        referenced = {block for table in self.tables for block in table}
        assert self.pool.num_free + len(referenced) == self.pool.num_blocks


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
