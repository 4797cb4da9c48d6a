"""What a client calls a field that an engine refuses: ours -> the client's, as `ApiError.rename` takes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from baton.engine.core.sampling import StructuredOutputsParams
from baton.engine.structured.schema_checks import parts_of

from .protocol import ChatRequest, GenerationRequest

GRAMMAR = "structured_outputs"
SCHEMA = "response_format.json_schema.schema"
TAG = f"{GRAMMAR}.structural_tag"


def client_names(
    request: GenerationRequest, constraint: StructuredOutputsParams | None, names: Mapping[str, str]
) -> dict[str, str]:
    """Return the names of the request's fields where they differ; `names` are those that its endpoint has."""
    result = {"bad_words_token_ids": "bad_words", **names}
    if constraint is not None:
        asked_by = _asked_by(request)
        result |= {GRAMMAR: asked_by, f"{GRAMMAR}.{constraint.kind}": asked_by}
        if constraint.structural_tag is not None and asked_by != TAG:  # of which the client knows the parts
            result |= _names_within(request, constraint.structural_tag)
    return result


def _asked_by(request: GenerationRequest) -> str:
    """Return the field that says most of what the answer must be."""
    asked, wanted = request.structured_outputs, request.response_format
    if asked is not None:
        kinds = asked.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True)
        return f"{GRAMMAR}.{next(iter(kinds))}"
    if wanted is not None and wanted.type != "text":
        return SCHEMA if wanted.json_schema is not None else "response_format"
    return "tools"


def _names_within(request: GenerationRequest, tag: str) -> dict[str, str]:
    """Return names for the parts of a structural tag that hold what the client sent."""
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
