"""The description of the API: an OpenAPI 3.1 document at `/openapi.json`, and the same as a page at `/docs`.

    OPERATIONS ──> schemas of their types ──> document ──docs_page.html──> page

Bodies are described by the models that validate them, and answers by the structs that are encoded, so neither can
differ from what the server does. A new route is a new row of `OPERATIONS`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .api.anthropic_answer import MessageEvent, MessageObject, TokenCount
from .api.anthropic_request import CountTokensRequest, MessagesRequest
from .api.chat import ChatChunk, ChatCompletion
from .api.completions import Completion
from .api.deadlines import FIRST_TOKEN_HEADER, MOST_MS, WHOLE_HEADER
from .api.endpoints import MAX_SESSION_ID_CHARS, SESSION_HEADER
from .api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from .api.responses import InputTokens, ResponseEvent, ResponseObject
from .api.responses_request import InputTokensRequest, ResponsesRequest
from .api.resume import ID_VERSION, LAST_EVENT_ID_HEADER
from .errors import AnthropicErrorResponse, ErrorResponse, is_anthropic
from .middleware import PAGE_FILES, is_open
from .routes import (
    AGE_HEADER,
    FAMILIES,
    PROMETHEUS_TYPE,
    READ,
    SCOPES,
    Alive,
    ModelCard,
    ModelCards,
    RankTable,
    Ready,
    ServerInfo,
    ServerLoad,
    Version,
)
from .routing.ranks import PIN_HEADER

REFERENCE = "#/components/schemas/"
MAX_AGE_S = 300  # so long clients keep the description, which only another version changes
# The page has one style sheet of its own, and nothing else: no scripts, nothing from elsewhere.
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
PAGE = Path(__file__).with_name("docs_page.html")
KEEP = f"public, max-age={MAX_AGE_S}"

Schema = dict[str, Any]

STATUSES = {
    304: "The client has the newest version already.",
    400: "A field or a header is wrong (`param` says which), or the prompt does not fit the context.",
    401: "API keys are set and none of them was sent.",
    404: "The model, or the file, does not exist.",
    408: "The request took longer than it may, or its first token did.",
    409: "A stream cannot be resumed: its tokens did not come again as they were.",
    413: "The body is larger than it may be, or the request needs more tokens than an engine can hold.",
    415: "The body is declared to be something other than plain JSON.",
    429: "Too many requests in this gateway, or with this API key.",
    500: "A fault of the server.",
    503: "Nothing can take the request now.",
}
ERROR_HEADERS = {401: "www-authenticate", 429: "retry-after", 503: "retry-after"}
READS = (500,)
TAKES_BODY = (400, 404, 408, 413, 415, 500, 503)
GENERATES = (*TAKES_BODY, 409, 429)

TEXT: Schema = {"type": "string"}
MILLISECONDS: Schema = {"type": "integer", "minimum": 1, "maximum": MOST_MS}
HEADERS: dict[str, tuple[str, Schema]] = {  # of requests
    "x-request-id": ("Up to 128 letters, digits and `._:-`; echoed, and in every log line.", TEXT),
    SESSION_HEADER: (
        "Requests of one name meet in the same engine, as long as that costs little.",
        TEXT | {"minLength": 1, "maxLength": MAX_SESSION_ID_CHARS},
    ),
    WHOLE_HEADER: ("Milliseconds that the client waits for the whole answer.", MILLISECONDS),
    FIRST_TOKEN_HEADER: ("Milliseconds that the client waits for the first token.", MILLISECONDS),
    LAST_EVENT_ID_HEADER: (
        "A stream that broke goes on behind this event; only with `stream_options.resumable`.",
        TEXT | {"pattern": rf"^{re.escape(ID_VERSION)}[A-Za-z0-9_=-]+$"},
    ),
    PIN_HEADER: ("The engine of this rank takes part, or the request fails.", {"type": "integer", "minimum": 0}),
    AGE_HEADER: ("`max-age=N`: an answer that is up to N seconds old will do.", TEXT),
}
GENERATING_HEADERS = tuple(HEADERS)[1:-1]


@dataclass(frozen=True)
class Operation:
    """One route with one method, as clients see it. HEAD goes along with each GET, without its body."""

    method: str
    path: str
    summary: str
    answer: Any  # the type of the answer with status 200
    errors: tuple[int, ...] = READS
    bodies: tuple[type[BaseModel], ...] = ()  # the body is one of them
    event: Any = None  # the type of `data` of the events of a stream
    headers: tuple[str, ...] = ()  # beside `x-request-id`
    query: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> values, the default first; (): a list
    media_type: str = "application/json"
    example: Schema = field(default_factory=dict)  # a body, to which the model's name is added

    @property
    def error(self) -> type[msgspec.Struct]:
        """The shape of its errors."""
        return AnthropicErrorResponse if is_anthropic(self.path) else ErrorResponse

    @property
    def is_open(self) -> bool:
        """True if the route needs no API key."""
        return is_open(self.path)


def _generating(path: str, summary: str, body: type[BaseModel], answer: Any, event: Any, example: Schema) -> Operation:
    return Operation("post", path, summary, answer, GENERATES, (body,), event, GENERATING_HEADERS, example=example)


MESSAGES = [{"role": "user", "content": "Hello!"}]
OPERATIONS = (
    _generating(
        *("/v1/completions", "Continue a text.", CompletionRequest, Completion, Completion),
        {"prompt": "Once upon a time", "max_tokens": 32},
    ),
    _generating(
        *("/v1/chat/completions", "Answer a chat.", ChatRequest, ChatCompletion, ChatChunk),
        {"messages": MESSAGES, "max_tokens": 64},
    ),
    _generating(
        *("/v1/responses", "Answer a chat in OpenAI's newer shape.", ResponsesRequest, ResponseObject, ResponseEvent),
        {"input": "Hello!", "max_output_tokens": 64},
    ),
    _generating(
        *("/v1/messages", "Answer a chat, as Anthropic's API does.", MessagesRequest, MessageObject, MessageEvent),
        {"messages": MESSAGES, "max_tokens": 64},
    ),
    Operation(
        *("post", "/v1/messages/count_tokens", "Return the number of tokens of a prompt.", TokenCount, TAKES_BODY),
        (CountTokensRequest,),
        example={"messages": MESSAGES},
    ),
    Operation(
        *("post", "/v1/responses/input_tokens", "Return the number of tokens of a response's prompt.", InputTokens),
        *(TAKES_BODY, (InputTokensRequest,)),
        example={"input": "Hello!"},
    ),
    Operation(
        *("post", "/tokenize", "Return the tokens of a text or a chat.", TokenizeAnswer, TAKES_BODY),
        (TokenizeTextRequest, TokenizeChatRequest),
        example={"prompt": "Hello!"},
    ),
    Operation(
        *("post", "/detokenize", "Return the text of tokens.", DetokenizeAnswer, TAKES_BODY, (DetokenizeRequest,)),
        example={"tokens": [1, 2, 3]},
    ),
    Operation("get", "/v1/models", "List the one model.", ModelCards),
    Operation("get", "/v1/models/{model_id}", "Return the model.", ModelCard, (404, *READS)),
    Operation("get", "/tokenizer_info", "Return the special tokens and the chat template.", dict[str, Any]),
    Operation("get", "/live", "Return 200 while the process runs.", Alive),
    Operation("get", "/health", "Return 200 if a request can be served now.", Ready, (503, *READS)),
    Operation("get", "/ping", "Return what `/health` does, by SageMaker's name.", Ready, (503, *READS)),
    Operation("post", "/ping", "Return what `/health` does, by SageMaker's name.", Ready, (503, *READS)),
    Operation(
        *("get", "/metrics", "Return the metrics of all processes, or of this machine's share.", str, (400, *READS)),
        headers=(AGE_HEADER,),
        query={"scope": SCOPES, FAMILIES: ()},
        media_type=PROMETHEUS_TYPE,
    ),
    Operation("get", "/version", "Return the server's version.", Version),
    Operation("get", "/load", "Return the number of generating requests in this gateway.", ServerLoad),
    Operation("get", "/server_info", "Return the model, and the engines that serve it.", ServerInfo),
    Operation(
        *("get", "/v1/cluster/ranks", "Return every engine and gateway with its statistics.", RankTable),
        headers=(AGE_HEADER,),
    ),
    Operation("get", "/openapi.json", "Return this document.", dict[str, Any], (304, *READS)),
    Operation("get", "/docs", "Return this document as a page.", str, (304, *READS), media_type="text/html"),
    Operation(
        *("get", "/", "Return the page that shows the fleet, with a playground.", str, (304, 404, *READS)),
        media_type="text/html",
    ),
    Operation(
        *("get", PAGE_FILES + "{file}", "Return a file of that page.", str, (304, 404, *READS)),
        media_type="*/*",
    ),
)


def add_description_routes(app: FastAPI, model_id: str) -> None:
    """Add `/openapi.json` and `/docs`. Each is made when it is first asked for."""

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
    """Return a body that clients keep as `cache_control` says; 304 where the client has it already."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": cache_control}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=media_type)


def api_document(model_id: str) -> Schema:
    """Return the OpenAPI document. `model_id` is in its examples."""
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
    """Return all named schemas, and the schema of each type that is sent."""
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
    said = "The answer."
    if operation.event is not None:
        content["text/event-stream"] = {"schema": answers[operation.event]}
        said = "The answer; with `stream`, events with such `data`."
    statuses = operation.errors if operation.is_open else (401, *operation.errors)
    described: Schema = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "parameters": list(_parameters(operation)),
        "responses": {
            "200": {"description": said, "content": content, "headers": _answer_headers(operation)},
            **{str(status): _error(status, answers[operation.error]) for status in sorted(statuses)},
        },
        "security": [] if operation.is_open else [{"key": []}, {"x-api-key": []}],
    }
    if operation.bodies:
        references = [{"$ref": REFERENCE + model.__name__} for model in operation.bodies]
        schema = references[0] if len(references) == 1 else {"anyOf": references}
        example = {"model": model_id, **operation.example}
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
    environment.filters |= {"type_text": type_text, "curl": curl}
    return environment.from_string(PAGE.read_text()).render(document=document)


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
