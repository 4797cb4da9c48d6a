"""The scheduler's one rule, seen through the plans that reach the runner."""

from __future__ import annotations

import pytest

from baton.engine.core.messages import FinishReason
from baton.engine.core.requests.request import Request
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.queues import SPARE_ENTRIES
from baton.engine.core.step import StepPlan

from .core_harness import BLOCK_SIZE, Harness, config, num_remembered, request
from .core_memory import expected_answer


def shape(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(row, start, number of tokens) of each chunk."""
    return [(chunk.row, chunk.start, chunk.num_tokens) for chunk in plan.chunks]


def shapes(engine: Harness) -> list[list[tuple[int, int, int]]]:
    return [shape(plan) for plan in engine.runner.plans]


class TestOneRule:
    def test_a_prompt_is_computed_and_then_one_token_a_step(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 6, max_tokens=3))
        engine.run_to_the_end()
        assert shapes(engine) == [[(0, 0, 6)], [(0, 6, 1)], [(0, 7, 1)]]

    def test_a_long_prompt_is_cut_at_the_budget_and_only_its_last_chunk_draws(self) -> None:
        engine = Harness(config(max_num_batched_tokens=8))
        engine.add(request("a", 20, max_tokens=1))
        engine.run_to_the_end()
        assert shapes(engine) == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 4)]]
        assert [plan.chunks[0].samples for plan in engine.runner.plans] == [False, False, True]

    def test_those_that_decode_go_before_a_prompt_that_fills_the_rest_of_the_budget(self) -> None:
        engine = Harness(config(max_num_batched_tokens=8))
        engine.add(request("a", [1] * 4, max_tokens=9))
        engine.step()
        engine.add(request("b", [2] * 20, max_tokens=2))
        engine.step(2)
        assert shapes(engine)[1:] == [[(0, 4, 1), (1, 0, 7)], [(0, 5, 1), (1, 7, 7)]]

    def test_no_more_requests_run_than_there_are_rows(self) -> None:
        engine = Harness(config(max_num_seqs=2))
        engine.add(*(request(name, 3, max_tokens=2) for name in "abc"))
        engine.step()
        assert len(engine.runner.plans[0].started_rows) == 2
        assert engine.core.stats().num_requests_waiting == 1
        engine.run_to_the_end()

    def test_a_row_is_taken_again_in_the_plan_that_frees_it(self) -> None:
        engine = Harness(config(max_num_seqs=1))
        engine.add(request("a", 3, max_tokens=1), request("b", 3, max_tokens=1))
        engine.run_to_the_end()
        second = engine.runner.plans[1]
        assert second.freed_rows == [0]
        assert [start.request_id for start in second.started_rows] == ["b"]

    def test_the_queue_is_served_by_priority_then_arrival(self) -> None:
        engine = Harness(config(max_num_seqs=1))
        engine.add(
            request("late", 3, max_tokens=1, arrival_s=2.0),
            request("early", 3, max_tokens=1, arrival_s=1.0),
            request("urgent", 3, max_tokens=1, arrival_s=3.0, priority=-1),
        )
        engine.run_to_the_end()
        started = [start.request_id for plan in engine.runner.plans for start in plan.started_rows]
        assert started == ["urgent", "early", "late"]

    @pytest.mark.slow
    def test_those_that_ended_behind_others_in_the_queue_do_not_pile_up(self) -> None:
        engine = Harness(config(max_num_seqs=1))
        engine.add(request("runs", 3, max_tokens=50), request("next", 3, max_tokens=2))
        engine.step()
        before = num_remembered(Request)
        for number in range(3 * SPARE_ENTRIES):
            engine.add(request(f"r{number}", 3, priority=1))
            engine.core.abort(f"r{number}")
        engine.add(request("last", 3, priority=2, max_tokens=2))
        assert num_remembered(Request) <= before + SPARE_ENTRIES + 4
        engine.run_to_the_end()
        assert len(engine.answer("last").token_ids) == 2

    def test_a_row_knows_all_that_the_device_needs(self) -> None:
        engine = Harness(config(eos_token_ids=[5]))
        sampling = SamplingParams(max_tokens=4, stop_token_ids=[9], temperature=0.5)
        engine.add(request("a", 6, sampling=sampling, output_token_ids=[1, 2], seed=11))
        engine.step()
        (start,) = engine.runner.plans[0].started_rows
        assert (start.request_id, start.output_token_ids, start.seed) == ("a", [1, 2], 11)
        assert start.sampling == sampling
        assert start.stop_token_ids == [5, 9]
        assert [len(table) for table in start.block_tables] == [2]

    def test_outputs_generated_elsewhere_are_computed_and_never_sent_back(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 6, max_tokens=4, output_token_ids=[1, 2]))
        engine.run_to_the_end()
        assert shapes(engine)[0] == [(0, 0, 8)]
        assert len(engine.answer("a").token_ids) == 2

    def test_a_request_that_has_all_its_tokens_is_over_at_once(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 6, max_tokens=2, output_token_ids=[1, 2]))
        engine.run_to_the_end()
        assert engine.answer("a").finish_reason is FinishReason.LENGTH
        assert engine.answer("a").token_ids == []
        assert not engine.runner.plans


class TestLongAndShort:
    """Long prompts do not hold up short ones without bound, and short ones do not keep long ones from their turn."""

    def started(self, engine: Harness) -> list[list[str]]:
        return [[start.request_id for start in plan.started_rows] for plan in engine.runner.plans]

    def test_a_share_of_each_step_is_for_short_prompts_while_a_long_one_is_read(self) -> None:
        engine = Harness(config(max_num_batched_tokens=16))
        engine.add(request("long", [1] * 60, max_tokens=1))
        engine.step()
        engine.add(request("short", [2] * 4, max_tokens=1), request("too long", [3] * 5, max_tokens=1))
        engine.step(2)
        assert shapes(engine)[1:] == [[(0, 16, 12), (1, 0, 4)], [(0, 28, 16)]], "what nobody uses is not kept"
        engine.run_to_the_end()
        assert self.started(engine) == [["long"], ["short"], [], [], ["too long"]]

    def test_nothing_is_kept_for_short_prompts_that_get_no_row(self) -> None:
        engine = Harness(config(max_num_batched_tokens=16, max_num_seqs=2))
        engine.add(request("long", [1] * 60, max_tokens=1))
        engine.step()
        engine.add(*(request(f"short {value}", [value] * 2, max_tokens=1) for value in (2, 3)))
        engine.step()
        assert shapes(engine)[1:] == [[(0, 16, 14), (1, 0, 2)]]
        engine.run_to_the_end()

    def test_a_short_prompt_passes_a_long_one_that_waits_for_the_step(self) -> None:
        engine = Harness(config(max_num_batched_tokens=16))
        engine.add(request("first", [1] * 60, max_tokens=1))
        engine.step()
        engine.add(request("second", [2] * 60, max_tokens=1), request("short", [3] * 3, max_tokens=1))
        engine.step()
        assert self.started(engine) == [["first"], ["short"]]
        engine.run_to_the_end()

    def test_a_prompt_of_another_priority_is_passed_by_none(self) -> None:
        engine = Harness(config(max_num_batched_tokens=16))
        engine.add(request("first", [1] * 60, max_tokens=1))
        engine.step()
        engine.add(request("second", [2] * 60, max_tokens=1), request("short", [3] * 3, max_tokens=1, priority=1))
        engine.step()
        assert self.started(engine) == [["first"], []]
        engine.run_to_the_end()

    def test_small_requests_pass_a_head_that_lacks_blocks_until_they_had_as_many_as_it_needs(self) -> None:
        engine = Harness(config(num_blocks=20, max_num_batched_tokens=128, max_model_len=128))
        engine.add(request("runs", [1] * (8 * BLOCK_SIZE), max_tokens=3 * BLOCK_SIZE))
        engine.step()
        engine.add(request("head", [2] * (16 * BLOCK_SIZE - 1), max_tokens=1, arrival_s=1.0))
        small = [request(f"s{n}", [3 + n] * (2 * BLOCK_SIZE - 1), max_tokens=1, arrival_s=2.0 + n) for n in range(12)]
        engine.add(*small)
        engine.run_to_the_end()
        order = [name for names in self.started(engine) for name in names]
        assert order.index("head") == 9, "eight of two blocks each pass a head that needs sixteen"
        assert sorted(order) == sorted(["runs", "head", *(asked.request_id for asked in small)])

    def test_while_a_long_prompt_is_read_short_ones_do_not_get_more_blocks_before_a_head_that_lacks_them(self) -> None:
        engine = Harness(config(num_blocks=44, max_num_batched_tokens=16, max_model_len=200))
        engine.add(request("long", [1] * (40 * BLOCK_SIZE), max_tokens=1))
        engine.step()
        engine.add(request("head", [2] * (8 * BLOCK_SIZE), max_tokens=1, arrival_s=1.0))
        short = [request(f"s{n}", [3 + n] * BLOCK_SIZE, max_tokens=1, arrival_s=2.0 + n) for n in range(12)]
        engine.add(*short)
        engine.run_to_the_end()
        order = [name for names in self.started(engine) for name in names]
        assert order.index("head") == 9, "eight of one block each pass a head that needs eight"

    def test_a_request_that_needs_more_than_a_few_blocks_waits_behind_the_head(self) -> None:
        engine = Harness(config(num_blocks=20, max_num_batched_tokens=128, max_model_len=128))
        engine.add(request("runs", [1] * (8 * BLOCK_SIZE), max_tokens=3 * BLOCK_SIZE))
        engine.step()
        engine.add(request("head", [2] * (16 * BLOCK_SIZE - 1), max_tokens=1, arrival_s=1.0))
        engine.add(request("third", [3] * (3 * BLOCK_SIZE - 1), max_tokens=1, arrival_s=2.0))
        engine.run_to_the_end()
        assert [name for names in self.started(engine) for name in names] == ["runs", "head", "third"]


class TestPipelining:
    def test_at_depth_two_a_step_is_planned_before_the_tokens_of_the_last_are_known(self) -> None:
        engine = Harness(config(depth=2))
        engine.add(request("a", 4, max_tokens=8))
        engine.step()
        assert not engine.answers
        engine.step()
        assert shapes(engine) == [[(0, 0, 4)], [(0, 4, 1)]]
        assert len(engine.answer("a").token_ids) == 1

    def test_no_step_is_planned_beyond_a_length_that_is_known(self) -> None:
        engine = Harness(config(depth=2))
        engine.add(request("a", 4, max_tokens=3))
        engine.run_to_the_end()
        assert len(engine.runner.plans) == 3

    def test_a_stop_drops_the_token_of_the_step_in_flight(self) -> None:
        engine = Harness(config(depth=2))
        first, _ = expected_answer(request("a", 4, max_tokens=1), engine.config)
        engine.add(request("a", 4, max_tokens=8, stop_token_ids=first))
        engine.run_to_the_end()
        assert engine.answer("a").token_ids == first
        assert engine.answer("a").last.stop_token_id == first[0]
        assert engine.core.stats().generation_tokens == 1

    def test_row_and_blocks_stay_taken_until_the_newest_step_that_writes_there_is_over(self) -> None:
        engine = Harness(config(depth=2, max_num_seqs=1))
        first, _ = expected_answer(request("a", 4, max_tokens=1), engine.config)
        engine.add(request("a", 4, max_tokens=8, stop_token_ids=first))
        engine.step(2)
        assert engine.is_answered("a")
        assert engine.core.stats().num_blocks_free < engine.config.num_blocks
        engine.add(request("b", 4, max_tokens=1))
        engine.step()
        assert len(engine.runner.plans) == 2, "the only row is still being written"
        engine.run_to_the_end()

    def test_an_abort_behind_a_step_in_flight_gives_everything_back(self) -> None:
        engine = Harness(config(depth=2))
        engine.add(request("a", 4, max_tokens=8))
        engine.step()
        engine.core.abort("a")
        engine.run_to_the_end()
        assert engine.answer("a").finish_reason is FinishReason.ABORT
        assert engine.answer("a").token_ids == []


class TestPrefixCache:
    def test_the_beginning_of_a_known_prompt_is_not_computed_again(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, max_tokens=1))
        engine.run()
        engine.add(request("b", 10, max_tokens=1))
        engine.run_to_the_end()
        assert shapes(engine) == [[(0, 0, 10)], [(0, 8, 2)]]
        assert engine.answer("a").last.num_cached_tokens == 0
        assert engine.answer("b").last.num_cached_tokens == 8
        stats = engine.core.stats()
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)

    def test_at_least_one_token_is_computed(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 2 * BLOCK_SIZE, max_tokens=1))
        engine.run()
        engine.add(request("b", 2 * BLOCK_SIZE, max_tokens=1))
        engine.run_to_the_end()
        assert shapes(engine)[1] == [(0, BLOCK_SIZE, BLOCK_SIZE)]

    def test_requests_of_one_step_share_what_the_first_one_computes(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, max_tokens=3, seed=1), request("b", 10, max_tokens=3, seed=2))
        engine.run_to_the_end()
        assert shapes(engine)[0] == [(0, 0, 10), (1, 8, 2)]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_answers_are_cached_too_so_that_a_conversation_goes_on_from_them(self, depth: int) -> None:
        engine = Harness(config(depth=depth))
        engine.add(request("a", 6, max_tokens=10))
        engine.run()
        turn = [*engine.asked["a", 0].prompt_token_ids, *engine.answer("a").token_ids]
        engine.add(request("b", [*turn, 1, 2], max_tokens=1))
        engine.run_to_the_end()
        computed = len(turn) - 1  # the last token of an answer is never run through the model
        assert engine.answer("b").last.num_cached_tokens == computed // BLOCK_SIZE * BLOCK_SIZE

    def test_a_single_token_waits_for_the_step_that_computes_its_prefix(self) -> None:
        """It is a decode, and those may read their old KV before a step has written its own."""
        engine = Harness(config())
        engine.add(*(request(name, list(range(9)), max_tokens=2) for name in "ab"))
        engine.run_to_the_end()
        assert shapes(engine) == [[(0, 0, 9)], [(0, 9, 1), (1, 8, 1)], [(1, 9, 1)]]

    def test_a_single_token_waits_for_a_prefix_that_goes_on_being_read(self) -> None:
        engine = Harness(config(depth=2, max_num_batched_tokens=10))
        prompt = request("a", 18).prompt_token_ids
        engine.add(request("a", prompt, max_tokens=4))
        engine.step()
        engine.add(request("b", [*prompt[:16], 5], max_tokens=2))
        engine.step(2)
        assert shapes(engine) == [[(0, 0, 10)], [(0, 10, 8)], [(0, 18, 1), (1, 16, 1)]]
        engine.run_to_the_end()

    def test_a_single_token_waits_for_no_step_that_computes_what_others_read(self) -> None:
        engine = Harness(config())
        engine.add(request("a", list(range(9)), max_tokens=1))
        engine.run()
        engine.add(request("b", [7] * 12, max_tokens=1), request("c", list(range(9)), max_tokens=1))
        engine.run_to_the_end()
        assert shapes(engine)[1:] == [[(1, 8, 1), (0, 0, 12)]]

    def test_the_last_token_of_a_budget_is_not_spent_on_a_prefix_of_the_same_step(self) -> None:
        engine = Harness(config(max_num_batched_tokens=9))
        engine.add(request("a", [5] * 8, max_tokens=1), request("b", [5] * 8 + [6] * 4, max_tokens=1))
        engine.run_to_the_end()
        assert shapes(engine) == [[(0, 0, 8)], [(0, 8, 4)]]

    def test_salts_keep_prefixes_apart(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, max_tokens=1))
        engine.run()
        engine.add(request("b", 10, max_tokens=1, cache_salt="x"), request("c", 10, max_tokens=1, cache_salt="x"))
        engine.run_to_the_end()
        assert [engine.answer(name).last.num_cached_tokens for name in "bc"] == [0, 8]

    def test_prompt_logprobs_need_every_position_computed(self) -> None:
        engine = Harness(config(max_num_batched_tokens=8))
        engine.add(request("a", 10, max_tokens=1))
        engine.run()
        engine.add(request("b", 10, max_tokens=2, prompt_logprobs=0))
        engine.run_to_the_end()
        first, *others = engine.answer("b").outputs
        assert first.num_cached_tokens == 0
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == 9  # nothing precedes the first token
        assert all(output.prompt_logprobs is None for output in others)

    def test_it_can_be_switched_off(self) -> None:
        engine = Harness(config(enable_prefix_caching=False))
        engine.add(request("a", 10, max_tokens=6), request("b", 10, max_tokens=6))
        engine.run_to_the_end()
        assert engine.core.stats().prefix_cache_queries == 0
        assert engine.answer("b").outputs[0].num_cached_tokens == 0
