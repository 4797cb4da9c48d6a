"""Processes that stood still: what waited meanwhile counts from when it may have come."""

from __future__ import annotations

import pytest

from baton.engine.core.connector import OfferEnded, OfferOutcome
from baton.kv_transfer.handoff.coordinator import LISTEN_EVERY_S
from baton.kv_transfer.lease_clock import STOOD_STILL_S
from baton.kv_transfer.protocol.messages import EngineKey, LeaseKey

from .handoff_engines import Engines


def stop_the_holder(engines: Engines, seconds: float, *, num_ready: int = 1) -> None:
    """An offer, a pause of the holder's process, a claim right after it began; the reader gives up and is not heard."""
    engines.meet()
    engines.holder.offer(LeaseKey(EngineKey("holder", 1), "request", 0, 1), [1], num_ready)
    engines.clock.advance(engines.holder.pump())
    engines.holder.pump()
    engines.receive(EngineKey("holder", 1))
    engines.reader.pump()
    engines.clock.advance(seconds)


def test_a_holder_that_stood_still_counts_a_claim_from_when_it_may_have_come() -> None:
    engines = Engines()
    stop_the_holder(engines, 20.0)
    engines.holder.pump()
    lease = engines.holder.leases.get(1)
    assert lease is not None
    assert 30.0 <= lease.expires_at - (engines.clock() - 20.0) < 30.0 + 2 * LISTEN_EVERY_S


def test_a_holder_that_stood_still_for_longer_than_a_lease_refuses_what_waited() -> None:
    engines = Engines()
    stop_the_holder(engines, 40.0)
    engines.holder.pump()
    assert engines.events == [OfferEnded(1, OfferOutcome.EXPIRED)]
    assert not engines.holder.leases.any_granted


def test_a_claim_that_reaches_python_a_moment_after_the_wake_waited_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of libzmq wake up with ours."""
    engines = Engines()
    stop_the_holder(engines, 20.0)
    channel = engines.network.bound("tcp://holder")
    with monkeypatch.context() as patched:
        patched.setattr(channel, "receive", lambda: [])
        engines.clock.advance(engines.holder.pump() / 2)
    engines.holder.pump()
    lease = engines.holder.leases.get(1)
    assert lease is not None
    assert lease.expires_at - engines.clock() < 30.0 - 20.0 + 2 * LISTEN_EVERY_S


def test_growth_that_waited_with_the_process_does_not_revive_a_lease() -> None:
    engines = Engines()
    stop_the_holder(engines, 40.0, num_ready=0)
    engines.holder.pump(lambda: [lambda handoff: handoff.advance(1, 1)])
    assert engines.events == [OfferEnded(1, OfferOutcome.EXPIRED)]


def test_a_holder_that_was_only_busy_grants_the_whole_lease() -> None:
    engines = Engines()
    stop_the_holder(engines, STOOD_STILL_S / 2)
    engines.holder.pump()
    assert engines.holder.leases.get(1).expires_at == engines.clock() + 30.0
