"""Which engine a request goes to."""

from __future__ import annotations

from collections import Counter
from typing import Any

from baton.cluster.contracts import EngineRecord, EngineView, Role
from baton.cluster.gateway.prefixes import CHUNK_TOKENS, PrefixMemory, prefix_chain
from baton.cluster.gateway.router import Path, Router
from baton.engine.core.messages import EngineRequest, EngineStats
from baton.engine.core.sampling import SamplingParams

STATS = EngineStats(
    **{**dict.fromkeys(EngineStats.__struct_fields__, 0), "num_blocks": 1000, "num_blocks_free": 1000, "experts": None}
)


def view(
    rank: int, role: Role = Role.UNIFIED, *, fingerprint: str = "f", outstanding: int = 0, **stats: int
) -> EngineView:
    record = EngineRecord(
        engine_id=f"e{rank}",
        group_id=f"e{rank}",
        epoch=rank,
        role=role,
        rank=rank,
        node_id="n",
        node_ip="",
        pid=0,
        address="",
        kv_address="",
        fingerprint=fingerprint,
        model_id="m",
        max_model_len=4096,
        num_blocks=1000,
    )
    values = {name: getattr(STATS, name) for name in EngineStats.__struct_fields__} | stats
    return EngineView(record, EngineStats(**values), outstanding)


def request(tokens: list[int], name: str = "r", **fields: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(), **fields)


def router(gateway_id: str = "g", capacity: int = 1000, local: int = 8192) -> Router:
    return Router(gateway_id, prefix_capacity=capacity, local_prefill_max_tokens=local)


def rank_of(router: Router, engines: list[EngineView], request: EngineRequest, **options: Any) -> int:
    route = router.route(engines, request, **options)
    assert route is not None
    return route.placement.engine.rank


def test_work_in_progress_goes_where_least_of_it_is() -> None:
    chooser, engines = router(), [view(0), view(1), view(2)]
    for index in range(30):
        route = chooser.route(engines, request([index] * 10, f"r{index}"))
        assert route is not None
        chooser.started(route.placement)
    assert sorted(chooser._work.values()) == [100, 100, 100]


def test_finished_work_counts_no_more() -> None:
    chooser, engines = router(), [view(0), view(1)]
    first = chooser.route(engines, request([1] * 50))
    assert first is not None
    chooser.started(first.placement)
    other = rank_of(chooser, engines, request([2] * 5))
    assert other != first.placement.engine.rank
    chooser.finished(first.placement)
    assert not chooser._work


def test_requests_of_other_gateways_count() -> None:
    assert rank_of(router(), [view(0, num_requests_running=3, outstanding=1), view(1)], request([1])) == 1
    assert rank_of(router(), [view(0), view(1, num_requests_waiting=1)], request([1])) == 0


def test_a_remembered_prefix_wins_until_the_queue_costs_more() -> None:
    chooser, engines = router(), [view(0), view(1)]
    prompt = list(range(CHUNK_TOKENS * 4))
    first = chooser.route(engines, request(prompt))
    assert first is not None
    chooser.started(first.placement)
    chooser.finished(first.placement)
    home = first.placement.engine.rank
    again = chooser.route(engines, request([*prompt, 1, 2, 3]))
    assert again is not None
    assert (again.placement.engine.rank, again.placement.work, again.reason) == (home, 3, "prefix-hit")
    long = chooser.route([engines[home]], request([9] * (CHUNK_TOKENS * 5)))
    assert long is not None
    chooser.started(long.placement)
    assert rank_of(chooser, engines, request([*prompt, 1, 2, 3])) != home


def test_a_prefix_is_shared_only_under_the_same_salt() -> None:
    chooser, engines = router(), [view(0), view(1)]
    prompt = list(range(CHUNK_TOKENS * 4))
    first = chooser.route(engines, request(prompt, cache_salt="a"))
    assert first is not None
    chooser.started(first.placement)
    chooser.finished(first.placement)
    for salt, reason in {"a": "prefix-hit", "b": "least-loaded", "": "least-loaded"}.items():
        route = chooser.route(engines, request(prompt, cache_salt=salt))
        assert route is not None
        assert route.reason == reason


def test_equals_are_told_apart_by_request_and_gateway_and_always_alike() -> None:
    engines = [view(rank) for rank in range(4)]
    names = [f"r{index}" for index in range(400)]
    ranks = [rank_of(router("g"), engines, request([1], name)) for name in names]
    assert ranks == [rank_of(router("g"), engines, request([1], name)) for name in names]
    assert min(Counter(ranks).values()) > 60
    assert ranks != [rank_of(router("h"), engines, request([1], name)) for name in names]


def test_an_engine_without_room_is_taken_only_when_no_other_is_there() -> None:
    full, busy = view(0, num_blocks_free=0), view(1, num_requests_running=50)
    assert rank_of(router(), [full, busy], request([1] * 20)) == 1
    assert rank_of(router(), [full], request([1] * 20)) == 0


def test_a_prefill_engine_is_of_use_only_with_a_mate_of_the_same_fingerprint() -> None:
    chooser = router()
    prefill, decode = view(0, Role.PREFILL), view(1, Role.DECODE)
    route = chooser.route([prefill, decode], request([1]))
    assert route is not None
    assert (route.placement.engine.rank, route.hands_off, route.path) == (0, True, Path.DISAGGREGATED)
    assert chooser.route([prefill], request([1])) is None
    stranger = view(1, Role.DECODE, fingerprint="g")
    route = chooser.route([prefill, stranger], request([1]))
    assert route is not None
    assert route.path is Path.LOCAL_PREFILL
    assert chooser.decode_placement([stranger], request([1]), "f") is None
    assert chooser.decode_placement([stranger, decode], request([1]), "f") is not None


def test_avoided_engines_are_not_chosen() -> None:
    engines = [view(0), view(1)]
    assert {rank_of(router(), engines, request([1], f"{i}"), avoid={("e0", 0)}) for i in range(9)} == {1}
    assert router().route(engines, request([1]), {("e0", 0), ("e1", 1)}) is None


def test_a_restarted_engine_has_no_prefixes() -> None:
    memory, chain = PrefixMemory(100), prefix_chain(range(256), ())
    memory.remember(chain, ("e", 1))
    assert memory.cached_tokens(chain, ("e", 1)) == 256
    assert memory.cached_tokens(chain, ("e", 2)) == 0


def test_memory_is_bounded_and_forgets_the_ends_of_old_chains_first() -> None:
    memory = PrefixMemory(6)
    old, new = prefix_chain([1] * 256, ()), prefix_chain([2] * 256, ())
    memory.remember(old, ("e", 1))
    memory.remember(new, ("e", 1))
    assert memory.cached_tokens(new, ("e", 1)) == 256
    assert memory.cached_tokens(old, ("e", 1)) == 128
