"""The terms of the cost formula, each by itself."""

from __future__ import annotations

import msgspec
import pytest

from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.routing.cost import Cost, Load, PrefillWork
from baton.cluster.gateway.routing.rates import CostRates, LearntRates
from baton.engine.core.pace import Line, StepTimes

from ...helpers.gateway_service import Clock
from .engine_views import view

GUESSES = CostRates(
    prefill_tokens_per_s=1000.0,
    decode_request_s=0.01,
    stall_weight=2.0,
    block_release_s=3.0,
    handoff_s=0.5,
    node_tokens_per_s=10_000.0,
    network_tokens_per_s=1000.0,
)
IDLE = Load(0, 0)


@pytest.fixture
def cost() -> Cost:
    return Cost(LearntRates(GUESSES, Clock()))


def test_running_answers_wait_for_a_prompt(cost: Cost) -> None:
    work = PrefillWork(100, restore_s=0.2)
    assert cost.whole_s(view(0), IDLE, work) == pytest.approx(0.1 + 0.2)
    stalled = cost.whole_s(view(0), Load(3, 50), work)
    assert stalled == pytest.approx((0.05 + 0.1) + 0.2 + 2.0 * 3 * 0.1 + 3 * 0.01)


def test_blocks_that_wait_for_readers_count_by_their_share_of_all_blocks(cost: Cost) -> None:
    assert cost.release_s(view(0)) == 0
    assert cost.release_s(view(0, num_blocks_held=250, num_blocks_free=250)) == pytest.approx(0.25 * 3.0)


@pytest.mark.parametrize(("node", "tokens_per_s"), [("n", 10_000.0), ("m", 1000.0)], ids=["same node", "other node"])
def test_a_hand_off_waits_for_earlier_reads_as_far_as_they_outlast_the_prompt(
    cost: Cost, node: str, tokens_per_s: float
) -> None:
    source, reader = view(0, Role.PREFILL).record, view(1, Role.DECODE, node=node, num_requests_waiting_for_kv=2)
    read_s = 400 / tokens_per_s

    def handoff_s(before: int, ready_s: float) -> float:
        return cost.handoff_s(reader, source, 400, before=before, ready_s=ready_s)

    assert handoff_s(0, 0.0) == pytest.approx(0.5 + 2 * read_s + read_s)
    assert handoff_s(3, 0.0) == pytest.approx(0.5 + 5 * read_s + read_s)
    assert handoff_s(3, read_s) == pytest.approx(0.5 + 4 * read_s + read_s)
    assert handoff_s(3, 9 * read_s) == pytest.approx(0.5 + read_s), "the prompt takes longer than all reads before it"


def test_a_prompt_takes_as_many_steps_as_it_needs() -> None:
    def engine(prefill: Line | None) -> EngineView:
        engine = view(0, step_times=StepTimes(prefill))
        return msgspec.structs.replace(engine, record=msgspec.structs.replace(engine.record, max_num_batched_tokens=10))

    rates = LearntRates(GUESSES, Clock())
    measured = engine(Line(1.0, 0.001))
    rates.renew([measured])
    seconds = [rates.prefill_s(measured, num_tokens) for num_tokens in (0, 1, 10, 11)]
    assert seconds == pytest.approx([0.0, 1.001, 1.01, 2.011])
