"""The number of drafts follows acceptance and step times; drafting never costs more than 3 % of the time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.speculation import account
from baton.engine.core.speculation.acceptance import Acceptance, chances
from baton.engine.core.speculation.account import ALLOWANCE
from baton.engine.core.speculation.length import DraftLengths
from baton.engine.core.speculation.pauses import MOST_IN_A_ROW

from .draft_simulation import Device, compute_bound, memory_bound, simulate

MOST_SLOWDOWN = 1.03
RATES = [0.0, 0.3, 0.6, 0.9]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("num_requests", [1, 8, 64, 256])
@pytest.mark.parametrize("rate", [*RATES, None], ids=[*map(str, RATES), "mixed"])
@pytest.mark.parametrize("device", [memory_bound, compute_bound])
def test_it_is_never_much_slower_than_without(device: Device, rate: float | None, num_requests: int) -> None:
    steps = 1000 if num_requests > 100 else 2000
    done = simulate(device, num_requests, RATES if rate is None else [rate], num_steps=steps)
    assert done.slowdown(device, num_requests) <= MOST_SLOWDOWN


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_requests", "rate", "times"),
    [(1, 0.6, 2.0), (1, 0.9, 4.0), (8, 0.3, 1.2), (8, 0.6, 1.9), (8, 0.9, 3.7), (64, 0.6, 1.25), (64, 0.9, 2.0)],
)
def test_on_a_device_bound_by_its_memory_it_comes_near_the_best_number(
    num_requests: int, rate: float, times: float
) -> None:
    done = simulate(memory_bound, num_requests, [rate])
    assert 1 / done.slowdown(memory_bound, num_requests) >= times


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("num_requests", "rate"), [(1, 0.6), (1, 0.9), (8, 0.3), (64, 0.9)])
def test_guesses_that_are_made_a_step_ahead_are_nearly_as_many(num_requests: int, rate: float) -> None:
    ahead, late = (
        simulate(memory_bound, num_requests, [rate], depth=1, looks_ahead=looks_ahead) for looks_ahead in (True, False)
    )
    assert ahead.slowdown(memory_bound, num_requests) < 1.04 * late.slowdown(memory_bound, num_requests)


@pytest.mark.parametrize("num_requests", [1, 64])
@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_guesses_that_are_made_a_step_ahead_are_made_and_tried_seldom_where_they_are_not_worth_it(
    num_requests: int, rate: float
) -> None:
    done = simulate(compute_bound, num_requests, [rate], depth=1, looks_ahead=True)
    assert done.slowdown(compute_bound, num_requests) <= MOST_SLOWDOWN
    assert done.drafts > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("num_requests", "rate", "guesses_most", "times"),
    [
        (1, 0.6, False, 1.5),
        (1, 0.9, False, 2.7),
        (8, 0.6, False, 1.35),
        (64, 0.9, False, 1.5),
        (1, 0.6, True, 1.4),
        (1, 0.9, True, 2.7),
        (8, 0.6, True, 1.3),
        (64, 0.9, True, 1.5),
    ],
)
def test_guesses_that_the_device_makes_in_a_tenth_of_a_step_are_worth_it(
    num_requests: int, rate: float, guesses_most: bool, times: float, depth: int
) -> None:
    guess_s = memory_bound(num_requests) / 10
    done = simulate(memory_bound, num_requests, [rate], depth=depth, guess_s=guess_s, guesses_most=guesses_most)
    assert 1 / done.slowdown(memory_bound, num_requests) >= times


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_requests", [1, 64])
@pytest.mark.parametrize(
    ("rate", "share", "guesses_most"), [(0.0, 0.1, False), (0.6, 3.0, False), (0.0, 0.1, True), (0.4, 0.4, True)]
)
@pytest.mark.parametrize("device", [memory_bound, compute_bound])
def test_guesses_that_the_device_makes_cost_little_where_they_are_not_worth_it(
    device: Device, share: float, rate: float, guesses_most: bool, num_requests: int, depth: int
) -> None:
    guess_s = device(num_requests) * share
    done = simulate(device, num_requests, [rate], depth=depth, guess_s=guess_s, guesses_most=guesses_most)
    assert done.slowdown(device, num_requests) <= MOST_SLOWDOWN


@pytest.mark.parametrize("num_requests", [8, 64, 256])
def test_where_a_draft_costs_what_a_request_costs_there_are_next_to_none(num_requests: int) -> None:
    done = simulate(compute_bound, num_requests, [0.9], num_steps=1000)
    assert done.drafts <= 0.01 * 1000 * num_requests


@pytest.mark.slow
def test_requests_get_drafts_by_their_own_acceptance() -> None:
    mixed = simulate(memory_bound, 64, [0.0, 0.9])
    alike = simulate(memory_bound, 64, [0.45])
    assert mixed.slowdown(memory_bound, 64) < 0.8 * alike.slowdown(memory_bound, 64)


@pytest.mark.slow
@given(
    st.integers(0, 3),
    st.sampled_from([1, 4, 32, 100]),
    st.floats(0, 1),
    st.floats(1e-4, 0.1),
    st.floats(0, 1e-2),
    st.integers(1, 15),
    st.integers(1, 2),
)
def test_the_bound_holds_for_any_device_and_acceptance(
    seed: int, num_requests: int, rate: float, base_s: float, token_s: float, most: int, depth: int
) -> None:
    def device(num_tokens: int) -> float:
        return base_s + token_s * num_tokens

    done = simulate(device, num_requests, [rate], num_steps=500, most=most, depth=depth, noise=0.0, seed=seed)
    assert done.slowdown(device, num_requests) <= 1 + 0.015 + (3 + depth * (1 + most)) / 500


def ready(num_requests: int = 1, seconds: float = 0.01, most: int = 4) -> DraftLengths:
    policy = DraftLengths(most)
    for _ in range(4):
        policy.begin_step(num_requests)
        policy.observe(num_requests, seconds)
    return policy


def run(
    policy: DraftLengths, *, accepted: float, steps: int, added_s: float = 0.0, sits_out: bool = False
) -> list[int]:
    """Let one request run alone, and return the number of its drafts in each step."""
    given = []
    for _ in range(steps):
        limit = policy.begin_step(1)
        count = policy.num_drafts_for("a", limit, sits_out=sits_out) if limit else 0
        right = round(accepted * count)
        policy.settled("a", count, right)
        policy.observe(1 + count, 0.01 + added_s * count, count, right)
        given.append(count)
    return given


def test_all_drafts_are_given_where_all_are_accepted_and_a_step_without_now_and_then() -> None:
    given = run(ready(), accepted=1.0, steps=300)
    assert given.count(4) > 280
    assert 3 <= given[60:].count(0) <= 2 * (300 / MOST_IN_A_ROW + 1)


def test_what_is_never_accepted_is_tried_ever_more_seldom_and_comes_back_when_it_is() -> None:
    policy = ready()
    given = run(policy, accepted=0.0, steps=1000)
    assert sum(given[100:]) <= 12
    assert sum(given[500:]) >= 1
    assert sum(run(policy, accepted=1.0, steps=300)[-100:]) > 350


def test_a_new_reason_to_hope_brings_the_next_try_forward_and_costs_no_more() -> None:
    hopeless = {"accepted": 0.0, "added_s": 0.01}
    policy = ready()
    run(policy, steps=1500, **hopeless)
    given = run(policy, steps=200, **hopeless)
    assert sum(given[:30]) == 0, "the next try is far away"
    policy.try_soon()
    assert 1 <= sum(run(policy, steps=10, **hopeless)) <= 2
    given = []
    for _ in range(200):
        policy.try_soon()
        given += run(policy, steps=5, **hopeless)
    assert 0 < sum(given) <= 1 + 2 * ALLOWANCE * len(given), "the account bounds what tries cost"


def test_a_batch_whose_drafts_are_never_worth_it_goes_on_trying_some_now_and_then() -> None:
    assert sum(run(ready(), accepted=0.0, steps=12_000, added_s=0.01)[-2500:]) >= 1


def test_one_delayed_try_does_not_end_all_tries() -> None:
    policy = ready()
    count = 0
    while not count:
        count = policy.begin_step(1)
        policy.observe(1 + count, 1.0 if count else 0.01, count, 0)
    for _ in range(20):
        policy.observe(1, 0.005)  # so that the account never again holds what the try seemed to cost
    assert sum(run(policy, accepted=1.0, steps=4000)[-100:]) > 350


def delaying(device: Device, delayed: Callable[[int, int], bool]) -> Device:
    """Return the device, with steps that take 100 times as long if `delayed` for their number and their tokens."""
    numbers = itertools.count()

    def seconds(num_tokens: int) -> float:
        return device(num_tokens) * (100 if delayed(next(numbers), num_tokens) else 1)

    return seconds


@pytest.mark.parametrize("guess_s", [None, 5e-4])
def test_after_a_delayed_first_try_of_a_batch_drafts_come_back(guess_s: float | None) -> None:
    """Single requests still try drafts, but such steps have other sizes than the one that was delayed."""
    tries = itertools.count()
    slow = delaying(memory_bound, lambda step, num_tokens: num_tokens > 8 and next(tries) == 0)
    normal = simulate(memory_bound, 8, [0.7], num_steps=4000, depth=1, guess_s=guess_s)
    assert simulate(slow, 8, [0.7], num_steps=4000, depth=1, guess_s=guess_s).drafts > 0.3 * normal.drafts


@pytest.mark.parametrize("delayed", [0, 1, 2])
def test_a_delayed_step_without_drafts_makes_drafts_look_cheap_for_a_few_steps_only(delayed: int) -> None:
    """The account does not stop them: it compares steps with drafts with those without."""
    slow = delaying(memory_bound, lambda step, num_tokens: step == delayed)
    normal, after = (
        simulate(device, 256, [0.9], num_steps=256, most=3, guess_s=6e-3, guesses_most=True)
        for device in (memory_bound, slow)
    )
    assert after.drafts < normal.drafts + 20 * 3 * 256


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_of_the_device_that_overdraw_the_account_are_used(depth: int) -> None:
    """Otherwise they would overdraw it again as soon as it is filled, and no draft would ever earn anything."""
    slow = delaying(memory_bound, lambda step, num_tokens: 1000 <= step < 1003)
    normal = simulate(memory_bound, 1, [0.7], num_steps=3000, depth=depth, guess_s=5e-4)
    assert simulate(slow, 1, [0.7], num_steps=3000, depth=depth, guess_s=5e-4).drafts > 0.5 * normal.drafts


@pytest.mark.parametrize(("guess_s", "are_made"), [(1e-3, True), (2e-2, False)])
def test_beside_prompts_guesses_are_made_only_if_drafts_pay_for_them(guess_s: float, are_made: bool) -> None:
    """There a draft costs little itself, as it takes the place of a prompt token."""
    names = [str(number) for number in range(64)]
    policy = DraftLengths(3, guesses_ahead=True, guesses_most=True)
    num_guessed = 0
    for _ in range(200):
        limit = policy.begin_step(64)
        counts = [policy.num_drafts_for(name, num_guessed) if limit and num_guessed else 0 for name in names]
        num_guessed = policy.num_guesses_to_make(names)
        for name, count in zip(names, counts, strict=True):
            policy.settled(name, count, count)
        policy.observe(64 + sum(counts), 1e-2 + guess_s * num_guessed, sum(counts), sum(counts), num_guessed)
    guesses = []
    for _ in range(50):
        policy.observe_prompts(4096, 0.1)
        policy.begin_step(64, 2000)
        guesses.append(policy.num_guesses_to_make(names))
    assert sum(count > 0 for count in guesses) == 50 if are_made else sum(guesses) <= 3


def test_a_request_that_misses_a_step_for_its_drafts_has_them_where_more_than_one_is_accepted() -> None:
    def drafts(accepted: float, *, sits_out: bool) -> list[int]:
        return run(ready(), accepted=accepted, steps=300, sits_out=sits_out)

    for accepted in (1.0, 0.75):
        few, all_of_them = (sum(drafts(accepted, sits_out=sits_out)[100:]) for sits_out in (True, False))
        assert few == all_of_them > 350
    assert 2 * sum(drafts(0.25, sits_out=True)) < 20 < sum(drafts(0.25, sits_out=False))


@pytest.mark.parametrize("sits_out", [False, True])
def test_steps_that_requests_miss_are_paid_for(sits_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts take no time here, and all are wrong."""
    monkeypatch.setattr(account, "LOAN_STEPS", 1.0)
    policy, limits = ready(num_requests=4), []
    for _ in range(60):
        limits.append(policy.begin_step(4))
        drafts = [
            policy.num_drafts_for(request_id, limits[-1], sits_out=sits_out) if limits[-1] else 0
            for request_id in "abcd"
        ]
        for request_id, count in zip("abcd", drafts, strict=True):
            policy.settled(request_id, count, 0)
        policy.observe(4 + sum(drafts), 0.01, sum(drafts), 0)
    assert any(limits)
    assert (not any(limits[-15:])) == sits_out


