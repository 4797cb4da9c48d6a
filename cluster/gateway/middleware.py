"""Middleware around every HTTP exchange: request id, API key, response count, last-resort errors, and draining."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection, Iterator, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.cluster import logs

from .api_keys import ApiKeys, Caller
from .errors import CLIENT_CLOSED_REQUEST, ApiError, excerpt, internal, invalid_api_key, is_anthropic
from .metrics import GatewayMetrics

logger = logging.getLogger(__name__)

SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
OPEN_PATHS = (  # health probes, scrapers and readers of the documentation send no key
    *("/health", "/live", "/metrics", "/ping"),
    *("/version", "/openapi.json", "/docs", "/"),
)
PAGE_FILES = "/page/"  # prefix of the page's files, which reveal nothing about the fleet: they need no key either
REQUEST_ID = "baton.request_id"  # keys in the ASGI scope
CALLER = "baton.caller"
FAILURE = "baton.failure"  # the error that was sent
REFUSED = "baton.refused"  # status that the HTTP server sent by itself, because a body did not arrive


def is_open(path: str) -> bool:
    """Return whether a request for this path needs no API key."""
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)


def request_id_of(scope: Scope) -> str:
    """Return the client's `x-request-id`, or else the generated one."""
    return scope[REQUEST_ID]


def error_body(error: ApiError, scope: Scope) -> bytes:
    """Return an error in the form of the API that the request's route belongs to."""
    return error.body_at(scope["path"], request_id_of(scope))


def error_response(error: ApiError, scope: Scope) -> Response:
    return Response(error_body(error, scope), error.status, error.headers, "application/json")


def caller_of(scope: Scope) -> Caller:
    """Return the caller to whom the request's API key belongs."""
    return scope[CALLER]


class Drain:
    """SERVING ──begin──> DRAINING

    While a gateway drains, `/health` answers 503 and every response closes its connection, but requests are served as
    before, because a balancer sends some until its next health check. Afterwards the HTTP server closes the port.
    """

    def __init__(self) -> None:
        self.has_begun = False

    def begin(self) -> None:
        """Begin to drain. Calling this again changes nothing."""
        self.has_begun = True


class RequestMiddleware:
    """ASGI middleware around each request. Streams pass through unchanged."""

    def __init__(
        self, app: ASGIApp, *, metrics: GatewayMetrics, keys: ApiKeys, routes: Collection[str], drain: Drain
    ) -> None:
        self._app = app
        self._drain = drain
        self._metrics = metrics
        self._routes = frozenset(routes)  # paths with their own label in metrics; all others count as "other"
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scope[REQUEST_ID] = request_id = _request_id(headers)
        logs.request_id.set(request_id)
        status, began_s = 0, time.monotonic()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                marks = [(b"x-request-id", request_id.encode())]
                if is_anthropic(scope["path"]):
                    marks.append((b"request-id", request_id.encode()))
                if self._drain.has_begun:  # the client must not reuse this connection
                    marks.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *marks]
            await send(message)

        try:
            scope[CALLER] = self._authenticate(scope["path"], headers)
            await self._app(scope, receive, send_marked)
        except ApiError as error:
            scope[FAILURE] = error
            await error_response(error, scope)(scope, receive, send_marked)
        except ClientDisconnect:
            status = status or CLIENT_CLOSED_REQUEST
        except Exception:
            if status:
                raise  # too late for an error status: the server closes the connection and logs the exception
            logger.exception("a fault of the gateway")
            scope[FAILURE] = fault = internal("The gateway failed to serve the request.")
            await error_response(fault, scope)(scope, receive, send_marked)
        finally:
            status = scope.get(REFUSED, status)
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._metrics.responses.labels(route, status).inc()
            if not is_open(scope["path"]):  # failing probes would fill the log: balancers repeat them every second
                log_failure(scope, status, time.monotonic() - began_s)

    def _authenticate(self, path: str, headers: dict[bytes, bytes]) -> Caller:
        if self._keys.is_open or is_open(path):
            return self._keys.anonymous
        for key in _keys_in(headers):
            if (caller := self._keys.caller(key)) is not None:
                return caller
        raise invalid_api_key()


def _keys_in(headers: Mapping[bytes, bytes]) -> Iterator[bytes]:
    """Yield a request's API keys, in the headers that OpenAI's or Anthropic's clients send."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        yield key.strip()
    if key := headers.get(b"x-api-key", b"").strip():
        yield key


def log_failure(scope: Scope, status: int, took_s: float) -> None:
    """Log a line if the request failed, before or after its response had begun."""
    error: ApiError | None = scope.get(FAILURE)
    if status == CLIENT_CLOSED_REQUEST:
        what, level = "was given up by its client", logging.INFO
    elif status >= 400:
        code = f" {error.code}" if error is not None and error.code else ""
        what, level = f"failed with {status}{code}", logging.WARNING if status >= 500 else logging.INFO
    elif error is not None:
        what, level = f"failed in its answer with {error.status}", logging.WARNING
    else:
        return
    why = f": {error.message}" if error is not None else ""
    why += f" ({error.detail})" if error is not None and error.detail else ""
    logger.log(level, "%s %s %s after %.2f s%s", scope["method"], excerpt(scope["path"]), what, took_s, why)


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if SANE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
