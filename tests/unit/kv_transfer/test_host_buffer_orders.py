"""Whatever happens to hand-offs by way of the host, in whichever order: each ends once, and all slots come back."""

from __future__ import annotations

import collections
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome, Received, ReceiveFailed
from baton.kv_transfer.staging import host_buffer
from baton.kv_transfer.staging.copy_thread import Call

from ...helpers.host_buffer_harness import BY_HOST, Inner, Station

pytestmark = pytest.mark.timeout(120)

WHICH = st.integers(0, 100)
BLOCKS = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True)


class Copies:
    """A `CopyThread` whose copies end when the test says so, in order."""

    newest: Copies

    def __init__(self, *_: object) -> None:
        Copies.newest = self
        self.jobs: collections.deque[tuple[Call, Call]] = collections.deque()
        self._done: list[Call] = []

    def down(self, pairs: object, after_copy: Call, on_poll: Call) -> None:
        self.jobs.append((after_copy, on_poll))

    def up(self, pairs: object, on_poll: Call) -> None:
        self.jobs.append((lambda: None, on_poll))

    def end_one(self) -> None:
        after_copy, on_poll = self.jobs.popleft()
        after_copy()
        self._done.append(on_poll)

    def poll(self) -> list[Call]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        pass


class Orders(RuleBasedStateMachine):
    """The layers below keep the contract of a connector, and of copies."""

    @initialize()
    def begin(self) -> None:
        self.station = Station()
        self.buffer, self.inner = self.station.buffer, self.station.inner
        self.copies = Copies.newest
        self.station.now_s = 0.0
        self.offers: list[int] = []
        self.receives: list[int] = []
        self.failing: list[int] = []  # below: whose blocks are still written
        self.heard: Counter[tuple[type, int]] = Counter()

    # ------------------------------------------------------------------ what the engine does

    @rule(blocks=BLOCKS)
    def offer(self, blocks: list[int]) -> None:
        self.offers.append(self.buffer.offer("r", 0, blocks, 16 * len(blocks)).transfer_id)

    @rule(blocks=BLOCKS, ready=st.integers(0, 5))
    def offer_early(self, blocks: list[int], ready: int) -> None:
        self.offers.append(self.buffer.offer_growing("r", 0, blocks, 16 * len(blocks)).transfer_id)
        self.buffer.advance(self.offers[-1], min(ready, len(blocks)))

    @rule(blocks=st.lists(st.integers(0, 15), max_size=9, unique=True))
    def receive(self, blocks: list[int]) -> None:
        self.receives.append(self.buffer.receive("r", 0, b"", 0, blocks))

    @precondition(lambda self: self.receives)
    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        self.buffer.cancel(self.receives[which % len(self.receives)])

    @precondition(lambda self: self.offers)
    @rule(which=WHICH)
    def withdraw(self, which: int) -> None:
        self.buffer.withdraw(self.offers[which % len(self.offers)])

    @rule()
    def poll(self) -> None:
        for event in self.buffer.poll():
            assert not isinstance(event, BlocksReleased) or self.heard[ReceiveFailed, event.transfer_id]
            self.heard[type(event), event.transfer_id] += 1

    # ------------------------------------------------------------------ what happens below

    @precondition(lambda self: self.inner.received)
    @rule(which=WHICH, well=st.booleans())
    def a_receive_ends(self, which: int, well: bool) -> None:
        number = list(self.inner.received)[which % len(self.inner.received)]
        del self.inner.received[number]
        self.inner.events.append(Received(number) if well else ReceiveFailed(number, "lost"))
        if not well:
            self.failing.append(number)

    @precondition(lambda self: self.failing)
    @rule()
    def nothing_writes_any_more(self) -> None:
        self.inner.events.append(BlocksReleased(self.failing.pop()))

    @precondition(lambda self: self.inner.offered)
    @rule(which=WHICH)
    def an_offer_ends(self, which: int) -> None:
        number = list(self.inner.offered)[which % len(self.inner.offered)]
        self.inner.end_offer(number, OfferOutcome.EXPIRED)

    @precondition(lambda self: self.copies.jobs)
    @rule()
    def a_copy_ends(self) -> None:
        self.copies.end_one()

    @rule(seconds=st.sampled_from((1.0, BY_HOST.lease_s)))
    def time_passes(self, seconds: float) -> None:
        assert self.station.now_s is not None
        self.station.now_s += seconds

    def teardown(self) -> None:
        if hasattr(self, "station"):
            for _ in range(len(self.offers) + len(self.receives) + 2):  # one may wait for another's places
                self._let_all_end()
            ends = [number for kind, number in self.heard if kind in (Received, BlocksReleased, OfferEnded)]
            assert sorted(ends) == sorted([*self.offers, *self.receives])
            assert all(count == 1 for count in self.heard.values())
            assert self.station.slots_used == 0
            self.buffer.close()

    def _let_all_end(self) -> None:
        while self.inner.received:
            self.a_receive_ends(0, well=True)
        while self.failing:
            self.nothing_writes_any_more()
        while self.inner.offered:
            self.an_offer_ends(0)
        while self.copies.jobs:
            self.a_copy_ends()
        self.poll()


@pytest.mark.slow
def test_every_hand_off_ends_once_and_all_slots_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffer, "TransferConnector", Inner)
    monkeypatch.setattr(host_buffer, "CopyThread", Copies)
    run_state_machine_as_test(
        Orders,
        settings=settings(
            max_examples=200,
            stateful_step_count=40,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
