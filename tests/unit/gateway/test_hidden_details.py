"""Errors name the field and no internals of the server; these are logged, with the id of the request."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.cluster import logs
from baton.cluster.contracts import Role
from baton.cluster.gateway.bodies.body import INLINE_BYTES
from baton.cluster.gateway.model import ServedModel
from baton.engine.core.messages import EngineError, EngineRequest, ErrorKind
from baton.engine.structured import GrammarVocabulary, XGrammarBackend
from baton.engine.text import Tokenizer

from ...helpers.fake_cluster import FakeEngine
from ...helpers.gateway_service import Service
from ...helpers.reasoning_model import reasoning_model

SECRET = "worker 7 at 10.1.2.3: CUDA error"
PYTHONS_WORDS = ("Error", "object", "NoneType", "attribute", "operand")
BROKEN_TEMPLATES = {
    "a type error": "{{ 1 + messages[0].content }}",
    "an undefined value": "{{ messages[0].content.secret.name }}",
    "an access that the sandbox denies": "{{ messages[0].content.__class__.__mro__ }}",
}


class RequestLog(logging.Handler):
    """A log handler that keeps the lines of each request."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.setdefault(logs.request_id.get(), []).append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[dict[str, list[str]]]:
    handler, logger = RequestLog(), logging.getLogger("baton.cluster.gateway")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.slow
@pytest.mark.parametrize("padding", [0, INLINE_BYTES], ids=["in the event loop", "in another process"])
@pytest.mark.parametrize("template", BROKEN_TEMPLATES.values(), ids=BROKEN_TEMPLATES)
async def test_a_template_that_fails_shows_no_classes(
    start: Callable[..., Service],
    model: ServedModel,
    tokenizer: Tokenizer,
    logged: dict[str, list[str]],
    template: str,
    padding: int,
) -> None:
    service = start(Role.UNIFIED, served=reasoning_model(model, tokenizer, template))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "user": "u" * padding}
    answer = await service.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "r-1"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "'messages'" in error["message"]
    assert not [word for word in PYTHONS_WORDS if word in error["message"]]
    (line,) = logged["r-1"]
    before, after = line.split(error["message"])
    assert before.startswith("POST '/v1/chat/completions' failed with 400")
    assert "Error: " in after


async def test_a_refusal_in_the_templates_own_words_is_shown(
    start: Callable[..., Service], model: ServedModel, tokenizer: Tokenizer
) -> None:
    service = start(Role.UNIFIED, served=reasoning_model(model, tokenizer, "{{ raise_exception('Say more.') }}"))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    answer = await service.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "Say more." in answer.json()["error"]["message"]


async def test_a_number_of_thousands_of_digits_names_no_function_of_python(
    start: Callable[..., Service], logged: dict[str, list[str]]
) -> None:
    body = b'{"model": "tiny", "prompt": "hi", "seed": ' + b"9" * 5000 + b"}"
    headers = {"content-type": "application/json", "x-request-id": "r-5"}
    answer = await start(Role.UNIFIED).http.post("/v1/completions", content=body, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_json")
    assert "digits" in error["message"]
    assert "sys." not in error["message"]
    assert "sys." in logged["r-5"][-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (ErrorKind.INTERNAL, 500),
        (ErrorKind.ENGINE_DEAD, 503),
        (ErrorKind.LEAVING, 503),
        (ErrorKind.KV_LOST, 503),
        (ErrorKind.OVERLOADED, 503),
    ],
)
async def test_details_of_an_engines_error_are_logged_and_not_sent(
    start: Callable[..., Service], logged: dict[str, list[str]], kind: ErrorKind, status: int, stream: bool
) -> None:
    service = start(Role.UNIFIED, capacity_timeout_s=0)

    def fault(engine: FakeEngine, request: EngineRequest) -> EngineError:
        return EngineError(kind, SECRET)

    service.cluster.fault = fault
    body = {"model": "tiny", "prompt": "hello", "stream": stream}
    answer = await service.http.post("/v1/completions", json=body, headers={"x-request-id": "r-2"})
    assert answer.status_code == status
    assert SECRET not in answer.text
    assert json.loads(answer.text)["error"]["message"]
    assert SECRET in logged["r-2"][-1], "the last line, which has the status"


async def test_a_tokenizer_that_cannot_be_read_shows_no_path(
    start: Callable[..., Service], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = XGrammarBackend(GrammarVocabulary(str(tmp_path / "gone"), 400, [0]))
    service = start(Role.UNIFIED, grammars=source)
    body = {"model": "tiny", "prompt": "hi", "structured_outputs": {"choice": ["a"]}}
    for request_id in ("r-3", "r-4"):  # the second refusal comes from the cache or from another process
        answer = await service.http.post("/v1/completions", json=body, headers={"x-request-id": request_id})
        assert answer.status_code == 400
        assert str(tmp_path) not in answer.text
        assert answer.json()["error"]["param"] == "structured_outputs.choice"
        assert [line for line in caplog.messages if request_id in line and str(tmp_path) in line]
    source.close()
