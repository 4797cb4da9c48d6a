"""Hypothesis chooses what happens to prefill and decode engines and a gateway, under every fault the fakes know."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from baton.kv_transfer.protocol.messages import DigestMode

from ...helpers.fake_transport import TransportFaults
from .simulated_engine import LEASE_S, STALL_S, require
from .simulation import World

PREFILL, DECODE = st.sampled_from(("P0", "P1")), st.sampled_from(("D0", "D1"))
ANY_ENGINE = st.sampled_from(("P0", "P1", "D0", "D1"))
WHICH = st.integers(0, 100)
# Ranks of P0, P1, D0, D1, and how many KV heads they share: halves, quarters, copies of heads, latents.
ALONE = ((1, 1, 1, 1), 1)
GROUPS = (((1, 2, 2, 4), 4), ((4, 2, 2, 1), 4), ((2, 4, 4, 2), 2), ((2, 1, 4, 2), 1), ((2, 3, 3, 1), 6))
NUM_EXAMPLES, NUM_STEPS = 150, 50


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

    @rule(prefill=PREFILL, decode=DECODE, num_blocks=st.integers(2, 8), cached=st.integers(0, 8))
    def submit_a_prompt_whose_last_block_is_replaced(
        self, prefill: str, decode: str, num_blocks: int, cached: int
    ) -> None:
        self.world.gateway.submit(prefill, decode, num_blocks, cached, num_blocks // 3, replaces=True)

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

    @rule(name=ANY_ENGINE, forgotten=ANY_ENGINE)
    def the_directory_forgets_a_live_engine(self, name: str, forgotten: str) -> None:
        """It lists the engine again when it speaks the next time."""
        self.world.tell(self.world.engines[name], without=forgotten)

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


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Log no refusals: there are thousands of them."""
    logger = logging.getLogger("baton.kv_transfer")
    before, logger.level = logger.level, logging.CRITICAL
    try:
        yield
    finally:
        logger.level = before


def run(machine: type[HandoffMachine], num_examples: int) -> None:
    """Run a machine with the same choices each time. Raises the `Violation` that it finds."""
    with quiet():
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
