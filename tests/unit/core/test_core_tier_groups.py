"""Engines of several cache groups with tiers: how much is restored and copied, and the cost of a failure."""

from __future__ import annotations

import pytest

from baton.engine.core.config import EngineCoreConfig
from baton.engine.core.prefix import block_hashes
from baton.engine.core.requests.request import RequestStatus

from .core_harness import BLOCK_SIZE, VOCAB_SIZE, Harness, config, request
from .core_tiers import name_in

WINDOW, EVERY = 6, 8  # tokens: a window ends inside a block, a checkpoint comes every second one
PROMPT = [(11 * position + 5) % VOCAB_SIZE for position in range(33)]  # eight full blocks and a token
HASHES = block_hashes(PROMPT, BLOCK_SIZE)
WINDOWED = config(groups=[(40, None), (24, WINDOW)])
HYBRID = config(groups=[(40, None)], states=[(8, EVERY)])
ALL_KINDS = config(groups=[(40, None), (24, WINDOW)], states=[(8, EVERY)])


def engine_of(sizes: EngineCoreConfig, prompt: list[int] = PROMPT) -> Harness:
    """Compute the prompt, store its blocks and states in tiers, and evict them from the pools."""
    engine = Harness(sizes, min_restored_tokens=1)
    engine.add(request("first", prompt, max_tokens=1))
    settle(engine)
    lose_the_pools(engine)
    return engine


def settle(engine: Harness) -> None:
    """Finish all stores, and those that follow."""
    assert engine.tiers is not None
    engine.run()
    while engine.tiers.stores:
        engine.tiers.finish_all()
        engine.run_to_the_end()


def lose_the_pools(engine: Harness, *numbers: int) -> None:
    for number in numbers or range(len(engine.scheduler.groups)):
        pool = engine.scheduler.groups[number].pool
        pool.release(pool.allocate(pool.num_blocks))


def names(group: int, *blocks: int) -> list[bytes]:
    return [name_in(HASHES[block], group) for block in blocks]


def restored(engine: Harness) -> list[bytes]:
    """Return the names of the entries that the only restore brings."""
    assert engine.tiers is not None
    (copy,) = engine.tiers.restores.values()
    return copy.names


def num_cached(engine: Harness, name: str = "again") -> int:
    engine.run_to_the_end()
    return engine.answer(name).outputs[0].num_cached_tokens


@pytest.mark.parametrize("sizes", [WINDOWED, HYBRID, ALL_KINDS], ids=["windows", "states", "both"])
class TestEveryMix:
    def test_each_group_stores_what_is_complete_under_the_hashes_of_the_pool(self, sizes: EngineCoreConfig) -> None:
        engine = engine_of(sizes)
        assert engine.tiers is not None
        for number, group in enumerate(sizes.groups):
            kept = [block for block in range(8) if name_in(HASHES[block], number) in engine.tiers.kept]
            if group.checkpoint_tokens is None:
                assert kept == list(range(8))
            else:
                assert 7 in kept, "the last checkpoint of the chunk"
                assert all(block % 2 for block in kept), "only ends of entries are checkpoints"

    def test_a_prompt_comes_back_as_deep_as_all_groups_have_it(self, sizes: EngineCoreConfig) -> None:
        engine = engine_of(sizes)
        engine.add(request("again", PROMPT, max_tokens=3))
        engine.run()
        assert engine.scheduler.requests["again"].status is RequestStatus.WAITING_FOR_KV
        found = restored(engine)
        wanted = names(0, *range(8))
        for number, group in enumerate(sizes.groups[1:], start=1):
            wanted += names(number, 6, 7) if group.window is not None else names(number, 7)
        assert found == wanted, "of each group what the next token sees, and nothing else"
        assert num_cached(engine) == 32
        stats = engine.core.stats().tiers
        assert stats is not None
        assert (stats.hits, stats.restored_tokens) == (len(wanted), 32)

    def test_what_the_pool_has_of_a_group_is_not_moved(self, sizes: EngineCoreConfig) -> None:
        engine = engine_of(sizes)
        assert engine.tiers is not None
        engine.add(request("fills the pool", PROMPT, max_tokens=1))
        engine.run()
        engine.run_to_the_end()
        lose_the_pools(engine, len(sizes.groups) - 1)
        engine.add(request("again", PROMPT, max_tokens=1))
        engine.run()
        last = len(sizes.groups) - 1
        assert all(name.startswith(b"%d:" % last) for name in restored(engine))
        assert num_cached(engine) == 32

    @pytest.mark.parametrize("num_good", [0, 3, 8])
    def test_where_not_all_comes_the_rest_of_it_is_of_use_and_the_answer_is_right(
        self, sizes: EngineCoreConfig, num_good: int
    ) -> None:
        engine = engine_of(sizes)
        assert engine.tiers is not None
        engine.add(request("again", PROMPT, max_tokens=3))
        engine.run()
        ((copy_id, copy),) = engine.tiers.restores.items()
        for name in copy.names[num_good:]:
            engine.tiers.lose(name)
        engine.tiers.finish_restore(copy_id, num_good)
        engine.step()
        pool = engine.scheduler.groups[0].pool
        assert [pool.has(block_hash) for block_hash in HASHES][:num_good] == [True] * min(8, num_good)
        assert num_cached(engine) < 32

    def test_the_blocks_of_an_aborted_restore_come_back_when_nothing_writes_them(self, sizes: EngineCoreConfig) -> None:
        engine = engine_of(sizes)
        assert engine.tiers is not None
        engine.add(request("again", PROMPT, max_tokens=1))
        engine.run()
        num_moved = len(restored(engine))
        engine.core.abort("again")
        engine.run()
        assert engine.core.stats().num_blocks_quarantined >= num_moved
        engine.tiers.finish_all()
        engine.step()
        engine.check_all_given_back()

    def test_two_requests_for_one_prefix_restore_it_once(self, sizes: EngineCoreConfig) -> None:
        engine = engine_of(sizes)
        assert engine.tiers is not None
        engine.add(request("again", PROMPT, max_tokens=1), request("other", PROMPT, max_tokens=1, seed=3))
        engine.run()
        assert len(engine.tiers.restores) == 1
        assert num_cached(engine, "other") == 32

    def test_a_preempted_request_comes_back_from_all_tiers(self, sizes: EngineCoreConfig) -> None:
        engine = Harness(sizes, min_restored_tokens=1)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=12))
        engine.step(4)
        for _ in range(12):
            engine.tiers.finish_all()
            engine.scheduler.poll_transfers()
        engine.scheduler.running.preempt(engine.scheduler.requests["a"])
        lose_the_pools(engine)
        engine.step()
        assert engine.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_KV
        engine.run_to_the_end()


