"""Routes that do not generate: the model, health, metrics, and the application's state."""

from __future__ import annotations

import importlib.metadata
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from baton.cluster.contracts import LoadBalancing

from .errors import bad_request, draining, excerpt, model_not_found, no_capacity, unknown_request
from .middleware import Drain, caller_of
from .model import ServedModel
from .routing.ranks import rank_table
from .serving.context import ServingContext
from .serving.recent_requests import MOST_REQUESTS, EndedRequest, RecentRequests

PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SCOPES = ("application", "node")  # of the metrics in an answer
FAMILIES = "name[]"  # query parameter of Prometheus' clients; may be repeated
AGE_HEADER = "cache-control"  # request header: RFC 9111, section 5.2.1.1
MAX_AGE = re.compile(r"\bmax-age=([0-9]{1,9})\b")
HEALTH_RETRY_S = 1.0
READ = ["GET", "HEAD"]
VERSION = importlib.metadata.version("baton")


class ModelCard(msgspec.Struct):
    """The application's only model."""

    id: str
    created: int
    max_model_len: int  # tokens of prompt and answer together
    object: Literal["model"] = "model"
    owned_by: Literal["baton"] = "baton"


class ModelCards(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class Live(msgspec.Struct):
    status: Literal["alive"] = "alive"


class Ready(msgspec.Struct):
    engines: int  # number that this gateway reaches
    status: Literal["ready"] = "ready"


class Version(msgspec.Struct):
    version: str


class ServerLoad(msgspec.Struct):
    server_load: int  # generating requests in progress in this gateway


class ServerInfo(msgspec.Struct):
    """The served model, and its engines."""

    model: str
    max_model_len: int
    version: str
    load_balancing: LoadBalancing
    engines: dict[str, int]  # role -> number of engines that this gateway reaches
    apis: list[str]  # the routes that generate
    is_admin: bool  # the request's API key has the right `admin`


class RankTable(msgspec.Struct):
    """All engines and gateways of the application, with their newest statistics."""

    object: Literal["list"]
    gateway: str
    data: list[dict[str, Any]]
    gateways: list[dict[str, Any]]
    starting: list[dict[str, str]]


def add_model_routes(app: FastAPI, model: ServedModel) -> None:
    card = ModelCard(model.model_id, model.created, model.max_model_len)

    @app.api_route("/v1/models", methods=READ)
    async def list_models() -> Response:
        return _json(ModelCards([card]))

    @app.api_route("/v1/models/{model_id:path}", methods=READ)  # ids such as `org/name` have slashes
    async def get_model(model_id: str) -> Response:
        if not model_id:
            raise HTTPException(404)
        if model_id != model.model_id:
            raise model_not_found(model_id, model.model_id)
        return _json(card)

    @app.api_route("/tokenizer_info", methods=READ)
    async def tokenizer_info() -> Response:
        """Return what evaluation harnesses need that tokenize with this server, in the same form as vLLM."""
        tokens = {"bos_token": None, "eos_token": None, "pad_token": None} | model.tokenizer.special_tokens
        template = {"chat_template": model.tokenizer.chat_template_source}
        return _json({**tokens, **template, "model_max_length": model.max_model_len})


class Scrape(Protocol):
    """Returns metrics in Prometheus' text format: of the families in `names`, or of all; at most `max_age_s` old."""

    async def __call__(self, of_node: bool, *, names: Collection[str] = (), max_age_s: float = 0.0) -> bytes: ...


def add_probe_routes(app: FastAPI, serving: ServingContext, scrape: Scrape, drain: Drain) -> None:
    @app.api_route("/live", methods=READ)
    async def live() -> Response:
        return _json(Live())

    @app.api_route("/health", methods=READ)
    @app.api_route("/ping", methods=[*READ, "POST"])  # the same route under SageMaker's name
    async def health() -> Response:
        if drain.has_begun:
            raise draining()
        if not serving.is_ready():
            raise no_capacity("No engine is ready that can serve a request.", HEALTH_RETRY_S)
        return _json(Ready(len(serving.client.engines())))

    @app.api_route("/metrics", methods=READ)
    async def prometheus(request: Request) -> Response:
        scope = request.query_params.get("scope", SCOPES[0])
        if scope not in SCOPES:
            raise bad_request("scope", f"scope is {' or '.join(SCOPES)}, not {excerpt(scope)}.")
        names = frozenset(request.query_params.getlist(FAMILIES))
        text = await scrape(scope == "node", names=names, max_age_s=max_age_s(request))
        return Response(text, media_type=PROMETHEUS_TYPE)


class EndedRequests(msgspec.Struct):
    data: list[EndedRequest]  # the newest first
    object: Literal["list"] = "list"


def add_request_route(app: FastAPI, recent: RecentRequests) -> None:
    @app.api_route("/v1/cluster/requests/{request_id}", methods=READ)
    async def ended_request(request: Request, request_id: str) -> Response:
        caller = caller_of(request.scope)
        if not (found := recent.find(request_id, caller.key, sees_all=caller.is_admin)):
            raise unknown_request(
                f"No request with the id {excerpt(request_id)} and this API key is among the last {MOST_REQUESTS} that "
                "have ended in this gateway."
            )
        return _json(EndedRequests(found))


def add_state_routes(
    app: FastAPI,
    model: ServedModel,
    serving: ServingContext,
    load_balancing: LoadBalancing,
    apis: list[str],
) -> None:
    @app.api_route("/version", methods=READ)
    async def version_of_server() -> Response:
        return _json(Version(VERSION))

    @app.api_route("/load", methods=READ)
    async def load() -> Response:
        return _json(ServerLoad(serving.admission.num_inflight))

    @app.api_route("/server_info", methods=READ)
    async def server_info(request: Request) -> Response:
        engines = dict(Counter(view.record.role.value for view in serving.client.engines()))
        is_admin = caller_of(request.scope).is_admin
        return _json(ServerInfo(model.model_id, model.max_model_len, VERSION, load_balancing, engines, apis, is_admin))

    table = SharedAnswer(
        lambda: msgspec.json.encode(rank_table(serving.settings.gateway_id, serving.client, serving.breakers))
    )

    @app.api_route("/v1/cluster/ranks", methods=READ)
    async def ranks(request: Request) -> Response:
        return Response(table.body(max_age_s(request)), media_type="application/json")


class SharedAnswer:
    """The newest body of a route, shared by all clients that accept its age."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made_s = -math.inf
        self._body = b""

    def body(self, age_s: float) -> bytes:
        """Return a body that was made at most `age_s` ago."""
        now_s = time.monotonic()
        if now_s - self._made_s >= age_s:
            self._made_s, self._body = now_s, self._make()
        return self._body


def max_age_s(request: Request) -> float:
    """Return the age in seconds that the client accepts for an answer: 0, unless its headers allow more."""
    found = MAX_AGE.search(request.headers.get(AGE_HEADER, ""))
    return float(found[1]) if found else 0.0


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