def test_steps_that_requests_miss_beside_prompts_leave_the_account_alone() -> None:
    policy = ready()
    run(policy, accepted=1.0, steps=50, added_s=0.006)
    policy.observe_prompts(1008, 0.050)
    for _ in range(20):
        limit = policy.begin_step(1, 1000)
        count = policy.num_drafts_for("a", limit, sits_out=True)
        assert count > 1
        policy.settled("a", count, count)
        policy.observe_prompts(1001 + count, 0.050)
        assert policy.begin_step(1), "the account must not be overdrawn"
        assert policy.num_drafts_for("a", 1) == 1
        policy.settled("a", 1, 1)
        policy.observe(2, 0.016, 1, 1)


def test_a_try_that_succeeded_is_soon_followed_by_another() -> None:
    policy = ready()
    run(policy, accepted=0.0, steps=1500, added_s=0.004)
    steps = [run(policy, accepted=0.0, steps=1, added_s=0.004)[0] for _ in range(300)]
    assert 1 <= sum(steps) <= 4, "tries have become rare"
    while not run(policy, accepted=1.0, steps=1, added_s=0.004)[0]:
        pass
    later = run(policy, accepted=0.0, steps=20, added_s=0.004)
    assert (sum(later[:6]), sum(later)) == (0, 1)


