"""The metrics that an engine exports."""

from __future__ import annotations

import msgspec

from baton.cluster.engines.engine_socket import MessageCounters
from baton.cluster.engines.metrics import EngineMetrics
from baton.cluster.wire import Status
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
