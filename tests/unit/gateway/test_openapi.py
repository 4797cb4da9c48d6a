"""The OpenAPI document agrees with the server: routes, requests and responses."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route

from baton.cluster.contracts import Role
from baton.cluster.gateway.errors import ApiError
from baton.cluster.gateway.model import ServedModel
from baton.cluster.gateway.openapi import api_document
from baton.cluster.gateway.operations import OPERATIONS
from baton.engine.structured import XGrammarBackend

from ...helpers.gateway_service import Service, events

DOCUMENT = api_document("tiny")
SCHEMAS = DOCUMENT["components"]["schemas"]
TAKING_BODIES = [operation.path for operation in OPERATIONS if operation.bodies and not operation.is_admin]
GENERATING = [path for path, methods in DOCUMENT["paths"].items() if "text/event-stream" in str(methods)]


def check(value: Any, schema: Any) -> None:
    """Validate a value by a schema of the document."""
    jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


async def test_the_document_has_every_route_and_no_other(service: Service) -> None:
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in service.app.router.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert routes == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


def test_the_schemas_are_valid_and_every_reference_resolves() -> None:
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(DOCUMENT)))
    assert named <= SCHEMAS.keys()
    operations = [each for methods in DOCUMENT["paths"].values() for each in methods.values()]
    assert len({each["operationId"] for each in operations}) == len(operations) == len(OPERATIONS)
    assert all(each["responses"].keys() >= {"200", "500"} for each in operations)


@pytest.mark.parametrize("path", TAKING_BODIES)
async def test_every_example_is_answered(service: Service, path: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]
    check(body["example"], body["schema"])
    response = await service.http.post(path, json=body["example"])
    assert response.status_code == 200, response.text
    check(response.json(), operation["responses"]["200"]["content"]["application/json"]["schema"])


@pytest.mark.slow
@pytest.mark.parametrize("path", GENERATING)
async def test_events_of_streams_fit_the_document(responses: Service, path: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    body = {**example, "stream": True, "baton_timeline": True}
    text = (await responses.http.post(path, json=body)).text
    schema = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    told = events(re.sub("^event: .*\n", "", text, flags=re.MULTILINE))
    assert len(told) > 2
    assert text.count('"baton_timeline"') == 1
    for each in told:
        if each != "[DONE]":
            check(each, schema)


@pytest.mark.parametrize(
    "path", [each.path for each in OPERATIONS if each.method == "get" and each.media_type == "application/json"]
)
async def test_answers_of_get_routes_fit_the_document(service: Service, path: str) -> None:
    await service.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "the fox", "max_tokens": 2},
        headers={"x-request-id": "mine"},
    )
    response = await service.http.get(path.replace("{model_id}", "tiny").replace("{request_id}", "mine"))
    assert response.status_code == 200
    check(response.json(), DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"])


def test_errors_fit_the_document() -> None:
    for error in (ApiError(400, "x", param="y", code="z"), ApiError(503, "x", gpu_time_spent=True)):
        check(json.loads(error.body()), SCHEMAS["ErrorResponse"])


async def test_keys_are_required_where_the_document_says_so(start: Callable[..., Service]) -> None:
    service = start(Role.UNIFIED, api_keys=["right"])
    for operation in OPERATIONS:
        response = await service.http.request(operation.method, operation.path)
        documented = DOCUMENT["paths"][operation.path][operation.method]["security"]
        assert (response.status_code == 401) == bool(documented) == (not operation.is_open), operation.path
    open_paths = {operation.path for operation in OPERATIONS if operation.is_open}
    page = {"/", "/page/{file}"}
    assert open_paths == {"/health", "/live", "/metrics", "/ping", "/version", "/openapi.json", "/docs"} | page


@pytest.mark.parametrize("path", ["/openapi.json", "/docs"])
async def test_clients_may_cache_the_document_until_it_changes(service: Service, path: str) -> None:
    first = await service.http.get(path)
    assert "max-age" in first.headers["cache-control"]
    again = await service.http.get(path, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await service.http.get(path, headers={"if-none-match": '"0"'})
    assert other.content == first.content


async def test_the_page_shows_every_route_and_type_and_loads_nothing(service: Service) -> None:
    response = await service.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    page = response.text
    for path, methods in DOCUMENT["paths"].items():
        assert f"<code>{path}</code>" in page
        assert all(f'id="{operation["operationId"]}"' in page for operation in methods.values())
    links = set(re.findall(r'href="([^"]*)"', page))
    assert links <= {"openapi.json", *(f"#{name}" for name in SCHEMAS)}
    assert all(f'<h3 id="{name}">' in page for name in SCHEMAS)
    assert not re.search(r"<script|src=|@import|url\(", page)
    assert "built-in method" not in page
    assert "`" not in page
    assert "<code>/health</code> does" in page


JUNK = st.sampled_from([None, True, -1, 1.5, "", "🦊", [], {}, [[]], {"a": None}, 2**70])
TEXTS = st.sampled_from(["tiny", "the fox", "", "🦊", "a", "[0-9]+", "{}", "\x00"])


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for small values that fit the schema."""
    if "$ref" in schema:
        return values(SCHEMAS[schema["$ref"].rpartition("/")[2]])
    if union := schema.get("anyOf", schema.get("oneOf")):
        return st.one_of([values(each) for each in union])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "string":
            return TEXTS
        case "integer":
            return st.integers(-2, 8)
        case "number":
            return st.floats(-1, 3)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(values(schema.get("items", {})), max_size=min(3, schema.get("maxItems", 3)))
        case "object":
            return objects(schema)
    return JUNK