def test_nothing_is_drafted_before_the_time_without_drafts_is_known() -> None:
    policy = DraftLengths(4)
    assert [policy.begin_step(1) for _ in range(10)] == [0] * 10


def test_a_batch_of_another_size_is_measured_first() -> None:
    policy = ready()
    run(policy, accepted=1.0, steps=50)
    assert policy.begin_step(50) == 0
    limits = []
    for _ in range(10):
        limits.append(policy.begin_step(50))
        policy.observe(50, 0.01)
    assert limits[:2] == [0, 0]
    assert any(limits)


def test_beside_prompts_a_draft_costs_what_a_prompt_token_costs() -> None:
    policy = ready(num_requests=8)
    assert policy.begin_step(8, 1000) == 0, "the time of prompts is not known"
    policy.observe_prompts(1008, 0.050)
    assert [policy.begin_step(8, 1000) for _ in range(10)][-1] == 4
    assert policy.num_drafts_for("a", 3) == 3
    slow = ready(num_requests=8)
    slow.observe_prompts(16, 0.050)
    assert slow.begin_step(8, 8) == 0


def test_speculation_comes_back_when_a_large_batch_has_become_small() -> None:
    policy = ready(num_requests=256, seconds=0.1)
    for _ in range(200):
        limit = policy.begin_step(256)
        num_drafts = sum(policy.num_drafts_for(str(number), limit) for number in range(256)) if limit else 0
        policy.observe(256 + num_drafts, 0.1 * (1 + num_drafts / 256), num_drafts, 0)
    assert policy.begin_step(256) == 0
    assert sum(run(policy, accepted=1.0, steps=60)[30:]) > 60


