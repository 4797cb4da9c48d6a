"""Requests end when their time is over, wherever they are."""

from __future__ import annotations

import pytest

from baton.engine.core.messages import EngineOutput, ErrorKind
from baton.engine.core.requests.request import Request
from baton.engine.core.scheduling.request_table import SPARE_ENTRIES, Deadlines
from baton.engine.core.stages import Stage

from .core_harness import Harness, config, num_remembered, request


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def harness_with(clock: Clock, **changes: object) -> Harness:
    harness = Harness(config(**changes))
    harness.scheduler.requests.deadlines = Deadlines(clock)
    return harness


def last_word(harness: Harness, request_id: str) -> EngineOutput:
    return harness.answer(request_id).outputs[-1]


def test_a_request_is_ended_in_the_queue_and_nothing_of_it_is_read() -> None:
    clock = Clock()
    harness = harness_with(clock)
    harness.add(request("late", 20, timeout_s=2.0, max_tokens=5), request("other", 20, max_tokens=5))
    clock.now_s += 2.0
    harness.run()
    word = last_word(harness, "late")
    assert word.error is not None
    assert (word.error.kind, word.ages.keys()) == (ErrorKind.TIMED_OUT, {Stage.QUEUED})
    assert harness.core.stats().prompt_tokens == 20, "the other one's"
    assert len(harness.answer("other").token_ids) == 5


def test_a_request_is_ended_in_the_batch_and_keeps_what_it_has_said() -> None:
    clock = Clock()
    harness = harness_with(clock)
    harness.add(request("late", 20, timeout_s=2.0, max_tokens=50))
    harness.step(4)
    clock.now_s += 1.9
    harness.step()
    assert not harness.is_answered("late")
    clock.now_s += 0.1
    harness.run()
    word = last_word(harness, "late")
    assert word.error is not None
    assert word.error.kind is ErrorKind.TIMED_OUT
    assert Stage.STARTED in word.ages, "a device has worked for it"
    assert harness.answer("late").token_ids
    assert harness.core.stats().num_blocks_free == harness.config.num_blocks


def test_a_request_without_a_time_never_ends_by_it() -> None:
    clock = Clock()
    harness = harness_with(clock)
    harness.add(request("patient", 20, max_tokens=5))
    clock.now_s += 1e9
    harness.run()
    assert len(harness.answer("patient").token_ids) == 5


def test_each_is_told_once_and_in_the_order_of_the_deadlines() -> None:
    clock = Clock()
    deadlines = Deadlines(clock)
    harness = Harness(config())
    for number, timeout_s in enumerate([3.0, 1.0, 2.0]):
        harness.add(request(f"r{number}", 8, timeout_s=timeout_s))
        deadlines.add(harness.scheduler.requests[f"r{number}"])
    assert deadlines.take_expired() == []
    clock.now_s += 2.5
    assert [each.request_id for each in deadlines.take_expired()] == ["r1", "r2"]
    assert deadlines.take_expired() == []
    clock.now_s += 1
    assert [each.request_id for each in deadlines.take_expired()] == ["r0"]


@pytest.mark.slow
def test_requests_that_are_over_do_not_pile_up() -> None:
    clock = Clock()
    harness = harness_with(clock)
    before = num_remembered(Request)
    for number in range(3 * SPARE_ENTRIES):
        harness.core.add(request(f"r{number}", 8, timeout_s=600.0))
        harness.core.abort(f"r{number}")
    assert num_remembered(Request) <= before + SPARE_ENTRIES
