"""The table of the API's operations: for each route and method, the body that it takes and the answer that it gives.

Bodies are the models that validate them, answers the structs that are encoded. A new route is a new row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import BaseModel

from .admin import AbortedRequests, AbortRequest, DrainingRanks, DrainRequest, EngineTraces
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
    SCOPES,
    EndedRequests,
    Live,
    ModelCard,
    ModelCards,
    RankTable,
    Ready,
    ServerInfo,
    ServerLoad,
    Version,
)
from .routing.ranks import PIN_HEADER

Schema = dict[str, Any]

STATUSES = {
    304: "The client has the newest version already.",
    400: "A field or a header is wrong (`param` says which), or the prompt does not fit the context.",
    403: "The API key lacks the right `admin`, or an operator has ended the request.",
    401: "API keys are set and none of them was sent.",
    404: "The model, the file or the request does not exist.",
    408: "The request took longer than it may, or its first token did.",
    409: "A stream cannot be resumed: its tokens did not come again as they were. Or: no trace is recorded.",
    413: "The body is larger than it may be, or the request needs more tokens than an engine can hold.",
    415: "The body is declared to be something other than plain JSON.",
    429: "Too many requests in this gateway, or with this API key.",
    500: "A fault of the server.",
    503: "Nothing can take the request now.",
}
ERROR_HEADERS = {401: "www-authenticate", 429: "retry-after", 503: "retry-after"}
READS = (500,)
TAKES_BODY = (400, 404, 408, 413, 415, 500, 503)
GENERATES = (*TAKES_BODY, 403, 409, 429)
ADMINISTERS = (403, *READS, 503)

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
    """One route with one method, as clients see it. Each GET can also be a HEAD, whose answer has no body."""

    method: str
    path: str
    summary: str
    answer: Any  # the type of the answer with status 200
    errors: tuple[int, ...] = READS
    bodies: tuple[type[BaseModel], ...] = ()  # the body must fit one of them
    event: Any = None  # the type of `data` in the events of a stream
    headers: tuple[str, ...] = ()  # of the request, in addition to `x-request-id`
    query: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> values, the default first; (): a list
    media_type: str = "application/json"
    example: Schema = field(default_factory=dict)  # an example body, without the model's name, which is added
    is_admin: bool = False  # needs a key with the right `admin`

    @property
    def error(self) -> type[msgspec.Struct]:
        """The type of the route's errors."""
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
    Operation("get", "/live", "Return 200 while the process runs.", Live),
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
    Operation(
        *("get", "/v1/cluster/requests/{request_id}", "Return where the time of a request went.", EndedRequests),
        (404, *READS),
    ),
    Operation(
        *("post", "/v1/admin/drain", "Replace a group of engines, without losing an answer.", DrainingRanks),
        *((*ADMINISTERS, 400, 413, 415), (DrainRequest,)),
        example={"rank": 0},
        is_admin=True,
    ),
    Operation(
        *("post", "/v1/admin/abort", "End the requests of this gateway with an id.", AbortedRequests),
        *((*ADMINISTERS, 400, 404, 413, 415), (AbortRequest,)),
        example={"request_id": "request-1"},
        is_admin=True,
    ),
    Operation("post", "/start_profile", "Begin a trace in each engine.", EngineTraces, ADMINISTERS, is_admin=True),
    Operation(
        *("post", "/stop_profile", "End the traces, and return their files.", EngineTraces, (*ADMINISTERS, 409)),
        is_admin=True,
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
