"""All error responses of the gateway, in the JSON of OpenAI's or of Anthropic's API."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
from msgspec import UNSET, UnsetType

from baton.cluster.pluralize import pluralize
from baton.engine.core.messages import EngineError, ErrorKind

MAX_TEXT_CHARS = 2048  # of an error message
EXCERPT_CHARS = 100  # of a client's text in a message
ANTHROPIC_ROUTE = "/v1/messages"  # this route and those below it send errors as Anthropic's API does
CLIENT_CLOSED_REQUEST = 499  # nginx's code; only counted, since the client has disconnected


class ErrorDetails(msgspec.Struct):
    """An error: what is wrong, and which field has to change."""

    message: str
    type: str
    param: str | None  # the field, such as `messages[0].content`
    code: str | None
    gpu_time_spent: bool | UnsetType = UNSET  # in errors about load: whether an engine may have worked on the request


class ErrorResponse(msgspec.Struct):
    """Every error has this shape, which is OpenAI's."""

    error: ErrorDetails


class AnthropicErrorDetails(msgspec.Struct):
    """An error of Anthropic's API. `param`, `details` and `gpu_time_spent` are Baton's additions."""

    type: str
    message: str
    param: str | UnsetType = UNSET  # the field that has to change
    details: dict[str, str] | UnsetType = UNSET  # `error_code`: the `code` of OpenAI's shape
    gpu_time_spent: bool | UnsetType = UNSET


class AnthropicErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    """Errors of Anthropic's routes have this shape."""

    error: AnthropicErrorDetails
    request_id: str


class ApiError(Exception):
    """An error response. `param` names the field that the client has to change, if any.

    `gpu_time_spent` says whether an engine may have worked on the request; None if that does not matter, as for an
    invalid request. `detail` goes to the log and never to the client: it may name engines, classes and files.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        gpu_time_spent: bool | None = None,
        detail: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shorten_message(message)
        self.type = type
        self.param = None if param is None else _shorten_message(param)
        self.code = code
        self.headers = dict(headers or {})
        self.gpu_time_spent = gpu_time_spent
        self.detail = _shorten_message(detail)

    @property
    def is_about_load(self) -> bool:
        """True if the same request may succeed later, so that clients want to know whether it has cost GPU time."""
        return self.status in (408, 429) or self.status >= 500

    def rename(self, names: Mapping[str, str]) -> None:
        """Replace engine field names with the client's, in `param` and in quotes in the message.

        `names` maps the engine's names to the client's. A path inside a field takes the field's new name, unless the
        path has a new name of its own.
        """
        if self.param is not None:
            within = [ours for ours in names if re.match(rf"{re.escape(ours)}($|[.\[])", self.param)]
            theirs = names[max(within, key=len)] if within else self.param
            self.message = self.message.replace(f"'{self.param}'", f"'{theirs}'")
            self.param = theirs
        for ours, theirs in names.items():
            self.message = self.message.replace(f"'{ours}'", f"'{theirs}'")

    def body(self) -> bytes:
        """Return `{"error": {"message", "type", "param", "code"}}`; error events of streams have the same content."""
        spent = UNSET if self.gpu_time_spent is None else self.gpu_time_spent
        return msgspec.json.encode(ErrorResponse(ErrorDetails(self.message, self.type, self.param, self.code, spent)))

    def anthropic_body(self, request_id: str) -> bytes:
        """Return the error as Anthropic's API has it: its type follows from the status. `param` is Baton's addition."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        details = AnthropicErrorDetails(
            type=kind,
            message=self.message,
            param=UNSET if self.param is None else self.param,
            details=UNSET if self.code is None else {"error_code": self.code},
            gpu_time_spent=UNSET if self.gpu_time_spent is None else self.gpu_time_spent,
        )
        return msgspec.json.encode(AnthropicErrorResponse(details, request_id))

    def body_at(self, path: str, request_id: str) -> bytes:
        """Return the body of an error response to a request of this path."""
        return self.anthropic_body(request_id) if is_anthropic(path) else self.body()


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return path == ANTHROPIC_ROUTE or path.startswith(f"{ANTHROPIC_ROUTE}/")


