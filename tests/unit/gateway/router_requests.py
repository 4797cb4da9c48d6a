"""Routers, and requests for which they choose engines."""

from __future__ import annotations

from typing import Any

from baton.cluster.contracts import EngineView
from baton.cluster.gateway.routing.rates import CostRates, LearntRates
from baton.cluster.gateway.routing.router import Route, Router, RoutingQuery
from baton.engine.core.layout import BLOCK_SIZE
from baton.engine.core.messages import EngineRequest
from baton.engine.core.sampling import SamplingParams

from ...helpers.gateway_service import Clock

PROMPT = list(range(1, 40 * BLOCK_SIZE))
RATES = CostRates()


def request(tokens: list[int], name: str = "r", **fields: Any) -> EngineRequest:
    sampling = fields.pop("sampling", SamplingParams())
    return EngineRequest(request_id=name, prompt_token_ids=tokens, sampling=sampling, **fields)


def router(gateway_id: str = "g", local: int = 8192, clock: Clock | None = None, **rates: float) -> Router:
    clock = clock or Clock()
    return Router(
        gateway_id,
        rates=LearntRates(CostRates(**rates), clock),
        session_patience_s=0.1,
        local_prefill_max_tokens=local,
        clock=clock,
    )


def wanted(tokens: list[int], name: str = "r", **fields: Any) -> RoutingQuery:
    return router().query(request(tokens, name, **fields))


def route(chooser: Router, engines: list[EngineView], tokens: list[int], name: str = "r", **fields: Any) -> Route:
    chosen = chooser.route(engines, chooser.query(request(tokens, name), **fields))
    assert chosen is not None
    return chosen


def rank_of(chooser: Router, engines: list[EngineView], tokens: list[int], name: str = "r", **fields: Any) -> int:
    return route(chooser, engines, tokens, name, **fields).placement.engine.rank
