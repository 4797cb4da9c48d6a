"""The router counts prefixes that engines can restore from host memory and from disk."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.cluster.cached_blocks import FoundPrefix
from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.routing.cost import UNTRIED, Cost, Load
from baton.cluster.gateway.routing.rates import LearntRates
from baton.cluster.gateway.routing.router import Path
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.tiers import TierStats
from baton.kv_transfer.protocol.messages import EngineKey

from ...helpers.gateway_service import Clock
from .engine_views import view
from .router_requests import PROMPT, RATES, rank_of, route, router, wanted

IN_BLOCKS = len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
FAST = TierStats(min_tokens=256, restore_s={"host": 0.1, "disk": 0.5}, compute_s=1.0)


class TestTiers:
    """Engines that could restore the prompt, and one that has to compute it."""

    def cost_s(self, engine: EngineView, tokens: list[int] = PROMPT) -> float:
        query, cost = wanted(tokens), Cost(LearntRates(RATES, Clock()))
        found = router().prefixes.find(engine.cached, engine.record.key, query.names)
        work = cost.prefill_work(engine, query.num_tokens, found)
        return cost.whole_s(engine, router().loads.of(engine), work)

    def test_a_prefix_in_a_tier_costs_less_than_none_and_more_than_one_in_the_pool(self) -> None:
        costs = [
            self.cost_s(view(0, cached=PROMPT, tiers=FAST)),
            self.cost_s(view(0, host=PROMPT, tiers=FAST)),
            self.cost_s(view(0, disk=PROMPT, tiers=FAST)),
            self.cost_s(view(0, tiers=FAST)),
        ]
        compute_s = IN_BLOCKS / RATES.prefill_tokens_per_s
        assert [round((cost - costs[0]) / compute_s, 6) for cost in costs] == [0, 0.1, 0.5, 1]
        engines = [view(0), view(1, disk=PROMPT, tiers=FAST), view(2, host=PROMPT, tiers=FAST)]
        assert rank_of(router(), engines, PROMPT) == 2
        assert rank_of(router(), engines[:2], PROMPT) == 1
        assert rank_of(router(), [*engines, view(3, cached=PROMPT)], PROMPT) == 3

    @given(
        found=st.tuples(*[st.integers(0, 10)] * 3),
        restore_s=st.dictionaries(st.sampled_from(["host", "disk"]), st.floats(0, 3)),
        compute_s=st.floats(0, 3),
        min_tokens=st.integers(0, 200),
        num_before=st.integers(0, 5),
        num_requests=st.integers(0, 5),
    )
    @example((0, 1, 0), {"host": 0.0, "disk": 2.0}, 1e-308, 0, 0, 0).via("a block in no time to speak of")
    def test_a_restore_is_never_cheaper_than_the_pool_nor_dearer_than_computing(
        self,
        found: tuple[int, int, int],
        restore_s: dict[str, float],
        compute_s: float,
        min_tokens: int,
        num_before: int,
        num_requests: int,
    ) -> None:
        tiers = TierStats(min_tokens=min_tokens, restore_s=restore_s, compute_s=compute_s)
        engine, load = view(0, tiers=tiers, num_requests_waiting_for_kv=num_before), Load(num_requests, 100)
        cost, known = Cost(LearntRates(RATES, Clock())), FoundPrefix(*found)
        in_pool = FoundPrefix(known.pool + known.in_tiers)
        costs = [
            cost.whole_s(engine, load, cost.prefill_work(engine, 500, each))
            for each in (in_pool, known, FoundPrefix(known.pool))
        ]
        assert costs[0] <= costs[1] + 1e-12
        assert costs[1] <= costs[2] + 1e-12

    def test_only_tokens_to_be_computed_count_as_queued(self) -> None:
        engine = view(0, cached=PROMPT[: 10 * BLOCK_SIZE], host=PROMPT, tiers=FAST)
        chosen = route(router(), [engine], PROMPT)
        assert (chosen.placement.uncached, chosen.reason) == (len(PROMPT) - IN_BLOCKS, "prefix-hit")

    @pytest.mark.parametrize(
        "change",
        [
            {"restore_s": {"host": 1.0}},
            {"restore_s": {"host": 9.0}},
            {"min_tokens": IN_BLOCKS + 1},
            {"answers": False},
        ],
        ids=["as slow as computing", "slower", "too short", "a tier that does not answer"],
    )
    def test_a_prefix_that_the_engine_would_not_restore_costs_as_much_as_computing(
        self, change: dict[str, Any]
    ) -> None:
        engine = view(0, host=PROMPT, tiers=msgspec.structs.replace(FAST, **change))
        assert self.cost_s(engine) == self.cost_s(view(0))
        assert route(router(), [engine], PROMPT).placement.uncached == len(PROMPT)

    def test_a_restore_without_a_measurement_is_rated_somewhat_faster_than_computing(self) -> None:
        compute_s = IN_BLOCKS / RATES.prefill_tokens_per_s
        for tiers in (
            TierStats(),
            TierStats(restore_s={"disk": 0.1}, compute_s=1.0),
            TierStats(restore_s={"host": 1.0}),
        ):
            saved_s = self.cost_s(view(0)) - self.cost_s(view(0, host=PROMPT, tiers=tiers))
            assert saved_s == pytest.approx(compute_s * (1 - UNTRIED))

    def test_a_restore_waits_for_those_under_way(self) -> None:
        found, compute_s = FoundPrefix(0, 20, 10), 30 * BLOCK_SIZE / RATES.prefill_tokens_per_s
        share = (20 * 0.1 + 10 * 0.5) / 30
        readings = [
            Cost(LearntRates(RATES, Clock())).prefill_work(
                view(0, tiers=FAST, num_requests_waiting_for_kv=number), 500, found
            )
            for number in (0, 1, 9)
        ]
        assert [reading.uncached for reading in readings] == [20, 20, 500]
        assert [reading.restore_s for reading in readings] == pytest.approx(
            [share * compute_s, 2 * share * compute_s, 0]
        )

    def test_computing_at_once_is_preferred_to_a_restore_behind_a_long_queue(self) -> None:
        for queue, expected in {IN_BLOCKS // 2: 1, 2 * IN_BLOCKS: 0}.items():
            there = view(1, host=PROMPT, tiers=FAST, num_waiting_tokens=queue)
            assert rank_of(router(), [view(0), there], PROMPT) == expected

    def test_tiers_count_for_prefill_engines_and_not_for_decode_engines_of_a_hand_off(self) -> None:
        prefill = [view(0, Role.PREFILL), view(1, Role.PREFILL, host=PROMPT, tiers=FAST)]
        decode = [view(2, Role.DECODE), view(3, Role.DECODE, host=PROMPT, tiers=FAST)]
        assert rank_of(router(local=0), [*prefill, decode[0]], PROMPT) == 1
        chooser = router()
        placed = {
            placement.engine.rank
            for number in range(20)
            if (placement := chooser.decode_placement(decode, wanted(PROMPT, f"{number}"), prefill[0].record))
        }
        assert placed == {2, 3}
        chosen = route(router(), [prefill[0], decode[1]], PROMPT)
        assert (chosen.path, chosen.reason) == (Path.LOCAL_PREFILL, "cheaper"), (
            "the decode engine may restore the prompt itself"
        )

    def test_blocks_that_another_request_restores_count_as_cached(self) -> None:
        chooser, engine = router(), view(0, host=PROMPT, tiers=FAST)
        chooser.loads.sent(route(chooser, [engine], PROMPT).placement)
        found = chooser.prefixes.find(engine.cached, EngineKey("e0", 0), wanted(PROMPT).names)
        assert found == (IN_BLOCKS // BLOCK_SIZE, 0, 0)
