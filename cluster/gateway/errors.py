"""Every way in which the gateway says no, in the shape that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from baton.engine.core.messages import EngineError, ErrorKind

CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it, it is only counted


class ApiError(Exception):
    """An answer that is not 200. `param` names the field that has to change, where there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """`{"error": {"message", "type", "param", "code"}}`, also the payload of an error event in a stream."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def bad_request(param: str | None, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def model_not_found(model: str, served: str) -> ApiError:
    message = f"The model {model!r} does not exist. This server has {served!r}."
    return ApiError(404, message, param="model", code="model_not_found")


def context_length_exceeded(param: str, max_model_len: int, prompt_tokens: int, max_tokens: int | None) -> ApiError:
    """OpenAI's refusal of a prompt that leaves no room: for anything where `max_tokens` is None, else for that many."""
    if max_tokens is None:
        asked = f"Your prompt has {prompt_tokens} tokens, which leaves no room for an answer. Shorten the prompt."
    else:
        asked = (
            f"You asked for {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} to "
            f"generate). Shorten one of them."
        )
    message = f"This model's maximum context length is {max_model_len} tokens. {asked}"
    return bad_request(param, message, "context_length_exceeded")


def no_capacity(message: str, retry_after_s: float) -> ApiError:
    headers = {"retry-after": str(max(1, round(retry_after_s)))}
    return ApiError(503, message, type="service_unavailable", code="no_capacity", headers=headers)


def draining() -> ApiError:
    """Of a gateway that is about to leave, to whoever asks for its health."""
    return ApiError(503, "This gateway is about to end: send requests elsewhere.", type="service_unavailable")


def timed_out(timeout_s: float) -> ApiError:
    message = f"The request was not finished within {timeout_s:g} s and was aborted."
    return ApiError(408, message, type="timeout", code="request_timeout")


def too_many_requests(limit: int) -> ApiError:
    message = f"This gateway already serves {limit} requests, which is its limit. Try again soon."
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers={"retry-after": "1"})


def invalid_api_key() -> ApiError:
    message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)


def internal(message: str) -> ApiError:
    return ApiError(500, message, type="internal_error", code="internal")


def from_engine(error: EngineError, retry_after_s: float) -> ApiError:
    """The HTTP form of an engine's refusal that no other engine could make good."""
    match error.kind:
        case ErrorKind.INVALID:
            return bad_request(None, error.message)
        case ErrorKind.TOO_LONG:
            return ApiError(413, error.message, code="context_length_exceeded")
        case ErrorKind.OVERLOADED | ErrorKind.ENGINE_DEAD | ErrorKind.KV_LOST:
            return no_capacity(error.message, retry_after_s)
        case _:
            return internal(error.message)