def _shorten_message(text: str) -> str:
    """Shorten a message, which may quote names and values of a client, of any length."""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."


def shorten(text: str) -> str:
    """Shorten a client's text, so that an error message is never as large as the request."""
    return text if len(text) <= EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]}..."


def excerpt(text: str) -> str:
    """Shorten a client's text and put it in quotes."""
    return repr(shorten(text))


def field_name(place: Iterable[str | int]) -> str | None:
    """Write a path of keys and indices as `param` has it: `messages[0].content`; None for the whole body."""
    names = (f"[{part}]" if isinstance(part, int) else f".{shorten(part)}" for part in place)
    return "".join(names).lstrip(".") or None


def bad_request(param: str | None, message: str, code: str | None = None, *, detail: str = "") -> ApiError:
    return ApiError(400, message, param=param, code=code, detail=detail)


def model_not_found(model: str, served: str) -> ApiError:
    message = f"The model {excerpt(model)} does not exist. This server has {served!r}."
    return ApiError(404, message, param="model", code="model_not_found")


def unknown_request(message: str) -> ApiError:
    return ApiError(404, message, param="request_id", code="unknown_request")


def priority_not_allowed(asked: int, least: int) -> ApiError:
    """Refuse a priority that the client's key or the settings do not allow."""
    message = (
        f"'priority' must be {least} or more, not {asked}: lower is served sooner. The operator sets the lowest "
        "allowed priority, with gateway.min_priority or for an API key (min_priority=N in its line of api_keys_file)."
    )
    return bad_request("priority", message, "priority_not_allowed")


def prompt_too_long(param: str, max_model_len: int, least_tokens: int) -> ApiError:
    """Refuse a prompt that is too long before all of it was tokenized."""
    message = f"This model's maximum context length is {max_model_len} tokens. Your prompt has {least_tokens} or more."
    return bad_request(param, message, "context_length_exceeded")


def prediction_too_long(param: str, max_model_len: int, least_tokens: int) -> ApiError:
    """Refuse a prediction that is longer than any possible answer."""
    message = (
        f"{param!r} has {least_tokens} tokens or more. No answer of this model is longer than its context, "
        f"{max_model_len} tokens."
    )
    return bad_request(param, message, "context_length_exceeded")


def context_length_exceeded(param: str, max_model_len: int, prompt_tokens: int, max_tokens: int | None) -> ApiError:
    """Refuse a prompt after which the context has no room for `max_tokens` more, or for any token if that is None."""
    if max_tokens is None:
        length = pluralize(prompt_tokens, "token")
        asked = f"Your prompt has {length}, which leaves no room for an answer. Shorten the prompt."
    else:
        asked = (
            f"You asked for {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} to "
            f"generate). Shorten one of them."
        )
    message = f"This model's maximum context length is {max_model_len} tokens. {asked}"
    return bad_request(param, message, "context_length_exceeded")


def _unavailable(message: str, code: str, retry_after_s: float, detail: str = "") -> ApiError:
    headers = _retry_after(retry_after_s)
    return ApiError(503, message, type="service_unavailable", code=code, headers=headers, detail=detail)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, round(seconds)))}


def no_capacity(message: str, retry_after_s: float, detail: str = "") -> ApiError:
    return _unavailable(message, "no_capacity", retry_after_s, detail)


def too_expensive(reason: str) -> ApiError:
    """Refuse a body that took more time or memory to read than one body may."""
    return bad_request(None, f"The body {reason}: send less in one request.", "body_too_expensive")


def memory_full(limit_bytes: int, retry_after_s: float) -> ApiError:
    """Refuse a request whose body, prompt or answer exceeds the memory that all requests share."""
    message = (
        f"Requests in this gateway use all of the {limit_bytes} bytes that they share, or the part of them that is for "
        f"large bodies and answers. Try again in {retry_after_s:g} s."
    )
    return _unavailable(message, "memory_full", retry_after_s)


def answer_too_large(limit_bytes: int) -> ApiError:
    """Refuse a request whose answer, held until it is complete, takes more memory than one answer may."""
    message = (
        f"The answer takes more than {limit_bytes} bytes until it is whole and can be sent. Set 'stream' to true, or "
        "ask for fewer choices, tokens or log probabilities."
    )
    return bad_request(None, message, "answer_too_large")


