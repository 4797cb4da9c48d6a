"""Both sides of many hand-offs at once, under every fault the fakes know; and the proof that the oracle can see."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simulation import LEASE_S, Engine, Violation, World

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome
from baton.kv_transfer import rank_reader
from baton.kv_transfer.actions import Emit
from baton.kv_transfer.crew import Crew
from baton.kv_transfer.crew_member import Follower
from baton.kv_transfer.descriptors import Share, cut
from baton.kv_transfer.leases import LeaseTable
from baton.kv_transfer.receives import ReceiveTable

logging.getLogger("baton.kv_transfer").setLevel(logging.ERROR)  # thousands of refusals are the point here

PREFILL, DECODE = st.sampled_from(("P0", "P1")), st.sampled_from(("D0", "D1"))
ANY_ENGINE = st.sampled_from(("P0", "P1", "D0", "D1"))

# Ranks of P0, P1, D0, D1, and how many KV heads they share: halves, quarters, copies of heads, latents.
ALONE = ((1, 1, 1, 1), 1)
GROUPS = (((1, 2, 2, 4), 4), ((4, 2, 2, 1), 4), ((2, 4, 4, 2), 2), ((2, 1, 4, 2), 1), ((2, 3, 3, 1), 6))


class HandoffMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens, and with which dice the fakes play."""

    @initialize(seed=st.integers(0, 2**32), groups=st.sampled_from((ALONE, *GROUPS)))
    def begin(self, seed: int, groups: tuple[tuple[int, int, int, int], int]) -> None:
        self.world = World(seed, *groups)

    @rule(prefill=PREFILL, decode=DECODE, num_blocks=st.integers(1, 8), cached=st.integers(0, 8))
    def hand_off(self, prefill: str, decode: str, num_blocks: int, cached: int) -> None:
        offering = self.world.engines[prefill].offer(num_blocks)
        if offering is not None:
            self.world.tickets.append(offering)
            self.world.engines[decode].receive(offering, cached)

    @rule(decode=DECODE, which=st.integers(0, 100))
    def present_an_old_ticket(self, decode: str, which: int) -> None:
        if self.world.tickets:
            offering = self.world.tickets[which % len(self.world.tickets)]
            self.world.engines[decode].receive(offering, 0)

    @rule(decode=DECODE, which=st.integers(0, 100))
    def cancel(self, decode: str, which: int) -> None:
        engine = self.world.engines[decode]
        if engine.receives:
            engine.cancel(list(engine.receives)[which % len(engine.receives)])

    @rule(prefill=PREFILL, which=st.integers(0, 100))
    def withdraw(self, prefill: str, which: int) -> None:
        engine = self.world.engines[prefill]
        if engine.offers:
            engine.withdraw(list(engine.offers)[which % len(engine.offers)])

    @rule(seconds=st.sampled_from((0.1, 0.5, 2.0, LEASE_S)))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(name=ANY_ENGINE, seconds=st.sampled_from((2.0, LEASE_S, 1.5 * LEASE_S)))
    def stall(self, name: str, seconds: float) -> None:
        self.world.pass_time(seconds, stalled=self.world.engines[name])

    @rule(name=ANY_ENGINE, rank=st.integers(1, 3))
    def lose_a_rank(self, name: str, rank: int) -> None:
        ranks = self.world.engines[name].ranks
        if rank < len(ranks):
            ranks[rank].die(self.world)

    @rule(name=ANY_ENGINE, rank=st.integers(1, 3), seconds=st.sampled_from((2.0, LEASE_S)))
    def stall_a_rank(self, name: str, rank: int, seconds: float) -> None:
        self.world.pass_time(seconds, stalled=self.world.engines[name], rank=rank)

    @rule(name=ANY_ENGINE)
    def restart_unnoticed(self, name: str) -> None:
        self.world.restart(name)

    @rule(name=ANY_ENGINE)
    def the_directory_speaks(self, name: str) -> None:
        self.world.tell(self.world.engines[name])

    @rule()
    def decoding_ends(self) -> None:
        self.world.finish_decoding()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check_books()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.come_to_rest()


TestHandoffMachine = HandoffMachine.TestCase
TestHandoffMachine.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def take_steps(world: World, steps: int) -> None:
    for _ in range(steps):
        world.step()


def simulate(seeds: range, sizes: tuple[int, int, int, int], num_heads: int, steps: int = 60) -> None:
    for seed in seeds:
        world = World(seed, sizes, num_heads)
        take_steps(world, steps)
        world.come_to_rest()


@pytest.mark.parametrize(("sizes", "num_heads"), [ALONE, *GROUPS])
def test_nothing_is_lost_or_mixed_up_in_random_runs(sizes: tuple[int, int, int, int], num_heads: int) -> None:
    simulate(range(15), sizes, num_heads)


