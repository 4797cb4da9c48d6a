"""Transfers of KV between engines that succeed or fail, and the fate of the request and its blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received
from baton.engine.core.messages import EngineRequest, ErrorKind, FinishReason, KVSource
from baton.engine.core.prefix import block_hashes
from baton.engine.core.requests.request import RequestStatus

from .core_connector import ticket_for
from .core_harness import BLOCK_SIZE, VOCAB_SIZE, Harness, config, request
from .core_memory import expected_answer


def arriving(request_id: str, prompt: list[int], first: int = 3, **changes: object) -> EngineRequest:
    """Return a request as it is after its hand-off: its KV is on another engine, one token is drawn."""
    source = KVSource(ticket_for(prompt), len(prompt))
    return request(request_id, prompt, output_token_ids=[first], kv_source=source, **changes)


class TestDecodeSide:
    def test_a_received_prompt_is_not_computed_and_the_next_token_follows(self) -> None:
        engine = Harness(config())
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.run()
        assert engine.core.stats().num_requests_waiting_for_kv == 1
        assert not engine.runner.plans
        engine.connector.complete(engine.only_pull())
        engine.run_to_the_end()
        (chunk,) = engine.runner.plans[0].chunks
        assert (chunk.start, chunk.num_tokens, chunk.samples) == (10, 1, True)
        assert len(engine.answer("a").token_ids) == 2
        assert engine.answer("a").outputs[0].num_cached_tokens == 10
        assert engine.core.stats().prompt_tokens == 0, "the prompt ran elsewhere"

    def test_others_run_on_while_one_waits_for_its_blocks(self) -> None:
        engine = Harness(config())
        engine.add(arriving("a", [5] * 10, max_tokens=3), request("b", 6, max_tokens=3))
        engine.run()
        assert engine.is_answered("b")
        assert not engine.is_answered("a")
        engine.run_to_the_end()

    def test_only_what_the_prefix_cache_lacks_is_fetched(self) -> None:
        engine = Harness(config())
        engine.add(request("a", [5] * 9, max_tokens=1))
        engine.run()
        engine.add(arriving("b", [5] * 15, max_tokens=3))
        engine.run()
        pull = engine.connector.pulls[engine.only_pull()]
        assert (pull.first_block, len(pull.blocks)) == (2, 2)
        engine.run_to_the_end()

    @pytest.mark.parametrize(
        ("kinds", "fetched"),
        [
            ({"groups": [(64, None)], "states": [(8, 12)]}, 3 + 1),
            ({"groups": [(64, None), (24, 9)]}, 3 + 3),
            ({"groups": [(64, None), (24, 9)], "states": [(8, 12)]}, 3 + 3 + 1),
        ],
        ids=["states", "windows", "all"],
    )
    def test_of_a_longer_chat_only_the_new_blocks_are_fetched(self, kinds: dict[str, Any], fetched: int) -> None:
        """Three new blocks, and the window and the state behind them; those of earlier tokens are read by nobody."""
        engine = Harness(config(max_model_len=96, **kinds))
        told = [(5 * position + 3) % VOCAB_SIZE for position in range(46)]
        assert BLOCK_SIZE == 4
        engine.add(arriving("a", told[:39], max_tokens=2))
        engine.run()
        engine.connector.complete(engine.only_pull())
        engine.run()
        engine.add(arriving("b", told, max_tokens=2))
        engine.run()
        assert len(engine.connector.pulls[engine.only_pull()].blocks) == fetched
        engine.run_to_the_end()

    def test_a_prompt_that_is_cached_whole_fetches_no_block_yet_tells_the_other_side(self) -> None:
        engine = Harness(config())
        engine.add(request("a", [5] * 9, max_tokens=1))
        engine.run()
        engine.add(arriving("b", [5] * 8, first=5, max_tokens=3))
        engine.run()
        pull = engine.connector.pulls[engine.only_pull()]
        assert (pull.first_block, pull.blocks) == (2, [])
        engine.run_to_the_end()

    def test_hits_that_reach_further_than_the_transfer_are_not_written_again(self) -> None:
        engine = Harness(config())
        engine.add(request("a", [5] * 20, max_tokens=20))
        engine.step()
        source = KVSource(ticket_for([5] * 8), 8)
        engine.add(request("b", [5] * 8, output_token_ids=[5] * 10, kv_source=source, max_tokens=14))
        engine.step()
        engine.connector.complete(engine.only_pull())
        engine.step()
        (chunk,) = (chunk for chunk in engine.runner.plans[-1].chunks if chunk.num_tokens > 1)
        assert (chunk.start, chunk.num_tokens) == (16, 2)
        engine.run_to_the_end()

    def test_prompt_logprobs_are_the_prefill_engines_to_give(self) -> None:
        engine = Harness(config())
        source = KVSource(ticket_for([5] * 8), 8)
        engine.add(request("a", [5] * 10, kv_source=source, max_tokens=3, prompt_logprobs=1))
        engine.run()
        engine.connector.complete(engine.only_pull())
        engine.run_to_the_end()
        assert len(engine.answer("a").token_ids) == 3
        assert engine.answer("a").outputs[0].prompt_logprobs is None

    def test_received_blocks_serve_later_prompts(self) -> None:
        engine = Harness(config())
        engine.add(arriving("a", [5] * 10, max_tokens=2))
        engine.run()
        engine.connector.complete(engine.only_pull())
        engine.run()
        engine.add(request("b", [5] * 10, max_tokens=1))
        engine.run_to_the_end()
        assert engine.answer("b").last.num_cached_tokens == 8

    def test_received_blocks_are_findable_before_their_request_has_a_row(self) -> None:
        engine = Harness(config(max_num_seqs=1))
        engine.add(request("b", [1] * 6, max_tokens=20))
        engine.step()
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.step()
        engine.connector.complete(engine.only_pull())
        engine.step()
        assert len(engine.scheduler.groups[0].pool.find_prefix(block_hashes([5] * 10, BLOCK_SIZE))) == 2
        engine.run_to_the_end()

    def test_blocks_that_have_not_arrived_serve_nobody(self) -> None:
        engine = Harness(config())
        engine.add(arriving("a", [5] * 10, max_tokens=2), request("b", [5] * 10, max_tokens=1))
        engine.run()
        assert engine.answer("b").last.num_cached_tokens == 0
        engine.run_to_the_end()

    def test_an_offer_that_had_ended_is_told_apart_from_a_transfer_that_failed(self) -> None:
        engine = Harness(config())
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.run()
        engine.connector.fail(engine.only_pull(), "the offer has ended", offer_ended=True)
        engine.step()
        error = engine.answer("a").last.error
        assert error is not None
        assert error.kind is ErrorKind.KV_EXPIRED
        engine.run_to_the_end()

    def test_a_lost_transfer_is_answered_at_once_and_its_blocks_wait_in_quarantine(self) -> None:
        engine = Harness(config(num_blocks=8))
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.run()
        transfer_id = engine.only_pull()
        engine.connector.fail(transfer_id, "the lease ran out")
        engine.step()
        error = engine.answer("a").last.error
        assert error is not None
        assert error.kind is ErrorKind.KV_LOST
        assert "the lease ran out" in error.message
        assert engine.core.stats().num_blocks_quarantined == 3
        engine.add(request("b", [2] * 16, max_tokens=4))
        engine.step()
        engine.connector.scribble(transfer_id)
        engine.run()
        engine.connector.release(transfer_id)
        engine.step()
        engine.check_all_given_back()

    def test_an_abort_cancels_the_transfer_and_trusts_no_block_before_the_release(self) -> None:
        engine = Harness(config())
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.run()
        transfer_id = engine.only_pull()
        engine.core.abort("a")
        engine.run()
        assert engine.answer("a").finish_reason is FinishReason.ABORT
        assert engine.connector.pulls[transfer_id].cancelled
        assert engine.core.stats().num_blocks_quarantined == 3
        engine.connector.fail(transfer_id)
        engine.connector.release(transfer_id)
        engine.step()
        engine.check_all_given_back()

    def test_an_abort_gives_prefix_hits_back_at_once_since_no_transfer_writes_them(self) -> None:
        engine = Harness(config())
        engine.add(request("a", [5] * 9, max_tokens=1))
        engine.run()
        free = engine.core.stats().num_blocks_free
        engine.add(arriving("b", [5] * 15, max_tokens=3))
        engine.run()
        transfer_id = engine.only_pull()
        engine.core.abort("b")
        engine.run()
        stats = engine.core.stats()
        assert (stats.num_blocks_quarantined, stats.num_blocks_free) == (2, free - 2)
        engine.connector.fail(transfer_id)
        engine.connector.release(transfer_id)
        engine.step()
        assert engine.core.stats().num_blocks_free == free
        engine.check_all_given_back()

    def test_an_arrival_that_crosses_with_an_abort_frees_the_blocks(self) -> None:
        engine = Harness(config())
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.run()
        engine.connector.complete(engine.only_pull())
        engine.core.abort("a")
        engine.run_to_the_end()
        assert engine.answer("a").finish_reason is FinishReason.ABORT

    def test_an_abort_between_arrival_and_row_gives_the_blocks_back(self) -> None:
        engine = Harness(config(max_num_seqs=1))
        engine.add(request("b", 6, max_tokens=20))
        engine.step()
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.step()
        engine.connector.complete(engine.only_pull())
        engine.step()
        assert engine.scheduler.requests["a"].status is RequestStatus.WAITING
        engine.core.abort("a")
        engine.run_to_the_end()

    def test_who_has_its_blocks_goes_before_who_needs_some(self) -> None:
        engine = Harness(config(num_blocks=8, max_num_seqs=1))
        engine.add(arriving("a", [5] * 10, max_tokens=3))
        engine.run()
        engine.add(request("b", [2] * 24, max_tokens=1, priority=-1))
        engine.run()
        assert not engine.is_answered("b"), "the blocks reserved for a are missing"
        engine.connector.complete(engine.only_pull())
        engine.run_to_the_end()

    def test_those_whose_blocks_came_start_by_priority_then_arrival_in_whatever_order_they_came(self) -> None:
        engine = Harness(config(max_num_seqs=3))
        engine.add(*(request(f"r{row}", 3, max_tokens=10 + 5 * row, ignore_eos=True) for row in range(3)))
        engine.step()
        late, early = arriving("late", [5] * 6, arrival_s=9.0), arriving("early", [6] * 6, arrival_s=1.0)
        urgent = arriving("urgent", [7] * 6, arrival_s=10.0, priority=-1)
        engine.add_during_prefill(msgspec.structs.replace(early, output_token_ids=[]), 3)  # its first token comes last
        engine.add(late, urgent)
        engine.step()
        for transfer_id in sorted(engine.connector.pulls):
            engine.connector.complete(transfer_id)
            engine.step()
        engine.begin("early")
        assert len(engine.scheduler.loading.ready) == 3
        order: list[str] = []
        while len(order) < 3:  # rows become free one by one
            engine.step()
            running = [each.request_id for each in engine.scheduler.running]
            order += [name for name in ("late", "early", "urgent") if name in running and name not in order]
        assert order == ["urgent", "early", "late"]
        engine.run_to_the_end()

    def test_a_single_token_waits_for_the_one_that_completes_its_prefix(self) -> None:
        engine = Harness(config())
        prompt = [5] * (2 * BLOCK_SIZE - 1)
        engine.add(arriving("a", prompt, first=3, max_tokens=3))
        engine.run()
        engine.connector.complete(engine.only_pull())
        engine.add(request("b", [*prompt, 3, 4], max_tokens=1))
        engine.run_to_the_end()
        assert engine.answer("b").last.num_cached_tokens == 2 * BLOCK_SIZE

    def test_transfers_run_at_most_one_batch_ahead_of_the_rows(self) -> None:
        engine = Harness(config(max_num_seqs=2))
        engine.add(*(arriving(name, [ord(name) % 50] * 6, max_tokens=3) for name in "abcd"))
        engine.run()
        assert len(engine.connector.pulls) == 2
        engine.run_to_the_end()

    def test_a_preempted_arrival_computes_its_prompt_here(self) -> None:
        engine = Harness(config(num_blocks=6))
        engine.add(request("a", [1] * 8, max_tokens=8))
        engine.step()
        engine.add(arriving("b", [5] * 8, max_tokens=12))
        engine.step()
        engine.connector.complete(engine.only_pull())
        engine.run()
        assert engine.core.stats().num_preemptions == 1
        assert not engine.connector.pulls, "the other engine has released the blocks"
        assert engine.is_answered("b")
        engine.run_to_the_end()


class TestStrayEvents:
    @pytest.mark.parametrize("event", [Received(77), BlocksReleased(77), OfferEnded(77, OfferOutcome.EXPIRED)])
    def test_an_event_about_an_unknown_transfer_changes_nothing(
        self, event: object, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = Harness(config())
        engine.connector.events.append(event)  # type: ignore[arg-type]
        engine.step()
        engine.check_all_given_back()
        assert "transfer_id=77" in caplog.text


class TestTwoEngines:
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("lazy", [True, False])
    def test_prefill_here_and_decode_there_is_token_for_token_one_engine(self, depth: int, lazy: bool) -> None:
        prefill = Harness(config(depth=depth, max_num_batched_tokens=8), lazy=lazy)
        offers = prefill.connector.offers
        decode = Harness(
            config(depth=depth, num_blocks=20), lazy=lazy, fetch=lambda ticket: offers[int(ticket)].content
        )
        whole = [request(f"r{index}", 9 + 3 * index, max_tokens=12, seed=index) for index in range(5)]

        prefill.add(*(msgspec.structs.replace(each, keep_kv=True) for each in whole))
        prefill.run()
        first = {each.request_id: prefill.answer(each.request_id).last for each in whole}
        for each in whole:
            output = first[each.request_id]
            decode.add(msgspec.structs.replace(each, output_token_ids=output.token_ids, kv_source=output.kv_source))
        decode.run_to_the_end()
        for each in whole:
            tokens = first[each.request_id].token_ids + decode.answer(each.request_id).token_ids
            assert (tokens, decode.answer(each.request_id).finish_reason) == expected_answer(each, decode.config)
        prefill.run_to_the_end()
