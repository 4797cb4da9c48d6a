"""Hand-offs that begin while the prompt is still being read."""

from __future__ import annotations

import msgspec
import pytest

from baton.engine.core.connector import OfferOutcome
from baton.engine.core.messages import EngineOutput, ErrorKind, FinishReason, KVSource
from baton.engine.core.sampling import SamplingParams, StructuredOutputsParams

from .core_connector import ticket_for
from .core_harness import BLOCK_SIZE, Harness, config, request
from .core_memory import expected_answer

CHUNK = 8
LONG = 3 * CHUNK - 2  # tokens: three chunks, the last block is not full


def prefill(*, depth: int = 1, **options: object) -> Harness:
    return Harness(config(depth=depth, max_num_batched_tokens=CHUNK, **options), offers_early=True)


def early_offers(engine: Harness, request_id: str = "a") -> list[EngineOutput]:
    return [output for output in engine.answer(request_id).outputs if not output.token_ids]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_long_prompt_is_on_offer_before_its_first_step_and_grows_with_each_result(depth: int) -> None:
    engine = prefill(depth=depth)
    engine.add(request("a", LONG, keep_kv=True, max_tokens=8))
    grown = []
    while not engine.is_answered("a"):
        engine.step()
        (offer,) = engine.connector.offers.values()
        grown.append(len(offer.content))
    assert grown == sorted(grown)
    assert {CHUNK, 2 * CHUNK} <= set(grown)
    assert grown[-1] == LONG
    (early,) = early_offers(engine)
    assert early.finish_reason is None
    assert engine.answer("a").last.finish_reason is FinishReason.HANDOFF
    assert engine.answer("a").last.kv_source == early.kv_source == KVSource(str(engine.only_offer()).encode(), LONG)
    engine.run_to_the_end()


def test_only_what_takes_several_steps_and_goes_elsewhere_is_offered_early() -> None:
    engine = prefill()
    engine.add(request("a", CHUNK, keep_kv=True, max_tokens=8))
    engine.add(request("b", LONG, max_tokens=8))
    engine.add(request("c", LONG, keep_kv=True, max_tokens=1))
    engine.run_to_the_end()
    assert early_offers(engine, "a") == early_offers(engine, "b") == early_offers(engine, "c") == []


def test_an_engine_that_shall_not_offers_nothing_early() -> None:
    engine = Harness(config(max_num_batched_tokens=CHUNK))
    engine.add(request("a", LONG, keep_kv=True, max_tokens=8))
    engine.run_to_the_end()
    assert early_offers(engine) == []


def test_prefix_hits_are_told_with_the_result_of_the_first_chunk() -> None:
    """Not before that: a step in flight may still be writing them."""
    engine = prefill()
    engine.add(request("first", LONG, max_tokens=1))
    engine.run()
    engine.add(request("a", [*request("first", LONG).prompt_token_ids, *[5] * LONG], keep_kv=True, max_tokens=8))
    engine.step()
    hits = LONG // BLOCK_SIZE * BLOCK_SIZE
    assert len(engine.connector.offers[engine.only_offer()].content) == hits + CHUNK
    engine.run_to_the_end()


def test_a_prompt_that_is_preempted_asks_its_blocks_back_and_is_offered_anew() -> None:
    engine = Harness(config(max_num_batched_tokens=CHUNK, num_blocks=7), offers_early=True)
    engine.add(request("urgent", 3, max_tokens=24, priority=-1, ignore_eos=True))
    engine.step()
    engine.add(request("a", LONG, keep_kv=True, max_tokens=8))
    engine.step()
    offer = engine.only_offer()
    engine.step()
    assert engine.connector.offers[offer].withdrawn
    assert engine.core.stats().num_preemptions == 1
    written = engine.connector.offers[offer].content
    engine.step(3)  # a reader may still read, so the urgent request waits for its blocks
    assert engine.connector.offers[offer].content == written
    assert not engine.is_answered("urgent")
    engine.connector.end_offer(offer, OfferOutcome.WITHDRAWN)
    engine.step()
    engine.run()
    assert engine.is_answered("urgent")
    tickets = {output.kv_source.ticket for output in engine.answer("a").outputs if output.kv_source}
    assert len(tickets) == 2
    assert engine.answer("a").last.kv_source.ticket == str(engine.only_offer()).encode()
    engine.run_to_the_end()


def test_a_prompt_on_offer_does_not_give_way_to_a_priority_since_its_blocks_would_not_be_free() -> None:
    engine = prefill(num_blocks=14)
    engine.add(request("plain", [4] * 20, max_tokens=20, priority=1, ignore_eos=True))
    engine.step(4)
    engine.add(request("a", LONG, keep_kv=True, max_tokens=8, priority=1))
    engine.step()
    engine.add(request("urgent", [9] * 14, max_tokens=1))
    engine.step()
    assert engine.core.stats().num_preemptions == 1
    assert not engine.connector.offers[engine.only_offer()].withdrawn
    engine.run_to_the_end()
    assert len({output.kv_source.ticket for output in engine.answer("a").outputs if output.kv_source}) == 1


