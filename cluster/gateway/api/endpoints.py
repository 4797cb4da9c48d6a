"""ASGI endpoints that generate: they read the body, prepare the request, run its sequences, and write the response.

Nothing is sent before the first token has arrived, so any failure until then has an HTTP status, and the headers can
name the engines. A later failure becomes an error event in the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from baton.engine.core.speculation.stats import NO_DRAFTS

from ..api_keys import cache_salt_of_key
from ..bodies.body import Body, read_body
from ..bodies.budget import Reservation
from ..errors import (
    CLIENT_CLOSED_REQUEST,
    ApiError,
    bad_request,
    draining,
    internal,
    not_finished,
    priority_not_allowed,
)
from ..metrics import GatewayMetrics
from ..middleware import FAILURE, REFUSED, caller_of, error_body, request_id_of
from ..routing.ranks import PIN_HEADER, pinned_rank, reachable
from ..serving.attempt import Deadline
from ..serving.recent_requests import EndedRequest
from ..serving.sequence import ServedSequence
from ..serving.timeline import Stamp, Timeline
from .body_reader import RequestKind
from .deadlines import RequestDeadlines
from .detokenize import ChoiceDelta, SequenceDetokenizer
from .job import GenerationJob, PreparedRequest
from .renderer import Renderer
from .response_writer import JSON_HEADERS, ResponseWriter
from .resume import LAST_EVENT_ID_HEADER, ResumableStream, StreamPosition
from .services import GatewayServices
from .streams import ClientDisconnected, merge_streams, run_until_disconnect

logger = logging.getLogger(__name__)

SESSION_HEADER = "x-session-id"
MAX_SESSION_ID_CHARS = 256


@dataclass(frozen=True)
class _RequestContext:
    """Headers, deadlines and caller of a request: everything except its body."""

    request_id: str
    rank: int | None  # of the engine that the client asks for
    session_id: str | None
    started_s: float  # by `time.monotonic`
    deadlines: RequestDeadlines
    last_event_id: str | None
    key_salt: str  # separates cached prefixes of API keys; "": shared with everyone
    min_priority: int  # lowest `priority` value that this client may ask for


class GenerationEndpoint:
    """A generating route. An ASGI app rather than a handler function, so that it notices a client that disconnects
    early.
    """

    def __init__(self, gateway: GatewayServices, kind: RequestKind, renderer: Callable[..., Renderer]) -> None:
        """`kind` and `renderer` distinguish one route from the others."""
        self._gateway = gateway
        self._kind = kind
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        with gateway.serving.admission.admit(caller_of(scope).key), gateway.metrics.inflight.track_inprogress():
            writer = ResponseWriter(send, gateway.turns, partial(error_body, scope=scope))
            await self._serve(scope, receive, writer)

    async def _serve(self, scope: Scope, receive: Receive, writer: ResponseWriter) -> None:
        gateway = self._gateway
        limits, metrics = gateway.settings, gateway.metrics
        started_s = time.monotonic()
        http = Request(scope, receive)
        try:
            deadlines = RequestDeadlines(limits, http.headers)
            async with deadlines.limit():
                with (
                    gateway.running.listed(request_id_of(scope), deadlines),
                    gateway.bodies.budget.reservation() as held,
                    await read_body(http, limits.max_body_bytes, held) as body,
                ):
                    context = self._context(http, started_s, deadlines)
                    await run_until_disconnect(receive, self._generate(context, body, held, writer))
        except ApiError as error:
            await self._fail(scope, writer, error)
        except asyncio.CancelledError:  # the server is shutting down, and its drain time is over
            await self._fail(scope, writer, draining())
        except (ClientDisconnected, ClientDisconnect):
            if REFUSED not in scope:
                metrics.disconnects.inc()
            await writer.fail(ApiError(scope.get(REFUSED, CLIENT_CLOSED_REQUEST), "The client closed its connection."))
        except Exception:
            logger.exception("a fault of the gateway")
            await self._fail(scope, writer, internal("The gateway failed to serve the request."))
        finally:
            self._ended(http, writer, started_s)

    def _context(self, http: Request, started_s: float, deadlines: RequestDeadlines) -> _RequestContext:
        gateway, scope = self._gateway, http.scope
        return _RequestContext(
            request_id=request_id_of(scope),
            rank=pinned_rank(http.headers.get(PIN_HEADER), gateway.serving.client),
            session_id=session_id_of(http.headers.get(SESSION_HEADER)),
            started_s=started_s,
            deadlines=deadlines,
            last_event_id=http.headers.get(LAST_EVENT_ID_HEADER),
            key_salt=cache_salt_of_key(caller_of(scope).key) if gateway.settings.isolate_keys else "",
            min_priority=caller_of(scope).min_priority,
        )

    def _ended(self, http: Request, writer: ResponseWriter, started_s: float) -> None:
        gateway, ended_s = self._gateway, time.monotonic()
        latency_s = ended_s - started_s
        gateway.metrics.request_s.observe(latency_s)
        timelines = [sequence.timeline for sequence in writer.sequences]
        for timeline in timelines:
            if timeline.is_whole:
                timeline.note(Stamp.LAST_BYTE, ended_s)
                gateway.metrics.observe_parts(timeline)
        request = EndedRequest(
            request_id=request_id_of(http.scope),
            route=http.scope["path"],
            status=writer.status,
            began_at=time.time() - latency_s,
            latency_s=latency_s,
            path=", ".join(dict.fromkeys(sequence.path for sequence in writer.sequences)),
            choices=[],
        )
        gateway.recent.note(request, caller_of(http.scope).key, timelines)
        if gateway.spans is not None:
            what: dict[str, str | int] = {
                "baton.request_id": request_id_of(http.scope),
                "http.response.status_code": writer.status,
            }
            gateway.spans.record(http.scope["path"], http.headers, what, started_s, ended_s, timelines)

    async def _fail(self, scope: Scope, writer: ResponseWriter, error: ApiError) -> None:
        """Send an error. If the same request may succeed later, the error says whether GPU time was spent."""
        scope[FAILURE] = error
        if writer.has_begun:
            self._gateway.metrics.stream_errors.labels(error.status).inc()
        if error.is_about_load and error.gpu_time_spent is None:
            error.gpu_time_spent = any(sequence.gpu_time_spent for sequence in writer.sequences)
        await writer.fail(error)

    async def _generate(self, context: _RequestContext, body: Body, held: Reservation, writer: ResponseWriter) -> None:
        gateway = self._gateway
        prepared = await gateway.bodies.prepare(self._kind, body, context.key_salt, held)
        if prepared.priority < context.min_priority:
            raise priority_not_allowed(prepared.priority, context.min_priority)
        resumed_from = StreamPosition.from_event_id(context.last_event_id, is_resumable=prepared.is_resumable)
        job = self._job(prepared, context, resumed_from)
        resumable = ResumableStream(job, resumed_from) if prepared.is_resumable else None
        gateway.serving.admission.check_engines(reachable(gateway.serving.client, context.rank))
        gateway.metrics.prompt_tokens.inc(prepared.num_tokens)
        renderer = self._renderer(job, gateway.model.model_id, gateway.model.tokenizer)
        writer.sequences = self._sequences(job, context)
        choices = [self._choice(job, index, each, context, resumable) for index, each in enumerate(writer.sequences)]
        try:
            async with aclosing(merge_streams(choices)) as steps:
                if prepared.streams:
                    await writer.write_events(renderer, steps, resumable)
                else:
                    await writer.write_whole(renderer, steps, held)
        except ApiError as error:
            error.rename(prepared.client_field_names)  # engines use the field names of their own messages
            raise

    def _job(
        self, prepared: PreparedRequest, context: _RequestContext, resumed_from: StreamPosition | None
    ) -> GenerationJob:
        """Return the job; for a resumed stream, with the same ids and seed as before."""
        tokenizer = self._gateway.model.tokenizer
        if resumed_from is None:
            return GenerationJob.of(prepared, context.request_id, tokenizer)
        self._gateway.metrics.resumed.inc()
        prepared.sampling = msgspec.structs.replace(prepared.sampling, seed=resumed_from.seed)
        return GenerationJob.of(prepared, resumed_from.request_id, tokenizer, resumed_from.created)

    def _sequences(self, job: GenerationJob, context: _RequestContext) -> list[ServedSequence]:
        """Return a sequence for each choice. Choices of one prompt share its block names."""
        admitted_s, deadlines = time.monotonic(), context.deadlines
        return [
            ServedSequence(
                self._gateway.serving,
                sequence,
                Timeline(context.started_s, admitted_s),
                job.block_names[index // job.prepared.sampling.n],
                rank=context.rank,
                session_id=context.session_id,
                deadline=Deadline(deadlines.deadline_s, deadlines.is_clients),
            )
            for index, sequence in enumerate(job.sequences)
        ]

    async def _choice(
        self,
        job: GenerationJob,
        index: int,
        served: ServedSequence,
        context: _RequestContext,
        resumable: ResumableStream | None,
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield the deltas of one choice."""
        model, metrics, sequence = self._gateway.model, self._gateway.metrics, job.sequences[index]
        text = SequenceDetokenizer(
            model.tokenizer,
            sequence.prompt_token_ids,
            job.prepared.sampling,
            job.shown_token_ids,
            returns_token_ids=job.prepared.returns_token_ids,
        )
        replay_filter = None if resumable is None else resumable.replay_filter(index)
        times = _TokenTimes(metrics, context, served.timeline)
        try:
            async with aclosing(served.outputs()) as outputs:
                async for output in outputs:
                    for part in (output,) if replay_filter is None else replay_filter.split(output):
                        delta = text.push(part)
                        times.note(delta)
                        if job.prepared.tells_timeline and delta.finish_reason is not None:
                            delta = msgspec.structs.replace(delta, timeline=served.timeline.report())
                        yield delta if replay_filter is None else replay_filter.with_position(delta, part)
                        if delta.finish_reason is not None:
                            metrics.finished.labels(model.model_id, delta.finish_reason).inc()
                            return
        finally:
            metrics.generation_tokens.inc(times.num_tokens)


