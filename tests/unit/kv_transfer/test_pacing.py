"""The pause before a transfer thread looks again."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from baton.kv_transfer.pacing import (
    POLL_GRANT_FOR_S,
    POLL_LONG_WARMING_S,
    POLL_READS_S,
    POLL_SERVING_S,
    POLL_WARMING_S,
    pause_s,
    sleep_precisely,
)

IDLE = {"device": "cpu", "warming_since": None, "serving": False}


def test_a_young_read_is_looked_at_at_once_and_an_old_one_every_100_us() -> None:
    pauses = [pause_s(100.0 + age, 100.0, None, **IDLE) for age in (0.0, 1e-4, 5e-4, 1.0)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.0, POLL_READS_S)


def test_a_read_of_a_gpus_memory_waits_a_hundredth_of_its_time_and_one_that_is_slow_does_not_burn_a_core() -> None:
    def of_gpu(age_s: float) -> float | None:
        return pause_s(100.0 + age_s, 100.0, None, device="cuda:0", warming_since=None, serving=False)

    assert of_gpu(7e-4) == pytest.approx(7e-6)
    assert of_gpu(5.0) == POLL_READS_S


@pytest.mark.parametrize("serving", [False, True])
def test_a_grant_is_looked_for_without_pause_but_not_for_long(serving: bool) -> None:
    def after(seconds: float) -> float | None:
        return pause_s(100.0 + seconds, None, 100.0, device="cpu", warming_since=None, serving=serving)

    assert after(0.0) == after(POLL_GRANT_FOR_S / 2) == 0.0
    assert after(2 * POLL_GRANT_FOR_S) == (POLL_SERVING_S if serving else None)


@pytest.mark.parametrize("serving", [False, True])
def test_a_peer_that_takes_long_to_connect_costs_no_core(serving: bool) -> None:
    def after(seconds: float) -> float | None:
        return pause_s(100.0 + seconds, None, None, device="cpu", warming_since=100.0, serving=serving)

    assert after(0.0) == after(0.005) == POLL_WARMING_S
    assert after(0.05) == pytest.approx(5e-4)
    assert after(600.0) == (POLL_SERVING_S if serving else POLL_LONG_WARMING_S)


def test_no_pause_is_negative_though_the_read_began_after_the_round_did() -> None:
    assert pause_s(100.0, 100.1, None, **IDLE) == 0.0


def test_whoever_has_nothing_to_do_is_not_woken() -> None:
    assert pause_s(100.0, None, None, **IDLE) is None


def slack_ns() -> int:
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())


def test_precise_sleeps_are_those_of_the_calling_thread_only() -> None:
    before, found = slack_ns(), []

    def sleeper() -> None:
        sleep_precisely()
        found.append(slack_ns())

    thread = threading.Thread(target=sleeper)
    thread.start()
    thread.join(30.0)
    assert found == [1]
    assert slack_ns() == before > 1
