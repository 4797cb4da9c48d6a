"""The count of prompt tokens that wait to be computed, which limits queues and guides routers."""

from __future__ import annotations

import pytest

from .core_harness import BLOCK_SIZE, Harness, config, request

PREFIX = [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5]  # three blocks
LAST = [9] * 3


def waiting(harness: Harness) -> int:
    return harness.core.stats().num_waiting_tokens


def behind(prefix: list[int], own: int) -> list[int]:
    """Return a prompt that continues `prefix` with tokens of its own."""
    return [*prefix, *([own] * 5)]


def test_prompts_in_the_queue_count() -> None:
    harness = Harness(config(max_num_seqs=1))
    harness.add(request("a", [1] * 20), request("b", [2] * 12))
    assert waiting(harness) == 32


@pytest.mark.parametrize(("depth", "expected"), [(1, [20, 12, 4, 0]), (2, [20, 20, 12, 4])])
def test_what_is_read_of_a_prompt_counts_no_more_and_what_a_step_under_way_reads_still_does(
    depth: int, expected: list[int]
) -> None:
    harness = Harness(config(depth=depth, max_num_batched_tokens=8))
    harness.add(request("a", 20, max_tokens=2))
    seen = []
    for _ in expected:
        seen.append(waiting(harness))
        harness.step()
    assert seen == expected


def test_what_is_cached_does_not_count_unless_it_has_to_be_computed_again() -> None:
    harness = Harness(config(max_num_seqs=1))
    harness.add(request("before", behind(PREFIX, 1), max_tokens=1))
    harness.run()
    harness.add(request("a", behind(PREFIX, 2)))
    assert waiting(harness) == 5
    harness.add(request("b", behind(PREFIX, 3), prompt_logprobs=0))
    assert waiting(harness) == 5 + 17, "every position of it has to run"
    for request_id, left in {"a": 17, "b": 0}.items():
        harness.core.abort(request_id)
        assert waiting(harness) == left


def test_what_several_prompts_share_counts_once_and_until_the_last_of_them_is_gone() -> None:
    harness = Harness(config())
    harness.add(*(request(f"{own}", behind(PREFIX, own)) for own in (1, 2, 3)))
    assert waiting(harness) == len(PREFIX) + 3 * 5
    for gone, left in {"2": 2, "1": 1, "3": 0}.items():
        harness.core.abort(gone)
        assert waiting(harness) == (len(PREFIX) + left * 5 if left else 0)


def test_salts_keep_equal_prompts_apart() -> None:
    harness = Harness(config())
    harness.add(request("a", PREFIX, cache_salt="a"), request("b", PREFIX, cache_salt="b"))
    assert waiting(harness) == 2 * len(PREFIX)


def test_without_a_prefix_cache_every_prompt_counts_whole() -> None:
    harness = Harness(config(max_num_seqs=1, enable_prefix_caching=False))
    harness.add(*(request(f"{own}", behind(PREFIX, own)) for own in (1, 2)))
    assert waiting(harness) == 2 * 17


def test_those_behind_the_one_that_reads_a_shared_prefix_get_shorter_with_it() -> None:
    harness = Harness(config(max_num_seqs=1, max_num_batched_tokens=BLOCK_SIZE))
    harness.add(*(request(f"{own}", behind(PREFIX, own), max_tokens=1) for own in (1, 2)))
    seen = []
    for _ in range(4):
        seen.append(waiting(harness))
        harness.step()
    # The second request also counts blocks that the first has not computed yet: the second might have to.
    assert seen == [22, 13 + 13, 9 + 9, 5 + 5]


def test_evicted_blocks_count_again() -> None:
    harness = Harness(config(num_blocks=8, max_num_seqs=1, max_model_len=32))
    harness.add(request("before", behind(PREFIX, 1), max_tokens=1))
    harness.run()
    harness.add(request("large", [3] * 28, max_tokens=3), request("a", behind(PREFIX, 2)))
    assert waiting(harness) == 28 + 5
    harness.step()
    assert waiting(harness) == 2 * BLOCK_SIZE + 5, "there was room for one of three"


def test_a_prompt_whose_blocks_another_engine_has_counts_nothing() -> None:
    giver, taker = Harness(config()), Harness(config())
    giver.add(request("a", PREFIX, keep_kv=True))
    giver.run()
    (last,) = giver.answer("a").outputs
    taker.core.add(request("a", PREFIX, kv_source=last.kv_source, output_token_ids=last.token_ids))
    assert waiting(taker) == 0


def test_nothing_counts_once_everything_is_over() -> None:
    harness = Harness(config(max_num_seqs=2, max_num_batched_tokens=8))
    harness.add(*(request(f"r{number}", [number] * (5 + number), max_tokens=3) for number in range(6)))
    harness.core.abort("r4")
    assert waiting(harness) == sum(5 + number for number in range(6)) - 9
    harness.run()
    assert waiting(harness) == 0
