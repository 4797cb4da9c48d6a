"""Prefill, decode and gateway at once, under every fault the fakes know: nothing is lost or mixed up."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.engine.core.connector import OfferOutcome
from baton.kv_transfer.protocol.receive_rules import ReceiveOutcome

from .handoff_machine import NUM_EXAMPLES, HandoffMachine, run
from .simulated_engine import Engine, Violation
from .simulation import World

MIN_STEPS = 5000


@pytest.mark.slow
def test_nothing_is_lost_or_mixed_up_whatever_happens() -> None:
    HandoffMachine.num_steps, HandoffMachine.ends = 0, Counter()
    run(HandoffMachine, NUM_EXAMPLES)
    assert HandoffMachine.num_steps >= MIN_STEPS
    reached = {end for end, count in HandoffMachine.ends.items() if count}
    assert reached >= {f"offer {outcome.value}" for outcome in OfferOutcome}
    assert reached >= {f"receive {outcome.value}" for outcome in ReceiveOutcome}
    assert reached >= {"rank missed", "block read early"}


@pytest.mark.slow
def test_a_block_written_after_it_was_freed_is_caught() -> None:
    world = World(0)
    engine: Engine = world.engines["D0"]
    with pytest.raises(Violation, match="written after it was freed"):
        world.fabric.on_write(engine.ranks[0].agent, 0, 8)
