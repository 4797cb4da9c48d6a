"""Prompts on offer: their blocks are held until the other engine has read them, however that ends."""

from __future__ import annotations

import pytest

from baton.engine.core.connector import OfferOutcome
from baton.engine.core.messages import FinishReason, KVSource

from .core_harness import Harness, config, request
from .core_memory import expected_answer, kv_of


class TestPrefillSide:
    def test_the_first_token_goes_out_with_the_place_of_the_blocks(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, keep_kv=True, max_tokens=8))
        engine.run()
        output = engine.answer("a").last
        assert output.finish_reason is FinishReason.HANDOFF
        assert len(output.token_ids) == 1
        assert output.kv_source == KVSource(str(engine.only_offer()).encode(), 10)
        assert engine.connector.offers[engine.only_offer()].content == kv_of(engine.asked["a", 0].prompt_token_ids)

    def test_held_blocks_are_neither_free_nor_taken_by_others(self) -> None:
        engine = Harness(config(num_blocks=8))
        engine.add(request("a", [1] * 10, keep_kv=True, max_tokens=8))
        engine.run()
        assert engine.core.stats().num_blocks_held == 3
        assert engine.core.stats().num_blocks_free == 5
        engine.add(request("b", [2] * 24, max_tokens=1))
        engine.run()
        assert not engine.is_answered("b"), "six blocks are not there while three are held"
        engine.connector.end_offer(engine.only_offer())
        engine.step()
        assert engine.is_answered("b")
        engine.run_to_the_end()

    @pytest.mark.parametrize("outcome", OfferOutcome)
    def test_however_an_offer_ends_its_blocks_come_back(self, outcome: OfferOutcome) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, keep_kv=True, max_tokens=8))
        engine.run()
        engine.connector.end_offer(engine.only_offer(), outcome)
        engine.step()
        engine.check_all_given_back()

    @pytest.mark.parametrize("offers_early", [False, True], ids=["read", "growing"])
    def test_an_abort_of_an_older_attempt_withdraws_nothing_that_is_on_offer_anew(self, offers_early: bool) -> None:
        """Neither before nor after the newer attempt has ended: an abort of the older one may come late."""
        engine = Harness(config(max_num_batched_tokens=8), offers_early=offers_early)
        engine.add(request("a", 20, keep_kv=True, max_tokens=8, generation=2))
        engine.step()
        engine.core.abort("a", 1)
        assert not engine.is_answered("a", 2)
        engine.run()
        assert engine.answer("a", 2).finish_reason is FinishReason.HANDOFF
        engine.core.abort("a", 1)
        assert not engine.connector.offers[engine.only_offer()].withdrawn
        engine.core.abort("a", 2)
        assert engine.connector.offers[engine.only_offer()].withdrawn
        engine.run_to_the_end()

    def test_an_abort_withdraws_the_offer_of_an_attempt_whose_successor_lives(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, keep_kv=True, max_tokens=8, generation=1))
        engine.run()
        old = engine.only_offer()
        engine.add(request("a", 10, keep_kv=True, max_tokens=8, generation=2))
        engine.core.abort("a", 1)
        assert engine.connector.offers[old].withdrawn
        engine.run()
        assert engine.answer("a", 2).finish_reason is FinishReason.HANDOFF
        (new,) = set(engine.connector.offers) - {old}
        assert not engine.connector.offers[new].withdrawn
        engine.run_to_the_end()

    def test_an_abort_withdraws_what_is_on_offer_without_another_answer(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, keep_kv=True, max_tokens=8))
        engine.run()
        engine.core.abort("a")
        engine.run()
        assert engine.connector.offers[engine.only_offer()].withdrawn
        assert len(engine.answer("a").outputs) == 1
        engine.run_to_the_end()

    def test_a_first_token_that_ends_the_request_offers_nothing(self) -> None:
        engine = Harness(config())
        first, _ = expected_answer(request("b", 10, max_tokens=1), engine.config)
        engine.add(request("a", 10, keep_kv=True, max_tokens=1))
        engine.add(request("b", 10, keep_kv=True, max_tokens=8, stop_token_ids=first))
        engine.run()
        assert engine.answer("a").finish_reason is FinishReason.LENGTH
        assert engine.answer("b").finish_reason is FinishReason.STOP
        assert not engine.connector.offers
        engine.check_all_given_back()

    def test_two_offers_of_one_prefix_hold_its_blocks_until_both_have_ended(self) -> None:
        engine = Harness(config())
        engine.add(*(request(name, 10, keep_kv=True, max_tokens=8) for name in "ab"))
        engine.run()
        assert engine.core.stats().num_blocks_held == 4, "two shared ones and two last ones"
        first, second = engine.connector.offers
        engine.connector.end_offer(first)
        engine.step()
        assert engine.core.stats().num_blocks_held == 3
        engine.connector.end_offer(second)
        engine.step()
        engine.check_all_given_back()

    def test_the_same_request_may_come_again_while_its_old_offer_is_held(self) -> None:
        engine = Harness(config())
        engine.add(request("a", 10, keep_kv=True, max_tokens=8))
        engine.run()
        engine.add(request("a", 10, keep_kv=True, max_tokens=8, generation=1))
        engine.run()
        assert engine.answer("a", 1).finish_reason is FinishReason.HANDOFF
        engine.run_to_the_end()
