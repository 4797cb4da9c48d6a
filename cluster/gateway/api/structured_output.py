"""Builds one grammar from everything that constrains an answer: response format, structured outputs, tool calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.engine.core.sampling import InvalidSamplingParams, StructuredOutputsParams
from baton.engine.text import GrammarSpec, ReasoningStart, ToolCallFormat, after_reasoning

from ..errors import bad_request
from .protocol import ChatRequest, GenerationRequest
from .tools import ToolCallRules


def requested_constraint(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Return the constraint on the answer's content, if any. Raises `ApiError` (400)."""
    wanted, asked = request.response_format, request.structured_outputs
    if wanted is not None and wanted.type != "text" and asked is not None:
        raise bad_request("response_format", "Give 'response_format' or 'structured_outputs', not both.")
    with _with_client_fields(request):
        if asked is not None:
            return StructuredOutputsParams(**asked.model_dump(by_alias=True))
        if wanted is None or wanted.type == "text":
            return None
        if wanted.json_schema is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=wanted.json_schema.schema_)


def reasoning_before(asked: StructuredOutputsParams | None, reasoning: ReasoningStart) -> ReasoningStart:
    """Return how reasoning begins in an answer with this constraint; `reasoning` is how it begins without one."""
    says_all = asked is not None and (asked.structural_tag is not None or asked.disable_any_whitespace)
    return ReasoningStart.NONE if says_all else reasoning


def answer_constraint(
    request: ChatRequest,
    asked: StructuredOutputsParams | None,
    form: ToolCallFormat | None,
    calls: ToolCallRules | None,
    reasoning: ReasoningStart,
) -> StructuredOutputsParams | None:
    """Return the constraint on the whole answer: reasoning, then content as `asked`, or calls in the model's format.

    Raises `ApiError` (400).
    """
    frame = form if form is not None and form.frames_answers else None
    if calls is None and (asked is None or (frame is None and reasoning is ReasoningStart.NONE)):
        return asked
    with _with_client_fields(request):
        answer = None if asked is None else _as_grammar(asked)
        grammar = answer if calls is None else calls.grammar(answer)
        if grammar is None:
            return None
        if calls is None and frame is not None:
            grammar = frame.answer_grammar(grammar)
        # Otherwise the grammar allows any text, reasoning included.
        if calls is None or calls.must_call or answer is not None:
            grammar = after_reasoning(grammar, reasoning)
        return StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": grammar}))


@contextmanager
def _with_client_fields(request: GenerationRequest) -> Iterator[None]:
    """Convert errors of sampling parameters to `ApiError`, with the client's field names."""
    try:
        yield
    except InvalidSamplingParams as error:
        names = {}
        if request.structured_outputs is None:
            schema = "response_format.json_schema.schema"
            has_tools = isinstance(request, ChatRequest) and request.usable_tools
            names = {"structured_outputs.json": schema}
            names["structured_outputs.structural_tag"] = "tools" if has_tools else schema
        param = names.get(error.field, error.field)
        raise bad_request(param, f"{param!r} {error.message}.") from None


def _as_grammar(asked: StructuredOutputsParams) -> GrammarSpec:
    """Return a constraint in the form of a part of a structural tag."""
    if asked.disable_any_whitespace:
        message = "cannot be combined with 'tools', or with models that put markers around every answer; leave it out"
        raise InvalidSamplingParams("structured_outputs.disable_any_whitespace", message)
    match asked:
        case StructuredOutputsParams(json=str(schema)):
            return {"type": "json_schema", "json_schema": _parsed(schema, "json")}
        case StructuredOutputsParams(json_object=True):
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case StructuredOutputsParams(regex=str(pattern)):
            return {"type": "regex", "pattern": pattern}
        case StructuredOutputsParams(choice=list(choices)):
            return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
        case StructuredOutputsParams(grammar=str(grammar)):
            return {"type": "grammar", "grammar": grammar}
        case StructuredOutputsParams(structural_tag=str(text)):
            tag = _parsed(text, "structural_tag")
            if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
                return tag["format"]
            raise InvalidSamplingParams("structured_outputs.structural_tag", "must be an object with a 'format'")
    raise AssertionError(f"no grammar for {asked.kind}")


def _parsed(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSamplingParams(f"structured_outputs.{field}", f"is not JSON: {error}") from None
