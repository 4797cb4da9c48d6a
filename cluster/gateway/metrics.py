"""The gateway's Prometheus metrics. Names are vLLM's with another prefix, so that its dashboards fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.cluster.autoscaling.load import FIRST_TOKEN_S, PER_TOKEN_S, GatewayLoad
from baton.cluster.contracts import ClientCounters, DirectorySnapshot, EngineView, MessageCounters
from baton.engine.core.connector import OfferOutcome
from baton.engine.core.messages import EngineStats
from baton.engine.core.tiers import TierStats
from baton.kv_transfer.protocol.receive_table import ReceiveOutcome
from baton.kv_transfer.protocol.stats import TransferStats
from baton.kv_transfer.tiers.tier_index import Loss

from .serving.timeline import Stamp, Timeline

REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

PART_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

DECISION_S = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 10, 15, 30, 60)

STREAM_ERRORS = (400, 408, 409, 413, 500, 503)  # statuses of errors after a stream's first byte
BODY_OUTCOMES = ("read", "refused", "too_slow", "broken")

ENGINE_LABELS = ["model_name", "engine", "role"]
StatsT = TypeVar("StatsT", EngineStats, TransferStats, TierStats, MessageCounters)


def _zeros(outcomes: Iterable[str]) -> dict[str, int]:
    """Return zero for each outcome, so that series exist before their first event.

    A rate begins with the second value of a series: the first event of a new series would be in no rate.
    """
    return {str(outcome): 0 for outcome in outcomes}


def _kv_usage(stats: EngineStats) -> float:
    return 1 - stats.num_blocks_free / stats.num_blocks if stats.num_blocks else 0.0


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
    "kv_cache_usage_perc": ("Used share of the KV blocks; 1 is full.", _kv_usage),
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
    "grammars_compiled_total": ("Grammars of structured outputs compiled.", lambda stats: stats.num_grammars_compiled),
    "grammars_refused_total": ("Grammars that could not be compiled.", lambda stats: stats.num_grammars_refused),
    "grammar_cache_hits_total": ("Grammars that were found compiled.", lambda stats: stats.num_grammar_hits),
    "grammar_compile_seconds_total": ("Seconds spent on compiling grammars.", lambda stats: stats.grammar_compile_s),
}
MAIL_COUNTERS: dict[str, tuple[str, Callable[[MessageCounters], float]]] = {
    "engine_messages_malformed_total": (
        "Messages of gateways that could not be read: dropped.",
        lambda mail: mail.malformed_messages,
    ),
    "engine_messages_stale_total": (
        "Messages of gateways that came too late: dropped.",
        lambda mail: mail.stale_messages,
    ),
    "engine_messages_unsent_total": ("Messages to gateways that were gone.", lambda mail: mail.undeliverable_messages),
}
CLIENT_COUNTERS: dict[str, tuple[str, Callable[[ClientCounters], float]]] = {
    "gateway_messages_malformed_total": (
        "Messages of engines that could not be read.",
        lambda counters: counters.malformed_messages,
    ),
    "gateway_messages_stale_total": (
        "Messages of engines that came too late: dropped.",
        lambda counters: counters.stale_messages,
    ),
    "engine_connections_lost_total": (
        "Connections to engines that broke or fell silent.",
        lambda counters: counters.engines_lost,
    ),
    "block_news_missed_total": (
        "Updates of an engine's cached blocks that were missed and asked for again.",
        lambda counters: counters.block_gaps,
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


class GatewayMetrics:
    """One gateway's metrics in a registry of their own."""

    def __init__(
        self,
        model_id: str,
        engines: Callable[[], Sequence[EngineView]],
        listed: Callable[[], DirectorySnapshot],
        counters: Callable[[], ClientCounters] = ClientCounters,
    ) -> None:
        registry = self._registry = CollectorRegistry()

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            metric = Histogram(f"baton_{name}", help, ["model_name"], registry=registry, buckets=buckets)
            return metric.labels(model_id)

        def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"baton_{name}", help, labels, registry=registry)

        self.first_token_s = histogram(
            "time_to_first_token_seconds", "Seconds from the request to its first token.", FIRST_TOKEN_S
        )
        self.inter_token_s = histogram(
            "inter_token_latency_seconds", "Seconds between the tokens of a choice.", PER_TOKEN_S
        )
        self.queue_s = histogram("request_queue_time_seconds", "Seconds from the request to its first step.", REQUEST_S)
        self.request_s = histogram(
            "e2e_request_latency_seconds", "Seconds from the request to its last byte.", REQUEST_S
        )
        help = "Seconds that each part of a choice's timeline added to its latency."
        labels = ["model_name", "part"]
        parts = Histogram("baton_request_part_seconds", help, labels, registry=registry, buckets=PART_S)
        self._parts_s: dict[Stamp, Histogram] = {
            stamp: parts.labels(model_id, stamp) for stamp in Stamp if stamp is not Stamp.INGRESS
        }
        self.finished = counter("request_success_total", "Choices by finish reason.", ["model_name", "finished_reason"])
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens.", ["model_name"]).labels(model_id)
        self.generation_tokens = counter("generation_tokens_total", "New tokens.", ["model_name"]).labels(model_id)
        self.requests = counter("choices_total", "Choices that were asked for.")
        self.paths = counter(
            "requests_by_path_total", "Ways that attempts took, also repeated ones.", ["path", "reason"]
        )
        self.retries = counter(
            "request_retries_total", "Failed attempts that were followed by another one.", ["reason"]
        )
        self.rungs = counter("request_rungs_total", "Attempts after a failure, by where they went.", ["rung", "reason"])
        help = "Seconds from a failed engine's last message, or the request to it, to the decision what follows."
        self.decisions_s = Histogram(
            "baton_failure_decision_seconds", help, ["failure"], registry=registry, buckets=DECISION_S
        )
        self.circuits_opened = counter("circuits_opened_total", "Engines and pairs that failed too often.", ["kind"])
        self.disconnects = counter("client_disconnects_total", "Clients that left before their answer was complete.")
        self.resumed = counter(
            "streams_resumed_total", "Streams that were resumed after a part had come from another gateway."
        )
        self.stream_errors = counter("stream_errors_total", "Streams that failed after their first byte.", ["status"])
        for status in STREAM_ERRORS:  # see `_zeros`
            self.stream_errors.labels(status)
        self.responses = counter("http_responses_total", "Responses by route and status.", ["route", "status"])
        self.inflight = Gauge("baton_gateway_requests_inflight", "Generation requests in progress.", registry=registry)
        self.unplaced = Gauge("baton_gateway_requests_unplaced", "Choices that wait for an engine.", registry=registry)
        self._bodies = counter("large_bodies_total", "Bodies read in a process of their own, by outcome.", ["outcome"])
        for outcome in BODY_OUTCOMES:  # see `_zeros`
            self._bodies.labels(outcome)
        self._memory = Gauge(
            "baton_request_memory_bytes", "Bytes of bodies and prompts that requests hold.", registry=registry
        )
        registry.register(_EngineCollector(model_id, engines))
        registry.register(_ClientCollector(counters))
        registry.register(_DirectoryCollector(listed))

    def count_body(self, outcome: str) -> None:
        """Count a large body by the outcome of reading it in another process."""
        self._bodies.labels(outcome).inc()

    def watch_memory(self, held_bytes: Callable[[], float]) -> None:
        """Show the number of bytes that requests hold together."""
        self._memory.set_function(held_bytes)

    def observe_decision(self, failure: str, seconds: float) -> None:
        """Observe how long it took to decide about a failed attempt."""
        self.decisions_s.labels(failure).observe(seconds)

    def circuit_opened(self, peer: tuple[object, ...]) -> None:
        """Count a circuit that opened, for an engine or for a pair of a prefill and a decode engine."""
        self.circuits_opened.labels("engine" if len(peer) == 1 else "pair").inc()

    def observe_parts(self, timeline: Timeline) -> None:
        """Observe the parts of the latency of a choice that was answered."""
        _, *parts = timeline.parts()
        for part in parts:
            self._parts_s[part.stamp].observe(part.part_s)

    def load(self) -> GatewayLoad:
        """Return the load figures that the autoscaler reads."""
        return GatewayLoad(
            requests=_sum(self.requests),
            prompt_tokens=_sum(self.prompt_tokens),
            generation_tokens=_sum(self.generation_tokens),
            first_token=_counts(self.first_token_s),
            inter_token=_counts(self.inter_token_s),
            inflight=round(_sum(self.inflight)),
            unplaced=round(_sum(self.unplaced)),
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Collects the engines' newest statistics at each scrape."""

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
        mail = [(self._labels(view), view.mail) for view in engines if view.mail is not None]
        yield from _families(CounterMetricFamily, MAIL_COUNTERS, mail)
        yield from _families(GaugeMetricFamily, HANDOFF_GAUGES, transfers)
        yield from _families(CounterMetricFamily, HANDOFF_COUNTERS, transfers)
        yield from _labelled(CounterMetricFamily, HANDOFF_OUTCOMES, "outcome", transfers)
        yield _lanes(transfers)
        tiers = [(labels, its_stats.tiers) for labels, its_stats in stats if its_stats.tiers is not None]
        yield from _families(CounterMetricFamily, TIER_COUNTERS, tiers)
        yield from _labelled(GaugeMetricFamily, TIER_BLOCKS, "tier", tiers)
        yield from _labelled(CounterMetricFamily, TIER_FAILURES, "reason", tiers)

    def _labels(self, view: EngineView) -> list[str]:
        return [self._model_id, view.record.engine_id, view.record.role]


def _lanes(transfers: Iterable[tuple[list[str], TransferStats]]) -> Metric:
    labels = ["model_name", "engine", "role", "peer", "transport"]
    family = GaugeMetricFamily(
        "baton_kv_peer_bytes_per_second",
        "Bytes per second from a peer lately; before its first blocks, as measured at pairing.",
        labels=labels,
    )
    for own, stats in transfers:
        for lane in stats.lanes:
            if lane.bytes_per_s is not None:
                family.add_metric([*own, lane.engine_id, lane.transport], lane.bytes_per_s)
    return family


def _sum(metric: Counter | Gauge) -> float:
    """Return a metric's sum over all its labels."""
    (family,) = metric.collect()
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


def _counts(histogram: Histogram) -> tuple[float, ...]:
    """Return the count of each bucket alone; Prometheus' samples are cumulative."""
    (family,) = histogram.collect()
    cumulative = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
    return tuple(upto - below for below, upto in itertools.pairwise([0.0, *cumulative]))


class _ClientCollector(Collector):
    """Collects counters of the gateway's own connections to engines."""

    def __init__(self, counters: Callable[[], ClientCounters]) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        counters = self._counters()
        for name, (help, value) in CLIENT_COUNTERS.items():
            yield CounterMetricFamily(f"baton_{name}", help, value(counters))


class _DirectoryCollector(Collector):
    """Collects counters of the directory; all gateways show the same."""

    def __init__(self, listed: Callable[[], DirectorySnapshot]) -> None:
        self._listed = listed

    def collect(self) -> Iterator[Metric]:
        drains = self._listed().drains
        yield CounterMetricFamily("baton_drains_total", "Groups of engines that drained.", drains.groups)
        yield CounterMetricFamily("baton_drain_seconds_total", "Seconds that drains took, summed.", drains.seconds)
        help = "Requests that went on elsewhere when the drain's time was over."
        yield CounterMetricFamily("baton_drain_handed_over_total", help, drains.handed_over)
        help = "Gateways and groups of engines without heartbeats that were kept, since their processes ran."
        yield CounterMetricFamily("baton_members_kept_total", help, self._listed().num_kept)


def _labelled(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    metrics: dict[str, tuple[str, Callable[[StatsT], dict[str, int]]]],
    label: str,
    engines: Sequence[tuple[list[str], StatsT]],
) -> Iterator[Metric]:
    """Yield one family for each metric, with a sample for each engine and label value."""
    for name, (help, values) in metrics.items():
        family = kind(f"baton_{name}", help, labels=[*ENGINE_LABELS, label])
        for own, stats in engines:
            for value, count in values(stats).items():
                family.add_metric(own + [value], count)  # noqa: RUF005 - mypy loses the type of what is unpacked here
        yield family


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    metrics: dict[str, tuple[str, Callable[[StatsT], float]]],
    engines: Sequence[tuple[list[str], StatsT]],
) -> Iterator[Metric]:
    """Yield one family for each metric, with a sample for each engine."""
    for name, (help, value) in metrics.items():
        family = kind(f"baton_{name}", help, labels=ENGINE_LABELS)
        for labels, stats in engines:
            family.add_metric(labels, value(stats))
        yield family
