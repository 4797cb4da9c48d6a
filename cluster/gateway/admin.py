"""Routes for operators, whose API key needs the right `admin`: drain engines, abort requests, record traces.

POST /v1/admin/drain, /v1/admin/abort, /start_profile, /stop_profile ──> Operator ──> directory ──> engines
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from baton.cluster.contracts import EngineTrace

from .api.json_body import parse_object
from .api.parsing import parse_request
from .api.services import GatewayServices
from .api.validators import Integer, RequestModel
from .bodies.body import read_body
from .errors import ApiError, excerpt, no_directory, not_admin, unknown_request
from .middleware import caller_of

MAX_BODY_BYTES = 4096
RequestT = TypeVar("RequestT", bound=RequestModel)


class Operator(Protocol):
    """Actions on the whole application. All raise `ApiError`."""

    async def drain(self, rank: int) -> list[int]:
        """Drain the group of a rank, which Serve then replaces; return the group's ranks."""
        ...

    async def start_profile(self) -> list[EngineTrace]:
        """Begin a trace in each engine, and return where the files will be."""
        ...

    async def stop_profile(self) -> list[EngineTrace]:
        """End the traces, and return those that were written."""
        ...


class NoOperator:
    """The `Operator` of a gateway without a directory."""

    async def drain(self, rank: int) -> list[int]:
        raise no_directory("this gateway has none")

    async def start_profile(self) -> list[EngineTrace]:
        raise no_directory("this gateway has none")

    async def stop_profile(self) -> list[EngineTrace]:
        raise no_directory("this gateway has none")


class DrainRequest(RequestModel):
    """`POST /v1/admin/drain`"""

    rank: Integer = Field(ge=0)  # any rank of the group


class AbortRequest(RequestModel):
    """`POST /v1/admin/abort`"""

    request_id: str = Field(min_length=1, max_length=128)  # as in the header `x-request-id`


class DrainingRanks(msgspec.Struct):
    ranks: list[int]  # of the group, which ends when its requests have ended


class AbortedRequests(msgspec.Struct):
    aborted: int


class EngineTraces(msgspec.Struct):
    data: list[EngineTrace]


def add_admin_routes(app: FastAPI, gateway: GatewayServices, operator: Operator) -> None:
    async def body(request: Request, kind: type[RequestT]) -> RequestT:
        with (
            gateway.bodies.budget.reservation() as held,
            await read_body(request, MAX_BODY_BYTES, held) as found,
        ):
            return parse_request(kind, parse_object(found.small_text() or b""))

    @app.post("/v1/admin/drain")
    async def drain(request: Request) -> Response:
        _check(request)
        asked = await body(request, DrainRequest)
        return _json(DrainingRanks(await operator.drain(asked.rank)))

    @app.post("/v1/admin/abort")
    async def abort(request: Request) -> Response:
        _check(request)
        request_id = (await body(request, AbortRequest)).request_id
        if not (count := gateway.running.end(request_id)):
            raise unknown_request(f"No request with the id {excerpt(request_id)} runs in this gateway.")
        return _json(AbortedRequests(count))

    @app.post("/start_profile")
    async def start_profile(request: Request) -> Response:
        _check(request)
        return _json(EngineTraces(await operator.start_profile()))

    @app.post("/stop_profile")
    async def stop_profile(request: Request) -> Response:
        _check(request)
        if not (traces := await operator.stop_profile()):
            message = "No trace is recorded: POST /start_profile begins one."
            raise ApiError(409, message, type="conflict", code="no_trace")
        return _json(EngineTraces(traces))


def _check(request: Request) -> None:
    """Raise `ApiError` (403) for a caller without the right `admin`."""
    if not caller_of(request.scope).is_admin:
        raise not_admin()


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
