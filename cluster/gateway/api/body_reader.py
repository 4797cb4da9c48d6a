"""Turns the bodies of requests into prepared requests, in the event loop or in a body process."""

from __future__ import annotations

import enum
import json
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from ..bodies.body import StructureScan
from ..errors import bad_request, field_name, model_not_found, prompt_too_long
from ..model import ServedModel
from ..settings import GatewaySettings
from .anthropic_input import count_tokens, parse_messages, prepare_messages
from .job import PreparedRequest
from .json_body import parse_object
from .parsing import parse_request
from .prepare import Preparer
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from .responses import count_input_tokens, parse_response, prepare_response


class RequestKind(enum.StrEnum):
    """The kind of a request, by its route."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSE = "response"
    MESSAGES = "messages"
    COUNT_TOKENS = "count_tokens"
    INPUT_TOKENS = "input_tokens"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"

    @property
    def generates(self) -> bool:
        return self in (RequestKind.COMPLETION, RequestKind.CHAT, RequestKind.RESPONSE, RequestKind.MESSAGES)


class BodyReader:
    """Reads bodies of requests to one model. Its methods raise `ApiError` that names the invalid field."""

    def __init__(self, model: ServedModel, settings: GatewaySettings, *, in_event_loop: bool = True) -> None:
        """`in_event_loop`: methods raise `TooLargeForEventLoop` for bodies that would block the event loop too long."""
        preparer = self._preparer = Preparer(model, settings, in_event_loop=in_event_loop)
        self._model = model
        self._parsers: dict[RequestKind, Callable[[dict[str, Any]], Any]] = {
            RequestKind.COMPLETION: partial(parse_request, CompletionRequest),
            RequestKind.CHAT: partial(parse_request, ChatRequest),
            RequestKind.RESPONSE: parse_response,
            RequestKind.MESSAGES: parse_messages,
        }
        self._preparers: dict[RequestKind, Callable[[Any, str], Awaitable[PreparedRequest]]] = {
            RequestKind.COMPLETION: preparer.completion,
            RequestKind.CHAT: preparer.chat,
            RequestKind.RESPONSE: partial(prepare_response, preparer),
            RequestKind.MESSAGES: partial(prepare_messages, preparer),
        }
        self._answers: dict[RequestKind, Callable[[dict[str, Any]], Awaitable[object]]] = {
            RequestKind.TOKENIZE: self._tokenize,
            RequestKind.DETOKENIZE: self._detokenize,
            RequestKind.COUNT_TOKENS: partial(count_tokens, preparer),
            RequestKind.INPUT_TOKENS: partial(count_input_tokens, preparer),
        }

    def reconfigure(self, settings: GatewaySettings) -> None:
        """Use other settings from the next body on."""
        self._preparer.settings = settings

    async def prepare(self, kind: RequestKind, text: bytes, key_salt: str) -> PreparedRequest:
        """Prepare a generation. `key_salt` separates the cached prefixes of API keys; "" shares them."""
        data = parse_object(text)
        check_sizes(data, self._model.max_model_len)
        return await self._preparers[kind](self._parsers[kind](data), key_salt)

    async def answer(self, kind: RequestKind, text: bytes) -> bytes:
        """Return the complete JSON response to a request that generates nothing."""
        data = parse_object(text)
        check_sizes(data, self._model.max_model_len)
        asked = data.get("model")
        if isinstance(asked, str) and asked != self._model.model_id:
            raise model_not_found(asked, self._model.model_id)
        return msgspec.json.encode(await self._answers[kind](data))

    async def _tokenize(self, data: dict[str, Any]) -> TokenizeAnswer:
        if "prompt" in data and "messages" in data:
            raise bad_request("messages", "Give either 'prompt' or 'messages'.")
        if "messages" in data:
            chat = parse_request(TokenizeChatRequest, data)
            tokens, shows = await self._preparer.chat_tokens(chat), chat.return_token_strs
        else:
            text = parse_request(TokenizeTextRequest, data)
            tokens = await self._preparer.tokenize(text.prompt, text.add_special_tokens)
            shows = text.return_token_strs
        token_strs = [self._model.tokenizer.token(token) for token in tokens] if shows else None
        return TokenizeAnswer(len(tokens), self._model.max_model_len, tokens, token_strs)

    async def _detokenize(self, data: dict[str, Any]) -> DetokenizeAnswer:
        request = parse_request(DetokenizeRequest, data)
        return DetokenizeAnswer(await self._preparer.detokenize(request.tokens))


MAX_FIELDS = 256  # of one body
MAX_METADATA = 16  # this and the next two are OpenAI's limits
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
MAX_VARIABLES_CHARS = 2**17  # of `chat_template_kwargs`, as JSON
MAX_TOOLS_CHARS = 2**20  # of `tools`, as JSON
MAX_CALL_CONTAINERS = 2**14  # lists and objects in all `arguments` together
MAX_CALL_COMMAS = 2**17

TURNS = ("messages", "input")


def check_sizes(data: dict[str, Any], max_model_len: int) -> None:
    """Check all limits. Raises `ApiError` (400) that names the field."""
    if len(data) > MAX_FIELDS:
        raise bad_request(None, f"The body has {len(data)} fields, more than {MAX_FIELDS}.", "too_many_values")
    _check_metadata(data.get("metadata"))
    _check_chars(data, "chat_template_kwargs", MAX_VARIABLES_CHARS)
    _check_chars(data, "tools", MAX_TOOLS_CHARS)
    for field in TURNS:
        turns = data.get(field)
        if not isinstance(turns, list):
            continue
        if len(turns) > max_model_len:  # each message is one token at least
            raise prompt_too_long(field, max_model_len, len(turns))
        _check_arguments(field, turns)


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, dict):
        return
    values = [value for value in metadata.values() if isinstance(value, str)]
    longest_key = max(map(len, metadata), default=0)
    longest = max(map(len, values), default=0)
    if len(metadata) > MAX_METADATA or longest_key > MAX_METADATA_KEY_CHARS or longest > MAX_METADATA_CHARS:
        message = (
            f"'metadata' may have {MAX_METADATA} keys of {MAX_METADATA_KEY_CHARS} characters, with values of "
            f"{MAX_METADATA_CHARS}."
        )
        raise bad_request("metadata", message)


def _check_chars(data: dict[str, Any], field: str, most: int) -> None:
    value = data.get(field)
    if value and (length := len(json.dumps(value, ensure_ascii=False))) > most:
        raise bad_request(field, f"{field!r} has {length} characters as JSON, more than the {most} that are allowed.")


def _check_arguments(field: str, turns: list[Any]) -> None:
    """Limit the arguments of all tool calls together: each is parsed, and most templates write each out as JSON."""
    scan = StructureScan()
    for place, arguments in _arguments(field, turns):
        scan.feed(arguments.encode(errors="replace"))
        scan.end()
        if scan.containers > MAX_CALL_CONTAINERS or scan.commas > MAX_CALL_COMMAS:
            name = field_name(place)
            message = (
                f"{name!r} and the calls before it hold more than {MAX_CALL_CONTAINERS} lists and objects, or "
                f"{MAX_CALL_COMMAS} values."
            )
            raise bad_request(name, message, "too_many_values")


def _arguments(field: str, turns: list[Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the path and the text of the arguments of each tool call."""
    for index, turn in enumerate(turns):
        if not isinstance(turn, dict):
            continue
        if isinstance(turn.get("arguments"), str):
            yield (field, index, "arguments"), turn["arguments"]
        calls = turn.get("tool_calls")
        for at, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                yield (field, index, "tool_calls", at, "function", "arguments"), function["arguments"]
        blocks = turn.get("content")
        for at, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if isinstance(block, dict) and isinstance(block.get("input"), dict):
                yield (field, index, "content", at, "input"), json.dumps(block["input"])
