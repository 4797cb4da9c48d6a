"""Engines whose layers keep different parts of a sequence: tables, hits and arenas of each group."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from baton.engine.core.config import CacheGroupConfig, EngineCoreConfig, InvalidEngineCoreConfig
from baton.engine.core.kv.cache_groups import NOT_CACHED, WindowGroup, make_groups
from baton.engine.core.messages import EngineRequest, FinishReason
from baton.engine.core.prefix import block_hashes
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.offline.bench_scheduler import result_of

from .core_grammars import FakeGrammars
from .core_harness import BLOCK_SIZE, VOCAB_SIZE, Harness, config, request
from .core_machine import EngineMachine
from .core_prompts import STEMS

LONG = [(11 * position + 5) % VOCAB_SIZE for position in range(200)]
WINDOW = 6  # tokens: a window ends inside a block


def engine_of(*groups: tuple[int, int | None], **changes: object) -> Harness:
    return Harness(config(groups=groups, **changes))


def held(engine: Harness, request_id: str = "a") -> list[int]:
    """Return how many blocks a request owns in each group."""
    return [len(blocks) for blocks in engine.scheduler.requests[request_id].owned_blocks()]


class TestWindows:
    def test_blocks_behind_the_window_are_given_back_while_the_request_runs(self) -> None:
        engine = engine_of((32, None), (32, WINDOW))
        engine.add(request("a", LONG[:30], max_tokens=40))
        most = 0
        for _ in range(40):
            engine.step()
            if "a" in engine.scheduler.requests and engine.scheduler.requests["a"].has_blocks:
                full, windowed = held(engine)
                length = engine.scheduler.requests["a"].num_tokens
                assert full >= length // BLOCK_SIZE
                most = max(most, windowed if length > 32 else 0)
        assert most == -(-WINDOW // BLOCK_SIZE) + 1
        engine.run_to_the_end()

    def test_blocks_that_only_one_group_has_left_are_not_left_for_requests(self) -> None:
        engine = engine_of((24, None), (40, WINDOW))
        assert engine.core.stats().num_blocks_left == 64
        engine.add(request("a", LONG[:30], max_tokens=40))
        engine.step()
        while held(engine)[0] < 16:
            engine.step()
        stats = engine.core.stats()
        assert (stats.num_blocks_left, stats.num_blocks_free) == (64 * 8 // 24, 64 - sum(held(engine)))
        engine.run_to_the_end()

    def test_a_prompt_read_in_chunks_gives_back_as_it_goes(self) -> None:
        engine = engine_of((32, None), (32, WINDOW), max_num_batched_tokens=8)
        engine.add(request("a", LONG[:64], max_tokens=4))
        counts = []
        for _ in range(8):
            engine.step()
            counts.append(held(engine)[1])
        assert counts == sorted(counts, reverse=True)
        assert (counts[0], counts[-1]) == (16, 2), "all are reserved at first, and 8 tokens are read a step"
        engine.run_to_the_end()

    def test_blocks_that_a_step_in_flight_reads_stay_until_its_result(self) -> None:
        engine = engine_of((32, None), (32, WINDOW), max_num_batched_tokens=8, depth=2)
        engine.add(request("a", LONG[:64], max_tokens=4))
        pool = engine.scheduler.groups[1].pool
        engine.step()  # one step is planned, none has given its result
        engine.step()  # two planned, one settled
        assert engine.scheduler.fence.owned_blocks(0) == []
        (behind,) = engine.scheduler.fence.owned_blocks(1)
        assert all(pool.references(block) == 1 for block in behind)
        engine.run_to_the_end()

    def test_every_layer_may_have_a_window(self) -> None:
        engine = engine_of((24, WINDOW))
        engine.add(request("a", LONG[:40], max_tokens=30), request("b", LONG[:40], max_tokens=30, seed=3))
        engine.run_to_the_end()

    @pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9])
    def test_any_window_gives_the_answers_of_one_alone(self, window: int) -> None:
        engine = engine_of((40, None), (20, window), (24, window + 7), max_num_batched_tokens=10, depth=2)
        engine.add(*(request(f"r{index}", LONG[index : 30 + 2 * index], max_tokens=20) for index in range(6)))
        engine.run_to_the_end()

    def test_an_arena_that_runs_dry_preempts_and_fails_nothing(self) -> None:
        engine = engine_of((64, None), (12, WINDOW), max_num_batched_tokens=16, max_num_seqs=6, depth=2)
        engine.add(*(request(f"r{index}", LONG[index : index + 20], max_tokens=40) for index in range(6)))
        engine.run_to_the_end()
        assert {answer.finish_reason for answer in engine.answers.values()} == {FinishReason.LENGTH}

    def test_where_every_second_layer_has_a_window_requests_hold_little_more_than_half(self) -> None:
        """64 requests of 4096 tokens behind windows of 128, in blocks of 16, as in gpt-oss."""
        num_requests, num_tokens, whole = 64, 4096, 270
        groups = [
            CacheGroupConfig(num_blocks=num_requests * whole),
            CacheGroupConfig(num_blocks=whole + num_requests * 11, window=128),
        ]
        scheduler = Scheduler(
            EngineCoreConfig(
                num_blocks=sum(group.num_blocks for group in groups),
                cache_groups=groups,
                max_num_seqs=num_requests,
                max_num_batched_tokens=2048,
                max_model_len=whole * 16,
                vocab_size=32_000,
            )
        )
        sampling = SamplingParams(max_tokens=None)
        for index in range(num_requests):
            prompt = [(index * 7 + position) % 1000 for position in range(num_tokens)]
            scheduler.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling))
        while len(scheduler.running) < num_requests or scheduler.running.num_unread_tokens:
            plan = scheduler.plan_step()
            assert plan is not None
            scheduler.settle(result_of(plan))
        assert scheduler.running.num_preemptions == 0
        full, windowed = (group.pool.num_blocks - group.pool.num_free for group in scheduler.groups)
        assert full >= num_requests * num_tokens // 16
        assert full + windowed <= 0.55 * 2 * full


class TestHits:
    def test_a_hit_needs_of_a_window_only_what_the_next_token_sees(self) -> None:
        engine = engine_of((40, None), (10, WINDOW), max_num_batched_tokens=8)
        engine.add(request("first", LONG[:34], max_tokens=1))
        engine.run()
        engine.add(request("other", LONG[1:17], max_tokens=1))
        engine.run()
        full, windowed = (group.pool for group in engine.scheduler.groups)
        names = block_hashes(LONG[:34], BLOCK_SIZE)
        assert all(map(full.has, names))
        assert not all(map(windowed.has, names[:4])), "the small arena has forgotten what is far behind the window"
        engine.add(request("second", LONG[:34], max_tokens=1))
        engine.run()
        assert engine.answer("second").outputs[0].num_cached_tokens == 32
        engine.run_to_the_end()

    def test_a_hit_is_as_deep_as_the_windows_have_what_it_sees(self) -> None:
        group = make_groups([CacheGroupConfig(num_blocks=16, window=WINDOW)], BLOCK_SIZE)[0]
        there = [0, 1, NOT_CACHED, 3, NOT_CACHED, 5, 6, 7]
        assert group.deepest(there, 8) == 8, "the token behind 32 sees from 27 on: blocks 6 and 7"
        assert group.deepest(there, 6) == 2, "that behind 24 sees 19, in block 4; behind 16, 11, in block 2"
        assert group.deepest(there[:2], 2) == 2

    @given(st.lists(st.booleans(), max_size=12), st.integers(1, 20), st.integers(0, 12))
    def test_the_deepest_hit_is_what_looking_at_every_place_finds(
        self, cached: list[bool], window: int, most: int
    ) -> None:
        group = WindowGroup(1, BLOCK_SIZE, window)
        found = [index if there else NOT_CACHED for index, there in enumerate(cached)]

        def may_begin(depth: int) -> bool:
            seen = range(max(0, depth * BLOCK_SIZE - window + 1), depth * BLOCK_SIZE)
            return all(cached[position // BLOCK_SIZE] for position in seen)

        places = [depth for depth in range(min(most, len(cached)) + 1) if may_begin(depth)]
        assert group.deepest(found, most) == max(places)


@pytest.mark.parametrize("groups", [[(0, None)], [(4, 0)]])
def test_an_arena_or_a_window_of_nothing_is_refused(groups: list[tuple[int, int | None]]) -> None:
    with pytest.raises(InvalidEngineCoreConfig, match="at least 1"):
        config(groups=groups, num_blocks=9)


class GroupsMachine(EngineMachine):
    """An engine with any mix of groups, with tiers or without."""

    @initialize(
        depth=st.sampled_from([1, 2, 2, 3]),
        lazy=st.booleans(),
        groups=st.lists(
            st.tuples(st.integers(4, 24), st.sampled_from([None, None, 1, 3, 4, 6, 9, 17])), min_size=1, max_size=3
        ),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(4, 24),
        caching=st.sampled_from([True, True, False]),
        states=st.lists(st.tuples(st.integers(2, 9), st.sampled_from([4, 8, 12, 16])), max_size=2),
        offers_early=st.booleans(),
        min_restored=st.sampled_from([None, 1, 1, 12]),
    )
    def start(
        self,
        depth: int,
        lazy: bool,
        groups: list[tuple[int, int | None]],
        max_num_seqs: int,
        budget: int,
        caching: bool,
        states: list[tuple[int, int]],
        offers_early: bool,
        min_restored: int | None,
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "max_model_len": 70}
        self.engine = Harness(
            config(
                groups=groups,
                states=states,
                depth=depth,
                enable_prefix_caching=caching,
                eos_token_ids=[1, 2],
                **sizes,
            ),
            lazy=lazy,
            offers_early=offers_early,
            min_restored_tokens=min_restored,
            grammars=FakeGrammars(),
            clock=self.clock,
        )
        self.engine.think_late()


TestGroups = pytest.mark.slow(GroupsMachine.TestCase)
TestGroups.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_on_few_blocks_of_each_group_gets_the_answers_that_each_gets_alone(depth: int, lazy: bool) -> None:
    groups = [(14, None), (13, WINDOW), (12, 2 * WINDOW)]
    engine = Harness(config(depth=depth, groups=groups, max_num_batched_tokens=12, max_model_len=48), lazy=lazy)
    engine.add(
        *(
            EngineRequest(
                request_id=f"r{index}",
                prompt_token_ids=STEMS[index % 3][: 5 + index],
                sampling=SamplingParams(max_tokens=10 + index),
                priority=index % 2,
                seed=index,
            )
            for index in range(16)
        )
    )
    engine.run_to_the_end()
    assert engine.core.stats().num_preemptions > 0
    assert engine.core.stats().prefix_cache_hits > 0
    assert {answer.finish_reason for answer in engine.answers.values()} == {FinishReason.LENGTH}
