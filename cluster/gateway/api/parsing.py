"""Validates a body as a request, or refuses it with a 400 that names the first invalid field.

Fields of OpenAI's or vLLM's API that Baton does not support are listed in `NOT_SUPPORTED`, and refused as such; all
other unknown fields are refused as unknown.

Pydantic's error paths contain levels that the body lacks: members of unions, and fields that a validator has renamed.
An error names only those parts of the path that the body has.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.cluster.pluralize import pluralize
from baton.engine.core.sampling import StructuredOutputsParams
from baton.engine.structured.schema_checks import parts_of

from ..errors import ApiError, bad_request, excerpt, field_name, shorten
from .protocol import ChatRequest, GenerationRequest
from .validators import FieldError, RequestModel, json_type_name

# Field -> values that have no effect, and are accepted because some clients send defaults.
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True),
    "kv_transfer_params": (None,),
    "length_penalty": (None, 1),
    "logprob_token_ids": (None,),
    "media_io_kwargs": (None,),
    "mm_processor_kwargs": (None,),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "prompt_embeds": (None,),
    "reasoning_effort": (None, "none"),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "return_token_ids": (None, False),
    "return_token_offsets": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None, 1),
    "suffix": (None, ""),
    "thinking_token_budget": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "truncation_side": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "vllm_xargs": (None,),
    "watermarking": (None, False),
    "web_search_options": (None,),
}

# Field names of older versions of vLLM -> today's.
RENAMED = {
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "structural_tag": "structured_outputs.structural_tag",
}

# Unknown fields that clients often send -> advice, and the field without which it does not apply.
ADVICE: dict[str, tuple[str, str | None]] = {
    "enable_thinking": ("Put it into 'chat_template_kwargs'.", "chat_template_kwargs"),
    "extra_body": ("Put its fields into the body itself.", None),
    "max_completion_tokens": ("Did you mean 'max_tokens'?", "max_tokens"),
    "request_id": ("Send it as the header 'x-request-id'.", None),
    "thinking": ("Put it into 'chat_template_kwargs'.", "chat_template_kwargs"),
}

_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
_TYPES = {  # pydantic's error -> the required type
    **dict.fromkeys(("string_type",), "a string"),
    **dict.fromkeys(("int_type", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "finite_number"), "a number"),
    **dict.fromkeys(("bool_type",), "true or false"),
    **dict.fromkeys(("list_type",), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
}
_LENGTHS = {  # pydantic's error -> the unit of which there are too few or too many
    "too_short": "item",
    "too_long": "item",
    "string_too_short": "character",
    "string_too_long": "character",
}
_BOUNDS = {  # pydantic's error -> the message, which is written after the field's name
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
}

RequestT = TypeVar("RequestT", bound=RequestModel)


def parse_request(kind: type[RequestT], data: dict[str, Any]) -> RequestT:
    """Validate a body as a request. Raises `ApiError` (400) that names the first invalid field."""
    asked = {key: value for key, value in data.items() if not _asks_for_nothing(kind, key, value, data)}
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise _first_error(kind, error, asked) from None


def _asks_for_nothing(kind: type[BaseModel], key: str, value: Any, data: dict[str, Any]) -> bool:
    if key in RENAMED:
        if value is None:
            return True
        raise bad_request(key, f"{key!r} is now called {RENAMED[key]!r}.", "unsupported_parameter")
    if key in kind.model_fields or key not in NOT_SUPPORTED:
        return False
    same_as_n = key == "best_of" and type(value) is int and value == (data.get("n") or 1)
    if same_as_n or equals_any(value, NOT_SUPPORTED[key]):
        return True
    raise bad_request(key, f"{key!r} is not supported by this server. Leave it out.", "unsupported_parameter")


def equals_any(value: Any, others: Sequence[Any]) -> bool:
    """Return whether a value equals one of the others as in JSON, where `true` is not 1."""
    return any(value == other and type(value) is type(other) for other in others)


def _first_error(kind: type[BaseModel], error: ValidationError, body: dict[str, Any]) -> ApiError:
    """Return the refusal of `body`, which is not a valid `kind`."""
    first = error.errors(include_url=False)[0]
    place = list(_known(first, body))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        place += cause.place
    path = field_name(place)
    match first["type"]:
        case "extra_forbidden":
            return bad_request(path, _unknown(kind, place), "unknown_parameter")
        case "missing":
            return bad_request(path, f"{path!r} is required.", "missing_required_parameter")
        case "value_error":
            return bad_request(path, f"{path!r} {cause}.")
        case "literal_error" | "none_required":
            return bad_request(path, f"{path!r} must be {_allowed(first)}.")
        case name if name in _TYPES:
            return bad_request(path, f"{path!r} must be {_TYPES[name]}, not {json_type_name(first['input'])}.")
        case name if name in _LENGTHS:
            return bad_request(path, f"{path!r} must have {_length(first)}.")
        case name if name in _BOUNDS:
            return bad_request(path, f"{path!r} {_BOUNDS[name].format(**first['ctx'])}.")
    return bad_request(path, f"{path!r} is not valid.")


def _known(error: ErrorDetails, body: Any) -> Iterator[str | int]:
    """Yield the parts of an error's path that `body` has, and the name of a missing field."""
    *_, last = error["loc"]
    for part in error["loc"]:
        match body:
            case dict() if (key := str(part)) in body:
                body = body[key]
                yield key
            case list() if isinstance(part, int):
                body = body[part]
                yield part
            case dict() if part is last and error["type"] == "missing":
                yield str(part)