class _TokenTimes:
    """Measures the latencies of a choice's tokens."""

    def __init__(self, metrics: GatewayMetrics, context: _RequestContext, timeline: Timeline) -> None:
        self.num_tokens = 0
        self._metrics = metrics
        self._context = context
        self._timeline = timeline
        self._last_s = 0.0

    def note(self, delta: ChoiceDelta) -> None:
        now_s = time.monotonic()
        if not self._last_s:
            self._context.deadlines.first_token()
            self._metrics.first_token_s.observe(now_s - self._context.started_s)
            if (queued_s := self._timeline.until_s(Stamp.PREFILL_STARTED)) is not None:
                self._metrics.queue_s.observe(queued_s)
        elif delta.num_tokens:
            self._metrics.inter_token_s.observe(now_s - self._last_s)  # once for all tokens of a step
        if delta.drafts is not NO_DRAFTS:
            self._timeline.note_drafts(delta.drafts)
        if delta.finish_reason is not None:
            self._timeline.note(Stamp.LAST_TOKEN, now_s)
        self._last_s = now_s
        self.num_tokens += delta.num_tokens


def session_id_of(header: str | None) -> str | None:
    """Return the session that the client names, or None. Raises `ApiError` (400) if the name is empty or too long."""
    if header is None:
        return None
    session_id = header.strip()
    if not 0 < len(session_id) <= MAX_SESSION_ID_CHARS:
        raise bad_request(SESSION_HEADER, f"{SESSION_HEADER!r} must have 1 to {MAX_SESSION_ID_CHARS} characters.")
    return session_id