def test_an_overdrawn_account_stops_drafts_whatever_the_estimates_say() -> None:
    policy = ready()
    run(policy, accepted=1.0, steps=50)
    count = policy.begin_step(1)
    assert count
    policy.observe(1 + count, 1.0, count, count)
    assert policy.begin_step(1), "one step that something else held up tells nothing"
    for _ in range(8):
        policy.observe(1 + count, 1.0, count, count)
    assert [policy.begin_step(1) for _ in range(10)] == [0] * 10


def test_it_is_a_function_of_the_calls() -> None:
    for device in (memory_bound, compute_bound):
        assert simulate(device, 8, RATES, seed=3) == simulate(device, 8, RATES, seed=3)


def test_requests_that_are_over_are_forgotten() -> None:
    policy = ready()
    run(policy, accepted=1.0, steps=20)
    assert policy.num_known == 1
    policy.end("a")
    policy.end("never seen")
    assert policy.num_known == 0


def test_a_share_is_that_of_the_drafts_that_were_checked() -> None:
    acceptance = Acceptance(3, kept=1.0, weight=1e-9)
    for accepted in (0, 1, 1, 3):
        acceptance.note(3, accepted)
    assert acceptance.shares([0.5] * 3) == pytest.approx([3 / 4, 1 / 3, 1.0])
    older = Acceptance(1, kept=0.5, weight=1e-9)
    older.note(1, 1)
    older.note(1, 0)
    assert older.shares([0.5]) == pytest.approx([0.5 / 1.5]), "older drafts weigh less"
    assert Acceptance(3, kept=0.9, weight=2.0).shares_from(0.4) == pytest.approx([0.4] * 3)
    assert chances([0.5, 0.5, 1.0]) == [0.5, 0.25, 0.25]
