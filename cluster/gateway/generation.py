"""The two generating endpoints: read, prepare, dispatch, write.

Nothing is written before the first token is there, so everything that can go wrong until then has an HTTP status, and
the headers can say which way the request went. What goes wrong later becomes an event in the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from .assembly import Delta, SequenceText
from .body import parse_object, read_body
from .dispatcher import Dispatch, Dispatcher
from .edge import request_id_of
from .errors import CLIENT_CLOSED_REQUEST, ApiError, draining, internal, timed_out, too_many_requests
from .metrics import GatewayMetrics
from .model import ServedModel
from .prepare import Job
from .protocol import GenerationRequest, StreamOptions, parse_request
from .ranks import PIN_HEADER, pinned_rank
from .render import Renderer, UsageOptions
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


class Gateway:
    """What every request needs, and how many there are."""

    def __init__(
        self, model: ServedModel, settings: GatewaySettings, metrics: GatewayMetrics, dispatcher: Dispatcher
    ) -> None:
        self.model = model
        self.settings = settings
        self.metrics = metrics
        self.dispatcher = dispatcher
        self.inflight = 0


@dataclass(frozen=True)
class _Place:
    """What a client wishes of the engines that serve it."""

    rank: int | None
    session_id: str | None


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
        gateway, answer = self._gateway, _Answer(send)
        limits, metrics = gateway.settings, gateway.metrics
        if gateway.inflight >= limits.max_inflight_requests:
            raise too_many_requests(limits.max_inflight_requests)
        gateway.inflight += 1
        metrics.inflight.set(gateway.inflight)
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(limits.request_timeout_s):
                http = Request(scope, receive)
                body = await read_body(http, limits.max_body_bytes)
                place = _Place(
                    pinned_rank(http.headers.get(PIN_HEADER), gateway.dispatcher.client),
                    session_id_of(http.headers.get(SESSION_HEADER)),
                )
                await until_gone(receive, self._generate(request_id_of(scope), body, place, answer, started_s))
        except ApiError as error:
            await self._fail(answer, error)
        except TimeoutError:
            await self._fail(answer, timed_out(limits.request_timeout_s))
        except asyncio.CancelledError:  # the server ends, and has waited long enough: the last word is ours
            await self._fail(answer, draining())
        except (ClientGone, ClientDisconnect):
            metrics.disconnects.inc()
            await answer.fail(ApiError(CLIENT_CLOSED_REQUEST, "The client closed its connection."))
        except Exception:
            logger.exception("request %s failed", request_id_of(scope))
            await self._fail(answer, internal("The gateway failed to serve the request."))
        finally:
            gateway.inflight -= 1
            metrics.inflight.set(gateway.inflight)
            metrics.request_s.observe(time.perf_counter() - started_s)

    async def _fail(self, answer: _Answer, error: ApiError) -> None:
        if answer.begun:
            self._gateway.metrics.stream_errors.labels(error.status).inc()
        await answer.fail(error)

    async def _generate(self, request_id: str, body: bytes, place: _Place, answer: _Answer, started_s: float) -> None:
        gateway = self._gateway
        request = parse_request(self._api.request_type, parse_object(body))
        job = await self._api.prepare(request, request_id)
        gateway.metrics.prompt_tokens.inc(sum(map(len, job.prompts)))
        options = request.stream_options or StreamOptions()
        usage = UsageOptions(at_end=options.include_usage, in_each_chunk=options.continuous_usage_stats)
        renderer = self._api.renderer(job, gateway.model.model_id, gateway.model.tokenizer, usage)
        dispatch = gateway.dispatcher.dispatch
        dispatches = [dispatch(each, rank=place.rank, session_id=place.session_id) for each in job.sequences]
        choices = [self._choice(job, index, dispatch, started_s) for index, dispatch in enumerate(dispatches)]
        async with aclosing(merge(choices)) as steps:
            write = _write_events if request.stream else _write_whole
            await write(answer, renderer, steps, dispatches)

    async def _choice(self, job: Job, index: int, dispatch: Dispatch, started_s: float) -> AsyncGenerator[Delta, None]:
        """What the engines generate for one choice, as text."""
        model, metrics = self._gateway.model, self._gateway.metrics
        text = SequenceText(model.tokenizer, job.sequences[index].prompt_token_ids, job.sampling)
        last_s, num_tokens = 0.0, 0
        try:
            async with aclosing(dispatch.outputs()) as outputs:
                async for output in outputs:
                    delta = text.push(output)
                    now_s = time.perf_counter()
                    if not last_s:
                        metrics.first_token_s.observe(now_s - started_s)
                        metrics.queue_s.observe(max(0.0, output.scheduled_s - job.sequences[index].arrival_s))
                    elif delta.num_tokens:
                        metrics.inter_token_s.observe((now_s - last_s) / delta.num_tokens)
                    last_s = now_s
                    num_tokens += delta.num_tokens
                    yield delta
                    if delta.finish_reason is not None:
                        metrics.finished.labels(model.model_id, delta.finish_reason).inc()
                        return
        finally:
            metrics.generation_tokens.inc(num_tokens)


async def _write_events(answer: _Answer, renderer: Renderer, steps: Steps, dispatches: Sequence[Dispatch]) -> None:
    async for step in steps:
        if not answer.begun:
            await answer.begin(STREAM_HEADERS | _path_header([dispatches[step[0][0]]]))
        if events := b"".join([renderer.event(index, delta) for index, delta in step]):
            await answer.write(events)
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
    paths = dict.fromkeys(f"{dispatch.path}; reason={dispatch.reason}" for dispatch in dispatches)
    return {"x-baton-path": ", ".join(paths)}


class _Answer:
    """The HTTP response of one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

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
