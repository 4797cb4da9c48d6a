"""Prefill, decode and gateway at once, under every fault the fakes know; and the proof that the oracle can see."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from baton.engine.core.connector import BlocksReleased, OfferEnded, OfferOutcome
from baton.engine.core.layout import KVLayout
from baton.kv_transfer.descriptors import AssignedHeads, HeadSlice, slice_heads
from baton.kv_transfer.group import rank_reader
from baton.kv_transfer.group.rank_reader import RankReader
from baton.kv_transfer.group.read_member import ReadHandler
from baton.kv_transfer.group.tp_read_group import TpReadGroup
from baton.kv_transfer.handoff.peers import Peers
from baton.kv_transfer.handoff.reads import BlockReads
from baton.kv_transfer.protocol.leases import LEASE_TABLE, LeaseEvent, LeaseRow, LeaseState, LeaseTable
from baton.kv_transfer.protocol.messages import DigestMode, Emit
from baton.kv_transfer.protocol.receive import Receive, ReceiveOutcome, ReceiveState
from baton.kv_transfer.protocol.receives import ReceiveTable

from ...helpers.fake_transport import TransportFaults
from .simulated_engine import LEASE_S, STALL_S, Engine, Violation, require
from .simulation import World

PREFILL, DECODE = st.sampled_from(("P0", "P1")), st.sampled_from(("D0", "D1"))
ANY_ENGINE = st.sampled_from(("P0", "P1", "D0", "D1"))
WHICH = st.integers(0, 100)

# Ranks of P0, P1, D0, D1, and how many KV heads they share: halves, quarters, copies of heads, latents.
ALONE = ((1, 1, 1, 1), 1)
GROUPS = (((1, 2, 2, 4), 4), ((4, 2, 2, 1), 4), ((2, 4, 4, 2), 2), ((2, 1, 4, 2), 1), ((2, 3, 3, 1), 6))

NUM_EXAMPLES, NUM_STEPS = 150, 50
MIN_STEPS = 5000


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of refusals are the point here."""
    logger = logging.getLogger("baton.kv_transfer")
    before, logger.level = logger.level, logging.CRITICAL
    yield
    logger.level = before