def _allowed(error: ErrorDetails) -> str:
    """Describe the allowed values of an enumeration, and the given one."""
    allowed = error.get("ctx", {}).get("expected", "None")
    for ours, name in _JSON_WORDS.items():
        allowed = allowed.replace(ours, name)
    given = error["input"]
    return allowed if not isinstance(given, str) else f"{allowed}, not {excerpt(given)}"


def _length(error: ErrorDetails) -> str:
    noun, limits = _LENGTHS[error["type"]], error["ctx"]
    if "min_length" in limits:
        return f"at least {pluralize(limits['min_length'], noun)}"
    return f"at most {pluralize(limits['max_length'], noun)}"


def _unknown(kind: type[BaseModel], place: list[str | int]) -> str:
    name = shorten(str(place[-1]))
    advice = _advice(kind, name) if len(place) == 1 else "Leave it out."
    return f"Unrecognized request argument: {name!r}. {advice}"


def _advice(kind: type[BaseModel], name: str) -> str:
    """Return what to do about a field that `kind` does not have."""
    advice, needed = ADVICE.get(name, (None, None))
    if advice is not None and (needed is None or needed in kind.model_fields):
        return advice
    nearest = difflib.get_close_matches(name, kind.model_fields, n=1)
    return f"Did you mean {nearest[0]!r}?" if nearest else "Leave it out."


_CHATS_TOOL = re.compile(r"(tools\[\d+\])\.function(?:\.(\w+))?")


@dataclass(frozen=True)
class ApiFields:
    """The fields of an API whose requests are converted to chat requests."""

    refused: Mapping[str, tuple[tuple[Any, ...], str]]  # field -> values that have no effect, and advice for others
    renamed: Mapping[str, str]  # refused field of another API -> name in this API
    names: Mapping[str, str]  # field of a chat request -> name in this API, for errors
    tool_names: Mapping[str, str] = field(default_factory=dict)  # the same for the fields of a tool's function

    def parse(self, kind: type[RequestT], data: dict[str, Any]) -> RequestT:
        """Validate a body. Raises `ApiError` (400) that names the first invalid field."""
        for theirs, ours in self.renamed.items():
            if data.get(theirs) is not None:
                raise bad_request(theirs, f"{theirs!r} is called {ours!r} here.", "unknown_parameter")
        asked = {key: value for key, value in data.items() if not self._asks_for_nothing(key, value)}
        return parse_request(kind, asked)

    def _asks_for_nothing(self, key: str, value: Any) -> bool:
        if key not in self.refused:
            return False
        nothing, advice = self.refused[key]
        if equals_any(value, nothing):
            return True
        raise bad_request(key, f"{key!r} is not supported by this server. {advice}", "unsupported_parameter")

    def name(self, chats: str) -> str:
        """Return this API's name for a field of a chat request."""
        return self.names.get(chats) or _CHATS_TOOL.sub(self._tool_field, chats)

    def _tool_field(self, found: re.Match[str]) -> str:
        tool, name = found.groups()
        return tool if name is None else f"{tool}.{self.tool_names.get(name, name)}"

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Give fields of a chat request this API's names in errors that are raised in the block."""
        try:
            yield
        except ApiError as error:
            error.rename({**self.names, **({} if error.param is None else {error.param: self.name(error.param)})})
            raise


GRAMMAR = "structured_outputs"
SCHEMA = "response_format.json_schema.schema"
TAG = f"{GRAMMAR}.structural_tag"


def client_names(
    request: GenerationRequest, constraint: StructuredOutputsParams | None, names: Mapping[str, str]
) -> dict[str, str]:
    """Return the client's name for each engine field that it names differently; `names` holds its endpoint's names."""
    result = {"bad_words_token_ids": "bad_words", **names}
    if constraint is not None:
        asked_by = _asked_by(request)
        result |= {GRAMMAR: asked_by, f"{GRAMMAR}.{constraint.kind}": asked_by}
        if constraint.structural_tag is not None and asked_by != TAG:  # the client sent parts of it, not the tag
            result |= _names_within(request, constraint.structural_tag)
    return result


def _asked_by(request: GenerationRequest) -> str:
    """Return the field that determines the answer's grammar."""
    asked, wanted = request.structured_outputs, request.response_format
    if asked is not None:
        kinds = asked.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
        return f"{GRAMMAR}.{next(iter(kinds))}"
    if wanted is not None and wanted.type != "text":
        return SCHEMA if wanted.json_schema is not None else "response_format"
    return "tools"


def _names_within(request: GenerationRequest, tag: str) -> dict[str, str]:
    """Return names for the parts of a structural tag that the client sent."""
    sources = list(_sources(request))
    result = {}
    for place, part in parts_of(tag):
        content = part.get("json_schema", part.get("pattern", part.get("grammar")))
        if (field := next((name for name, value in sources if value == content), None)) is not None:
            result[f"{TAG}{place}"] = field
    return result


def _sources(request: GenerationRequest) -> Iterator[tuple[str, Any]]:
    asked, wanted = request.structured_outputs, request.response_format
    if asked is not None:
        yield f"{GRAMMAR}.json", json.loads(asked.json_) if isinstance(asked.json_, str) else asked.json_
        yield f"{GRAMMAR}.regex", asked.regex
        yield f"{GRAMMAR}.grammar", asked.grammar
    if wanted is not None and wanted.json_schema is not None:
        yield SCHEMA, wanted.json_schema.schema_
    if isinstance(request, ChatRequest):
        for index, tool in enumerate(request.usable_tools):
            yield f"tools[{index}].function.parameters", tool.function.parameters
