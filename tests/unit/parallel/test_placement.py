"""Placement of experts: every expert has a place, none has two on a rank, and busy ones get replicas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.parallel.placement import ExpertPlacement


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertPlacement, list[list[int]]]:
    """Draw an initial placement and a sequence of loads."""
    num_ranks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    places = num_ranks * slots
    num_experts = draw(st.integers(slots, places))
    loads = st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts)
    placement = ExpertPlacement.initial(num_experts, places - num_experts, num_ranks)
    return placement, draw(st.lists(loads, min_size=1, max_size=3))


def check(placement: ExpertPlacement, num_experts: int) -> None:
    replicas = placement.replicas()
    assert len(replicas) == num_experts
    assert all(1 <= len(places) <= placement.most_replicas for places in replicas)
    assert all(len(set(rank)) == len(rank) == placement.slots for rank in placement.held)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_plan_gives_each_expert_a_place_and_moves_lead_to_it(
    case: tuple[ExpertPlacement, list[list[int]]],
) -> None:
    placement, history = case
    num_experts = placement.num_experts
    for loads in history:
        check(placement, num_experts)
        target = placement.balanced(loads)
        check(target, num_experts)
        assert target.most_replicas == placement.most_replicas, "tables must keep their shape"
        memory = [expert for rank in placement.held for expert in rank]
        before = list(memory)
        for move in placement.moves_to(target):
            memory[move.target] = before[move.source]
        assert memory == [expert for rank in target.held for expert in rank]
        assert sum(target.rank_loads(loads)) == pytest.approx(sum(loads))
        placement = target


def test_the_initial_placement_is_in_order_with_replicas_of_the_first_experts() -> None:
    assert ExpertPlacement.initial(4, 2, 3).held == ((0, 1), (2, 3), (0, 1))
    assert ExpertPlacement.initial(4, 0, 2).held == ((0, 1), (2, 3))


def test_two_busy_experts_of_one_rank_are_separated() -> None:
    placement = ExpertPlacement.initial(4, 0, 2)
    loads = [50, 50, 1, 1]
    assert placement.imbalance(loads) == pytest.approx(100 * 2 / 102)
    assert placement.balanced(loads).imbalance(loads) == 1.0


def test_the_busiest_expert_gets_the_spare_places() -> None:
    placement = ExpertPlacement.initial(6, 2, 4)
    loads = [0, 0, 90, 5, 5, 5]
    target = placement.balanced(loads)
    assert len(target.replicas()[2]) == 3
    assert target.imbalance(loads) < placement.imbalance(loads) / 1.8


def test_experts_of_balanced_ranks_do_not_move() -> None:
    placement = ExpertPlacement.initial(8, 0, 4)
    loads = [4, 3, 2, 5, 6, 1, 0, 7]
    target = placement.balanced(loads)
    assert target.moves_to(target.balanced(loads)) == []


def test_without_loads_there_is_no_imbalance() -> None:
    assert ExpertPlacement.initial(4, 0, 2).imbalance([0] * 4) == 0.0


def test_uneven_loads_of_many_experts_come_close_to_even() -> None:
    """A published case: 256 experts, 32 replicas, 32 ranks, and loads that fall off by a power law."""
    placement = ExpertPlacement.initial(256, 32, 32)
    loads = [int(100_000 / (1 + (37 * expert) % 256)) for expert in range(256)]
    target = placement.balanced(loads)
    assert placement.imbalance(loads) > 3
    assert target.imbalance(loads) < 1.05
