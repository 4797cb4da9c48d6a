"""Numbers of blocks through all arenas, and the order in which a hand-off lists them."""

from __future__ import annotations

import pytest

from baton.engine.core.config import CacheGroupConfig
from baton.engine.core.kv.block_numbers import BlockNumbers
from baton.engine.core.kv.cache_groups import make_groups

from .core_harness import BLOCK_SIZE

GROUPS = make_groups(
    [
        CacheGroupConfig(num_blocks=100),
        CacheGroupConfig(num_blocks=40, window=BLOCK_SIZE + 1),
        CacheGroupConfig(num_blocks=8, checkpoint_tokens=4 * BLOCK_SIZE),
    ],
    BLOCK_SIZE,
)
NUM_TOKENS = 2 * BLOCK_SIZE + 2
TABLES = [[7, 3, 9], [0, 5, 6], [2]]


def test_blocks_are_in_the_order_in_which_they_are_complete_and_a_state_is_the_last() -> None:
    numbers = BlockNumbers(GROUPS)
    assert numbers.handed_over(TABLES, NUM_TOKENS) == [7, 3, 105, 9, 106, 142]
    complete = [numbers.num_complete(NUM_TOKENS, count) for count in range(NUM_TOKENS + 3)]
    assert complete == [0] * 4 + [1] * 4 + [3] * 2 + [6] * 3


def test_a_slot_that_is_not_known_yet_is_named_by_the_one_of_the_moment() -> None:
    numbers = BlockNumbers(GROUPS)
    long = 9 * BLOCK_SIZE
    tables = [list(range(9)), list(range(9)), [4]]
    assert numbers.handed_over(tables, long)[-1] == 144
    assert numbers.states([*tables[:2], [4, 1, 6]]) == [146]


def test_one_group_has_its_block_ids() -> None:
    numbers = BlockNumbers(GROUPS[:1])
    assert numbers.handed_over([[7, 3, 9, 1]], NUM_TOKENS) == [7, 3, 9]
    assert [numbers.num_complete(NUM_TOKENS, count) for count in (3, 4, 9, 10)] == [0, 1, 2, 3]
    assert numbers.of_groups([[4, 5]]) == [4, 5]
    assert not numbers.num_states


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[:1]], ids=["several", "one"])
def test_references_go_to_the_arena_of_each_number(groups: list) -> None:  # type: ignore[type-arg]
    numbers = BlockNumbers(groups)
    taken = [group.pool.allocate(2) for group in groups]
    owned = numbers.of_groups(taken)
    numbers.reference(owned)
    assert all(group.pool.references(block) == 2 for group, some in zip(groups, taken, strict=True) for block in some)
    for _ in range(2):
        numbers.release(owned)
    assert all(group.pool.num_free == group.pool.num_blocks for group in groups)
