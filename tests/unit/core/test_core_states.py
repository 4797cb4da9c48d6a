"""Cache groups of recurrent states: slots of requests, checkpoints, and hits that begin behind one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.config import CacheGroupConfig, EngineCoreConfig, InvalidEngineCoreConfig
from baton.engine.core.kv.blocks import BlockPoolCorrupted
from baton.engine.core.kv.cache_groups import NOT_CACHED, StateGroup
from baton.engine.core.layout import CHECKPOINT_TOKENS
from baton.engine.core.messages import EngineRequest, KVSource
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.offline.bench_scheduler import result_of

from .core_connector import ticket_for
from .core_harness import BLOCK_SIZE, VOCAB_SIZE, Harness, config, request

EVERY = 12  # tokens from one checkpoint to the next
LONG = [(11 * position + 5) % VOCAB_SIZE for position in range(90)]


def engine_of(num_slots: int, *, num_blocks: int = 64, **changes: object) -> Harness:
    return Harness(config(groups=[(num_blocks, None)], states=[(num_slots, EVERY)], **changes))


def slots_in_use(engine: Harness) -> int:
    pool = engine.scheduler.groups[1].pool
    return pool.num_blocks - pool.num_free


class TestSlots:
    def test_a_request_holds_its_slot_and_for_a_while_the_one_before(self) -> None:
        engine = engine_of(8)
        engine.add(request("a", LONG[:5], max_tokens=60))
        counts = []
        while engine.core.has_work():
            engine.step()
            counts.append(slots_in_use(engine))
        assert (max(counts), counts[EVERY - 5]) == (2, 1)
        engine.run_to_the_end()

    def test_with_a_slot_a_request_all_run_at_once(self) -> None:
        engine = engine_of(4, max_num_seqs=4, depth=2, max_num_batched_tokens=40)
        engine.add(*(request(f"r{index}", LONG[index : index + 20], max_tokens=30) for index in range(4)))
        engine.step(6)
        assert engine.core.stats().num_requests_running == 4
        engine.run_to_the_end()
        assert engine.core.stats().num_preemptions == 0

    @pytest.mark.parametrize("lazy", [True, False])
    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_request_gives_its_row_to_the_one_that_holds_the_slot_that_it_would_write(
        self, depth: int, lazy: bool
    ) -> None:
        """The checkpoint after the first chunk is held by a request that waits for a row, with KV of a hand-off."""
        sizes = {"max_num_seqs": 1, "max_num_batched_tokens": EVERY}
        engine = Harness(config(groups=[(24, None)], states=[(2, EVERY)], depth=depth, **sizes), lazy=lazy)
        source = KVSource(ticket_for(LONG[:EVERY]), EVERY)
        engine.add(
            request("long", LONG[: 2 * EVERY], max_tokens=4),
            request("moved", LONG[:EVERY], output_token_ids=[5], kv_source=source, max_tokens=4),
        )
        engine.step()
        assert engine.scheduler.transfers.num_pulling == 1
        engine.run_to_the_end()
        assert engine.core.stats().num_preemptions == 1

    def test_requests_wait_for_a_slot_and_are_answered(self) -> None:
        engine = engine_of(2, max_num_seqs=4)
        engine.add(*(request(f"r{index}", LONG[:20], max_tokens=20, seed=index) for index in range(5)))
        engine.step(3)
        assert engine.core.stats().num_requests_running <= 2
        engine.run_to_the_end()

    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("budget", [4, 12, 32])
    def test_prompts_may_be_cut_anywhere(self, budget: int, depth: int) -> None:
        engine = engine_of(9, max_num_batched_tokens=budget, depth=depth)
        engine.add(*(request(f"r{index}", LONG[: 20 + 13 * index], max_tokens=15, seed=index) for index in range(5)))
        engine.run_to_the_end()
        assert engine.core.stats().prefix_cache_hits > 0


class TestHits:
    def test_a_hit_begins_behind_the_last_checkpoint(self) -> None:
        engine = engine_of(8)
        engine.add(request("first", LONG[:50], max_tokens=1))
        engine.run()
        engine.add(request("second", LONG[:50], max_tokens=1))
        engine.run()
        assert engine.answer("second").outputs[0].num_cached_tokens == 48
        engine.run_to_the_end()

    def test_an_answer_is_found_by_the_next_turn(self) -> None:
        engine = engine_of(8)
        engine.add(request("first", LONG[:20], max_tokens=30))
        engine.run()
        told = LONG[:20] + engine.answer("first").token_ids
        engine.add(request("second", [*told, 1, 2, 3], max_tokens=1))
        engine.run()
        assert engine.answer("second").outputs[0].num_cached_tokens == 48
        engine.run_to_the_end()

    def test_one_that_starts_in_the_step_that_writes_its_checkpoint_waits_for_the_next(self) -> None:
        engine = engine_of(8, max_num_batched_tokens=96)
        engine.add(request("first", LONG[:30], max_tokens=5), request("second", LONG[:40], max_tokens=5))
        engine.step()
        assert engine.core.stats().num_requests_running == 1
        engine.run()
        assert engine.answer("second").outputs[0].num_cached_tokens == 24
        engine.run_to_the_end()

    def test_where_a_prefix_was_seen_before_a_checkpoint_is_kept_though_slots_are_full(self) -> None:
        """Users share a system prompt and add long parts: the third one begins where the system prompt ends."""
        system, own = LONG[:52], 43
        engine = engine_of(4, max_num_batched_tokens=96, max_model_len=96)
        for user in range(3):
            tail = [(user * 17 + position * 3) % VOCAB_SIZE for position in range(own)]
            engine.add(request(f"r{user}", system + tail, max_tokens=1))
            engine.run()
        cached = [engine.answer(f"r{user}").outputs[0].num_cached_tokens for user in range(3)]
        assert cached[0] == 0
        assert cached[1] < 48
        assert cached[2] == 48
        engine.run_to_the_end()

    def test_the_end_of_a_prompt_is_kept_before_what_comes_earlier(self) -> None:
        engine = engine_of(2, max_num_batched_tokens=96, max_model_len=96)
        for name in ("first", "second"):
            engine.add(request(name, LONG[:80], max_tokens=1))
            engine.run()
        assert engine.answer("second").outputs[0].num_cached_tokens == 72
        engine.run_to_the_end()

    def test_without_prefix_caching_nothing_is_kept(self) -> None:
        engine = engine_of(3, enable_prefix_caching=False, max_num_batched_tokens=16)
        engine.add(request("first", LONG[:50], max_tokens=20))
        engine.run()
        assert not engine.scheduler.groups[1].pool.findable
        engine.run_to_the_end()

    def test_on_a_chat_hits_are_within_a_tenth_of_those_of_a_model_that_keeps_everything(self) -> None:
        """A system prompt of 3000 tokens, three conversations of 20 turns each, all of them alternating."""
        hybrid, whole = chat_hits(states=True), chat_hits(states=False)
        assert whole > 0.9
        assert hybrid > 0.9 * whole


def chat_hits(*, states: bool) -> float:
    """Return the share of prompt tokens that come from the cache."""
    groups = [CacheGroupConfig(num_blocks=4096)]
    if states:
        groups.append(CacheGroupConfig(num_blocks=64, checkpoint_tokens=CHECKPOINT_TOKENS))
    scheduler = Scheduler(
        EngineCoreConfig(
            num_blocks=sum(group.num_blocks for group in groups),
            cache_groups=groups,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=16_384,
            vocab_size=32_000,
        )
    )
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(32_000) for _ in range(count)]

    system = words(3000)
    chats = [list(system) for _ in range(3)]
    for turn in range(20):
        for number, chat in enumerate(chats):
            chat += words(rng.randint(20, 200))
            sampling = SamplingParams(max_tokens=rng.randint(20, 150))
            name = f"{turn}-{number}"
            scheduler.add(EngineRequest(request_id=name, prompt_token_ids=list(chat), sampling=sampling))
            while scheduler.has_work():
                plan = scheduler.plan_step()
                if plan is not None:
                    for output in scheduler.settle(result_of(plan)):
                        chat += output.token_ids
    stats = scheduler.stats()
    return stats.prefix_cache_hits / stats.prefix_cache_queries


class TestGroup:
    @given(st.lists(st.booleans(), max_size=6), st.integers(0, 40))
    def test_the_deepest_hit_is_the_last_checkpoint_that_is_there(self, cached: list[bool], most: int) -> None:
        group = StateGroup(1, BLOCK_SIZE, EVERY)
        found = [index if there else NOT_CACHED for index, there in enumerate(cached)]
        span = EVERY // BLOCK_SIZE
        places = [0, *((index + 1) * span for index, there in enumerate(cached) if there)]
        assert group.deepest(found, most) == max(place for place in places if place <= most)

    def test_the_entry_of_a_token_is_the_one_that_its_own_is_counted_in(self) -> None:
        group = StateGroup(1, BLOCK_SIZE, EVERY)
        assert [group.first_visible(tokens) for tokens in (0, 1, 12, 13, 24, 25)] == [0, 0, 0, 1, 1, 2]

    def test_a_slot_is_moved_on_where_none_is_free(self) -> None:
        group = StateGroup(1, BLOCK_SIZE, EVERY)
        table = group.pool.allocate(1)
        assert list(group.extend(table, 0, 30, keeps=True, wanted=0)) == [NOT_CACHED, 0]
        assert table == [NOT_CACHED]

    def test_a_slot_that_others_read_is_not_written(self) -> None:
        group = StateGroup(2, BLOCK_SIZE, EVERY)
        table = group.pool.allocate(1)
        group.pool.reference(table[0])
        assert list(group.extend(table, EVERY, EVERY + 1, keeps=False, wanted=0)) == [1]
        full = StateGroup(1, BLOCK_SIZE, EVERY)
        table = full.pool.allocate(1)
        assert full.may_extend(table, EVERY + 1)
        full.pool.reference(table[0])
        assert full.may_extend(table, EVERY)
        assert not full.may_extend(table, EVERY + 1)
        with pytest.raises(BlockPoolCorrupted, match="2 owners"):
            full.pool.forget(table[0])


def test_checkpoints_lie_between_blocks_and_behind_a_group_of_tokens() -> None:
    with pytest.raises(InvalidEngineCoreConfig, match="whole blocks of 4"):
        config(groups=[(8, None)], states=[(4, 6)])
    with pytest.raises(InvalidEngineCoreConfig, match="first must keep tokens"):
        config(groups=[], states=[(4, 8)])
    with pytest.raises(InvalidEngineCoreConfig, match="need 2 slots"):
        config(groups=[(8, None)], states=[(1, 8)])