def test_a_prompt_that_is_aborted_in_mid_growth_keeps_its_blocks_until_the_reader_let_go() -> None:
    engine = prefill()
    engine.add(request("a", LONG, keep_kv=True, max_tokens=8))
    engine.step(2)
    engine.core.abort("a")
    engine.step()
    stats = engine.core.stats()
    assert engine.connector.offers[engine.only_offer()].withdrawn
    assert stats.num_blocks_held == stats.num_blocks - stats.num_blocks_free == 6
    engine.connector.end_offer(engine.only_offer(), OfferOutcome.WITHDRAWN)
    engine.run_to_the_end()


@pytest.mark.parametrize("outcome", [OfferOutcome.WITHDRAWN, OfferOutcome.EXPIRED])
def test_a_reader_that_gives_up_in_mid_growth_costs_the_prompt_nothing(outcome: OfferOutcome) -> None:
    engine = prefill()
    engine.add(request("a", LONG, keep_kv=True, max_tokens=8))
    engine.step(2)
    first = engine.only_offer()
    engine.connector.end_offer(first, outcome)
    engine.run()
    assert engine.answer("a").last.finish_reason is FinishReason.HANDOFF
    assert engine.answer("a").last.kv_source == KVSource(str(engine.only_offer()).encode(), LONG)
    assert engine.only_offer() != first
    engine.run_to_the_end()


def test_a_prompt_whose_first_token_ends_it_takes_its_offer_back() -> None:
    engine = prefill()
    asked = request("a", LONG, keep_kv=True, max_tokens=8)
    (first,), _ = expected_answer(asked, engine.config)
    engine.add(msgspec.structs.replace(asked, sampling=SamplingParams(max_tokens=8, stop_token_ids=[first])))
    engine.run()
    assert engine.answer("a").last.finish_reason is FinishReason.STOP
    assert engine.connector.offers[engine.only_offer()].withdrawn
    engine.run_to_the_end()


# ---------------------------------------------------------------------- the engine that goes on


def decode(num_tokens: int = 10, first: int = 7, **changes: object) -> Harness:
    engine = Harness(config())
    prompt = request("a", num_tokens).prompt_token_ids
    source = KVSource(ticket_for(prompt), num_tokens)
    engine.add_during_prefill(request("a", prompt, kv_source=source, max_tokens=6, ignore_eos=True, **changes), first)
    engine.step()
    return engine


@pytest.mark.parametrize("num_tokens", [1, 10, 4 * BLOCK_SIZE])
@pytest.mark.parametrize("token_first", [True, False])
def test_it_goes_on_when_it_has_both_the_blocks_and_the_first_token(num_tokens: int, token_first: bool) -> None:
    engine = decode(num_tokens)
    if token_first:
        engine.begin("a")
        engine.run()
        assert "a" not in {request_id for request_id, _ in engine.answers}
        engine.connector.complete(engine.only_pull())
    else:
        engine.connector.complete(engine.only_pull())
        engine.step()
        engine.run()
        assert engine.core.stats().num_requests_waiting == 1
        engine.begin("a")
    engine.step()
    engine.run()
    assert len(engine.answer("a").token_ids) == 5
    engine.run_to_the_end()


def test_first_tokens_of_another_generation_and_second_ones_are_ignored() -> None:
    engine = decode()
    engine.connector.complete(engine.only_pull())
    engine.step()
    engine.core.begin("a", 1, 7)
    engine.core.begin("b", 0, 7)
    assert not engine.core.has_work()
    engine.begin("a")
    engine.core.begin("a", 0, 8)
    engine.run_to_the_end()


@pytest.mark.parametrize("received", [True, False])
def test_who_waits_for_its_first_token_can_be_aborted(received: bool) -> None:
    engine = decode()
    if received:
        engine.connector.complete(engine.only_pull())
        engine.step()
    engine.core.abort("a")
    engine.step()
    assert engine.answer("a").finish_reason is FinishReason.ABORT
    engine.unbegun.clear()
    engine.run_to_the_end()


def test_a_first_token_that_is_none_is_an_error() -> None:
    engine = decode(first=50)
    engine.begin("a")
    engine.step()
    assert engine.answer("a").last.error.kind is ErrorKind.INVALID
    assert "50 is not in the vocabulary of 50" in engine.answer("a").last.error.message
    engine.run_to_the_end()


def test_waiting_for_a_first_token_needs_kv_and_no_grammar() -> None:
    engine = Harness(config())
    awaiting = msgspec.structs.replace(request("a", 5), awaits_first_token=True)
    constrained = request("b", 5, structured_outputs=StructuredOutputsParams(regex="a"), kv_source=KVSource(b"", 5))
    engine.add(awaiting, msgspec.structs.replace(constrained, awaits_first_token=True))
    engine.step()
    refusal = "only a request with a kv_source and without structured outputs"
    assert all(refusal in engine.answer(name).last.error.message for name in "ab")
