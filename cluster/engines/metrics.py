"""The Prometheus metrics of one engine, which its own process exports.

Where vLLM has a metric, Baton's has the same name with another prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.cluster.wire import Status
from baton.engine.core.connector import OfferOutcome
from baton.engine.core.messages import EngineStats
from baton.engine.core.speculation.stats import SpeculationStats
from baton.engine.core.tiers import TierStats
from baton.kv_transfer.protocol.receive_rules import ReceiveOutcome
from baton.kv_transfer.protocol.stats import TransferStats
from baton.kv_transfer.tiers.tier_index import Loss

from .engine_socket import MessageCounters

LABELS = ["model_name", "engine", "role"]
StatsT = TypeVar("StatsT", EngineStats, TransferStats, TierStats, SpeculationStats, MessageCounters)


def _zeros(outcomes: Iterable[str]) -> dict[str, int]:
    """Return zero for each outcome, so that its series exists before the first event.

    Prometheus computes a rate from the second value of a series on: the first event of a new series would be lost.
    """
    return {str(outcome): 0 for outcome in outcomes}


ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests in the engine's batch.", lambda stats: stats.num_requests_running),
    "num_requests_waiting": ("Requests that wait to start.", lambda stats: stats.num_requests_waiting),
    "num_prompt_tokens_waiting": (
        "Tokens of waiting prompts that are not cached; `gateway.queue_limits` may bound them.",
        lambda stats: stats.num_waiting_tokens,
    ),
    "num_requests_waiting_for_kv": (
        "Requests that wait for blocks of another engine or a tier.",
        lambda stats: stats.num_requests_waiting_for_kv,
    ),
    "kv_cache_usage_perc": ("Used share of the KV blocks; 1 is full.", lambda stats: stats.kv_usage),
    "kv_blocks_held": ("Blocks of finished prefills, kept for decode engines.", lambda stats: stats.num_blocks_held),
    "kv_blocks_quarantined": (
        "Blocks that a failed transfer may still write.",
        lambda stats: stats.num_blocks_quarantined,
    ),
    "jit_compilations_after_ready": (
        "Kernels compiled while serving: more than 0 is a fault.",
        lambda stats: stats.num_late_compilations,
    ),
    "expert_imbalance": (
        "Load of the rank with the busiest experts over the mean; 0 where experts are not spread over ranks.",
        lambda stats: stats.experts.imbalance if stats.experts else 0.0,
    ),
}
ENGINE_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_preemptions_total": (
        "Running requests that gave their blocks to others.",
        lambda stats: stats.num_preemptions,
    ),
    "engine_steps_total": ("Steps of the model.", lambda stats: stats.num_steps),
    "engine_prompt_tokens_total": ("Prompt tokens computed.", lambda stats: stats.prompt_tokens),
    "engine_generation_tokens_total": ("Tokens generated.", lambda stats: stats.generation_tokens),
    "prefix_cache_queries_total": ("Prompt tokens looked up in the cache.", lambda stats: stats.prefix_cache_queries),
    "prefix_cache_hits_total": ("Prompt tokens found in the cache.", lambda stats: stats.prefix_cache_hits),
    "expert_moves_total": (
        "Experts that were copied to other ranks to even out the load.",
        lambda stats: stats.experts.num_moves if stats.experts else 0,
    ),
    "decode_yield_seconds_total": (
        "Seconds that decode steps waited while another engine on the same GPU had prompts to compute.",
        lambda stats: stats.yielded_s,
    ),
    "grammars_compiled_total": ("Grammars of structured outputs compiled.", lambda stats: stats.num_grammars_compiled),
    "grammars_refused_total": ("Grammars that could not be compiled.", lambda stats: stats.num_grammars_refused),
    "grammar_cache_hits_total": ("Grammars that were found compiled.", lambda stats: stats.num_grammar_hits),
    "grammar_compile_seconds_total": ("Seconds spent on compiling grammars.", lambda stats: stats.grammar_compile_s),
}
MESSAGE_COUNTERS: dict[str, tuple[str, Callable[[MessageCounters], float]]] = {
    "engine_messages_malformed_total": (
        "Messages of gateways that could not be read: dropped.",
        lambda counters: counters.malformed_messages,
    ),
    "engine_messages_stale_total": (
        "Messages of gateways that came too late: dropped.",
        lambda counters: counters.stale_messages,
    ),
    "engine_messages_unsent_total": (
        "Messages to gateways that were gone.",
        lambda counters: counters.undeliverable_messages,
    ),
}
HANDOFF_GAUGES: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "kv_leases_held": ("Tickets whose blocks wait for a decode engine.", lambda stats: stats.leases_held),
    "kv_receives_active": ("Hand-offs that are being received.", lambda stats: stats.receives_active),
    "kv_buffer_blocks": ("Blocks on their way through the memory of a host.", lambda stats: stats.buffer_blocks),
    "kv_peers_ready": ("Engines whose blocks can be read.", lambda stats: stats.peers_ready),
    "kv_slow_peers": (
        "Engines whose GPU memory is read slowly, probably through TCP.",
        lambda stats: sum(lane.is_slow for lane in stats.lanes),
    ),
    "kv_staged_peers": (
        "Engines whose GPU memory is read through pinned memory of both hosts, since that is the fastest lane.",
        lambda stats: sum(lane.is_staged for lane in stats.lanes),
    ),
}
HANDOFF_COUNTERS: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "kv_transfer_bytes_total": ("Bytes read from peers.", lambda stats: stats.bytes_read),
    "kv_transfer_descriptors_total": ("Ranges of memory read from peers.", lambda stats: stats.descriptors_read),
    "kv_blocks_read_early_total": ("Blocks read while prefill still ran.", lambda stats: stats.blocks_read_early),
    "kv_transfer_seconds_total": ("Seconds of received hand-offs, summed.", lambda stats: stats.receive_seconds),
    "kv_buffer_refusals_total": ("Prompts that had no room in the host buffer.", lambda stats: stats.buffer_refusals),
    "kv_read_fallbacks_total": (
        "Reads that failed in one way and were begun again in another.",
        lambda stats: stats.reads_fallen_back,
    ),
    "kv_messages_stale_total": (
        "Messages about hand-offs of another epoch, or too late: dropped.",
        lambda stats: stats.messages_stale,
    ),
    "kv_messages_malformed_total": (
        "Messages about hand-offs that could not be read: dropped.",
        lambda stats: stats.messages_malformed,
    ),
    "kv_messages_unsent_total": (
        "Messages about hand-offs to peers that were gone.",
        lambda stats: stats.messages_unsent,
    ),
}
HANDOFF_OUTCOMES: dict[str, tuple[str, Callable[[TransferStats], dict[str, int]]]] = {
    "kv_tickets_total": ("Tickets given out, by how they ended.", lambda stats: _zeros(OfferOutcome) | stats.offers),
    "kv_receives_total": ("Tickets taken, by how they ended.", lambda stats: _zeros(ReceiveOutcome) | stats.receives),
}
TIER_COUNTERS: dict[str, tuple[str, Callable[[TierStats], float]]] = {
    "kv_tier_hits_total": ("Blocks that were found in a tier and asked for.", lambda stats: stats.hits),
    "kv_tier_misses_total": ("Full blocks of prompts that no tier had.", lambda stats: stats.misses),
    "kv_tier_restored_tokens_total": ("Tokens that came out of a tier.", lambda stats: stats.restored_tokens),
    "kv_tier_written_bytes_total": ("Bytes written into tiers.", lambda stats: stats.written_bytes),
    "kv_tier_evictions_total": ("Blocks that no tier had room for.", lambda stats: stats.evictions),
}
TIER_BLOCKS: dict[str, tuple[str, Callable[[TierStats], dict[str, int]]]] = {
    "kv_tier_blocks": ("Blocks that a tier keeps.", lambda stats: stats.blocks),
}
TIER_FAILURES: dict[str, tuple[str, Callable[[TierStats], dict[str, int]]]] = {
    "kv_tier_failures_total": (
        "Blocks that a tier lost, by reason.",
        lambda stats: (
            _zeros([*Loss, "slow"]) | stats.failures
        ),  # "slow" is counted by the engine, which waited no longer
    ),
}
SPECULATION_COUNTERS: dict[str, tuple[str, Callable[[SpeculationStats], float]]] = {
    "spec_decode_num_drafts_total": (
        "Times that a request had drafts in a step.",
        lambda stats: stats.num_drafts,
    ),
    "spec_decode_num_draft_tokens_total": ("Drafts that steps checked.", lambda stats: stats.num_draft_tokens),
    "spec_decode_num_accepted_tokens_total": (
        "Drafts that were accepted: tokens that needed no step of their own.",
        lambda stats: stats.num_accepted_tokens,
    ),
}
SPECULATION_POSITIONS: dict[str, tuple[str, Callable[[SpeculationStats], dict[str, int]]]] = {
    "spec_decode_num_accepted_tokens_per_pos_total": (
        "Drafts that were accepted, by their position among those of a request in a step; the first is 0.",
        lambda stats: {str(position): count for position, count in enumerate(stats.num_accepted_per_pos)},
    ),
}


class EngineMetrics(Collector):
    """Collects the newest status of the engine of this process at each scrape. Any thread may scrape."""

    def __init__(self, labels: list[str], status: Callable[[], Status | None], counters: MessageCounters) -> None:
        """`labels` are the values of `LABELS`. `status()` is None before the engine's first status."""
        self._labels, self._status, self._counters = labels, status, counters

    def collect(self) -> Iterator[Metric]:
        yield from self._families(CounterMetricFamily, MESSAGE_COUNTERS, self._counters)
        status = self._status()
        if status is None:
            return
        yield from self._families(GaugeMetricFamily, ENGINE_GAUGES, status.stats)
        yield from self._families(CounterMetricFamily, ENGINE_COUNTERS, status.stats)
        if (transfers := status.transfers) is not None:
            yield from self._families(GaugeMetricFamily, HANDOFF_GAUGES, transfers)
            yield from self._families(CounterMetricFamily, HANDOFF_COUNTERS, transfers)
            yield from self._labelled(CounterMetricFamily, HANDOFF_OUTCOMES, "outcome", transfers)
            yield self._lanes(transfers)
        if (tiers := status.stats.tiers) is not None:
            yield from self._families(CounterMetricFamily, TIER_COUNTERS, tiers)
            yield from self._labelled(GaugeMetricFamily, TIER_BLOCKS, "tier", tiers)
            yield from self._labelled(CounterMetricFamily, TIER_FAILURES, "reason", tiers)
        if (speculation := status.stats.speculation) is not None:
            yield from self._families(CounterMetricFamily, SPECULATION_COUNTERS, speculation)
            yield from self._labelled(CounterMetricFamily, SPECULATION_POSITIONS, "position", speculation)

    def _families(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        metrics: dict[str, tuple[str, Callable[[StatsT], float]]],
        stats: StatsT,
    ) -> Iterator[Metric]:
        for name, (help, value) in metrics.items():
            family = kind(f"baton_{name}", help, labels=LABELS)
            family.add_metric(self._labels, value(stats))
            yield family

    def _labelled(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        metrics: dict[str, tuple[str, Callable[[StatsT], dict[str, int]]]],
        label: str,
        stats: StatsT,
    ) -> Iterator[Metric]:
        """Yield a family for each metric, with one sample for each value of `label`."""
        for name, (help, values) in metrics.items():
            family = kind(f"baton_{name}", help, labels=[*LABELS, label])
            for value, count in values(stats).items():
                family.add_metric([*self._labels, value], count)
            yield family

    def _lanes(self, transfers: TransferStats) -> Metric:
        help = "Bytes per second from a peer lately; before its first blocks, as measured at pairing."
        family = GaugeMetricFamily("baton_kv_peer_bytes_per_second", help, labels=[*LABELS, "peer", "transport"])
        for lane in transfers.lanes:
            if lane.bytes_per_s is not None:
                family.add_metric([*self._labels, lane.engine_id, lane.transport], lane.bytes_per_s)
        return family
