"""Requests as OpenTelemetry spans: the same stamps as in their timelines."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from baton.cluster.contracts import Role
from baton.cluster.gateway import tracing
from baton.cluster.gateway.tracing import EXPORTER, OTLP_PROTOCOLS, RequestSpans, TraceExporterError

from ...helpers.gateway_service import Service

PROMPT = list(range(20, 60))
FIELDS: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A collector of the spans that a gateway exports."""

    def __init__(self, **options: Any) -> None:
        self._memory = InMemorySpanExporter()
        provider = TracerProvider(**options)
        provider.add_span_processor(SimpleSpanProcessor(self._memory))
        self.spans = RequestSpans(provider)

    def tree(self) -> tuple[ReadableSpan, list[ReadableSpan]]:
        """Return the span of the only request, and its child spans in order."""
        spans = self._memory.get_finished_spans()
        (root,) = (span for span in spans if span.name.startswith("POST"))
        parts = [span for span in spans if span is not root]
        assert all(part.parent.span_id == root.context.span_id for part in parts)
        return root, parts

    def __len__(self) -> int:
        return len(self._memory.get_finished_spans())


async def ask(service: Service, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    body = FIELDS | {"baton_timeline": True} | fields
    return (await service.http.post("/v1/completions", json=body, headers=headers or {})).json()


async def test_a_request_is_a_span_and_its_parts_are_its_children(start: Callable[..., Service]) -> None:
    collector, began_ns = Collector(), time.time_ns()
    (timeline,) = (await ask(start(Role.PREFILL, Role.DECODE, spans=collector.spans)))["baton_timeline"]
    root, parts = collector.tree()
    assert (root.name, root.attributes["http.response.status_code"]) == ("POST /v1/completions", 200)
    expected = [part["stamp"] for part in timeline["parts"] if part["part_s"]]
    assert [part.name for part in parts] == [*expected, "last_byte"]
    assert [event.name for event in root.events] == [*(part["stamp"] for part in timeline["parts"]), "last_byte"]
    assert began_ns - 1_000_000 <= root.start_time <= root.end_time <= time.time_ns() + 1_000_000
    edges = [root.start_time, *(part.end_time for part in parts)]
    assert [part.start_time for part in parts] == pytest.approx(edges[:-1], abs=1000)
    assert edges[-1] == pytest.approx(root.end_time, abs=1000)
    of_engines = {part.attributes["baton.engine"] for part in parts if "baton.engine" in part.attributes}
    assert of_engines == {"prefill-0", "decode-1"}


async def test_a_trace_of_the_client_is_continued(start: Callable[..., Service]) -> None:
    collector = Collector()
    await ask(start(Role.UNIFIED, spans=collector.spans), {"traceparent": f"00-{TRACE}-{CALLER}-01"})
    root, _ = collector.tree()
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, CALLER)


async def test_spans_name_their_choice(start: Callable[..., Service]) -> None:
    collector = Collector()
    await ask(start(Role.UNIFIED, spans=collector.spans), n=2)
    _, parts = collector.tree()
    assert {part.attributes["baton.choice"] for part in parts} == {0, 1}


async def test_a_request_that_fails_is_a_span_with_its_status(start: Callable[..., Service]) -> None:
    collector = Collector()
    await ask(start(spans=collector.spans, capacity_timeout_s=0.01))
    root, _ = collector.tree()
    assert root.attributes["http.response.status_code"] == 503
    assert not root.status.is_ok


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-0-0-00", "ff-" + "0" * 60])
async def test_an_invalid_parent_is_ignored(start: Callable[..., Service], traceparent: str) -> None:
    collector = Collector()
    assert "choices" in await ask(start(Role.UNIFIED, spans=collector.spans), {"traceparent": traceparent})
    root, _ = collector.tree()
    assert root.parent is None


async def test_a_dropped_request_has_no_child_spans(start: Callable[..., Service]) -> None:
    collector = Collector(sampler=ALWAYS_OFF)
    assert "choices" in await ask(start(Role.UNIFIED, spans=collector.spans))
    assert len(collector) == 0


class DeadCollector(SpanExporter):
    """An exporter to a collector that never answers: exports block until `revived` is set."""

    def __init__(self) -> None:
        self.asked, self.revived = threading.Event(), threading.Event()
        self.taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.revived.wait()
        self.taken += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@pytest.fixture
def dead_collector() -> Iterator[DeadCollector]:
    collector = DeadCollector()
    yield collector
    collector.revived.set()


