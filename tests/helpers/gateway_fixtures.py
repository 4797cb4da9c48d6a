"""Fixtures: a gateway over real engine cores with a fake model, called through ASGI or, for streams, over TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from baton.cluster.contracts import Role
from baton.cluster.gateway.admin import NoOperator, Operator
from baton.cluster.gateway.api.body_service import BodyService
from baton.cluster.gateway.app import ApplicationAccess, create_app
from baton.cluster.gateway.metrics import GatewayMetrics
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.settings import GatewaySettings
from baton.cluster.gateway.tracing import RequestSpans
from baton.engine import StructuredOutputsParams
from baton.engine.core.grammar import GrammarSource
from baton.engine.core.speculation.drafter import Drafter
from baton.engine.structured import GrammarVocabulary, XGrammarBackend
from baton.engine.text import Tokenizer

from .fake_cluster import FakeCluster
from .fake_runner import Scripts
from .gateway_service import HANGS_AFTER_S, Service
from .reasoning_model import reasoning_model
from .tiny_model import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> ServedModel:
    return tiny_model(tokenizer)


@pytest.fixture
async def start(model: ServedModel) -> AsyncIterator[Callable[..., Service]]:
    """Return a function that starts a gateway with engines of these roles and these settings.

    For example `start(Role.PREFILL, Role.DECODE, api_keys=[...])`.
    """
    services: list[Service] = []

    def start_service(
        *roles: Role,
        served: ServedModel = model,
        grammars: GrammarSource | None = None,
        spans: RequestSpans | None = None,
        operator: Operator = NoOperator(),
        new_drafter: Callable[[Scripts], Drafter] | None = None,
        **settings: Any,
    ) -> Service:
        cluster = FakeCluster(
            {},
            grammars,
            num_blocks=64,
            max_num_seqs=32,
            max_num_batched_tokens=64,
            max_model_len=served.max_model_len,
            vocab_size=served.vocab_size,
            eos_token_ids=list(served.eos_token_ids),
        )
        if new_drafter is not None:
            cluster.new_drafter = partial(new_drafter, cluster.scripts)
        for role in roles:
            cluster.start(role)
        limits = {"capacity_timeout_s": 5.0, "request_timeout_s": HANGS_AFTER_S, **settings}
        gateway_settings = GatewaySettings(**limits)
        metrics = GatewayMetrics(served.model_id, cluster.engines, cluster.counters)
        bodies = BodyService(served, gateway_settings, metrics)
        app = create_app(
            cluster,
            served,
            gateway_settings,
            metrics=metrics,
            bodies=bodies,
            spans=spans,
            application=ApplicationAccess(operator=operator),
        )
        service = Service(cluster, app, served.tokenizer, bodies)
        services.append(service)
        return service

    yield start_service
    for service in services:
        service.bodies.processes.close()
        await service.http.aclose()
        await service.cluster.close()


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[XGrammarBackend]:
    """A started grammar backend for engines; starting it takes seconds."""
    folder = tmp_path_factory.mktemp("tokenizer")
    backend: Backend = tokenizer.backend
    backend.save(str(folder / "tokenizer.json"))
    assert tokenizer.eos_token_id is not None
    source = XGrammarBackend(GrammarVocabulary(str(folder), tokenizer.vocab_size, [tokenizer.eos_token_id]))
    source.open(StructuredOutputsParams(choice=["any"]))
    yield source
    source.close()


@pytest.fixture(params=["unified", "disaggregated"])
async def service(start: Callable[..., Service], request: pytest.FixtureRequest) -> Service:
    """Start a gateway once with one engine and once with two: what tests demand must hold for both."""
    roles = [Role.UNIFIED] if request.param == "unified" else [Role.PREFILL, Role.DECODE]
    return start(*roles)


@pytest.fixture(scope="session")
def thinker(model: ServedModel, tokenizer: Tokenizer) -> ServedModel:
    return reasoning_model(model, tokenizer)


@pytest.fixture(params=[[Role.UNIFIED], [Role.PREFILL, Role.DECODE]], ids=["unified", "disaggregated"])
async def responses(
    start: Callable[..., Service], thinker: ServedModel, grammars: XGrammarBackend, request: pytest.FixtureRequest
) -> Service:
    """Start a gateway whose model thinks, calls functions and supports grammars."""
    return start(*request.param, served=thinker, grammars=grammars)


@pytest.fixture
async def disaggregated(start: Callable[..., Service]) -> Service:
    return start(Role.PREFILL, Role.DECODE)
