"""The router's choice of an engine for a request."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from baton.cluster.cached_blocks import CachedBlocks
from baton.cluster.contracts import EngineView, Role
from baton.cluster.gateway.routing.cost import Load
from baton.cluster.gateway.routing.prefix_index import REPORT_DELAY_S, PrefixIndex, prefix_names
from baton.cluster.gateway.routing.rates import CostRates
from baton.cluster.gateway.routing.router import Path
from baton.engine.core.block_log import NAME_BYTES, BlocksCached, unpack_names
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.sampling import SamplingParams
from baton.kv_transfer.protocol.messages import EngineKey

from ...helpers.gateway_service import Clock
from .engine_views import view
from .router_requests import PROMPT, RATES, rank_of, request, route, router, wanted


def test_requests_go_to_the_engine_with_the_least_work() -> None:
    chooser, engines = router(), [view(0), view(1), view(2)]
    ranks = Counter()
    for index in range(30):
        chosen = route(chooser, engines, [index] * 10, f"r{index}")
        chooser.loads.sent(chosen.placement)
        ranks[chosen.placement.engine.rank] += 1
    assert ranks == {0: 10, 1: 10, 2: 10}


def test_finished_work_no_longer_counts() -> None:
    chooser, engines = router(), [view(0), view(1)]
    first = route(chooser, engines, [1] * 50).placement
    chooser.loads.sent(first)
    assert rank_of(chooser, engines, [2] * 5) != first.engine.rank
    chooser.loads.first_token(first)
    assert all(chooser.loads.of(engine).queued_tokens == 0 for engine in engines)
    assert rank_of(chooser, engines, [2] * 5) != first.engine.rank, "the first request is still decoding"
    chooser.loads.ended(first)
    assert {rank_of(chooser, engines, [2] * 5, f"{i}") for i in range(20)} == {0, 1}
    assert chooser.loads.own == Load(0, 0)


def test_requests_of_other_gateways_count() -> None:
    assert rank_of(router(), [view(0, num_requests_running=3, outstanding=1), view(1)], [1]) == 1
    assert (
        rank_of(router(), [view(0, num_requests_running=3, outstanding=3), view(1, num_requests_running=1)], [1]) == 0
    )
    assert rank_of(router(), [view(0), view(1, num_requests_waiting=1)], [1]) == 0


def test_waiting_requests_of_other_gateways_are_those_that_are_not_this_gateways() -> None:
    chooser = router()
    loads, told = chooser.loads, view(0, num_requests_waiting=2, num_waiting_tokens=900)
    assert loads.of(told) == Load(2, 900)
    mine = route(chooser, [told], [1] * 100).placement
    loads.sent(mine)
    assert loads.of(told) == Load(3, 1000), "the engine's status is older than the request"
    told = view(0, num_requests_waiting=3, num_waiting_tokens=1000, outstanding=1)
    assert loads.of(told) == Load(3, 1000), "the engine's status includes the request"
    loads.first_token(mine)
    assert loads.of(told) == Load(3, 900)
    loads.ended(mine)
    assert loads.of(told) == Load(2, 900)


def test_a_new_engine_at_the_rank_of_another_does_not_inherit_its_load() -> None:
    loads = router().loads
    assert loads.of(view(0, num_waiting_tokens=500)).queued_tokens == 500
    assert loads.of(view(0)).queued_tokens == 0
    assert loads.num_reports == 1


def test_a_cached_prefix_wins_until_the_queue_costs_more() -> None:
    engines = [view(0), view(1, cached=PROMPT)]
    chosen = route(router(), engines, [*PROMPT, 1, 2])
    assert (chosen.placement.engine.rank, chosen.reason) == (1, "prefix-hit")
    assert chosen.placement.uncached == len(PROMPT) + 2 - len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE
    for queue, expected in {len(PROMPT) // 2: 1, 2 * len(PROMPT): 0}.items():
        others = view(1, cached=PROMPT, num_requests_waiting=1, num_waiting_tokens=queue)
        assert rank_of(router(), [view(0), others], [*PROMPT, 1, 2]) == expected
    busy = view(1, cached=PROMPT, num_waiting_tokens=2 * len(PROMPT))
    chosen = route(router(decode_request_s=0), [view(0), busy], [*PROMPT, 1, 2])
    assert (chosen.placement.engine.rank, chosen.reason) == (0, "least-loaded")


def test_the_last_token_is_never_found_in_a_cache() -> None:
    whole = PROMPT[: 4 * BLOCK_SIZE]
    assert route(router(), [view(0, cached=whole)], whole).placement.uncached == BLOCK_SIZE


def test_prompt_logprobs_find_nothing_in_a_cache() -> None:
    assert wanted(PROMPT, sampling=SamplingParams(prompt_logprobs=0)).names == ()


def test_a_prefix_is_shared_only_under_the_same_salt() -> None:
    engines = [view(0), view(1, cached=PROMPT, salt="a")]
    chooser = router()
    for salt, reason in {"a": "prefix-hit", "b": "least-loaded", "": "least-loaded"}.items():
        chosen = chooser.route(engines, chooser.query(request(PROMPT, cache_salt=salt)))
        assert chosen is not None
        assert chosen.reason == reason


def test_a_prefix_that_was_just_sent_counts_as_cached_until_the_engine_reports() -> None:
    clock = Clock()
    chooser, engines = router(clock=clock), [view(0), view(1)]
    first = route(chooser, engines, PROMPT).placement
    chooser.loads.sent(first)
    chooser.loads.first_token(first)
    home = first.engine.rank
    assert rank_of(chooser, engines, [*PROMPT, 1]) == home
    chooser.loads.ended(first)
    assert rank_of(chooser, engines, [*PROMPT, 1]) == home
    clock.now_s += REPORT_DELAY_S
    other = route(chooser, engines, [9]).placement
    chooser.loads.sent(other)
    assert route(chooser, engines, [*PROMPT, 1]).reason == "least-loaded"
    assert chooser.prefixes.num_expected == 0


def test_cached_blocks_behind_expected_ones_count() -> None:
    packed = prefix_names([*PROMPT, 1], SamplingParams(), "")
    names, blocks, key = unpack_names(packed), CachedBlocks(100), EngineKey("e0", 0)
    blocks.apply(BlocksCached(0, packed[NAME_BYTES:]))
    index = PrefixIndex(Clock())
    assert index.find(blocks, key, names).pool == 0, "the first block was evicted"
    index.expect(key, names[:1])
    assert index.find(blocks, key, names).pool == len(names)


def test_a_prefix_whose_request_was_given_up_no_longer_counts() -> None:
    chooser = router()
    first = route(chooser, [view(0)], PROMPT).placement
    chooser.loads.sent(first)
    assert route(chooser, [view(0)], [*PROMPT, 1]).reason == "prefix-hit"
    chooser.loads.given_up(first)
    assert route(chooser, [view(0)], [*PROMPT, 1]).reason == "least-loaded"
    assert chooser.prefixes.num_expected == 0
    assert chooser.loads.own == Load(0, 0)


def test_a_hot_prefix_spreads_over_engines_as_their_queues_grow() -> None:
    """An engine that computes the prefix has it cached; requests spread once a prefill costs less than the queue."""
    chooser, engines = router(), [view(0, cached=PROMPT), *(view(rank) for rank in range(1, 8))]
    ranks = Counter()
    for index in range(200):
        placement = route(chooser, engines, [*PROMPT, index], f"r{index}").placement
        chooser.loads.sent(placement)
        chooser.loads.first_token(placement)
        ranks[placement.engine.rank] += 1
    assert set(ranks) == set(range(8))
    assert max(ranks.values()) - min(ranks.values()) <= 4


def test_ties_are_broken_by_request_and_gateway_and_always_in_the_same_way() -> None:
    engines = [view(rank) for rank in range(4)]
    names = [f"r{index}" for index in range(400)]
    ranks = [rank_of(router("g"), engines, [1], name) for name in names]
    assert ranks == [rank_of(router("g"), engines, [1], name) for name in names]
    assert min(Counter(ranks).values()) > 60
    assert ranks != [rank_of(router("h"), engines, [1], name) for name in names]


def test_a_session_has_one_home_at_every_gateway_and_leaves_it_only_with_its_engine() -> None:
    engines = [view(rank) for rank in range(5)]
    homes = {f"s{i}": rank_of(router("g"), engines, [i], session_id=f"s{i}") for i in range(100)}
    assert set(homes.values()) == set(range(5))
    for session_id, home in homes.items():
        assert rank_of(router("h"), engines, [7] * 30, "other", session_id=session_id) == home
        assert home == 2 or rank_of(router(), [*engines[:2], *engines[3:]], [1], session_id=session_id) == home


def test_a_session_waits_for_its_home_no_longer_than_the_patience() -> None:
    engines = [view(0), view(1)]
    home = rank_of(router(), engines, [1], session_id="s")
    few, many = (round(0.1 / RATES.decode_request_s * share) for share in (0.5, 2))
    for num_running, expected in {few: home, many: 1 - home}.items():
        engines[home] = view(home, num_requests_running=num_running)
        assert rank_of(router(), engines, [1], session_id="s") == expected


def test_costs_within_a_twentieth_are_equal() -> None:
    for waiting, chosen in (1030, {0, 1}), (1090, {0}):
        engines = [view(0, num_waiting_tokens=1000), view(1, num_waiting_tokens=waiting)]
        assert {rank_of(router(), engines, [1] * 100, f"{i}") for i in range(20)} == chosen


def test_the_patience_of_a_session_is_for_its_home_and_not_for_another_path() -> None:
    engines = [view(0, Role.PREFILL), view(1, Role.DECODE, cached=PROMPT)]
    paths = {route(router(), engines, [*PROMPT, 1], session_id=f"{i}").path for i in range(20)}
    assert paths == {Path.LOCAL_PREFILL}


@pytest.mark.parametrize("blocks", [{"num_blocks_free": 0}, {"num_blocks_free": 900, "kv_usage": 1.0}], ids=str)
def test_a_full_engine_is_chosen_only_without_another(blocks: dict[str, float]) -> None:
    full, busy = view(0, **blocks), view(1, num_requests_running=50)
    assert rank_of(router(), [full, busy], [1] * 20) == 1
    assert rank_of(router(), [full], [1] * 20) == 0


def test_a_prefill_engine_needs_a_decode_engine_of_the_same_fingerprint() -> None:
    chooser = router()
    prefill, decode = view(0, Role.PREFILL), view(1, Role.DECODE)
    chosen = route(chooser, [prefill, decode], [1])
    assert (chosen.placement.engine.rank, chosen.hands_off, chosen.path) == (0, True, Path.DISAGGREGATED)
    assert chooser.route([prefill], wanted([1])) is None
    stranger = view(1, Role.DECODE, fingerprint="g")
    assert route(chooser, [prefill, stranger], [1]).path is Path.LOCAL_PREFILL
    assert chooser.decode_placement([stranger], wanted([1]), prefill.record) is None
    assert chooser.decode_placement([stranger, decode], wanted([1]), prefill.record) is not None


def test_of_equal_prefill_engines_one_on_the_node_of_an_idle_decode_engine_is_chosen() -> None:
    engines = [view(0, Role.PREFILL, node="a"), view(1, Role.PREFILL, node="b"), view(2, Role.DECODE, node="b")]
    assert {rank_of(router(), engines, PROMPT, f"{i}") for i in range(20)} == {1}


def test_the_decode_engine_is_chosen_by_its_link_and_its_cached_blocks() -> None:
    source = view(0, Role.PREFILL, node="a").record
    far, near = view(1, Role.DECODE, node="b"), view(2, Role.DECODE, node="a")
    chooser = router(handoff_s=0)

    def placed(*engines: EngineView) -> int:
        placement = chooser.decode_placement(engines, wanted(PROMPT), source)
        assert placement is not None
        return placement.engine.rank

    assert placed(far, near) == 2
    assert placed(view(1, Role.DECODE, node="b", cached=PROMPT), near) == 1
    assert placed(far, view(2, Role.DECODE, node="a", num_requests_running=5)) == 1
    assert placed(far, view(2, Role.DECODE, node="a", num_requests_waiting_for_kv=9)) == 1


def test_prefill_engines_full_of_held_blocks_are_avoided() -> None:
    engines = [view(0, Role.PREFILL, num_blocks_held=500), view(1, Role.PREFILL), view(2, Role.DECODE)]
    assert {rank_of(router(), engines, [1], f"{i}") for i in range(20)} == {1}


def test_a_decode_engine_with_a_cached_prefix_prefills_the_rest_if_that_is_cheaper() -> None:
    prefill = view(0, Role.PREFILL)
    chosen = route(router(), [prefill, view(1, Role.DECODE, cached=PROMPT)], [*PROMPT, 1])
    assert (chosen.path, chosen.reason, chosen.hands_off) == (Path.LOCAL_PREFILL, "cheaper", False)
    rest = [1] * 4000
    busy = view(1, Role.DECODE, cached=PROMPT, num_requests_running=60)
    assert route(router(), [prefill, busy], [*PROMPT, *rest]).path is Path.DISAGGREGATED
    assert route(router(local=1), [prefill, view(1, Role.DECODE, cached=PROMPT)], PROMPT).hands_off
    assert route(router(), [prefill, view(1, Role.DECODE)], [1]).hands_off, "a short prompt alone is no reason"


@pytest.mark.parametrize(("num_cached", "path"), [(256, Path.LOCAL_PREFILL), (240, Path.DISAGGREGATED)])
def test_a_decode_engine_needs_256_cached_tokens_to_be_compared(num_cached: int, path: Path) -> None:
    engines = [view(0, Role.PREFILL, num_waiting_tokens=9000), view(1, Role.DECODE, cached=PROMPT[:num_cached])]
    assert route(router(), engines, PROMPT[:300]).path is path


def test_a_decode_engine_computes_prompts_up_to_the_limit() -> None:
    chooser, engines = router(local=10), [view(0, Role.DECODE)]
    assert rank_of(chooser, engines, [1] * 10) == 0
    assert chooser.route(engines, wanted([1] * 11)) is None


def test_a_prompt_avoids_the_queue_of_a_prefill_engine() -> None:
    engines = [view(0, Role.PREFILL, num_waiting_tokens=4000), view(1, Role.PREFILL), view(2, Role.DECODE)]
    assert {rank_of(router(), engines, [1], f"{i}") for i in range(20)} == {1}


def test_pending_transfers_to_a_decode_engine_count_for_its_link() -> None:
    source = view(0, Role.PREFILL, node="a").record
    far, near = view(1, Role.DECODE, node="b"), view(2, Role.DECODE, node="a", num_requests_waiting_for_kv=9)
    placement = router(handoff_s=0, decode_request_s=0).decode_placement([far, near], wanted(PROMPT), source)
    assert placement is not None
    assert placement.engine.rank == 1


def test_a_reader_is_neither_avoided_nor_full_if_there_is_another() -> None:
    source, idle, busy = view(0, Role.PREFILL), view(1, Role.DECODE), view(2, Role.DECODE, num_requests_running=9)

    def reader(engines: list[EngineView], *avoided: EngineView) -> int | None:
        avoid = {engine.record.key for engine in avoided}
        placement = router().decode_placement(engines, wanted([1] * 20), source.record, avoid)
        return None if placement is None else placement.engine.rank

    full = view(1, Role.DECODE, num_blocks_free=1)
    assert reader([idle, busy]) == 1
    assert reader([idle, busy], idle) == 2
    assert reader([idle, busy], idle, busy) is None
    assert reader([full, busy]) == 2
    assert reader([full]) == 1


def draining(engine: EngineView) -> EngineView:
    return msgspec.structs.replace(engine, record=msgspec.structs.replace(engine.record, draining=True))


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
def test_a_draining_engine_gets_prompts_only_if_no_other_can_take_them(role: Role) -> None:
    leaving, busy, decode = draining(view(0, role)), view(1, role, num_waiting_tokens=10**6), view(2, Role.DECODE)
    others = [decode] if role is Role.PREFILL else []
    assert rank_of(router(local=0), [leaving, busy, *others], [1]) == 1
    assert rank_of(router(local=0), [leaving, *others], [1]) == 0


def test_a_draining_engine_gets_blocks_only_if_no_other_can_take_them() -> None:
    leaving, busy = draining(view(0, Role.DECODE)), view(1, Role.DECODE, num_requests_running=99)
    for engines, expected in [([leaving, busy], 1), ([leaving], 0)]:
        placement = router().decode_placement(engines, wanted([1]), view(2, Role.PREFILL).record)
        assert placement is not None
        assert placement.engine.rank == expected


def test_a_pinned_prefill_engine_is_never_skipped() -> None:
    engines = [view(0, Role.PREFILL), view(1, Role.DECODE, cached=PROMPT)]
    assert rank_of(router(), engines, PROMPT, pinned_rank=0) == 0
    chooser = router()
    assert chooser.route(engines, chooser.query(request(PROMPT), pinned_rank=0), {EngineKey("e0", 0)}) is None


def test_avoided_engines_are_not_chosen() -> None:
    engines = [view(0), view(1)]
    chooser = router()
    avoid = [chooser.route(engines, wanted([1], f"{i}"), {EngineKey("e0", 0)}) for i in range(9)]
    assert {chosen.placement.engine.rank for chosen in avoid if chosen} == {1}
    assert chooser.route(engines, wanted([1]), {EngineKey("e0", 0), EngineKey("e1", 1)}) is None


@pytest.mark.parametrize("field", list(CostRates.model_fields))
def test_every_rate_has_a_unit_and_refuses_invalid_values(field: str) -> None:
    assert field.endswith(("_s", "_weight", "_tokens"))
    with pytest.raises(ValueError, match=field):
        CostRates(**{field: -1})