class HandoffMachine(RuleBasedStateMachine):
    """Hypothesis chooses what happens, and with which dice the fakes play."""

    kinds: Sequence[tuple[tuple[int, int, int, int], int]] = (ALONE, *GROUPS)
    digests: Sequence[DigestMode] = tuple(DigestMode)
    num_steps = 0
    ends: Counter[str] = Counter()

    @initialize(seed=st.integers(0, 2**32), data=st.data())
    def begin(self, seed: int, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from(self.kinds))
        self.world = World(seed, *kind, digest=data.draw(st.sampled_from(self.digests)))

    # ------------------------------------------------------------------ what gateways do

    @rule(prefill=PREFILL, decode=DECODE, num_blocks=st.integers(1, 8), cached=st.integers(0, 8), grows=st.booleans())
    def submit(self, prefill: str, decode: str, num_blocks: int, cached: int, grows: bool) -> None:
        self.world.gateway.submit(prefill, decode, num_blocks, cached, num_blocks // 3 if grows else num_blocks)

    @rule(prefill=PREFILL, decode=DECODE, which=WHICH)
    def resubmit(self, prefill: str, decode: str, which: int) -> None:
        self.world.gateway.resubmit(which, prefill, decode)

    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        self.world.gateway.abort(which)

    @rule(decode=DECODE, which=WHICH)
    def replay_an_old_ticket(self, decode: str, which: int) -> None:
        self.world.gateway.replay(decode, which)

    # ------------------------------------------------------------------ what engines do

    @rule(prefill=PREFILL, which=WHICH, num_blocks=st.integers(1, 4))
    def write_a_chunk(self, prefill: str, which: int, num_blocks: int) -> None:
        engine = self.world.engines[prefill]
        growing = [number for number, offering in engine.offers.items() if offering.grows]
        if growing:
            engine.write(growing[which % len(growing)], num_blocks)

    @rule(prefill=PREFILL, decode=DECODE, seconds=st.sampled_from((0.2, 1.0, 3.0)))
    def read_a_prompt_chunk_by_chunk(self, prefill: str, decode: str, seconds: float) -> None:
        self.world.gateway.submit(prefill, decode, 7, 0, 1)
        engine = self.world.engines[prefill]
        for number in [number for number, offering in engine.offers.items() if offering.grows][-1:]:
            for _ in range(3):
                self.world.pass_time(seconds)
                if number in engine.offers:
                    engine.write(number, 2)

    @rule(prefill=PREFILL, which=WHICH)
    def preempt(self, prefill: str, which: int) -> None:
        engine = self.world.engines[prefill]
        if engine.offers:
            engine.withdraw(list(engine.offers)[which % len(engine.offers)])

    @rule(decode=DECODE, which=WHICH)
    def cancel(self, decode: str, which: int) -> None:
        engine = self.world.engines[decode]
        if engine.receives:
            engine.cancel(list(engine.receives)[which % len(engine.receives)])

    @rule()
    def decoding_ends(self) -> None:
        self.world.finish_decoding()

    # ------------------------------------------------------------------ what the world does

    @rule(seconds=st.sampled_from((0.1, 0.5, 2.0, LEASE_S)))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(slow=st.sampled_from((0.0, 0.1, 1.0)))
    def reads_get_slower_or_quicker(self, slow: float) -> None:
        self.world.fabric.faults.slow = slow

    @rule(name=ANY_ENGINE, seconds=st.sampled_from((2.0, LEASE_S, 1.5 * LEASE_S)))
    def stall(self, name: str, seconds: float) -> None:
        self.world.pass_time(seconds, stalled=self.world.engines[name])

    @rule(prefill=PREFILL, decode=DECODE)
    def stall_a_reader_whose_read_takes_longer_than_the_lease(self, prefill: str, decode: str) -> None:
        offering = self.world.engines[prefill].offer(3, 3, "slow", 0)
        if offering is not None:
            faults = self.world.fabric.faults
            self.world.fabric.faults = TransportFaults(read_s=(LEASE_S, 1.4 * LEASE_S))
            self.world.engines[decode].receive(offering, 0)
            self.world.pump(self.world.engines[decode])
            self.world.fabric.faults = faults
            self.world.pass_time(1.5 * LEASE_S, stalled=self.world.engines[decode])

    @rule(prefill=PREFILL, decode=DECODE)
    def a_read_hangs(self, prefill: str, decode: str) -> None:
        """Nothing of it comes, and both ends hear each other all the while."""
        engine, offering = self.world.engines[decode], self.world.engines[prefill].offer(3, 3, "hangs", 0)
        if offering is None:
            return
        faults = self.world.fabric.faults
        self.world.fabric.faults = TransportFaults(read_s=(1.5 * STALL_S, 1.7 * STALL_S))
        receive = engine.receive(offering, 0)
        self.world.pump(engine)
        self.world.fabric.faults = faults
        has_begun = receive in engine.handoff.reads
        self.world.pass_time(STALL_S + 1.0)
        if has_begun and receive in engine.receives and self.world.engines[decode] is engine:
            require(engine.receives[receive].failed, "a read of which nothing comes is waited for")

    @rule(name=ANY_ENGINE, rank=st.integers(1, 3))
    def lose_a_rank(self, name: str, rank: int) -> None:
        ranks = self.world.engines[name].ranks
        if rank < len(ranks):
            ranks[rank].die(self.world)

    @rule(name=ANY_ENGINE, rank=st.integers(1, 3), seconds=st.sampled_from((2.0, LEASE_S)))
    def stall_a_rank(self, name: str, rank: int, seconds: float) -> None:
        if rank < len(self.world.engines[name].ranks):
            self.world.pass_time(seconds, stalled=self.world.engines[name], rank=rank)

    @rule(name=ANY_ENGINE)
    def restart_unnoticed(self, name: str) -> None:
        self.world.restart(name)

    @rule(name=ANY_ENGINE)
    def connections_break(self, name: str) -> None:
        self.world.engines[name].channel.break_all()

    @rule(name=ANY_ENGINE)
    def the_directory_speaks(self, name: str) -> None:
        self.world.tell(self.world.engines[name])

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            type(self).num_steps += 1
            self.world.check_books()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.come_to_rest()
            self.ends.update(self.world.ends)
            self.world.prove_all_can_still_hand_off()


class EnginesAlone(HandoffMachine):
    kinds = (ALONE,)
    digests = (DigestMode.OFF,)


class OneGroup(HandoffMachine):
    kinds = GROUPS[:1]
    digests = (DigestMode.OFF,)


class Verifying(HandoffMachine):
    kinds = (ALONE, GROUPS[0])
    digests = (DigestMode.VERIFY,)


def run(machine: type[HandoffMachine], num_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=NUM_STEPS,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.slow
def test_nothing_is_lost_or_mixed_up_whatever_happens() -> None:
    HandoffMachine.num_steps, HandoffMachine.ends = 0, Counter()
    run(HandoffMachine, NUM_EXAMPLES)
    assert HandoffMachine.num_steps >= MIN_STEPS
    reached = {end for end, count in HandoffMachine.ends.items() if count}
    assert reached >= {f"offer {outcome.value}" for outcome in OfferOutcome}
    assert reached >= {f"receive {outcome.value}" for outcome in ReceiveOutcome}
    assert reached >= {"rank missed", "block read early"}


# ---------------------------------------------------------------------- planted bugs


def free_before_the_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    on, early = ReceiveTable._on, set()

    def freeing_at_once(self, receive, event, reason="", now=0.0):
        before = receive.state
        actions = on(self, receive, event, reason, now)
        released = Emit(BlocksReleased(receive.id))
        if receive.state is ReceiveState.QUARANTINED and before is not ReceiveState.QUARANTINED:
            early.add(receive.key)
            return [*actions, released]
        return [action for action in actions if action != released or receive.key not in early]

    monkeypatch.setattr(ReceiveTable, "_on", freeing_at_once)


def free_what_a_reader_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = LeaseRow(LeaseState.RELEASED, ended=OfferOutcome.WITHDRAWN)
    monkeypatch.setitem(LEASE_TABLE, (LeaseState.GRANTED, LeaseEvent.WITHDRAW), at_once)


def expire_before_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    expire = LeaseTable.expire
    monkeypatch.setattr(LeaseTable, "expire", lambda self, now: expire(self, now + LEASE_S / 2))


def ignore_the_epoch_at_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "_named_by", lambda self, key: self._leases.get(key.offer))


def ignore_the_generation_at_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_request(self, key):
        of_request = [lease for lease in self._leases.values() if lease.key.request_id == key.request_id]
        return of_request[-1] if of_request and key.holder == self.engine else None

    monkeypatch.setattr(LeaseTable, "_named_by", by_request)


def ignore_the_epoch_at_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_number_only(self, message):
        return next((r for r in self._active() if r.id == message.reader.receive and r.sent_at), None)

    monkeypatch.setattr(ReceiveTable, "_named_by", by_number_only)


def keep_a_peer_that_was_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Peers.connect

    def by_name(self, key, address, now):
        known = (peer for peer in self._peers.values() if peer.key.engine_id == key.engine_id)
        return next(known, None) or connect(self, key, address, now)

    monkeypatch.setattr(Peers, "connect", by_name)
    monkeypatch.setattr(Peers, "_forget", lambda self, key: None)


def release_blocks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    on = ReceiveTable._on

    def twice(self, receive, *event, **options):
        actions = on(self, receive, *event, **options)
        return actions * 2 if actions == [Emit(BlocksReleased(receive.id))] else actions

    monkeypatch.setattr(ReceiveTable, "_on", twice)


def end_an_offer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self, lease, outcome):
        return [Emit(OfferEnded(lease.key.offer, outcome))]

    monkeypatch.setattr(LeaseTable, "_release", forgetful)


