"""Turns request bodies into prepared requests: small ones in the event loop, large ones in a process of their own."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from ..errors import bad_request, model_not_found
from ..model import ServedModel
from ..settings import GatewaySettings
from .job import PreparedRequest
from .json_body import parse_object
from .limits import check_sizes
from .parsing import parse_request
from .prepare import Preparer
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from .responses import parse_response, prepare_response


class RequestKind(enum.StrEnum):
    """The kind of a request, by its route."""

    COMPLETION = "completion"
    CHAT = "chat"
    RESPONSE = "response"
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"

    @property
    def generates(self) -> bool:
        return self not in (RequestKind.TOKENIZE, RequestKind.DETOKENIZE)


class BodyReader:
    """Reads bodies of requests to one model. Its methods raise `ApiError` that names the field."""

    def __init__(self, model: ServedModel, settings: GatewaySettings, *, in_event_loop: bool = True) -> None:
        """With `in_event_loop`, methods raise `TooLargeForEventLoop` for requests that would block it."""
        preparer = self._preparer = Preparer(model, settings, in_event_loop=in_event_loop)
        self._model = model
        self._parsers: dict[RequestKind, Callable[[dict[str, Any]], Any]] = {
            RequestKind.COMPLETION: partial(parse_request, CompletionRequest),
            RequestKind.CHAT: partial(parse_request, ChatRequest),
            RequestKind.RESPONSE: parse_response,
        }
        self._preparers: dict[RequestKind, Callable[[Any, str], Awaitable[PreparedRequest]]] = {
            RequestKind.COMPLETION: preparer.completion,
            RequestKind.CHAT: preparer.chat,
            RequestKind.RESPONSE: partial(prepare_response, preparer),
        }
        self._answers = {RequestKind.TOKENIZE: self._tokenize, RequestKind.DETOKENIZE: self._detokenize}

    async def prepare(self, kind: RequestKind, text: bytes, key_salt: str) -> PreparedRequest:
        """Prepare a generation. `key_salt` separates the cached prefixes of different API keys; "" shares them."""
        data = parse_object(text)
        check_sizes(data, self._model.max_model_len)
        return await self._preparers[kind](self._parsers[kind](data), key_salt)

    async def answer(self, kind: RequestKind, text: bytes) -> bytes:
        """Return the whole JSON response to a request that generates nothing."""
        data = parse_object(text)
        check_sizes(data, self._model.max_model_len)
        asked = data.get("model")
        if isinstance(asked, str) and asked != self._model.model_id:
            raise model_not_found(asked, self._model.model_id)
        return msgspec.json.encode(await self._answers[kind](data))

    async def _tokenize(self, data: dict[str, Any]) -> dict[str, Any]:
        if "prompt" in data and "messages" in data:
            raise bad_request("messages", "Give either 'prompt' or 'messages'.")
        if "messages" in data:
            chat = parse_request(TokenizeChatRequest, data)
            tokens, shows = await self._preparer.chat_tokens(chat), chat.return_token_strs
        else:
            text = parse_request(TokenizeTextRequest, data)
            tokens = await self._preparer.tokenize(text.prompt, text.add_special_tokens)
            shows = text.return_token_strs
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self._model.max_model_len, "tokens": tokens}
        answer["token_strs"] = [self._model.tokenizer.token(token) for token in tokens] if shows else None
        return answer

    async def _detokenize(self, data: dict[str, Any]) -> dict[str, Any]:
        request = parse_request(DetokenizeRequest, data)
        return {"prompt": await self._preparer.detokenize(request.tokens)}
