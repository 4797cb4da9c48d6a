"""The measured times of computing a token and of restoring a block."""

from __future__ import annotations

import pytest

from baton.engine.core.kv.restore_cost import FORGOTTEN_S, KEPT, MIN_MEASURED_TOKENS, Rate, RestoreCost
from baton.engine.core.tiers import Restored, Tier, TierRead

MANY = MIN_MEASURED_TOKENS
NOW_S = 100.0


def computed(cost: RestoreCost, seconds: float, now_s: float = NOW_S) -> None:
    """Measure a step of `MANY` tokens that ends at `now_s`."""
    cost.planned(1, now_s - seconds)
    cost.settled(1, MANY, now_s)


def restored(**seconds: float) -> Restored:
    """Return a restore of 10 blocks from each tier, with the time that it copied."""
    return Restored(1, 20, tuple(TierRead(Tier(tier), 10, each) for tier, each in seconds.items()))


def test_steps_run_one_after_the_other_however_early_they_were_planned() -> None:
    cost = RestoreCost()
    for step in (1, 2, 3):
        cost.planned(step, 0.0)
    cost.settled(1, 2 * MANY, 1.0)
    assert cost.token_s(1.0) == pytest.approx(1.0 / (2 * MANY))
    cost.settled(2, MANY - 1, 5.0)
    assert cost.token_s(5.0) == pytest.approx(1.0 / (2 * MANY)), "a short step says nothing"
    cost.settled(3, 2 * MANY, 6.0)
    assert cost.token_s(6.0) == pytest.approx(1.0 / (2 * MANY)), "it began when the short one ended"


def test_restores_run_one_after_the_other_however_early_they_were_asked_for() -> None:
    cost = RestoreCost()
    cost.restored(restored(host=0.1), 0.0, 2.0)
    cost.restored(restored(host=0.1), 0.0, 3.0)
    assert cost.blocks_s(3.0)[Tier.HOST] == pytest.approx((2.0 * KEPT + 1.0) / (10 * KEPT + 10))


def test_the_time_of_a_restore_is_divided_among_tiers_by_the_time_they_copied() -> None:
    cost = RestoreCost()
    cost.restored(restored(host=0.1, disk=0.3), 0.0, 4.0)
    assert cost.blocks_s(4.0) == pytest.approx({Tier.HOST: 0.1, Tier.DISK: 0.3})
    cost.restored(restored(host=0.0), 4.0, 9.0)
    assert cost.blocks_s(9.0) == pytest.approx({Tier.HOST: 0.1, Tier.DISK: 0.3}), "it has read nothing"


def test_an_old_measurement_weighs_nothing_beside_a_new_one() -> None:
    rate = Rate()
    rate.add(10.0, 1.0, 0.0)
    assert rate.per_unit_s(FORGOTTEN_S) == 10.0
    assert (rate.per_unit_s(FORGOTTEN_S + 1), rate.newest_s) == (None, 10.0)
    rate.add(1.0, 1.0, FORGOTTEN_S + 1)
    assert rate.newest_s == 1.0


def test_the_faster_one_is_preferred_and_the_unknown_is_tried() -> None:
    cost, blocks = RestoreCost(), {Tier.HOST: 10.0}
    assert cost.prefer_restoring(blocks, MANY, NOW_S), "nothing is known"
    computed(cost, 1.0)
    assert cost.prefer_restoring(blocks, MANY, NOW_S), "the tier is not known"
    cost.restored(restored(host=0.1), NOW_S - 1.1, NOW_S)
    assert not cost.prefer_restoring(blocks, MANY, NOW_S)
    assert cost.prefer_restoring(blocks, 2 * MANY, NOW_S)
    assert cost.prefer_restoring(blocks | {Tier.DISK: 1.0}, MANY, NOW_S), "the disk is not known"


@pytest.mark.parametrize("newer", ["computing", "restoring", "neither"])
def test_a_slower_tier_is_tried_by_one_restore_at_a_time_once_either_measurement_is_old(newer: str) -> None:
    cost, blocks = RestoreCost(), {Tier.HOST: 10.0}
    computed(cost, 1.0)
    cost.restored(restored(host=0.1), NOW_S - 2.0, NOW_S)
    now_s = NOW_S + FORGOTTEN_S + 1
    if newer == "computing":
        computed(cost, 1.0, now_s)
    elif newer == "restoring":
        cost.restored(restored(host=0.1), now_s - 2.0, now_s)
    assert cost.prefer_restoring(blocks, MANY, now_s)
    assert not cost.prefer_restoring(blocks, MANY, now_s, running={Tier.HOST})
    assert cost.prefer_restoring(blocks, MANY, now_s, running={Tier.DISK})