def commit_after_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReceiveTable, "_in_time", lambda self, read_finished_at, granted_until: True)


def commit_without_a_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ReceiveTable.start

    def granting_oneself(self, receive, *values):
        start(self, receive, *values)
        self[receive].granted_until = self[receive].deadline + LEASE_S

    monkeypatch.setattr(ReceiveTable, "start", granting_oneself)


def count_the_lease_from_the_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = ReceiveTable._granted

    def from_now(self, receive, message, now):
        if message.number in receive.sent_at:
            receive.sent_at[message.number] = now
        return granted(self, receive, message, now)

    monkeypatch.setattr(ReceiveTable, "_granted", from_now)


def count_no_time_while_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_time = World.pass_time

    def by_a_clock_that_stands_still(self, seconds, stalled=None, rank=None, **options):
        pass_time(self, seconds, stalled, rank, **options)
        if stalled is not None and rank is None:
            clock = stalled.handoff._clock
            stalled.handoff._clock = lambda: clock() - seconds

    monkeypatch.setattr(World, "pass_time", by_a_clock_that_stands_still)


def wait_for_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    init = BlockReads.__init__

    def patient(self, group, batch_bytes, reads_in_flight, stall_s, clock):
        init(self, group, batch_bytes, reads_in_flight, math.inf, clock)

    monkeypatch.setattr(BlockReads, "__init__", patient)


