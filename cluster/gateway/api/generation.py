"""The generating endpoints: read, prepare, dispatch, write.

Nothing is written before the first token is there, so everything that can go wrong until then has an HTTP status, and
the headers can say which way the request went. What goes wrong later becomes an event in the stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from ..bodies.body import Body, read_body
from ..bodies.budget import Reservation
from ..bodies.reading import Bodies
from ..edge import FAILURE, REFUSED, client_of, request_id_of
from ..errors import CLIENT_CLOSED_REQUEST, ApiError, draining, internal, priority_not_allowed
from ..keys import circle_of
from ..metrics import GatewayMetrics
from ..model import ServedModel
from ..routing.ranks import PIN_HEADER, pinned_rank, reachable
from ..serving.admission import AdmissionControl
from ..serving.attempt import Deadline
from ..serving.dispatcher import Dispatcher
from ..serving.sequence import ServedSequence
from ..serving.timeline import Stamp, Timeline
from ..settings import GatewaySettings
from ..spans import Spans
from .answer import Answer
from .assembly import Delta, SequenceText
from .job import Job, Prepared
from .patience import Patience
from .reader import Kind
from .render import Renderer
from .resume import LAST_EVENT_ID_HEADER, Position, Trail
from .sessions import SESSION_HEADER, session_id_of
from .streams import ClientGone, merge, until_gone

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gateway:
    """What every request needs."""

    model: ServedModel
    settings: GatewaySettings
    metrics: GatewayMetrics
    admission: AdmissionControl
    dispatcher: Dispatcher
    bodies: Bodies
    spans: Spans | None  # where somebody collects them


@dataclass(frozen=True)
class _Call:
    """What is known of a request beside its body."""

    request_id: str
    rank: int | None  # the engine that the client wishes
    session_id: str | None
    started_s: float  # by `time.monotonic`
    patience: Patience
    last_event_id: str | None
    circle: str  # of those who may find prefixes that this client has left; "": everyone
    min_priority: int  # that this client may ask for


class GenerationEndpoint:
    """An ASGI app rather than a handler function: it must notice a client that leaves while it waits for tokens."""

    def __init__(self, gateway: Gateway, kind: Kind, renderer: Callable[..., Renderer]) -> None:
        """`kind` and `renderer` are what tells one endpoint from the others."""
        self._gateway = gateway
        self._kind = kind
        self._renderer = renderer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        with gateway.admission.place(client_of(scope).key), gateway.metrics.inflight.track_inprogress():
            await self._serve(scope, receive, Answer(send))

    async def _serve(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        gateway = self._gateway
        limits, metrics = gateway.settings, gateway.metrics
        started_s = time.monotonic()
        http = Request(scope, receive)
        try:
            patience = Patience(limits, http.headers)
            async with patience.limit():
                with (
                    gateway.bodies.budget.reservation() as held,
                    await read_body(http, limits.max_body_bytes, held) as body,
                ):
                    call = self._call(http, started_s, patience)
                    await until_gone(receive, self._generate(call, body, held, answer))
        except ApiError as error:
            await self._fail(scope, answer, error)
        except asyncio.CancelledError:  # the server ends, and has waited long enough: the last word is ours
            await self._fail(scope, answer, draining())
        except (ClientGone, ClientDisconnect):
            if REFUSED not in scope:
                metrics.disconnects.inc()
            await answer.fail(ApiError(scope.get(REFUSED, CLIENT_CLOSED_REQUEST), "The client closed its connection."))
        except Exception:
            logger.exception("a fault of the gateway")
            await self._fail(scope, answer, internal("The gateway failed to serve the request."))
        finally:
            self._ended(http, answer, started_s)

    def _call(self, http: Request, started_s: float, patience: Patience) -> _Call:
        gateway, scope = self._gateway, http.scope
        return _Call(
            request_id=request_id_of(scope),
            rank=pinned_rank(http.headers.get(PIN_HEADER), gateway.dispatcher.client),
            session_id=session_id_of(http.headers.get(SESSION_HEADER)),
            started_s=started_s,
            patience=patience,
            last_event_id=http.headers.get(LAST_EVENT_ID_HEADER),
            circle=circle_of(client_of(scope).key) if gateway.settings.isolate_keys else "",
            min_priority=client_of(scope).min_priority,
        )

    def _ended(self, http: Request, answer: Answer, started_s: float) -> None:
        gateway, ended_s = self._gateway, time.monotonic()
        gateway.metrics.request_s.observe(ended_s - started_s)
        timelines = [sequence.timeline for sequence in answer.sequences]
        for timeline in timelines:
            if timeline.is_whole:
                timeline.note(Stamp.LAST_BYTE, ended_s)
                gateway.metrics.observe_parts(timeline)
        if gateway.spans is not None:
            what: dict[str, str | int] = {
                "baton.request_id": request_id_of(http.scope),
                "http.response.status_code": answer.status,
            }
            gateway.spans.record(http.scope["path"], http.headers, what, started_s, ended_s, timelines)

    async def _fail(self, scope: Scope, answer: Answer, error: ApiError) -> None:
        """Whoever may come again is told whether this time has cost anything."""
        scope[FAILURE] = error
        if answer.begun:
            self._gateway.metrics.stream_errors.labels(error.status).inc()
        if error.is_about_load and error.gpu_time_spent is None:
            error.gpu_time_spent = any(sequence.gpu_time_spent for sequence in answer.sequences)
        await answer.fail(error)

    async def _generate(self, call: _Call, body: Body, held: Reservation, answer: Answer) -> None:
        gateway = self._gateway
        prepared = await gateway.bodies.prepare(self._kind, body, call.circle, held)
        if prepared.priority < call.min_priority:
            raise priority_not_allowed(prepared.priority, call.min_priority)
        told = Position.known(call.last_event_id, is_resumable=prepared.is_resumable)
        job = self._job(prepared, call, told)
        trail = Trail(job, told) if prepared.is_resumable else None
        gateway.admission.check_engines(reachable(gateway.dispatcher.client, call.rank))
        gateway.metrics.prompt_tokens.inc(prepared.num_tokens)
        renderer = self._renderer(job, gateway.model.model_id, gateway.model.tokenizer, prepared.usage)
        answer.sequences = self._sequences(job, call)
        choices = [
            self._choice(job, index, each, call, trail, tells_timeline=prepared.tells_timeline)
            for index, each in enumerate(answer.sequences)
        ]
        try:
            async with aclosing(merge(choices)) as steps:
                if prepared.streams:
                    await answer.write_events(renderer, steps, trail)
                else:
                    await answer.write_whole(renderer, steps)
        except ApiError as error:
            error.rename(prepared.names)  # an engine's refusal has the engine's
            raise

    def _job(self, prepared: Prepared, call: _Call, told: Position | None) -> Job:
        """Return the work; the same as before where the client knows a part of the answer."""
        tokenizer = self._gateway.model.tokenizer
        if told is None:
            return Job.of(prepared, call.request_id, tokenizer)
        self._gateway.metrics.resumed.inc()
        prepared.sampling = msgspec.structs.replace(prepared.sampling, seed=told.seed)
        return dataclasses.replace(Job.of(prepared, told.request_id, tokenizer), created=told.created)

    def _sequences(self, job: Job, call: _Call) -> list[ServedSequence]:
        """Return one for each choice. Choices of a prompt share the names of its blocks."""
        admitted_s, patience = time.monotonic(), call.patience
        return [
            self._gateway.dispatcher.dispatch(
                sequence,
                Timeline(call.started_s, admitted_s),
                job.block_names[index // job.sampling.n],
                rank=call.rank,
                session_id=call.session_id,
                deadline=Deadline(patience.deadline_s, patience.is_clients),
            )
            for index, sequence in enumerate(job.sequences)
        ]

    async def _choice(
        self, job: Job, index: int, served: ServedSequence, call: _Call, trail: Trail | None, *, tells_timeline: bool
    ) -> AsyncGenerator[Delta, None]:
        """What the engines generate for one choice, as text."""
        model, metrics, sequence = self._gateway.model, self._gateway.metrics, job.sequences[index]
        text = SequenceText(model.tokenizer, sequence.prompt_token_ids, job.sampling, job.shown_token_ids)
        retelling = None if trail is None else trail.retelling(index)
        pace = _Pace(metrics, call, served.timeline)
        try:
            async with aclosing(served.outputs()) as outputs:
                async for output in outputs:
                    for part in (output,) if retelling is None else retelling.cut(output):
                        delta = text.push(part)
                        pace.note(delta)
                        if tells_timeline and delta.finish_reason is not None:
                            delta = msgspec.structs.replace(delta, timeline=served.timeline.report())
                        yield delta if retelling is None else retelling.marked(delta, part)
                        if delta.finish_reason is not None:
                            metrics.finished.labels(model.model_id, delta.finish_reason).inc()
                            return
        finally:
            metrics.generation_tokens.inc(pace.num_tokens)


class _Pace:
    """When the tokens of one choice came."""

    def __init__(self, metrics: GatewayMetrics, call: _Call, timeline: Timeline) -> None:
        self.num_tokens = 0
        self._metrics = metrics
        self._call = call
        self._timeline = timeline
        self._last_s = 0.0

    def note(self, delta: Delta) -> None:
        now_s = time.monotonic()
        if not self._last_s:
            self._call.patience.first_token()
            self._metrics.first_token_s.observe(now_s - self._call.started_s)
            if (queued_s := self._timeline.until_s(Stamp.PREFILL_STARTED)) is not None:
                self._metrics.queue_s.observe(queued_s)
        elif delta.num_tokens:
            self._metrics.inter_token_s.observe((now_s - self._last_s) / delta.num_tokens)
        if delta.finish_reason is not None:
            self._timeline.note(Stamp.LAST_TOKEN, now_s)
        self._last_s = now_s
        self.num_tokens += delta.num_tokens