class TokenEndpoint:
    """The routes that count or convert tokens. An ASGI app, so that it writes a long response in pieces, as fast as its
    client reads.
    """

    def __init__(self, gateway: GatewayServices, kind: RequestKind) -> None:
        self._gateway, self._kind = gateway, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, limit_s = self._gateway, self._gateway.settings.request_timeout_s
        writer = ResponseWriter(send, gateway.turns, partial(error_body, scope=scope))
        try:
            async with asyncio.timeout(limit_s):
                await self._answer(Request(scope, receive), writer)
        except TimeoutError:
            await self._fail(scope, writer, not_finished(limit_s))
        except ApiError as error:
            await self._fail(scope, writer, error)

    async def _fail(self, scope: Scope, writer: ResponseWriter, error: ApiError) -> None:
        scope[FAILURE] = error
        await writer.fail(error)

    async def _answer(self, http: Request, writer: ResponseWriter) -> None:
        bodies, max_body_bytes = self._gateway.bodies, self._gateway.settings.max_body_bytes
        with bodies.budget.reservation() as held:
            with await read_body(http, max_body_bytes, held) as body:
                answer = await bodies.answer(self._kind, body, held)
            with answer:
                await writer.begin(JSON_HEADERS | {"content-length": str(answer.size)})
                for piece in answer.pieces():
                    await writer.write(piece)
                await writer.write(b"", more=False)