def readers_full(retry_after_s: float) -> ApiError:
    """Refuse a large body because too many others wait to be read."""
    message = f"Too many large request bodies are waiting to be read. Try again in {retry_after_s:g} s."
    return _unavailable(message, "readers_full", retry_after_s)


def engines_full(retry_after_s: float, detail: str = "") -> ApiError:
    message = f"Too many requests are waiting for engines. Try again in {retry_after_s:g} s."
    return _unavailable(message, "engines_full", retry_after_s, detail)


def no_retries_left(message: str, retry_after_s: float, detail: str = "") -> ApiError:
    return _unavailable(message, "retry_budget_exhausted", retry_after_s, detail)


def draining() -> ApiError:
    """Return the error with which health checks learn that this gateway is about to end."""
    return ApiError(503, "This gateway is shutting down: send requests elsewhere.", type="service_unavailable")


def too_many_connections() -> ApiError:
    message = "This gateway has reached its limit of open connections. Try again in 1 s."
    return _unavailable(message, "too_many_connections", 1.0)


def timed_out(message: str, code: str = "request_timeout") -> ApiError:
    return ApiError(408, message, type="timeout", code=code)


def not_finished(limit_s: float) -> ApiError:
    return timed_out(f"The request was not finished within {limit_s:g} s, so it was aborted.")


def queue_full(limit: int, retry_after_s: float) -> ApiError:
    served = pluralize(limit, "request")
    message = f"This gateway already serves {served}, which is its limit. Try again in {retry_after_s:g} s."
    return _too_many(message, "queue_full", retry_after_s)


def key_limit(limit: int, retry_after_s: float) -> ApiError:
    served = pluralize(limit, "request")
    message = f"This API key already has {served} under way, which is its limit. Try again in {retry_after_s:g} s."
    return _too_many(message, "key_limit", retry_after_s)


def _too_many(message: str, code: str, retry_after_s: float) -> ApiError:
    headers = _retry_after(retry_after_s)
    return ApiError(429, message, type="rate_limit_error", code=code, headers=headers, gpu_time_spent=False)


def invalid_api_key() -> ApiError:
    message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, type="authentication_error", code="invalid_api_key", headers=headers)


def not_admin() -> ApiError:
    """Refuse an operator's route to a client without the right `admin`."""
    message = (
        "This route is for API keys with the right 'admin': write 'admin' after the key in the gateways' api_keys_file."
    )
    return ApiError(403, message, type="permission_error", code="not_admin")


def ended_by_operator() -> ApiError:
    """End a request at an operator's order. Clients do not retry a 403 by themselves."""
    return ApiError(403, "The operator has ended this request.", type="permission_error", code="ended_by_operator")


def no_directory(detail: str) -> ApiError:
    return _unavailable("The application's directory does not answer. Try again in 1 s.", "no_directory", 1.0, detail)


def internal(message: str, detail: str = "") -> ApiError:
    return ApiError(500, message, type="internal_error", code="internal", detail=detail)


def from_engine(error: EngineError, retry_after_s: float) -> ApiError:
    """Return the HTTP error for an engine's error after which no other engine was tried, or none could help.

    Only the text of an error in the request itself is passed on; all other texts go to the log.
    """
    match error.kind:
        case ErrorKind.INVALID if error.field:
            return bad_request(error.field, f"{error.field!r} {error.message}.")
        case ErrorKind.INVALID:
            return bad_request(None, error.message)
        case ErrorKind.TOO_LONG:
            return ApiError(413, error.message, param="prompt", code="context_length_exceeded")
        case ErrorKind.TIMED_OUT:
            return timed_out("The request was not finished in its time and was aborted.")
        case ErrorKind.OVERLOADED:
            return engines_full(retry_after_s, error.text)
        case ErrorKind.ENGINE_DEAD | ErrorKind.LEAVING | ErrorKind.KV_LOST | ErrorKind.KV_EXPIRED:
            message = "The request was lost in an engine, and no other engine could take it over."
            return no_capacity(message, retry_after_s, error.text)
        case _:
            return internal("An engine failed to serve the request.", error.text)