def test_a_window_that_is_lost_at_the_end_is_found_further_up() -> None:
    engine = engine_of(WINDOWED)
    assert engine.tiers is not None
    for name in names(1, 7):
        engine.tiers.lose(name)
    engine.add(request("again", PROMPT, max_tokens=1))
    engine.run()
    assert restored(engine) == [*names(0, *range(7)), *names(1, 5, 6)]
    assert num_cached(engine) == 28


def test_a_window_half_in_the_pool_and_half_in_a_tier_is_put_together() -> None:
    engine = engine_of(WINDOWED)
    assert engine.tiers is not None
    windowed = engine.scheduler.groups[1].pool
    (block,) = windowed.allocate(1)
    windowed.register(block, HASHES[7])
    windowed.release([block])
    engine.runner.memories[1].blocks[block] = engine.tiers.kept[name_in(HASHES[7], 1)]
    engine.add(request("again", PROMPT, max_tokens=1))
    engine.run()
    assert restored(engine) == [*names(0, *range(8)), *names(1, 6)]
    assert num_cached(engine) == 32


def test_without_a_checkpoint_nothing_is_restored() -> None:
    engine = engine_of(HYBRID)
    assert engine.tiers is not None
    for name in [name for name in engine.tiers.kept if name.startswith(b"1:")]:
        engine.tiers.lose(name)
    engine.add(request("again", PROMPT, max_tokens=1))
    engine.run()
    assert not engine.tiers.restores
    assert num_cached(engine) == 0


def test_a_stale_state_shows_as_a_wrong_step() -> None:
    engine = engine_of(HYBRID)
    assert engine.tiers is not None
    engine.tiers.kept[name_in(HASHES[7], 1)] = [12345]
    engine.add(request("again", PROMPT, max_tokens=1))
    with pytest.raises(Exception, match="wrong state"):
        engine.run_to_the_end()


def test_no_state_is_lent_while_no_slot_is_free() -> None:
    """Otherwise a sequence would have to wait for the copy: it cannot write a slot that is being read."""
    engine = Harness(config(groups=[(40, None)], states=[(2, EVERY)], max_num_seqs=2), min_restored_tokens=1)
    engine.add(*(request(name, PROMPT[start : start + 5], max_tokens=24) for start, name in enumerate("ab")))
    for _ in range(30):
        engine.step()
    assert not engine.scheduler.requests, "both ran to their ends, although no store has ended"
    engine.run_to_the_end()


def test_blocks_of_several_sizes_count_by_their_size() -> None:
    engine = engine_of(HYBRID)
    assert engine.tiers is not None
    engine.tiers.block_sizes = [1.0, 40.0]
    engine.add(request("other", [token ^ 1 for token in PROMPT], max_tokens=1))
    engine.run()
    states = [copy for copy in engine.tiers.stores.values() if copy.names[0].startswith(b"1:")]
    assert [len(copy.names) for copy in states] == [1], "a store is no larger than 32 blocks of the first group"
    engine.run_to_the_end()
