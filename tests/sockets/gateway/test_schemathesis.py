"""Schemathesis generates requests from `/openapi.json`: every answer must fit the document."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from baton.cluster.contracts import Role
from baton.cluster.gateway.api.deadlines import FIRST_TOKEN_HEADER, WHOLE_HEADER
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.operations import OPERATIONS
from baton.engine.structured import XGrammarBackend

from ...helpers.gateway_service import Service
from ...helpers.recording_operator import RecordingOperator

KEY = "right"
DEADLINES = (WHOLE_HEADER, FIRST_TOKEN_HEADER)
PATHS = sorted({operation.path for operation in OPERATIONS})
CASES, SECONDS = 40, 10  # limits for each operation and kind of case
AS_DOCUMENTED: list[schemathesis.CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
    checks.ignored_auth,
]
# Every body that violates its schema must be refused.
REFUSES = [*AS_DOCUMENTED, checks.negative_data_rejection]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PATHS)
async def test_every_answer_is_as_documented(
    start: Callable[..., Service], thinker: ServedModel, grammars: XGrammarBackend, tmp_path: Path, path: str
) -> None:
    """Valid and invalid requests get no 5xx, and no status, header or body that the document does not have."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} admin")
    operator = RecordingOperator()
    service = start(Role.UNIFIED, served=thinker, grammars=grammars, api_keys_file=str(keys), operator=operator)

    def send_all(url: str) -> int:
        document = schemathesis.openapi.from_url(f"{url}/openapi.json").include(path=path)
        return sum(_send(found.ok(), mode, url) for found in document.get_all_operations() for mode in GenerationMode)

    async with service.over_tcp() as url:
        assert await asyncio.to_thread(send_all, url) > 0


def _send(operation: schemathesis.APIOperation, mode: GenerationMode, url: str) -> int:
    """Send cases of one operation until their number or their time is used up. Return how many were sent."""
    sent, end_s = 0, time.monotonic() + SECONDS
    is_body = bool(operation.definition.raw.get("requestBody"))
    if mode.is_negative and not is_body:
        return 0  # headers and queries are strings, so no value violates the schema

    @seed(7)
    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: schemathesis.Case) -> None:
        nonlocal sent
        if time.monotonic() > end_s:
            return
        sent += 1
        for name in DEADLINES if mode.is_negative else ():  # otherwise a 408 may come before the refusal
            case.headers.pop(name, None)
        case.call_and_validate(
            base_url=url,
            headers={"Authorization": f"Bearer {KEY}"},
            checks=REFUSES if is_body else AS_DOCUMENTED,
            timeout=30,
        )

    send()
    return sent
