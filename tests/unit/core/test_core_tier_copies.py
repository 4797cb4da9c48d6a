"""Blocks are stored in tiers and restored: who may use them meanwhile, and the requests' outcome."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest

from baton.engine.core.kv.tier_copies import RESTORE_TIMEOUT_S
from baton.engine.core.messages import KVSource
from baton.engine.core.prefix import block_hashes
from baton.engine.core.requests.request import RequestStatus
from baton.engine.core.tiers import Stored

from .core_connector import ticket_for
from .core_harness import BLOCK_SIZE, HandClock, Harness, config, request
from .core_memory import expected_answer, kv_of

PROMPT = [(11 * position + 5) % 50 for position in range(21)]  # five full blocks and a token


def with_tiers(clock: Callable[[], float] = time.monotonic, *, min_tokens: int = 1, **changes: object) -> Harness:
    return Harness(config(**changes), min_restored_tokens=min_tokens, clock=clock)


def fill_tiers(engine: Harness) -> None:
    """Compute PROMPT, store its blocks in tiers, and evict them from the pool."""
    assert engine.tiers is not None
    engine.add(request("first", PROMPT, max_tokens=1))
    engine.run()
    while engine.tiers.stores:
        engine.tiers.finish_all()
        engine.run_to_the_end()
    lose_the_pool(engine)


def lose_the_pool(engine: Harness) -> None:
    pool = engine.scheduler.groups[0].pool
    pool.release(pool.allocate(pool.num_blocks))
    assert pool.find_prefix(names()) == []


def lose_all_but_quarantined(engine: Harness) -> None:
    pool = engine.scheduler.groups[0].pool
    pool.release(pool.allocate(pool.num_free))


def names() -> list[bytes]:
    return block_hashes(PROMPT, BLOCK_SIZE)


class TestDown:
    @pytest.mark.parametrize("depth", [1, 2])
    def test_full_blocks_go_down_once_the_step_that_fills_them_is_settled(self, depth: int) -> None:
        engine = with_tiers(depth=depth, num_blocks=160)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=2 * BLOCK_SIZE))
        engine.step()
        assert (engine.tiers.stores == {}) == (depth == 2), "with two steps in flight the first is not settled yet"
        engine.run()
        engine.run_to_the_end()
        tokens = [*PROMPT, *engine.answer("a").token_ids]
        assert set(engine.tiers.kept) == set(block_hashes(tokens[:-1], BLOCK_SIZE))

    def test_a_block_on_loan_is_not_given_away_until_its_copy_is_over(self) -> None:
        engine = with_tiers(num_blocks=6, max_num_batched_tokens=24)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT[:9], max_tokens=1))
        engine.run()
        engine.add(request("b", [7] * 22, max_tokens=1))  # needs all six blocks
        for _ in range(2):  # one of a's two after the other
            engine.run()
            assert not engine.is_answered("b")
            (copy_id,) = engine.tiers.stores
            engine.tiers.finish_store(copy_id)
            engine.step()
        assert engine.is_answered("b")
        engine.run_to_the_end()

    def test_few_blocks_are_on_loan_at_a_time_and_the_rest_follows(self) -> None:
        engine = with_tiers(num_blocks=32)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run()
        assert [len(copy.blocks) for copy in engine.tiers.stores.values()] == [2]
        engine.run_to_the_end()
        assert list(engine.tiers.kept) == names()

    def test_what_is_evicted_before_its_turn_is_not_stored(self) -> None:
        engine = with_tiers(num_blocks=6, max_num_batched_tokens=24)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT[:13], max_tokens=1))
        engine.run()
        engine.add(request("b", [9] * 17, max_tokens=1))  # takes five, of which two held a's second and third block
        engine.run()
        engine.run_to_the_end()
        assert names()[0] in engine.tiers.kept
        assert names()[2] not in engine.tiers.kept

    def test_what_a_tier_has_already_is_not_stored_again(self) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.tiers.min_tokens = 1000
        engine.add(request("again", PROMPT, max_tokens=1))
        engine.run()
        assert engine.tiers.stores == {}

    def test_without_a_prefix_cache_nothing_goes_down(self) -> None:
        engine = with_tiers(enable_prefix_caching=False)
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run_to_the_end()
        assert engine.tiers is not None
        assert engine.tiers.kept == {}


class TestUp:
    def test_a_prompt_that_is_in_a_tier_waits_for_it_and_computes_the_rest(self) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=3))
        engine.run()
        assert engine.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_KV
        assert engine.core.stats().num_requests_waiting_for_kv == 1
        engine.tiers.finish_all()
        engine.run_to_the_end()
        assert engine.answer("a").outputs[0].num_cached_tokens == 5 * BLOCK_SIZE
        stats = engine.core.stats().tiers
        assert stats is not None
        assert (stats.hits, stats.restored_tokens) == (5, 20)

    def test_only_what_the_pool_lacks_is_restored(self) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.tiers.min_tokens = 1000
        engine.add(request("short", PROMPT[:9], max_tokens=1))
        engine.run()
        engine.tiers.min_tokens = 1
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run()
        ((_, copy),) = engine.tiers.restores.items()
        assert copy.names == names()[2:]
        engine.run_to_the_end()

    @pytest.mark.parametrize("num_good", [0, 1, 4])
    def test_what_does_not_come_is_computed(self, num_good: int) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=3))
        engine.run()
        ((copy_id, _),) = engine.tiers.restores.items()
        engine.tiers.finish_restore(copy_id, num_good)
        engine.run_to_the_end()
        assert engine.answer("a").outputs[0].num_cached_tokens == num_good * BLOCK_SIZE

    def test_a_prefix_that_is_too_short_to_pay_is_computed(self) -> None:
        engine = with_tiers(min_tokens=5 * BLOCK_SIZE + 1)
        fill_tiers(engine)
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run()
        assert engine.is_answered("a")
        assert engine.tiers is not None
        assert engine.tiers.restores == {}

    def test_another_salt_finds_nothing(self) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        engine.add(request("a", PROMPT, max_tokens=1, cache_salt="mine"))
        engine.run()
        assert engine.is_answered("a")

    def test_two_requests_for_one_prefix_restore_it_once(self) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=1), request("b", PROMPT, max_tokens=1))
        engine.run()
        ((copy_id, _),) = engine.tiers.restores.items()
        engine.tiers.finish_restore(copy_id)
        engine.step()
        engine.run()
        assert engine.is_answered("b")
        assert engine.tiers.restores == {}
        assert engine.answer("b").outputs[0].num_cached_tokens == 5 * BLOCK_SIZE

    def test_the_blocks_of_an_aborted_restore_come_back_when_nothing_writes_them(self) -> None:
        engine = with_tiers(num_blocks=32)
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run()
        engine.core.abort("a")
        engine.run()
        assert engine.core.stats().num_blocks_quarantined == 6
        engine.tiers.finish_all()
        engine.step()
        engine.check_all_given_back()

    def test_a_preempted_request_gets_its_blocks_back_from_a_tier(self) -> None:
        engine = with_tiers(num_blocks=32)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=12))
        engine.step(4)
        for _ in range(4):
            engine.tiers.finish_all()
            engine.scheduler.poll_transfers()
        engine.scheduler.running.preempt(engine.scheduler.requests["a"])
        lose_the_pool(engine)
        engine.step()
        assert engine.scheduler.requests["a"].status is RequestStatus.WAITING_FOR_KV
        engine.run_to_the_end()

    def test_a_request_that_was_handed_over_once_is_not_fetched_again_where_tiers_take_too_long(self) -> None:
        """The prefill engine has freed the blocks: fetching would lose the request, which can still be computed."""
        clock = HandClock()
        engine = with_tiers(clock, num_blocks=160)
        fill_tiers(engine)
        assert engine.tiers is not None
        asked = request("a", PROMPT, max_tokens=8)
        first = expected_answer(asked, engine.config)[0][0]
        source = KVSource(ticket_for(PROMPT), len(PROMPT))
        engine.add(msgspec.structs.replace(asked, output_token_ids=[first], kv_source=source))
        engine.step()
        engine.connector.complete(engine.only_pull())
        engine.step(2)
        engine.scheduler.running.preempt(engine.scheduler.requests["a"])
        lose_the_pool(engine)
        engine.run()
        assert engine.tiers.restores
        clock.now_s += RESTORE_TIMEOUT_S + 1
        engine.step()
        engine.run()
        assert not engine.connector.pulls
        assert engine.is_answered("a")
        engine.run_to_the_end()

    def test_requests_do_not_wait_for_tiers_that_hang(self, caplog: pytest.LogCaptureFixture) -> None:
        clock = HandClock()
        engine = with_tiers(clock, num_blocks=32)
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(*(request(name, PROMPT, max_tokens=2) for name in "ab"))
        engine.run()
        clock.now_s += RESTORE_TIMEOUT_S + 1
        engine.step()
        engine.run()
        assert engine.is_answered("a")
        assert engine.is_answered("b")
        stats = engine.core.stats()
        assert stats.num_blocks_quarantined == 6
        assert stats.tiers is not None
        assert stats.tiers.failures == {"slow": 5}
        assert not stats.tiers.answers
        assert "have not answered for 10 s: 1 requests compute their prompts instead" in caplog.text
        lose_all_but_quarantined(engine)
        engine.add(request("c", PROMPT, max_tokens=1))
        engine.run()
        assert engine.is_answered("c"), "nothing is asked of them meanwhile"
        engine.run_to_the_end()
        lose_the_pool(engine)
        engine.add(request("d", PROMPT, max_tokens=1))
        engine.run()
        assert engine.tiers.restores, "they have answered"
        assert engine.core.stats().tiers.answers
        engine.run_to_the_end()

    def test_a_request_that_waits_for_a_restore_of_another_delays_none_behind_it(self) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(*(request(name, PROMPT, max_tokens=1) for name in "abc"))
        engine.add(request("behind", 9, max_tokens=1))
        engine.run()
        assert engine.is_answered("behind")
        ((copy_id, _),) = engine.tiers.restores.items()
        engine.tiers.finish_restore(copy_id)
        engine.step()
        engine.run()
        for name in "abc":
            assert engine.answer(name).outputs[0].num_cached_tokens == 5 * BLOCK_SIZE

    def test_requests_do_not_wait_for_a_restore_that_hangs_for_a_request_that_is_gone(self) -> None:
        """Nobody is left whose blocks would come into the pool, or whose wait would end after a while."""
        clock = HandClock()
        engine = with_tiers(clock, num_blocks=32)
        fill_tiers(engine)
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run()
        engine.core.abort("a")
        engine.add(request("b", PROMPT, max_tokens=1), request("behind", 9, max_tokens=1))
        engine.run()
        assert engine.is_answered("behind")
        clock.now_s += RESTORE_TIMEOUT_S + 1
        engine.step()
        engine.run()
        assert engine.is_answered("b")
        engine.run_to_the_end()

    def test_tiers_that_hang_are_noticed_although_no_request_waits_for_so_long(self) -> None:
        clock = HandClock()
        engine = with_tiers(clock, num_blocks=64)
        fill_tiers(engine)
        for name in "ab":
            engine.add(request(name, PROMPT, max_tokens=1))
            engine.run()
            clock.now_s += RESTORE_TIMEOUT_S - 1
            engine.step()
            engine.core.abort(name)
        engine.run()
        stats = engine.core.stats().tiers
        assert stats is not None
        assert not stats.answers
        engine.add(request("c", PROMPT, max_tokens=1))
        engine.run()
        assert engine.is_answered("c")
        engine.run_to_the_end()

    def test_the_end_of_an_aborted_restore_is_not_taken_for_that_of_another(self) -> None:
        engine = with_tiers(num_blocks=32)
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run()
        engine.core.abort("a")
        engine.add(request("b", PROMPT, max_tokens=1))
        engine.run()
        aborted, other = engine.tiers.restores
        engine.tiers.finish_restore(aborted)
        engine.add(request("c", PROMPT, max_tokens=1))
        engine.step()
        engine.run()
        assert list(engine.tiers.restores) == [other], "c waits for the blocks of b"
        engine.run_to_the_end()
        assert engine.answer("c").outputs[0].num_cached_tokens == 5 * BLOCK_SIZE

    def test_a_restore_that_hangs_takes_no_time_from_later_ones(self) -> None:
        clock = HandClock()
        engine = with_tiers(clock, num_blocks=32)
        fill_tiers(engine)
        assert engine.tiers is not None
        other = [(token + 1) % 50 for token in PROMPT]
        kv = kv_of(other)
        kept = block_hashes(other, BLOCK_SIZE)
        engine.tiers.keep({name: kv[4 * number : 4 * number + 4] for number, name in enumerate(kept)})
        engine.add(request("hangs", PROMPT, max_tokens=2))
        engine.run()
        (hung,) = engine.tiers.restores
        clock.now_s += RESTORE_TIMEOUT_S + 1
        engine.step()
        engine.add(request("another", 9, max_tokens=2))
        engine.run()
        engine.tiers.finish_store(min(engine.tiers.stores))  # the tiers answer again, except for the store that hangs
        engine.step()
        engine.add(request("later", other, max_tokens=2))
        engine.run()
        clock.now_s += RESTORE_TIMEOUT_S - 1
        engine.step()
        assert engine.core.stats().num_requests_waiting_for_kv == 1
        engine.tiers.finish_restore(max(engine.tiers.restores))
        engine.step()
        engine.run()
        assert engine.answer("later").outputs[0].num_cached_tokens == 20
        assert list(engine.tiers.restores) == [hung]
        engine.run_to_the_end()

    def test_a_prefix_whose_restore_hangs_is_restored_anew_once_the_tiers_answer(self) -> None:
        clock = HandClock()
        engine = with_tiers(clock, num_blocks=32)
        fill_tiers(engine)
        assert engine.tiers is not None
        engine.add(request("hangs", PROMPT, max_tokens=2))
        engine.run()
        clock.now_s += RESTORE_TIMEOUT_S + 1
        engine.step()
        engine.add(request("another", 9, max_tokens=2))
        engine.run()
        engine.tiers.finish_store(min(engine.tiers.stores))
        engine.step()
        lose_all_but_quarantined(engine)
        engine.add(request("later", PROMPT, max_tokens=2))
        engine.run()
        assert len(engine.tiers.restores) == 2, "who waits for the one that hangs might wait for ever"
        engine.run_to_the_end()

    def test_the_block_of_the_last_token_is_no_miss(self) -> None:
        engine = with_tiers()
        engine.add(request("a", 2 * BLOCK_SIZE, max_tokens=1))
        engine.run_to_the_end()
        stats = engine.core.stats().tiers
        assert stats is not None
        assert stats.misses == 1

    def test_new_prompts_that_were_nowhere_are_counted_as_misses_and_used_prefixes_are_touched(self) -> None:
        engine = with_tiers()
        fill_tiers(engine)
        stats = engine.core.stats().tiers
        assert stats is not None
        assert stats.misses == 5
        engine.add(request("a", PROMPT, max_tokens=1))
        engine.run_to_the_end()
        assert engine.tiers is not None
        assert engine.tiers.touched == names()


def test_an_event_of_a_copy_that_nobody_asked_for_is_a_bug_that_shows() -> None:
    engine = with_tiers()
    assert engine.tiers is not None
    engine.tiers.events.append(Stored(99))
    with pytest.raises(KeyError):
        engine.scheduler.poll_transfers()