@pytest.mark.parametrize(("sizes", "num_heads"), [ALONE, *GROUPS])
def test_the_runs_reach_every_end_of_a_hand_off(sizes: tuple[int, int, int, int], num_heads: int) -> None:
    """Otherwise the tests above would prove little."""
    offers: set[str] = set()
    receives: set[str] = set()
    ranks_missed = 0
    for seed in range(40):
        world = World(seed, sizes, num_heads)
        for _ in range(60):
            world.step()
            for engine in world.engines.values():
                offers |= engine.handoff.stats().offers.keys()
                receives |= engine.handoff.stats().receives.keys()
        ranks_missed += world.ranks_missed
    assert (ranks_missed > 0) == (max(sizes) > 1)
    assert offers == {outcome.value for outcome in OfferOutcome}
    assert receives >= {"received", "refused", "withdrawn", "expired", "failed", "lost", "cancelled"}


# ---------------------------------------------------------------------- planted bugs


def free_before_the_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fail, release = ReceiveTable._fail, ReceiveTable.read_released

    def freeing_at_once(self, receive, outcome, reason, **options):
        actions = fail(self, receive, outcome, reason, **options)
        freed = Emit(BlocksReleased(receive.id))
        return actions if freed in actions else [*actions, freed]

    def silently(self, receive):
        return [action for action in release(self, receive) if not isinstance(action, Emit)]

    monkeypatch.setattr(ReceiveTable, "_fail", freeing_at_once)
    monkeypatch.setattr(ReceiveTable, "read_released", silently)


def free_what_a_reader_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(self, offer):
        lease = self._leases.get(offer)
        return self._release(lease, OfferOutcome.WITHDRAWN) if lease else []

    monkeypatch.setattr(LeaseTable, "withdraw", at_once)


def ignore_epoch_and_generation_at_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "_named_by", lambda self, key: self._leases.get(key.offer))


def ignore_epoch_and_offer_at_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_number_only(self, message):
        return next((r for r in self._active() if r.id == message.reader.receive and r.sent_at), None)

    monkeypatch.setattr(ReceiveTable, "_named_by", by_number_only)


def release_blocks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ReceiveTable._free
    monkeypatch.setattr(ReceiveTable, "_free", lambda self, receive: free(self, receive) * 2)


def end_an_offer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self, lease, outcome):
        return [Emit(OfferEnded(lease.key.offer, outcome))]

    monkeypatch.setattr(LeaseTable, "_release", forgetful)


def commit_after_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReceiveTable, "_in_time", lambda self, read_finished_at, granted_until: True)


def count_the_lease_from_the_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = ReceiveTable._granted

    def from_now(self, receive, message, now):
        if message.number in receive.sent_at:
            receive.sent_at[message.number] = now
        return granted(self, receive, message, now)

    monkeypatch.setattr(ReceiveTable, "_granted", from_now)


def forget_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "expire", lambda self, now: [])


BUGS = [
    free_before_the_read_has_ended,
    free_what_a_reader_was_promised,
    ignore_epoch_and_generation_at_the_holder,
    ignore_epoch_and_offer_at_the_reader,
    release_blocks_twice,
    end_an_offer_twice,
    commit_after_expiry,
    count_the_lease_from_the_grant,
    forget_expiry,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        simulate(range(200), *ALONE)


# ---------------------------------------------------------------------- planted bugs of groups


def commit_when_rank_0_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crew, "poll", lambda self, read: self._own.poll(read))


def release_what_only_rank_0_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Crew, "release", lambda self, read: self._own.release(read))


def report_a_read_as_released_when_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Follower._report
    at_once = lambda self, read, state, reason, *, released: report(self, read, state, reason, released=True)  # noqa: E731
    monkeypatch.setattr(Follower, "_report", at_once)


def take_the_holders_first_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        rank_reader, "cut", lambda heads, remote, local, size: cut(heads, remote, local, size)._replace(remote_offset=0)
    )


def read_as_if_both_sides_had_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_rank(rank: int, heads: range, holders: Sequence[range]) -> list[Share]:
        return [Share(rank % len(holders), heads)]

    monkeypatch.setattr(rank_reader, "shares", same_rank)


GROUP_BUGS = [
    commit_when_rank_0_is_done,
    release_what_only_rank_0_has_let_go,
    report_a_read_as_released_when_it_failed,
    take_the_holders_first_heads,
    read_as_if_both_sides_had_as_many_ranks,
]


@pytest.mark.parametrize("plant", GROUP_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_planted_in_a_group_is_caught(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        simulate(range(100), *GROUPS[0])


def test_corruption_in_transit_is_caught() -> None:
    world = World(0)
    world.fabric.faults.corrupt = 1.0
    world.fabric.faults.fail = 0.0
    with pytest.raises(Violation, match="hold something else"):
        take_steps(world, 60)


def test_a_block_written_after_it_was_freed_is_caught() -> None:
    world = World(0)
    engine: Engine = world.engines["D0"]
    with pytest.raises(Violation, match="written after it was freed"):
        world.fabric.on_write(engine.ranks[0].agent, 0, 8)
