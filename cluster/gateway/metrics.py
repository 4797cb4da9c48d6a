"""The gateway's Prometheus metrics. Names are vLLM's with another prefix, so that dashboards can be adapted easily."""

from __future__ import annotations

import itertools
from collections import Counter as CountOf
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.cluster.autoscaling.load_samples import FIRST_TOKEN_S, PER_TOKEN_S, GatewayLoad
from baton.cluster.contracts import ClientCounters, EngineView

from .serving.timeline import Stamp, Timeline

REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

PART_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

DECISION_S = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 6, 8, 10, 15, 30, 60)

STREAM_ERRORS = (400, 408, 409, 413, 500, 503)  # statuses of errors that can occur after a stream's first byte
BODY_OUTCOMES = ("read", "refused", "too_slow", "broken")

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
        "Connections to engines that broke or missed heartbeats.",
        lambda counters: counters.engines_lost,
    ),
    "block_news_missed_total": (
        "Updates of an engine's cached blocks that were missed and asked for again.",
        lambda counters: counters.block_gaps,
    ),
}


class GatewayMetrics:
    """One gateway's metrics, in their own registry."""

    def __init__(
        self,
        model_id: str,
        engines: Callable[[], Sequence[EngineView]],
        counters: Callable[[], ClientCounters] = ClientCounters,
    ) -> None:
        registry = self.registry = CollectorRegistry()

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            metric = Histogram(f"baton_{name}", help, ["model_name"], registry=registry, buckets=buckets)
            return metric.labels(model_id)

        def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"baton_{name}", help, labels, registry=registry)

        self.first_token_s = histogram(
            "time_to_first_token_seconds", "Seconds from the request to its first token.", FIRST_TOKEN_S
        )
        self.inter_token_s = histogram(
            "inter_token_latency_seconds",
            "Seconds between the tokens of a choice; those that one step has drawn count once.",
            PER_TOKEN_S,
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
        self.resumed = counter("streams_resumed_total", "Streams resumed after a part had come from another gateway.")
        self.stream_errors = counter("stream_errors_total", "Streams that failed after their first byte.", ["status"])
        for status in STREAM_ERRORS:  # exist from the start, because a rate needs a value before the first error
            self.stream_errors.labels(status)
        self.responses = counter("http_responses_total", "Responses by route and status.", ["route", "status"])
        self.inflight = Gauge("baton_gateway_requests_inflight", "Generation requests in progress.", registry=registry)
        help = "1 while `user_config` has settings that this gateway refused: the previous ones stay in effect."
        self.settings_refused = Gauge("baton_gateway_settings_refused", help, registry=registry)
        self.unplaced = Gauge("baton_gateway_requests_unplaced", "Choices that wait for an engine.", registry=registry)
        self._bodies = counter("large_bodies_total", "Bodies read in a process of their own, by outcome.", ["outcome"])
        for outcome in BODY_OUTCOMES:
            self._bodies.labels(outcome)
        self._memory = Gauge(
            "baton_request_memory_bytes", "Bytes of bodies and prompts that requests hold.", registry=registry
        )
        registry.register(_ClientCollector(engines, counters))

    def count_body(self, outcome: str) -> None:
        """Count a large body by the outcome of reading it in another process."""
        self._bodies.labels(outcome).inc()

    def watch_memory(self, held_bytes: Callable[[], float]) -> None:
        """Show the number of bytes that all requests together hold."""
        self._memory.set_function(held_bytes)

    def observe_decision(self, failure: str, seconds: float) -> None:
        """Record the seconds from a failed engine's last message, or its request, to the decision what follows."""
        self.decisions_s.labels(failure).observe(seconds)

    def circuit_opened(self, circuit: tuple[object, ...]) -> None:
        """Count a circuit that opened, for an engine or for a pair of a prefill and a decode engine."""
        self.circuits_opened.labels("engine" if len(circuit) == 1 else "pair").inc()

    def observe_parts(self, timeline: Timeline) -> None:
        """Record the parts of the latency of an answered choice."""
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
        """Return this gateway's metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _sum(metric: Counter | Gauge) -> float:
    """Return a metric's sum over all its labels."""
    (family,) = metric.collect()
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


def _counts(histogram: Histogram) -> tuple[float, ...]:
    """Return the count of each bucket; Prometheus' samples are cumulative."""
    (family,) = histogram.collect()
    cumulative = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
    return tuple(upto - below for below, upto in itertools.pairwise([0.0, *cumulative]))


class _ClientCollector(Collector):
    """Collects figures of the gateway's connections to engines."""

    def __init__(self, engines: Callable[[], Sequence[EngineView]], counters: Callable[[], ClientCounters]) -> None:
        self._engines, self._counters = engines, counters

    def collect(self) -> Iterator[Metric]:
        alive = GaugeMetricFamily("baton_engines", "Engines that this gateway reaches.", labels=["role"])
        for role, count in sorted(CountOf(view.record.role for view in self._engines()).items()):
            alive.add_metric([role], count)
        yield alive
        counters = self._counters()
        for name, (help, value) in CLIENT_COUNTERS.items():
            yield CounterMetricFamily(f"baton_{name}", help, value(counters))
