"""What a gateway counts, for Prometheus. Names are vLLM's with another prefix, so that its dashboards fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.cluster.contracts import EngineView
from baton.engine.core.messages import EngineStats
from baton.kv_transfer.handoff import TransferStats

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
PER_TOKEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

ENGINE_LABELS = ["model_name", "engine", "role"]
StatsT = TypeVar("StatsT", EngineStats, TransferStats)


def _kv_usage(stats: EngineStats) -> float:
    return 1 - stats.num_blocks_free / stats.num_blocks if stats.num_blocks else 0.0


ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests in the engine's batch.", lambda stats: stats.num_requests_running),
    "num_requests_waiting": ("Requests that wait for a place.", lambda stats: stats.num_requests_waiting),
    "num_requests_waiting_for_kv": (
        "Requests whose KV is on its way.",
        lambda stats: stats.num_requests_waiting_for_kv,
    ),
    "kv_cache_usage_perc": ("Used share of the KV blocks, 1 is full.", _kv_usage),
    "kv_blocks_held": ("Blocks kept for readers of finished prefills.", lambda stats: stats.num_blocks_held),
    "kv_blocks_quarantined": ("Blocks a failed transfer may still write.", lambda stats: stats.num_blocks_quarantined),
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
    "num_preemptions_total": ("Requests that lost their place.", lambda stats: stats.num_preemptions),
    "engine_steps_total": ("Steps of the model.", lambda stats: stats.num_steps),
    "engine_prompt_tokens_total": ("Prompt tokens computed.", lambda stats: stats.prompt_tokens),
    "engine_generation_tokens_total": ("Tokens generated.", lambda stats: stats.generation_tokens),
    "prefix_cache_queries_total": ("Prompt tokens looked up in the cache.", lambda stats: stats.prefix_cache_queries),
    "prefix_cache_hits_total": ("Prompt tokens found in the cache.", lambda stats: stats.prefix_cache_hits),
    "expert_moves_total": (
        "Experts that were copied to other places, by load.",
        lambda stats: stats.experts.num_moves if stats.experts else 0,
    ),
}
HANDOFF_GAUGES: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "kv_leases_held": ("Tickets whose blocks wait for a reader.", lambda stats: stats.leases_held),
    "kv_receives_active": ("Hand-offs on their way in, or quarantined.", lambda stats: stats.receives_active),
    "kv_peers_ready": ("Engines whose blocks can be read.", lambda stats: stats.peers_ready),
}
HANDOFF_COUNTERS: dict[str, tuple[str, Callable[[TransferStats], float]]] = {
    "kv_transfer_bytes_total": ("Bytes read from peers.", lambda stats: stats.bytes_read),
    "kv_transfer_descriptors_total": ("Ranges of memory read from peers.", lambda stats: stats.descriptors_read),
    "kv_transfer_seconds_total": ("Time of received hand-offs, summed.", lambda stats: stats.receive_seconds),
    "kv_messages_stale_total": ("Of another epoch, or too late: dropped.", lambda stats: stats.messages_stale),
    "kv_messages_malformed_total": ("No messages of ours: dropped.", lambda stats: stats.messages_malformed),
    "kv_messages_unsent_total": ("To peers that were gone.", lambda stats: stats.messages_unsent),
}
HANDOFF_OUTCOMES: dict[str, tuple[str, Callable[[TransferStats], dict[str, int]]]] = {
    "kv_tickets_total": ("Tickets given out, by how they ended.", lambda stats: stats.offers),
    "kv_receives_total": ("Tickets taken, by how they ended.", lambda stats: stats.receives),
}


class GatewayMetrics:
    """One gateway's metrics in a registry of their own."""

    def __init__(self, model_id: str, engines: Callable[[], Sequence[EngineView]]) -> None:
        registry = self._registry = CollectorRegistry()

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            metric = Histogram(f"baton_{name}", help, ["model_name"], registry=registry, buckets=buckets)
            return metric.labels(model_id)

        def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"baton_{name}", help, labels, registry=registry)

        self.first_token_s = histogram("time_to_first_token_seconds", "From the request to token 1.", FIRST_TOKEN_S)
        self.inter_token_s = histogram("inter_token_latency_seconds", "Between the tokens of a choice.", PER_TOKEN_S)
        self.queue_s = histogram("request_queue_time_seconds", "From the request to its first step.", REQUEST_S)
        self.request_s = histogram("e2e_request_latency_seconds", "From the request to its last byte.", REQUEST_S)
        self.finished = counter("request_success_total", "Choices by finish reason.", ["model_name", "finished_reason"])
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens.", ["model_name"]).labels(model_id)
        self.generation_tokens = counter("generation_tokens_total", "New tokens.", ["model_name"]).labels(model_id)
        self.paths = counter("requests_by_path_total", "Routes taken, also repeated ones.", ["path", "reason"])
        self.retries = counter("request_retries_total", "Failed attempts that another one followed.", ["reason"])
        self.disconnects = counter("client_disconnects_total", "Clients that left before their answer was complete.")
        self.stream_errors = counter("stream_errors_total", "Streams that failed after their first byte.", ["status"])
        self.responses = counter("http_responses_total", "Responses by route and status.", ["route", "status"])
        self.inflight = Gauge("baton_gateway_requests_inflight", "Generation requests in progress.", registry=registry)
        registry.register(_EngineCollector(model_id, engines))

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engines' newest statistics when somebody asks."""

    def __init__(self, model_id: str, engines: Callable[[], Sequence[EngineView]]) -> None:
        self._model_id = model_id
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        engines = self._engines()
        alive = GaugeMetricFamily("baton_engines", "Engines that this gateway reaches.", labels=["role"])
        for role in sorted({view.record.role for view in engines}):
            alive.add_metric([role], sum(view.record.role is role for view in engines))
        yield alive
        stats = [(self._labels(view), view.stats) for view in engines if view.stats is not None]
        transfers = [(self._labels(view), view.transfers) for view in engines if view.transfers is not None]
        yield from _families(GaugeMetricFamily, ENGINE_GAUGES, stats)
        yield from _families(CounterMetricFamily, ENGINE_COUNTERS, stats)
        yield from _families(GaugeMetricFamily, HANDOFF_GAUGES, transfers)
        yield from _families(CounterMetricFamily, HANDOFF_COUNTERS, transfers)
        for name, (help, outcomes) in HANDOFF_OUTCOMES.items():
            family = CounterMetricFamily(f"baton_{name}", help, labels=[*ENGINE_LABELS, "outcome"])
            for labels, its_stats in transfers:
                for outcome, count in outcomes(its_stats).items():
                    family.add_metric([*labels, outcome], count)
            yield family

    def _labels(self, view: EngineView) -> list[str]:
        return [self._model_id, view.record.engine_id, view.record.role]


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    metrics: dict[str, tuple[str, Callable[[StatsT], float]]],
    engines: Sequence[tuple[list[str], StatsT]],
) -> Iterator[Metric]:
    """One family a metric, with a sample an engine."""
    for name, (help, value) in metrics.items():
        family = kind(f"baton_{name}", help, labels=ENGINE_LABELS)
        for labels, stats in engines:
            family.add_metric(labels, value(stats))
        yield family