def objects(schema: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for objects with all required fields and a few of the others."""
    if not schema.get("properties"):
        return st.dictionaries(st.sampled_from(["a", "1", "type"]), JUNK, max_size=2)
    fields = {name: values(each) for name, each in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    some = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True) if fields else st.just([])
    return some.flatmap(lambda names: st.fixed_dictionaries(required | {name: fields[name] for name in names}))


def bodies() -> st.SearchStrategy[tuple[str, Any]]:
    """Return a strategy for a route and a body, of whose fields one in ten does not fit."""

    def of(path: str) -> st.SearchStrategy[tuple[str, Any]]:
        body = DOCUMENT["paths"][path]["post"]["requestBody"]
        schema = body["content"]["application/json"]["schema"]
        wrong = st.dictionaries(
            st.sampled_from(["n", "stop", "messages", "prompt", "input", "tools"]), JUNK, max_size=1
        )
        spoilt = st.integers(0, 9).flatmap(lambda digit: wrong if digit == 0 else st.just({}))
        return st.tuples(values(schema), spoilt).map(lambda drawn: (path, drawn[0] | {"model": "tiny"} | drawn[1]))

    return st.sampled_from(TAKING_BODIES).flatmap(of)


@pytest.mark.slow
async def test_every_answer_fits_the_document(
    start: Callable[..., Service], thinker: ServedModel, grammars: XGrammarBackend
) -> None:
    service, loop = start(Role.UNIFIED, served=thinker, grammars=grammars), asyncio.get_running_loop()
    statuses: set[int] = set()

    async def send(path: str, body: Any) -> None:
        response = await service.http.post(path, json=body)
        documented = DOCUMENT["paths"][path]["post"]["responses"]
        assert response.status_code < 500, response.text
        answer = documented[str(response.status_code)]["content"]
        statuses.add(response.status_code)
        media_type = response.headers["content-type"].partition(";")[0]
        if media_type == "application/json":
            check(response.json(), answer[media_type]["schema"])
        else:
            assert media_type in answer
            assert response.text.endswith("\n\n")

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(bodies())
    def play(case: tuple[str, Any]) -> None:
        asyncio.run_coroutine_threadsafe(send(*case), loop).result(20)

    await asyncio.to_thread(play)
    assert {200, 400} <= statuses
