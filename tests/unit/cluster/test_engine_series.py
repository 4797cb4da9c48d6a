"""The metrics that an engine exports."""

from __future__ import annotations

from typing import Any

import msgspec

from baton.cluster.engines.engine_socket import MessageCounters
from baton.cluster.engines.metrics import EngineMetrics
from baton.cluster.wire import Status
from baton.engine.core.messages import EngineStats, ExpertReview
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.core.tiers import TierStats
from baton.kv_transfer.protocol.stats import PeerLane, TransferStats

from ...helpers.fakes import CountingEngine


def engine_samples(status: Status | None, counters: MessageCounters = MessageCounters()) -> dict[str, float]:
    """Return values by metric name and the labels apart from the engine's own."""
    labels = {"model_name": "m", "engine": "decode-1", "role": "decode"}
    found = {}
    for family in EngineMetrics(list(labels.values()), lambda: status, counters).collect():
        for sample in family.samples:
            assert sample.labels.items() >= labels.items()
            others = [value for name, value in sample.labels.items() if name not in labels]
            found[" ".join([sample.name.removeprefix("baton_"), *others])] = sample.value
    return found


def test_an_engine_exports_its_state_its_hand_offs_and_its_tiers() -> None:
    transfers = TransferStats(
        offers={"finished": 2, "expired": 1},
        leases_held=3,
        receives={"received": 2, "corrupt": 1},
        bytes_read=4096,
        descriptors_read=5,
        blocks_read_early=3,
        receive_seconds=0.5,
        reads_fallen_back=6,
        lanes=[
            PeerLane(engine_id="prefill-0", transport="nixl/UCX", bytes_per_s=4e8, is_slow=True),
            PeerLane(engine_id="prefill-9", transport="cuda_ipc", bytes_per_s=None, is_slow=False),
            PeerLane(engine_id="p", transport="nixl/UCX staged", bytes_per_s=None, is_slow=False, is_staged=True),
        ],
    )
    stats = msgspec.structs.replace(
        CountingEngine().stats(),
        num_blocks=4,
        num_blocks_free=1,
        kv_usage=0.75,
        prompt_tokens=20,
        num_waiting_tokens=7,
        tiers=TierStats(blocks={"disk": 8}, failures={"slow": 9}),
    )
    found = engine_samples(Status(1, stats, transfers))
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert [name for name in found if name.startswith("kv_peer_bytes")] == [
        "kv_peer_bytes_per_second prefill-0 nixl/UCX"
    ]


EXPECTED = {
    "kv_cache_usage_perc": 0.75,
    "num_prompt_tokens_waiting": 7,
    "engine_prompt_tokens_total": 20,
    "kv_tickets_total finished": 2,
    "kv_tickets_total expired": 1,
    "kv_tickets_total withdrawn": 0,
    "kv_leases_held": 3,
    "kv_receives_total received": 2,
    "kv_receives_total corrupt": 1,
    "kv_blocks_read_early_total": 3,
    "kv_transfer_bytes_total": 4096,
    "kv_transfer_descriptors_total": 5,
    "kv_transfer_seconds_total": 0.5,
    "kv_read_fallbacks_total": 6,
    "kv_slow_peers": 1,
    "kv_staged_peers": 1,
    "kv_peer_bytes_per_second prefill-0 nixl/UCX": 4e8,
    "kv_tier_blocks disk": 8,
    "kv_tier_failures_total slow": 9,
    "kv_tier_failures_total corrupt": 0,
}


