"""The gateway's HTTP application."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.cluster.contracts import EngineClient

from .api.body_reader import RequestKind
from .api.body_service import BodyService
from .api.chat import ChatRenderer
from .api.completions import CompletionRenderer
from .api.endpoints import GatewayServices, GenerationEndpoint, TokenEndpoint
from .api.responses import ResponsesRenderer
from .api_keys import ApiKeys
from .errors import ApiError, bad_request, draining, excerpt, model_not_found, no_capacity
from .metrics import GatewayMetrics
from .middleware import FAILURE, Drain, RequestMiddleware
from .model import ServedModel
from .routing.breaker import Breakers
from .routing.ranks import rank_table
from .routing.rates import LearntRates
from .routing.router import Router
from .serving.admission import AdmissionControl
from .serving.context import ServingContext
from .settings import GatewaySettings
from .tracing import RequestSpans

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SCOPES = ("application", "node")  # of the metrics in an answer
HEALTH_RETRY_S = 1.0
READ = ["GET", "HEAD"]
EXPOSED_HEADERS = ["x-request-id", "x-baton-path", "retry-after"]  # readable by scripts of web pages
# Routes for clients, named in 404 responses; those for operators are in the documentation.
CLIENT_ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize", "/detokenize")


def create_app(
    client: EngineClient,
    model: ServedModel,
    settings: GatewaySettings,
    drain: Drain | None = None,
    metrics: GatewayMetrics | None = None,
    bodies: BodyService | None = None,
    *,
    scrape: Callable[[bool], Awaitable[bytes]] | None = None,
    spans: RequestSpans | None = None,
    scales_from_zero: bool = False,
) -> FastAPI:
    """Return the HTTP application for one model. It needs no lifespan events and does not close `client`.

    `drain` lets its owner announce that the gateway leaves, `metrics` can be read without HTTP, `bodies` starts and
    stops the processes that read large bodies, and finished requests are recorded in `spans`. `scrape` returns the
    metrics of all processes, or those of this node's share; without it this gateway shows its own alone. With
    `scales_from_zero` the application is ready without engines, which start with the first request.

    Raises `InvalidKeys`.
    """
    keys = ApiKeys(settings)
    drain = drain or Drain()
    metrics = metrics or GatewayMetrics(model.model_id, client.engines, client.counters)
    rates = LearntRates(settings.cost, time.monotonic)
    router = Router(
        settings.gateway_id,
        rates=rates,
        session_patience_s=settings.session_patience_s,
        local_prefill_max_tokens=settings.local_prefill_max_tokens,
    )
    admission = AdmissionControl(settings, rates, time.monotonic)
    breakers = Breakers(settings.breaker, time.monotonic, metrics.circuit_opened)
    serving = ServingContext(client, router, settings, metrics, admission, breakers, scales_from_zero=scales_from_zero)
    bodies = bodies or BodyService(model, settings, metrics)
    gateway = GatewayServices(model, metrics, admission, serving, bodies, spans)

    # A redirect would hold the scheme and host of this gateway, which differ from the client's behind a balancer.
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    endpoints: dict[str, ASGIApp] = {
        "/v1/completions": GenerationEndpoint(gateway, RequestKind.COMPLETION, CompletionRenderer),
        "/v1/chat/completions": GenerationEndpoint(gateway, RequestKind.CHAT, ChatRenderer),
        "/v1/responses": GenerationEndpoint(gateway, RequestKind.RESPONSE, ResponsesRenderer),
        "/tokenize": TokenEndpoint(gateway, RequestKind.TOKENIZE),
        "/detokenize": TokenEndpoint(gateway, RequestKind.DETOKENIZE),
    }
    for path, endpoint in endpoints.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    _add_model_routes(app, model)
    _add_token_routes(app, model)
    _add_operator_routes(app, settings.gateway_id, serving, scrape or _only(metrics), drain)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    paths = {route.path for route in app.router.routes if isinstance(route, Route)}
    app.add_middleware(RequestMiddleware, metrics=metrics, keys=keys, routes=paths, drain=drain)
    # Outermost: pages may read refusals, too, and preflight requests carry no key.
    app.add_middleware(OriginsMiddleware, allowed=lambda: serving.settings.allowed_origins)
    app.state.parts = _Parts(keys, bodies, serving)
    return app


@dataclass(frozen=True)
class _Parts:
    """The parts of an application that follow a change of settings."""

    keys: ApiKeys
    bodies: BodyService
    serving: ServingContext


def reconfigure_app(app: FastAPI, settings: GatewaySettings) -> None:
    """Make other settings hold, all of them at once: nothing else runs on the event loop meanwhile.

    A request that has begun keeps what was decided at its beginning: its deadlines, its admission, its caller, the size
    of its body. What it decides later follows the new settings: engines, waits for one, further attempts.

    `body_processes` is the only one that changes nothing here. Raises `InvalidKeys`; then nothing has changed.
    """
    parts: _Parts = app.state.parts
    parts.keys.reconfigure(settings)
    parts.bodies.reconfigure(settings)
    parts.serving.reconfigure(settings)


class OriginsMiddleware:
    """CORS for the origins that are allowed now; without any, requests pass unchanged."""

    def __init__(self, app: ASGIApp, *, allowed: Callable[[], list[str]]) -> None:
        self._app, self._allowed = app, allowed
        self._origins: list[str] = []
        self._current = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._origins != (origins := self._allowed()):
            self._origins, self._current = origins, self._answering(origins)
        await self._current(scope, receive, send)

    def _answering(self, origins: list[str]) -> ASGIApp:
        if not origins:
            return self._app
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=[*READ, "POST"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )


def _add_model_routes(app: FastAPI, model: ServedModel) -> None:
    card = {
        "id": model.model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "baton",
        "max_model_len": model.max_model_len,
    }

    @app.api_route("/v1/models", methods=READ)
    async def list_models() -> Response:
        return _json({"object": "list", "data": [card]})

    @app.api_route("/v1/models/{model_id:path}", methods=READ)  # ids such as `org/name` have slashes
    async def get_model(model_id: str) -> Response:
        if not model_id:
            raise HTTPException(404)
        if model_id != model.model_id:
            raise model_not_found(model_id, model.model_id)
        return _json(card)


def _add_token_routes(app: FastAPI, model: ServedModel) -> None:
    @app.api_route("/tokenizer_info", methods=READ)
    async def tokenizer_info() -> Response:
        """Return what evaluation harnesses need that tokenize with this server, as vLLM does."""
        tokens = {"bos_token": None, "eos_token": None, "pad_token": None} | model.tokenizer.special_tokens
        template = {"chat_template": model.tokenizer.chat_template_source}
        return _json({**tokens, **template, "model_max_length": model.max_model_len})


def _add_operator_routes(
    app: FastAPI,
    gateway_id: str,
    serving: ServingContext,
    scrape: Callable[[bool], Awaitable[bytes]],
    drain: Drain,
) -> None:
    @app.api_route("/live", methods=READ)
    async def live() -> Response:
        return _json({"status": "alive"})

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        if drain.has_begun:
            raise draining()
        if not serving.is_ready():
            raise no_capacity("No engine is ready that can serve a request.", HEALTH_RETRY_S)
        return _json({"status": "ready", "engines": len(serving.client.engines())})

    @app.api_route("/metrics", methods=READ)
    async def prometheus(request: Request) -> Response:
        scope = request.query_params.get("scope", SCOPES[0])
        if scope not in SCOPES:
            raise bad_request("scope", f"scope is {' or '.join(SCOPES)}, not {excerpt(scope)}.")
        return Response(await scrape(scope == "node"), media_type=PROMETHEUS_TYPE)

    @app.api_route("/v1/cluster/ranks", methods=READ)
    async def ranks() -> Response:
        return _json(rank_table(gateway_id, serving.client, serving.breakers))


def _only(metrics: GatewayMetrics) -> Callable[[bool], Awaitable[bytes]]:
    async def render(of_node: bool) -> bytes:
        return metrics.render()

    return render


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope[FAILURE] = error
    return error.response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer errors that the framework raises in the same JSON as all others."""
    assert isinstance(error, HTTPException)
    there = f"There are {', '.join(CLIENT_ROUTES)}."
    not_allowed = f"{request.method} is not allowed here."
    if asking_page := request.headers.get("origin") if request.method == "OPTIONS" else None:
        not_allowed += (
            f" For web pages of {excerpt(asking_page)} put that into gateway.allowed_origins (--allowed-origin)."
        )
    messages = {404: f"There is no {excerpt(request.scope['path'])} here. {there}", 405: not_allowed}
    message = messages.get(error.status_code, str(error.detail))
    return await _answer_error(request, ApiError(error.status_code, message, headers=error.headers))
