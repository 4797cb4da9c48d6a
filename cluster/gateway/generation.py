"""The two generating endpoints: read, prepare, dispatch, write.

Nothing is written before the first token is there, so everything that can go wrong until then has an HTTP status, and
the headers can say which way the request went. What goes wrong later becomes an event in the stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .admission import Admission
from .assembly import Delta, SequenceText
from .body import parse_object, read_body
from .dispatcher import Dispatch, Dispatcher
from .edge import api_key_of, request_id_of
from .errors import CLIENT_CLOSED_REQUEST, ApiError, draining, internal
from .metrics import GatewayMetrics
from .model import ServedModel
from .patience import Patience
from .prepare import Job
from .protocol import GenerationRequest, StreamOptions, parse_request
from .ranks import PIN_HEADER, pinned_rank, reachable
from .render import Renderer, UsageOptions
from .resume import LAST_EVENT_ID_HEADER, Position, Trail, is_resumable
from .sessions import SESSION_HEADER, session_id_of
from .settings import GatewaySettings
from .streams import ClientGone, merge, until_gone

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=GenerationRequest)
Steps = AsyncGenerator[list[tuple[int, Delta]], None]

JSON_HEADERS = {"content-type": "application/json"}
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx collects tokens
}


@dataclass(frozen=True)
class Gateway:
    """What every request needs."""

    model: ServedModel
    settings: GatewaySettings
    metrics: GatewayMetrics
    admission: Admission
    dispatcher: Dispatcher


@dataclass(frozen=True)
class _Call:
    """What is known of a request beside its body."""

    request_id: str
    rank: int | None  # the engine that the client wishes
    session_id: str | None
    started_s: float  # by `time.perf_counter`
    patience: Patience
    last_event_id: str | None


@dataclass(frozen=True)
class GenerationApi(Generic[RequestT]):
    """What tells one endpoint from the other."""

    request_type: type[RequestT]
    prepare: Callable[[RequestT, str], Awaitable[Job]]
    renderer: Callable[..., Renderer]


class GenerationEndpoint(Generic[RequestT]):
    """An ASGI app rather than a handler function: it must notice a client that leaves while it waits for tokens."""

    def __init__(self, gateway: Gateway, api: GenerationApi[RequestT]) -> None:
        self._gateway = gateway
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        with gateway.admission.place(api_key_of(scope)), gateway.metrics.inflight.track_inprogress():
            await self._serve(scope, receive, _Answer(send))

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        gateway = self._gateway
        limits, metrics, client = gateway.settings, gateway.metrics, gateway.dispatcher.client
        started_s = time.perf_counter()
        http = Request(scope, receive)
        try:
            patience = Patience(limits, http.headers)
            async with patience.limit():
                body = await read_body(http, limits.max_body_bytes)
                call = _Call(
                    request_id=request_id_of(scope),
                    rank=pinned_rank(http.headers.get(PIN_HEADER), client),
                    session_id=session_id_of(http.headers.get(SESSION_HEADER)),
                    started_s=started_s,
                    patience=patience,
                    last_event_id=http.headers.get(LAST_EVENT_ID_HEADER),
                )
                await until_gone(receive, self._generate(call, body, answer))
        except ApiError as error:
            await self._fail(answer, error)
        except asyncio.CancelledError:  # the server ends, and has waited long enough: the last word is ours
            await self._fail(answer, draining())
        except (ClientGone, ClientDisconnect):
            metrics.disconnects.inc()
            await answer.fail(ApiError(CLIENT_CLOSED_REQUEST, "The client closed its connection."))
        except Exception:
            logger.exception("request %s failed", request_id_of(scope))
            await self._fail(answer, internal("The gateway failed to serve the request."))
        finally:
            metrics.request_s.observe(time.perf_counter() - started_s)

    async def _fail(self, answer: _Answer, error: ApiError) -> None:
        """Whoever may come again is told whether this time has cost anything."""
        if answer.begun:
            self._gateway.metrics.stream_errors.labels(error.status).inc()
        if error.is_about_load and error.gpu_time_spent is None:
            error.gpu_time_spent = any(dispatch.gpu_time_spent for dispatch in answer.dispatches)
        await answer.fail(error)

    async def _generate(self, call: _Call, body: bytes, answer: _Answer) -> None:
        gateway = self._gateway
        request = parse_request(self._api.request_type, parse_object(body))
        told = Position.known(call.last_event_id, request)
        job = await self._prepare(request, call, told)
        trail = Trail(job, told) if is_resumable(request) else None
        gateway.admission.check_engines(reachable(gateway.dispatcher.client, call.rank))
        gateway.metrics.prompt_tokens.inc(sum(map(len, job.prompts)))
        options = request.stream_options or StreamOptions()
        usage = UsageOptions(at_end=options.include_usage, in_each_chunk=options.continuous_usage_stats)
        renderer = self._api.renderer(job, gateway.model.model_id, gateway.model.tokenizer, usage)
        patience = call.patience
        dispatch = functools.partial(
            gateway.dispatcher.dispatch,
            rank=call.rank,
            session_id=call.session_id,
            deadline_s=patience.deadline_s,
            is_clients_deadline=patience.is_clients,
        )
        answer.dispatches = [dispatch(each) for each in job.sequences]
        choices = [self._choice(job, index, dispatch, call, trail) for index, dispatch in enumerate(answer.dispatches)]
        async with aclosing(merge(choices)) as steps:
            if request.stream:
                await _write_events(answer, renderer, steps, answer.dispatches, trail)
            else:
                await _write_whole(answer, renderer, steps, answer.dispatches)

    async def _prepare(self, request: RequestT, call: _Call, told: Position | None) -> Job:
        """As it was, where the client knows a part of the answer."""
        if told is None:
            return await self._api.prepare(request, call.request_id)
        self._gateway.metrics.resumed.inc()
        job = await self._api.prepare(request.model_copy(update={"seed": told.seed}), told.request_id)
        return dataclasses.replace(job, created=told.created)

    async def _choice(
        self, job: Job, index: int, dispatch: Dispatch, call: _Call, trail: Trail | None
    ) -> AsyncGenerator[Delta, None]:
        """What the engines generate for one choice, as text."""
        model, metrics, sequence = self._gateway.model, self._gateway.metrics, job.sequences[index]
        text = SequenceText(model.tokenizer, sequence.prompt_token_ids, job.sampling)
        retelling = None if trail is None else trail.retelling(index)
        pace = _Pace(metrics, call, sequence.arrival_s)
        try:
            async with aclosing(dispatch.outputs()) as outputs:
                async for output in outputs:
                    for part in (output,) if retelling is None else retelling.cut(output):
                        delta = text.push(part)
                        pace.note(delta, output.scheduled_s)
                        yield delta if retelling is None else retelling.marked(delta, part)
                        if delta.finish_reason is not None:
                            metrics.finished.labels(model.model_id, delta.finish_reason).inc()
                            return
        finally:
            metrics.generation_tokens.inc(pace.num_tokens)


class _Pace:
    """When the tokens of one choice came."""

    def __init__(self, metrics: GatewayMetrics, call: _Call, arrival_s: float) -> None:
        self.num_tokens = 0
        self._metrics = metrics
        self._call = call
        self._arrival_s = arrival_s
        self._last_s = 0.0

    def note(self, delta: Delta, scheduled_s: float) -> None:
        now_s = time.perf_counter()
        if not self._last_s:
            self._call.patience.first_token()
            self._metrics.first_token_s.observe(now_s - self._call.started_s)
            self._metrics.queue_s.observe(max(0.0, scheduled_s - self._arrival_s))
        elif delta.num_tokens:
            self._metrics.inter_token_s.observe((now_s - self._last_s) / delta.num_tokens)
        self._last_s = now_s
        self.num_tokens += delta.num_tokens


async def _write_events(
    answer: _Answer, renderer: Renderer, steps: Steps, dispatches: Sequence[Dispatch], trail: Trail | None
) -> None:
    event = renderer.event if trail is None else functools.partial(trail.event, renderer)
    async for step in steps:
        events = b"".join([event(index, delta) for index, delta in step])
        if not answer.begun and (events or trail is None):  # before there is news the answer may still be a 409
            await answer.begin(STREAM_HEADERS | _path_header([dispatches[step[0][0]]]))
        if events:
            await answer.write(events)
    if not answer.begun:  # the client had it all, but for the end
        await answer.begin(STREAM_HEADERS | _path_header(dispatches))
    await answer.write(renderer.end(), more=False)


async def _write_whole(answer: _Answer, renderer: Renderer, steps: Steps, dispatches: Sequence[Dispatch]) -> None:
    choices: list[list[Delta]] = [[] for _ in dispatches]
    async for step in steps:
        for index, delta in step:
            choices[index].append(delta)
    body = renderer.whole(choices)
    length = {"content-length": str(len(body))}
    await answer.begin(JSON_HEADERS | length | _path_header(dispatches))
    await answer.write(body, more=False)


def _path_header(dispatches: Iterable[Dispatch]) -> dict[str, str]:
    """Choices of one request may go different ways: all are named."""
    return {"x-baton-path": ", ".join(dict.fromkeys(dispatch.way for dispatch in dispatches))}


class _Answer:
    """The HTTP response of one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.dispatches: Sequence[Dispatch] = ()  # of its choices

    async def begin(self, headers: dict[str, str], status: int = 200) -> None:
        self.begun = True
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def fail(self, error: ApiError) -> None:
        """Ends the response: with the error's status where none is sent yet, else with a last event and no `[DONE]`."""
        body = error.body()
        if self.begun:
            await self.write(b"data: " + body + b"\n\n", more=False)
            return
        length = {"content-length": str(len(body))}
        await self.begin(JSON_HEADERS | length | error.headers, error.status)
        await self.write(body, more=False)
