"""The gateway's log: a line for each request that failed, was retried or took another path, and none for others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import httpx
import pytest

from baton.cluster import logs
from baton.cluster.contracts import Role

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Service

FIELDS = {"seed": 11, "max_tokens": 30, "ignore_eos": True}


class RecordedLines(logging.Handler):
    """A log handler that keeps each line with its level and its request."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, logs.request_id.get(), record.getMessage()))


@pytest.fixture
def logged() -> Iterator[list[tuple[str, str, str]]]:
    handler, logger = RecordedLines(), logging.getLogger("baton.cluster.gateway")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


async def ask(service: Service, name: str, *, stream: bool = False, prompt: str = "hello") -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "stream": stream, **FIELDS}
    return await service.http.post("/v1/completions", json=body, headers={"x-request-id": name})


async def test_successful_requests_are_not_logged(service: Service, logged: list[tuple[str, str, str]]) -> None:
    for stream in (False, True):
        assert (await ask(service, "well", stream=stream)).status_code == 200
    assert logged == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/completions", 400), ("POST", "/tokenize", 400), ("GET", "/nowhere", 404), ("GET", "/tokenize", 405)],
)
async def test_a_refused_request_is_logged_in_one_line(
    service: Service, logged: list[tuple[str, str, str]], method: str, path: str, status: int
) -> None:
    answer = await service.http.request(method, path, content=b"[]", headers={"x-request-id": "bad-1"})
    assert answer.status_code == status
    ((level, request, message),) = logged
    assert (level, request) == ("INFO", "bad-1")
    assert message.startswith(f"{method} '{path}' failed with {status}")
    assert message.endswith(answer.json()["error"]["message"])


async def test_a_failed_probe_is_not_logged(start: Callable[..., Service], logged: list[tuple[str, str, str]]) -> None:
    assert (await start().http.get("/health")).status_code == 503
    assert logged == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_no_engine_serves_is_logged_with_its_attempts(
    start: Callable[..., Service], logged: list[tuple[str, str, str]], stream: bool
) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0)
    engine = service.cluster.members[0]
    engine.die_after_tokens = 5
    answer = await ask(service, "lost-1", stream=stream)
    assert "error" in answer.text
    assert {request for _, request, _ in logged} == {"lost-1"}
    attempt, last = [message for level, _, message in logged if level == "WARNING"]
    assert attempt.startswith("attempt 1 ")
    assert "engine-gone" in attempt
    assert engine.record.engine_id in attempt
    assert last.startswith("POST '/v1/completions' failed " + ("in its answer with 503" if stream else "with 503"))


async def test_a_retried_request_is_logged_with_its_path(
    start: Callable[..., Service], logged: list[tuple[str, str, str]]
) -> None:
    service = start(Role.UNIFIED, Role.UNIFIED)

    def spare_the_others() -> None:
        for engine in service.cluster.members:
            engine.die_after_tokens = None

    for engine in service.cluster.members:
        engine.die_after_tokens, engine.on_death = 5, spare_the_others
    assert (await ask(service, "again-1")).status_code == 200
    assert [(level, request) for level, request, _ in logged] == [("WARNING", "again-1"), ("INFO", "again-1")]
    assert "takes another path: recomputed; reason=engine-gone" in logged[1][2]


async def test_a_request_without_a_prefill_engine_is_logged(
    start: Callable[..., Service], logged: list[tuple[str, str, str]]
) -> None:
    assert (await ask(start(Role.DECODE), "around-1")).status_code == 200
    ((level, request, message),) = logged
    assert (level, request) == ("INFO", "around-1")
    assert "local-prefill; reason=no-prefill-engine" in message


async def test_an_internal_error_of_the_gateway_is_logged_with_its_cause(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: FakeEngine, *args: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(type(service.cluster), "submit", fail)
    assert (await ask(service, "fault-1")).status_code == 500
    faults = [record for record in caplog.records if record.exc_info]
    assert len(faults) == 1
    assert isinstance(faults[0].exc_info, tuple)
    assert faults[0].exc_info[0] is ZeroDivisionError
