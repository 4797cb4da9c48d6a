"""Requests that are preempted when blocks run out, and come back."""

from __future__ import annotations

import pytest

from baton.engine.core.kv.request_memory import RequestMemory
from baton.engine.core.messages import EngineRequest, FinishReason, KVSource

from .core_connector import ticket_for
from .core_harness import BLOCK_SIZE, Harness, config, request


class TestPreemption:
    def crowded(self, **changes: object) -> Harness:
        """Make an engine with 6 blocks, and requests that each need 4 in the end."""
        return Harness(config(num_blocks=6, **changes))

    def long_request(self, name: str, **changes: object) -> EngineRequest:
        tokens = [ord(name) % 50] * 2 * BLOCK_SIZE
        return request(name, tokens, max_tokens=2 * BLOCK_SIZE, **changes)

    @pytest.mark.parametrize("depth", [1, 2])
    def test_when_blocks_run_out_the_latest_gives_way_and_comes_back(self, depth: int) -> None:
        engine = self.crowded(depth=depth)
        engine.add(self.long_request("a"), self.long_request("b"))
        engine.run_to_the_end()
        started = [start.request_id for plan in engine.runner.plans for start in plan.started_rows]
        assert started == ["a", "b", "b"]
        assert engine.core.stats().num_preemptions == 1
        again = [start for plan in engine.runner.plans for start in plan.started_rows][-1]
        assert again.output_token_ids, "what it had drawn is kept"

    @pytest.mark.parametrize("depth", [1, 2])
    def test_no_more_give_way_than_is_needed(self, depth: int) -> None:
        engine = Harness(config(num_blocks=6, depth=depth))
        engine.add(*(request(str(index), [index] * 2 * BLOCK_SIZE, max_tokens=3) for index in range(3)))
        engine.run_to_the_end()
        started = [start.request_id for plan in engine.runner.plans for start in plan.started_rows]
        assert started == ["0", "1", "2", "2"]

    def test_nobody_is_let_in_by_the_step_that_takes_blocks_from_somebody(self) -> None:
        engine = self.crowded(max_num_seqs=2)
        engine.add(request("a", [1] * 8, max_tokens=9), request("b", [2] * 16, max_tokens=9, priority=1))
        engine.step()
        engine.add(request("c", [3] * 3, max_tokens=1))
        engine.step()
        assert engine.core.stats().num_preemptions == 1
        assert not engine.runner.plans[-1].started_rows
        engine.run_to_the_end()

    def test_the_lowest_priority_gives_way_before_the_latest(self) -> None:
        engine = self.crowded()
        engine.add(self.long_request("a", priority=1), self.long_request("b", priority=0))
        engine.run_to_the_end()
        started = [start.request_id for plan in engine.runner.plans for start in plan.started_rows]
        assert started == ["b", "a", "a"]

    def test_a_request_whose_last_token_is_on_the_way_is_not_preempted(self) -> None:
        engine = Harness(config(num_blocks=4, depth=2))
        engine.add(request("a", [1] * 8, max_tokens=3), request("b", [2] * 8, max_tokens=1))
        engine.run_to_the_end()
        assert engine.core.stats().num_preemptions == 0

    def test_a_priority_takes_blocks_from_lower_ones_when_there_are_no_others(self) -> None:
        engine = self.crowded()
        engine.add(self.long_request("a"), self.long_request("b"))
        engine.step()
        engine.add(request("urgent", [9] * 10, max_tokens=1, priority=-1))
        engine.step()
        assert engine.is_answered("urgent")
        assert engine.core.stats().num_preemptions == 1
        engine.run_to_the_end()

    def test_nobody_gives_way_to_a_priority_in_vain(self) -> None:
        engine = Harness(config(num_blocks=10))
        engine.add(request("held", [9] * 16, keep_kv=True, max_tokens=2))
        engine.run()
        engine.add(self.long_request("a"))
        engine.step()
        engine.add(request("urgent", [8] * 28, max_tokens=1, priority=-1))
        engine.step(3)
        assert engine.core.stats().num_preemptions == 0, "four blocks are held, so seven are not to be had"
        assert engine.core.stats().num_requests_running == 1
        engine.connector.end_offer(engine.only_offer())
        engine.run_to_the_end()

    def test_a_shortage_is_not_counted_again_before_enough_has_been_given_back(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counted, count = [], RequestMemory.shortage
        monkeypatch.setattr(
            RequestMemory, "shortage", lambda *args, **kwargs: counted.append(args[1]) or count(*args, **kwargs)
        )
        engine = Harness(config(num_blocks=10))
        engine.add(request("held", [9] * 16, keep_kv=True, max_tokens=2))
        engine.run()
        engine.add(self.long_request("a"))
        engine.step()
        engine.add(request("urgent", [8] * 36, max_tokens=1, priority=-1))
        engine.step(3)
        assert len(counted) == 1
        assert engine.core.stats().num_preemptions == 0
        engine.connector.end_offer(engine.only_offer())
        engine.step(2)
        assert len(counted) == 2
        assert engine.core.stats().num_preemptions == 1
        engine.run_to_the_end()

    def test_a_shortage_of_one_request_is_none_of_a_more_urgent_one(self) -> None:
        engine = Harness(config(num_blocks=6))
        engine.add(self.long_request("a"), self.long_request("b", priority=1))
        engine.step()
        engine.add(request("c", [8] * 20, max_tokens=1))
        engine.step(3)
        assert engine.core.stats().num_preemptions == 0, "only a has as many blocks as c needs"
        engine.add(request("urgent", [7] * 20, max_tokens=1, priority=-1))
        engine.step()
        assert engine.core.stats().num_preemptions > 0
        engine.run_to_the_end()

    def test_a_request_whose_kv_was_on_its_way_gives_way_once_it_runs(self) -> None:
        engine = Harness(config(num_blocks=10))
        engine.add(self.long_request("a", priority=1))
        source = KVSource(ticket_for([5] * 16), 16)
        engine.add(request("b", [5] * 16, output_token_ids=[5], kv_source=source, max_tokens=9, priority=1))
        engine.step()
        engine.add(request("urgent", [8] * 32, max_tokens=1, priority=-1))
        engine.step()
        assert engine.core.stats().num_preemptions == 0, "b is not running yet, and a has fewer blocks than are lacking"
        engine.finish_transfers()
        engine.step(2)
        assert engine.core.stats().num_preemptions > 0
        engine.run_to_the_end()

    @pytest.mark.parametrize("shared", [True, False])
    def test_blocks_count_once_whether_those_who_give_way_share_them_or_not(self, shared: bool) -> None:
        engine = Harness(config(num_blocks=7))
        engine.add(*(request(name, [1 if shared else index] * 9, max_tokens=3) for index, name in enumerate("ab")))
        engine.step()
        engine.add(request("urgent", [8] * 26, max_tokens=1, priority=-1))
        engine.step()
        assert engine.is_answered("urgent")
        engine.run_to_the_end()

    def test_a_priority_does_not_preempt_for_a_row(self) -> None:
        engine = Harness(config(max_num_seqs=1))
        engine.add(request("a", 8, max_tokens=4))
        engine.step()
        engine.add(request("urgent", 8, max_tokens=1, priority=-1))
        engine.run_to_the_end()
        assert engine.core.stats().num_preemptions == 0

    def test_an_equal_priority_waits_for_blocks(self) -> None:
        engine = Harness(config(num_blocks=6))
        engine.add(request("a", [1] * 18, max_tokens=4), request("b", [2] * 10, max_tokens=1))
        engine.run_to_the_end()
        assert engine.core.stats().num_preemptions == 0

    def test_a_preempted_prompt_keeps_the_logprobs_that_it_has(self) -> None:
        engine = Harness(config(num_blocks=8, max_num_batched_tokens=6, depth=2))
        engine.add(request("a", [1] * 6, max_tokens=20), request("b", [2] * 20, max_tokens=2, prompt_logprobs=0))
        engine.run_to_the_end()
        assert engine.core.stats().num_preemptions > 0

    def test_a_preempted_request_comes_back_only_when_all_its_drawn_tokens_are_known(self) -> None:
        engine = Harness(config(num_blocks=9, depth=3))
        engine.add(request("held", [9] * 10, keep_kv=True, max_tokens=2))
        engine.run()
        engine.add(self.long_request("a"), self.long_request("b"))
        while engine.core.stats().num_preemptions == 0:
            engine.step()
        engine.connector.end_offer(engine.only_offer())  # now there are blocks, and two steps are still in flight
        engine.step()
        assert not engine.runner.plans[-1].started_rows
        engine.run_to_the_end()

    def test_one_request_may_fill_the_whole_pool(self) -> None:
        engine = Harness(config(num_blocks=5, max_model_len=96))
        engine.add(request("a", 6, max_tokens=None))
        engine.run_to_the_end()
        assert engine.answer("a").finish_reason is FinishReason.LENGTH
        assert len(engine.answer("a").token_ids) == 5 * BLOCK_SIZE - 6