async def test_a_dead_collector_delays_neither_requests_nor_the_end_of_the_gateway(
    start: Callable[..., Service], dead_collector: DeadCollector, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(dead_collector, schedule_delay_millis=1))
    told = RequestSpans(provider)
    service = start(Role.UNIFIED, spans=told)
    for _ in range(3):
        assert "choices" in await ask(service)
    assert await asyncio.to_thread(dead_collector.asked.wait, 20)
    assert "choices" in await ask(service), "requests must be served while the exporter blocks"
    ending = threading.Thread(target=told.close, daemon=True)
    ending.start()
    await asyncio.to_thread(ending.join, 20)
    assert not ending.is_alive(), "the gateway must not wait for 30 s as the processor does by default"
    (record,) = [record for record in caplog.records if record.name == tracing.__name__]
    assert "they are lost" in record.getMessage()


def test_remaining_spans_are_exported_at_the_end(
    dead_collector: DeadCollector, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(dead_collector))
    told = RequestSpans(provider)
    dead_collector.revived.set()
    told.record("/v1/completions", {}, {"http.response.status_code": 200}, 1.0, 2.0, [])
    told.close()
    assert dead_collector.taken == 1
    assert caplog.records == []


def is_installed(exporter: str) -> bool:
    return any(entry.name == exporter for entry in entry_points(group="opentelemetry_traces_exporter"))


@contextmanager
def grpc_collector() -> Iterator[tuple[str, queue.Queue[Any]]]:
    """Start a gRPC collector, and yield its address and a queue of its requests with their metadata."""
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: queue.Queue[Any] = queue.Queue()

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            received.put((request, dict(context.invocation_metadata())))
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", received
    server.stop(None).wait(20)


class TestEnvironment:
    @pytest.fixture(autouse=True)
    def _without_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (EXPORTER, *OTLP_PROTOCOLS):
            monkeypatch.delenv(name, raising=False)

    @pytest.mark.parametrize("name", [None, "", "none"])
    def test_nothing_is_recorded_without_an_exporter(self, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
        if name is not None:
            monkeypatch.setenv(EXPORTER, name)
        assert RequestSpans.from_environment("gateway-1") is None

    @pytest.mark.slow
    def test_the_named_exporter_gets_the_spans(self) -> None:
        environment = {EXPORTER: "console", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=here"}
        code = (
            "from baton.cluster.gateway.tracing import RequestSpans\n"
            "spans = RequestSpans.from_environment('gateway-1')\n"
            "spans.record('/v1/completions', {}, {'http.response.status_code': 200}, 1.0, 2.0, [])\n"
            "spans.close()"
        )
        command = [sys.executable, "-c", code]
        told = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60).stdout
        assert all(word in told for word in ("POST /v1/completions", "baton-gateway", "gateway-1", "here"))

    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            ({EXPORTER: "jaguar"}, ["'jaguar'", "console", "baton[tracing]"]),
            ({EXPORTER: "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "fax"}, ["'fax'", "http/protobuf, grpc"]),
            ({EXPORTER: "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "post"}, ["TRACES_PROTOCOL is 'post'"]),
            (
                {EXPORTER: "console", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "99999"},
                ["'console'", "max_queue_size", "OTEL_BSP_"],
            ),
        ],
    )
    def test_an_unknown_exporter_is_refused_by_name(
        self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: list[str]
    ) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TraceExporterError) as refusal:
            RequestSpans.from_environment("gateway-1")
        assert not [word for word in words if word not in str(refusal.value)]

    @pytest.mark.parametrize(
        ("protocol", "extra"),
        [(None, "tracing"), ("", "tracing"), ("http/protobuf", "tracing"), ("grpc", "tracing-grpc")],
    )
    def test_the_error_of_a_missing_exporter_names_its_package(
        self, monkeypatch: pytest.MonkeyPatch, protocol: str | None, extra: str
    ) -> None:
        monkeypatch.setattr(tracing, "entry_points", lambda group: ())
        monkeypatch.setenv(EXPORTER, "otlp")
        if protocol is not None:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        with pytest.raises(TraceExporterError, match=re.escape(f"'baton[{extra}]'")):
            RequestSpans.from_environment("gateway-1")

    @pytest.mark.skipif(not is_installed("otlp_proto_grpc"), reason="needs baton[tracing-grpc]")
    @pytest.mark.parametrize("variable", OTLP_PROTOCOLS)
    def test_a_grpc_collector_gets_spans_with_their_trace_and_headers(
        self, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        with grpc_collector() as (endpoint, received):
            monkeypatch.setenv(EXPORTER, "otlp")
            monkeypatch.setenv(variable, "grpc")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=here")
            told = RequestSpans.from_environment("gateway-1")
            assert told is not None
            caller = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            told.record("/v1/completions", caller, {"http.response.status_code": 200}, 1.0, 2.0, [])
            told.close()
            request, headers = received.get(timeout=20)
        (resource,) = request.resource_spans
        (span,) = resource.scope_spans[0].spans
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("POST /v1/completions", TRACE, CALLER)
        assert "gateway-1" in [attribute.value.string_value for attribute in resource.resource.attributes]
        assert headers["x-tenant"] == "here"
