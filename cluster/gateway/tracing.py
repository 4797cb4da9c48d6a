"""OpenTelemetry spans of requests, if the environment names an exporter.

    POST /v1/completions     with an event for each stamp, at its time
      └─ admitted, routed, prefill_queued, ..., last_token, last_byte     a child for each part of each choice

Spans are made from a request's timelines after its end. So engines need no tracing, no request waits for an exporter,
and without an exporter tracing costs nothing. The environment variables are OpenTelemetry's own.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Self

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .serving.timeline import Timeline

logger = logging.getLogger(__name__)

CLOSE_S = 2.0  # for which the gateway waits for the collector when it ends
EXPORTER = "OTEL_TRACES_EXPORTER"
OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP_EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
# Extras of this package that install the exporters:
EXTRAS = {"otlp_proto_http": "tracing", "otlp_proto_grpc": "tracing-grpc"}


class TraceExporterError(RuntimeError):
    """The environment names an exporter that is not installed or cannot start. The message says what to do."""


class RequestSpans:
    """Records the finished requests of one gateway as spans."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("baton")
        self._context_of = TraceContextTextMapPropagator().extract

    @classmethod
    def from_environment(cls, gateway_id: str) -> Self | None:
        """Return None if no exporter is named. Raises `TraceExporterError` if it is not installed or cannot start."""
        name = os.environ.get(EXPORTER, "none")
        if name in ("", "none"):
            return None
        ours = Resource({SERVICE_NAME: "baton-gateway", "service.instance.id": gateway_id})
        resource = ours.merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # True would block the process's exit
        provider.add_span_processor(_sending(_exporter_entry(name)))
        return cls(provider)

    def record(
        self,
        route: str,
        headers: Mapping[str, str],
        attributes: Mapping[str, str | int],
        began_s: float,
        ended_s: float,
        timelines: Sequence[Timeline],
    ) -> None:
        """Record a finished request. Times are on `time.monotonic`'s clock."""
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"POST {route}",
            context=self._context_of(headers),
            kind=SpanKind.SERVER,
            attributes={"http.route": route, **attributes},
            start_time=_ns(began_s, offset_ns),
        )
        if span.is_recording():
            if int(attributes["http.response.status_code"]) >= 500:
                span.set_status(Status(StatusCode.ERROR))
            context = set_span_in_context(span)
            for index, timeline in enumerate(timelines):
                self._record_parts(span, context, index, timeline, offset_ns)
        span.end(_ns(ended_s, offset_ns))

    def _record_parts(self, span: Span, context: Context, index: int, timeline: Timeline, offset_ns: int) -> None:
        reached_s = timeline.ingress_s
        for part in timeline.parts():
            where: dict[str, str | int] = {"baton.choice": index}
            if part.engine:
                where["baton.engine"] = part.engine
            span.add_event(part.stamp, where, _ns(timeline.ingress_s + part.at_s, offset_ns))
            if part.part_s:
                child = self._tracer.start_span(
                    part.stamp,
                    context=context,
                    attributes=where,
                    start_time=_ns(reached_s, offset_ns),
                )
                reached_s += part.part_s
                child.end(_ns(reached_s, offset_ns))

    def close(self) -> None:
        """Send the remaining spans, for at most `CLOSE_S`.

        Without this limit, exporters would retry for half a minute if the collector is gone.
        """
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(CLOSE_S)
        if sending.is_alive():
            logger.warning("the collector did not take the last spans within %g s: they are lost", CLOSE_S)


def _exporter_entry(name: str) -> EntryPoint:
    """Return the exporter's entry point. Raises `TraceExporterError`."""
    if name == "otlp":
        name = _otlp_exporter()
    installed = {entry.name: entry for entry in entry_points(group="opentelemetry_traces_exporter")}
    if name not in installed:
        extra = EXTRAS.get(name, "tracing")
        raise TraceExporterError(
            f"{EXPORTER} asks for {name!r}, and installed are {', '.join(sorted(installed))}: pip install "
            f"'baton[{extra}]' brings OTLP over {'gRPC' if extra == 'tracing-grpc' else 'HTTP'}; or unset it."
        )
    return installed[name]


def _sending(entry: EntryPoint) -> SpanProcessor:
    """Return a processor that sends spans through the exporter. Raises `TraceExporterError`."""
    try:
        return BatchSpanProcessor(entry.load()())
    except Exception as error:  # exporters raise errors of various types for wrong variables
        raise TraceExporterError(
            f"{EXPORTER} asks for {entry.name!r}, which does not start ({type(error).__name__}: {error}): look at the "
            "other variables OTEL_EXPORTER_* and OTEL_BSP_*, or unset it."
        ) from error


def _otlp_exporter() -> str:
    """Return the OTLP exporter for the protocol in the environment; an empty variable counts as unset.

    Raises `TraceExporterError` for a protocol that OTLP does not have.
    """
    variable, protocol = next(((each, os.environ[each]) for each in OTLP_PROTOCOLS if os.environ.get(each)), ("", ""))
    if variable and protocol not in OTLP_EXPORTERS:
        raise TraceExporterError(f"{variable} is {protocol!r}; it can be one of {', '.join(OTLP_EXPORTERS)}.")
    return OTLP_EXPORTERS[protocol or "http/protobuf"]


def _ns(at_s: float, offset_ns: int) -> int:
    return round(at_s * 1e9) + offset_ns
