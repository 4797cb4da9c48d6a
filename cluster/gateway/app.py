"""The gateway's HTTP application."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.cluster.contracts import EngineClient, LoadBalancing
from baton.cluster.process_metrics import collect, merge

from .admin import NoOperator, Operator, add_admin_routes
from .api.anthropic_answer import MessagesRenderer
from .api.body_reader import RequestKind
from .api.body_service import BodyService
from .api.chat import ChatRenderer
from .api.completions import CompletionRenderer
from .api.endpoints import GenerationEndpoint, TokenEndpoint
from .api.responses import ResponsesRenderer
from .api.services import GatewayServices
from .api_keys import ApiKeys
from .errors import ANTHROPIC_ROUTE, ApiError, excerpt
from .metrics import GatewayMetrics
from .middleware import FAILURE, Drain, RequestMiddleware, error_response
from .model import ServedModel
from .openapi import add_description_routes
from .routes import READ, Scrape, add_model_routes, add_probe_routes, add_request_route, add_state_routes
from .serving.context import ServingContext
from .settings import GatewaySettings
from .tracing import RequestSpans
from .web_page import add_page_routes

EXPOSED_HEADERS = ["x-request-id", "request-id", "x-baton-path", "retry-after"]  # readable by scripts on web pages
# Routes for clients, named in 404 responses; routes for operators are only in the documentation.
CLIENT_ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", ANTHROPIC_ROUTE, "/v1/models"),
    *("/tokenize", "/detokenize"),
)


@dataclass(frozen=True)
class ApplicationAccess:
    """A gateway's access to the rest of its application. The defaults are those of a gateway on its own."""

    scrape: Scrape | None = None  # metrics of all processes, or of those on this node; None: only this gateway's
    operator: Operator = field(default_factory=NoOperator)  # serves keys with the right `admin`
    load_balancing: LoadBalancing = LoadBalancing.INTERNAL  # as shown to operators
    scales_from_zero: bool = False  # engines start with the first request, so the gateway is ready without any


def create_app(
    client: EngineClient,
    model: ServedModel,
    settings: GatewaySettings,
    drain: Drain | None = None,
    metrics: GatewayMetrics | None = None,
    bodies: BodyService | None = None,
    *,
    spans: RequestSpans | None = None,
    application: ApplicationAccess = ApplicationAccess(),
) -> FastAPI:
    """Return the HTTP application for one model. It needs no lifespan events and does not close `client`.

    `drain` lets the caller announce that the gateway leaves, `metrics` can be read without HTTP, `bodies` starts and
    stops the processes that read large bodies, and `spans` records finished requests. Raises `InvalidKeys`.
    """
    keys = ApiKeys(settings)
    drain = drain or Drain()
    metrics = metrics or GatewayMetrics(model.model_id, client.engines, client.counters)
    serving = ServingContext(client, settings, metrics, scales_from_zero=application.scales_from_zero)
    bodies = bodies or BodyService(model, settings, metrics)
    gateway = GatewayServices(model, metrics, serving, bodies, spans)

    # A redirect would name the scheme and host of this gateway; behind a balancer, clients use others.
    app = FastAPI(title="Baton", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    endpoints = _endpoints(gateway)
    for path, endpoint in endpoints.items():
        app.router.routes.append(Route(path, endpoint, methods=["POST"]))
    add_model_routes(app, model)
    add_probe_routes(app, serving, application.scrape or _only(metrics), drain)
    apis = [path for path, endpoint in endpoints.items() if isinstance(endpoint, GenerationEndpoint)]
    add_state_routes(app, model, serving, application.load_balancing, apis)
    add_request_route(app, gateway.recent)
    add_admin_routes(app, gateway, application.operator)
    add_description_routes(app, model.model_id)
    add_page_routes(app, lambda: serving.settings.page)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    paths = {route.path for route in app.router.routes if isinstance(route, Route)}
    app.add_middleware(RequestMiddleware, metrics=metrics, keys=keys, routes=paths, drain=drain)
    # Outermost, so that web pages can read refusals, too, and because preflight requests carry no key.
    app.add_middleware(OriginsMiddleware, allowed=lambda: serving.settings.allowed_origins)
    app.state.parts = _Parts(keys, bodies, serving)
    return app


def _endpoints(gateway: GatewayServices) -> dict[str, ASGIApp]:
    """Return the application of each route that generates or counts tokens, by its path."""
    return {
        "/v1/completions": GenerationEndpoint(gateway, RequestKind.COMPLETION, CompletionRenderer),
        "/v1/chat/completions": GenerationEndpoint(gateway, RequestKind.CHAT, ChatRenderer),
        "/v1/responses": GenerationEndpoint(gateway, RequestKind.RESPONSE, ResponsesRenderer),
        ANTHROPIC_ROUTE: GenerationEndpoint(gateway, RequestKind.MESSAGES, MessagesRenderer),
        f"{ANTHROPIC_ROUTE}/count_tokens": TokenEndpoint(gateway, RequestKind.COUNT_TOKENS),
        "/v1/responses/input_tokens": TokenEndpoint(gateway, RequestKind.INPUT_TOKENS),
        "/tokenize": TokenEndpoint(gateway, RequestKind.TOKENIZE),
        "/detokenize": TokenEndpoint(gateway, RequestKind.DETOKENIZE),
    }


@dataclass(frozen=True)
class _Parts:
    """The parts of an application that a change of settings reaches."""

    keys: ApiKeys
    bodies: BodyService
    serving: ServingContext


def reconfigure_app(app: FastAPI, settings: GatewaySettings) -> None:
    """Apply other settings, all at once: nothing else runs on the event loop meanwhile.

    A request that has begun keeps what was decided at its beginning: its deadlines, its admission, its caller, the size
    limit of its body. Its later decisions follow the new settings: the choice of engines, waits for one, retries.

    Only `body_processes` cannot be changed here. Raises `InvalidKeys`; then nothing has changed.
    """
    parts: _Parts = app.state.parts
    parts.keys.reconfigure(settings)
    parts.bodies.reconfigure(settings)
    parts.serving.reconfigure(settings)


class OriginsMiddleware:
    """CORS for the presently allowed origins; if there are none, requests pass unchanged."""

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


def _only(metrics: GatewayMetrics) -> Scrape:
    async def render(of_node: bool, *, names: Collection[str] = (), max_age_s: float = 0.0) -> bytes:
        return merge([collect(metrics.registry, names=names)])

    return render


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope[FAILURE] = error
    return error_response(error, request.scope)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer the framework's errors in the same JSON as all others."""
    assert isinstance(error, HTTPException)
    there = f"There are {', '.join(CLIENT_ROUTES)}."
    allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
    not_allowed = f"{request.method} is not allowed here; allowed: {allowed}."
    if asking_page := request.headers.get("origin") if request.method == "OPTIONS" else None:
        not_allowed += (
            f" For web pages of {excerpt(asking_page)} put that into gateway.allowed_origins (--allowed-origin)."
        )
    messages = {404: f"There is no {excerpt(request.scope['path'])} here. {there}", 405: not_allowed}
    message = messages.get(error.status_code, str(error.detail))
    return await _answer_error(request, ApiError(error.status_code, message, headers=error.headers))
