"""The client's names for fields that engines refuse, as `ApiError.rename` expects them: ours -> the client's."""

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
    """Return the client's names of fields where they differ; `names` holds those of its endpoint."""
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
    """Return names for those parts of a structural tag that the client sent."""
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
