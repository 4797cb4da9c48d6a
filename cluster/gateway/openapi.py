"""The description of the API: an OpenAPI 3.1 document at `/openapi.json`, and the same content as a page at `/docs`.

    OPERATIONS ──> schemas of their types ──> document ──docs_page.html──> page

Bodies are described by the models that validate them, and answers by the structs that are encoded, so the description
cannot differ from the server. A new route is a new row of `OPERATIONS` in `operations.py`.
"""

from __future__ import annotations

import hashlib
import html
import importlib.metadata
import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic.json_schema import models_json_schema

from .operations import ERROR_HEADERS, HEADERS, OPERATIONS, STATUSES, Operation, Schema
from .routes import (
    READ,
)

REFERENCE = "#/components/schemas/"
MAX_AGE_S = 300  # clients may cache the description for so long; it changes only with the version
# The page has one style sheet inside, no scripts, and loads nothing.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
PAGE = Path(__file__).with_name("docs_page.html")
KEEP = f"public, max-age={MAX_AGE_S}"


def add_description_routes(app: FastAPI, model_id: str) -> None:
    """Add `/openapi.json` and `/docs`. Each is made at its first request."""

    @cache
    def document() -> Schema:
        return api_document(model_id)

    @cache
    def json_text() -> bytes:
        return msgspec.json.encode(document())

    @cache
    def page() -> bytes:
        return docs_page(document()).encode()

    @app.api_route("/openapi.json", methods=READ)
    async def openapi(request: Request) -> Response:
        return cacheable(request, json_text(), "application/json", KEEP)

    @app.api_route("/docs", methods=READ)
    async def docs(request: Request) -> Response:
        answer = cacheable(request, page(), "text/html; charset=utf-8", KEEP)
        answer.headers["content-security-policy"] = PAGE_POLICY
        return answer


def cacheable(request: Request, body: bytes, media_type: str, cache_control: str) -> Response:
    """Return a body that clients cache as `cache_control` says; 304 if the client has the same one already."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": cache_control}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def api_document(model_id: str) -> Schema:
    """Return the OpenAPI document; its examples name `model_id`."""
    paths: dict[str, Schema] = {}
    schemas, answers = _schemas()
    for operation in OPERATIONS:
        described = _operation(operation, answers, model_id)
        paths.setdefault(operation.path, {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": importlib.metadata.version("baton")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _schemas() -> tuple[Schema, dict[Any, Schema]]:
    """Return all named schemas, and the schema of each type of answer."""
    read = {model for operation in OPERATIONS for model in operation.bodies}
    of_bodies: Schema = models_json_schema(
        [(model, "validation") for model in sorted(read, key=lambda model: model.__name__)],
        ref_template=REFERENCE + "{model}",
    )[1]["$defs"]
    sent = list(dict.fromkeys(each for row in OPERATIONS for each in (row.error, row.answer, row.event)))
    sent.remove(None)
    found, of_answers = msgspec.json.schema_components(sent, ref_template=REFERENCE + "{name}")
    if same := of_bodies.keys() & of_answers.keys():
        raise ValueError(f"a body and an answer have types of one name: {', '.join(sorted(same))}")
    return dict(sorted((of_bodies | of_answers).items())), dict(zip(sent, found, strict=True))


def _operation(operation: Operation, answers: dict[Any, Schema], model_id: str) -> Schema:
    content = {operation.media_type: {"schema": answers[operation.answer]}}
    description = "The answer."
    if operation.event is not None:
        content["text/event-stream"] = {"schema": answers[operation.event]}
        description = "The answer; with `stream`, events with such `data`."
    statuses = operation.errors if operation.is_open else (401, *operation.errors)
    described: Schema = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "parameters": list(_parameters(operation)),
        "responses": {
            "200": {"description": description, "content": content, "headers": _answer_headers(operation)},
            **{str(status): _error(status, answers[operation.error]) for status in sorted(statuses)},
        },
        "security": [] if operation.is_open else [{"key": []}, {"x-api-key": []}],
    }
    if operation.bodies:
        references = [{"$ref": REFERENCE + model.__name__} for model in operation.bodies]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        example = operation.example if operation.is_admin else {"model": model_id, **operation.example}
        body = {"application/json": {"schema": schema, "example": example}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _operation_id(operation: Operation) -> str:
    words = operation.path.translate(str.maketrans("/.{}", "____")).split("_")
    return "_".join([operation.method, *filter(None, words)])


def _parameters(operation: Operation) -> Iterable[Schema]:
    for part in operation.path.split("/"):
        if part.startswith("{"):
            yield {"name": part.strip("{}"), "in": "path", "required": True, "schema": {"type": "string"}}
    for name, values in operation.query.items():
        texts = {"type": "array", "items": {"type": "string"}}
        schema = {"enum": list(values), "default": values[0]} if values else texts
        yield {"name": name, "in": "query", "schema": schema}
    for name in ("x-request-id", *operation.headers):
        description, schema = HEADERS[name]
        yield {"name": name, "in": "header", "description": description, "schema": schema}


def _answer_headers(operation: Operation) -> Schema:
    names = ["x-request-id", *(["x-baton-path"] if operation.event is not None else [])]
    return {name: {"schema": {"type": "string"}} for name in names}


def _error(status: int, schema: Schema) -> Schema:
    described: Schema = {"description": STATUSES[status]}
    if status >= 400:
        described["content"] = {"application/json": {"schema": schema}}
    if (header := ERROR_HEADERS.get(status)) is not None:
        described["headers"] = {header: {"schema": {"type": "string"}}}
    return described


def docs_page(document: Schema) -> str:
    """Return the document as an HTML page that loads nothing."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"type_text": type_text, "curl": curl, "code": code}
    return environment.from_string(PAGE.read_text()).render(document=document)


def code(text: str) -> str:
    """Return a text as HTML in which parts between backticks are code."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def type_text(schema: Schema) -> str:
    """Return a schema in a few words: `string | null`, `list of ChatMessage`."""
    if reference := schema.get("$ref"):
        return str(reference).removeprefix(REFERENCE)
    if union := schema.get("anyOf", schema.get("oneOf")):
        return " | ".join(dict.fromkeys(map(type_text, union)))
    if "const" in schema or "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of {type_text(schema.get('items') or schema.get('prefixItems') or {})}"
        case "object" if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {type_text(schema['additionalProperties'])}"
        case None:
            return "any"
        case name:
            return str(name)


def curl(operation: Schema, path: str, method: str) -> str:
    """Return a command that calls an operation of the document."""
    parts = ["curl", *(["-X", method.upper()] if method != "get" else [])]
    parts += ['-H "Authorization: Bearer $API_KEY"'] if operation["security"] else []
    if body := operation.get("requestBody"):
        example = json.dumps(body["content"]["application/json"]["example"]).replace("'", r"'\''")
        parts.append(f"-H 'Content-Type: application/json' -d '{example}'")
    return " ".join([*parts, f"$BASE_URL{path}"])