FIELDS: dict[type[msgspec.Struct], dict[str, str]] = {  # series -> field that it shows
    EngineStats: {
        "num_requests_running": "num_requests_running",
        "num_requests_waiting": "num_requests_waiting",
        "num_prompt_tokens_waiting": "num_waiting_tokens",
        "num_requests_waiting_for_kv": "num_requests_waiting_for_kv",
        "kv_cache_usage_perc": "kv_usage",
        "kv_blocks_held": "num_blocks_held",
        "kv_blocks_quarantined": "num_blocks_quarantined",
        "jit_compilations_after_ready": "num_late_compilations",
        "num_preemptions_total": "num_preemptions",
        "engine_steps_total": "num_steps",
        "decode_yield_seconds_total": "yielded_s",
        "engine_prompt_tokens_total": "prompt_tokens",
        "engine_generation_tokens_total": "generation_tokens",
        "prefix_cache_queries_total": "prefix_cache_queries",
        "prefix_cache_hits_total": "prefix_cache_hits",
        "grammars_compiled_total": "num_grammars_compiled",
        "grammars_refused_total": "num_grammars_refused",
        "grammar_cache_hits_total": "num_grammar_hits",
        "grammar_compile_seconds_total": "grammar_compile_s",
    },
    TransferStats: {
        "kv_leases_held": "leases_held",
        "kv_receives_active": "receives_active",
        "kv_buffer_blocks": "buffer_blocks",
        "kv_peers_ready": "peers_ready",
        "kv_transfer_bytes_total": "bytes_read",
        "kv_transfer_descriptors_total": "descriptors_read",
        "kv_blocks_read_early_total": "blocks_read_early",
        "kv_transfer_seconds_total": "receive_seconds",
        "kv_buffer_refusals_total": "buffer_refusals",
        "kv_read_fallbacks_total": "reads_fallen_back",
        "kv_messages_stale_total": "messages_stale",
        "kv_messages_malformed_total": "messages_malformed",
        "kv_messages_unsent_total": "messages_unsent",
    },
    TierStats: {
        "kv_tier_hits_total": "hits",
        "kv_tier_misses_total": "misses",
        "kv_tier_restored_tokens_total": "restored_tokens",
        "kv_tier_written_bytes_total": "written_bytes",
        "kv_tier_evictions_total": "evictions",
    },
    SpeculationStats: {
        "spec_decode_num_drafts_total": "num_drafts",
        "spec_decode_num_draft_tokens_total": "num_draft_tokens",
        "spec_decode_num_accepted_tokens_total": "num_accepted_tokens",
    },
}


def test_each_series_shows_its_own_figure() -> None:
    """Each field has another value."""
    fields = [(kind, name) for kind, shown in FIELDS.items() for name in shown.values()]
    numbers = {field: number for number, field in enumerate(fields, 1)}

    def values(kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {name: number for (owner, name), number in numbers.items() if owner is kind}

    stats = msgspec.structs.replace(
        CountingEngine().stats(),
        **values(EngineStats),
        tiers=TierStats(**values(TierStats)),
        speculation=SpeculationStats(**values(SpeculationStats), num_accepted_per_pos=[90, 80]),
        experts=ExpertReview(imbalance=1.5, num_moves=70),
    )
    slow = PeerLane(engine_id="p", transport="t", bytes_per_s=None, is_slow=True)
    transfers = TransferStats(**values(TransferStats), lanes=[slow, slow])
    found = engine_samples(Status(1, stats, transfers))
    expected = {series: numbers[kind, name] for kind, shown in FIELDS.items() for series, name in shown.items()} | {
        "expert_imbalance": 1.5,
        "expert_moves_total": 70,
        "kv_slow_peers": 2,
        "kv_staged_peers": 0,
        "spec_decode_num_accepted_tokens_per_pos_total 0": 90,
        "spec_decode_num_accepted_tokens_per_pos_total 1": 80,
    }
    assert {series: found[series] for series in expected} == expected
    by_outcome = ("kv_tickets_total", "kv_receives_total", "kv_tier_failures_total", "engine_messages")
    assert not [name for name in found.keys() - expected.keys() if not name.startswith(by_outcome)]


def test_an_engine_exports_lost_messages_even_before_its_first_status() -> None:
    lost = MessageCounters(malformed_messages=5, stale_messages=6, undeliverable_messages=7)
    assert engine_samples(None, lost) == {
        "engine_messages_malformed_total": 5,
        "engine_messages_stale_total": 6,
        "engine_messages_unsent_total": 7,
    }


def test_an_engine_without_hand_offs_and_tiers_has_no_such_series() -> None:
    found = engine_samples(Status(1, CountingEngine().stats()))
    assert not [name for name in found if name.startswith(("kv_tickets", "kv_tier", "kv_peers"))]
    assert found["engine_steps_total"] == 0