def forget_expiry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "expire", lambda self, now: [])


def read_what_is_not_written_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receive, "grows", False)
    order = Receive.order

    def all_at_once(self):
        self.num_ready = self.ticket.num_blocks
        return order(self)

    monkeypatch.setattr(Receive, "order", all_at_once)


def promise_more_than_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = LeaseTable.advance
    monkeypatch.setattr(
        LeaseTable, "advance", lambda self, offer, ready, now, last=(): advance(self, offer, ready + 2, now)
    )


def forget_to_tell_the_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "advance", lambda self, offer, num_ready, now, last=(): [])


def ask_nobody_for_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockReads, "given_up", ())


BUGS = [
    free_before_the_read_has_ended,
    free_what_a_reader_was_promised,
    expire_before_the_time,
    ignore_the_epoch_at_the_holder,
    ignore_the_generation_at_the_holder,
    ignore_the_epoch_at_the_reader,
    keep_a_peer_that_was_restarted,
    release_blocks_twice,
    end_an_offer_twice,
    commit_after_expiry,
    commit_without_a_grant,
    count_the_lease_from_the_grant,
    count_no_time_while_suspended,
    wait_for_what_hangs,
    forget_expiry,
    read_what_is_not_written_yet,
    promise_more_than_is_written,
    forget_to_tell_the_growth,
    ask_nobody_for_help,
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        run(EnginesAlone, 400)


# ---------------------------------------------------------------------- planted bugs of groups


def commit_when_rank_0_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TpReadGroup, "poll", lambda self, read: self._own.poll(read))


def release_what_only_rank_0_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TpReadGroup, "release", lambda self, read: self._own.release(read))


def report_a_read_as_released_when_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = ReadHandler._report
    at_once = lambda self, read, state, reason, *, released: report(self, read, state, reason, released=True)  # noqa: E731
    monkeypatch.setattr(ReadHandler, "_report", at_once)


def take_the_holders_first_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_the_first(layout: KVLayout, heads: range, remote: range, local: range) -> HeadSlice:
        right = slice_heads(layout, heads, remote, local)
        return right._replace(pieces=tuple(piece._replace(remote=0) for piece in right.pieces))

    monkeypatch.setattr(rank_reader, "slice_heads", of_the_first)


def read_as_if_both_sides_had_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_rank(rank: int, heads: range, holders: Sequence[range]) -> list[AssignedHeads]:
        return [AssignedHeads(rank % len(holders), heads)]

    monkeypatch.setattr(rank_reader, "assign_heads", same_rank)


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
        run(OneGroup, 400)


# ---------------------------------------------------------------------- planted bugs of digests


def compare_no_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankReader, "difference", lambda self, peer, blocks, by_rank: "")


def commit_before_the_digests_came(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ReceiveTable.start

    def believing(self, receive, *values):
        start(self, receive, *values)
        self[receive].num_unverified = 0

    monkeypatch.setattr(ReceiveTable, "start", believing)


def commit_when_some_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = ReceiveTable.matched

    def believing(self, receive, now):
        self[receive].num_unverified = self[receive].digests.count
        return matched(self, receive, now)

    monkeypatch.setattr(ReceiveTable, "matched", believing)


DIGEST_BUGS = [compare_no_digests, commit_before_the_digests_came, commit_when_some_are_proven]


@pytest.mark.parametrize("plant", DIGEST_BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_planted_in_the_comparison_is_caught(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Violation):
        run(Verifying, 400)


def test_a_block_written_after_it_was_freed_is_caught() -> None:
    world = World(0)
    engine: Engine = world.engines["D0"]
    with pytest.raises(Violation, match="written after it was freed"):
        world.fabric.on_write(engine.ranks[0].agent, 0, 8)
