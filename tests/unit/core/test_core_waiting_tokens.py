"""How many tokens of prompts wait to be read: what gateways limit queues by."""

from __future__ import annotations

from core_harness import Harness, config, request


def waiting(harness: Harness) -> int:
    return harness.core.stats().num_waiting_tokens


def test_prompts_in_the_queue_count_whole() -> None:
    harness = Harness(config(max_num_seqs=1))
    harness.add(request("a", 20), request("b", 12))
    assert waiting(harness) == 32


def test_what_chunks_have_read_of_a_prompt_counts_no_more() -> None:
    harness = Harness(config(max_num_batched_tokens=8))
    harness.add(request("a", 20, max_tokens=2))
    seen = []
    for _ in range(4):
        seen.append(waiting(harness))
        harness.step()
    assert seen == [20, 12, 4, 0]


def test_nothing_counts_once_everything_is_over() -> None:
    harness = Harness(config(max_num_seqs=2, max_num_batched_tokens=8))
    harness.add(*(request(f"r{number}", 5 + number, max_tokens=3) for number in range(6)))
    harness.core.abort("r4")
    assert waiting(harness) == sum(5 + number for number in range(6)) - 9
    harness.run()
    assert waiting(harness) == 0
