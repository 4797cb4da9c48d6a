"""Schemas are refused if the compiled grammar would allow answers that violate them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.engine.core.grammar import GrammarRefused
from baton.engine.structured.schema_checks import check_schema, check_structural_tag

from ...helpers.structured_cases import SCHEMA

KEPT: dict[str, Any] = {
    "a whole one": SCHEMA,
    "anything": True,
    "a list of types": {"type": ["integer", "null"], "minimum": 3},
    "an enum of its type": {"type": ["string", "null"], "enum": ["a", None]},
    "a union": {"oneOf": [{"const": 1}, {"const": "a"}], "discriminator": {"propertyName": "kind"}},
    "names that are keywords": {"type": "object", "properties": {"not": {"type": "string"}, "required": {}}},
    "values that look like schemas": {"enum": [{"uniqueItems": True}]},
    "what asks for nothing": {"type": "array", "items": {}, "uniqueItems": False},
    "unknown words": {"type": "string", "x-order": 3, "title": "t", "format": "date"},
    "patterns that JSON need not escape": {
        "type": "object",
        "patternProperties": {
            r"^[^\"\\]+\u0041\x7e\d\.$": {"type": "string", "pattern": r"^\[[\\\s]*\]\u{1F600}[ -~]$"}
        },
    },
    "a pattern beside an unknown format": {"type": "string", "format": "phone", "pattern": "^[0-9]+$"},
    "a format of no string": {"type": "integer", "format": "date"},
    "inferred objects": {"properties": {"a": {}}, "required": ["a"]},
}

REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "#: 'not'"),
    "conditions": ({"if": {}, "then": {}}, "#: 'if'"),
    "unique items": ({"type": "array", "items": {}, "uniqueItems": True}, "uniqueItems"),
    "deep inside": ({"properties": {"a": {"items": {"contains": {}}}}}, "#/properties/a/items: 'contains'"),
    "in a definition": ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, r"#/\$defs/a"),
    "in a union": ({"anyOf": [{}, {"dependentRequired": {"a": ["b"]}}]}, "#/anyOf/1"),
    "a bound without a type": ({"minimum": 3}, '\'minimum\' needs "type": "integer"'),
    "a bound of another type": ({"type": "string", "minItems": 3}, "minItems"),
    "beside a reference": ({"$ref": "#", "minimum": 3, "type": "integer"}, "beside '\\$ref'"),
    "beside a union": ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "beside 'anyOf'"),
    "a union of nothing": ({"properties": {"a": {"anyOf": []}}}, "#/properties/a: 'anyOf' must not be empty"),
    "no type": ({"type": []}, "#: 'type' must not be empty"),
    "a pattern beside a format": (
        {"type": "string", "format": "date", "pattern": "^2"},
        "#: 'pattern' beside 'format': 'date' is not supported",
    ),
    "two unions": ({"anyOf": [{}], "oneOf": [{}]}, "'oneOf' beside 'anyOf'"),
    "an enum of another type": ({"type": "string", "enum": ["a", 1]}, "1 is not of type 'string'"),
    "true is no number": ({"type": "integer", "const": True}, "True is not of type"),
    "required, and no name": ({"type": "object", "properties": {"a": {}}, "required": [["a"]]}, "is required"),
    "a type that is none": ({"type": [{}], "enum": [1]}, "1 is not of type"),
    "required and unnamed": ({"type": "object", "required": ["z"]}, "'z' is required"),
    "patterns beside names": (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a": {"type": "string"}}},
        "patternProperties",
    ),
    "a quote in a pattern": ({"type": "string", "pattern": '^a"b$'}, "#: '\"' in a pattern"),
    "a backslash in a pattern": ({"items": {"type": "string", "pattern": r"^[A-Z]:\\.*$"}}, "#/items: .* in a pattern"),
    "a line break in a pattern": ({"type": "string", "pattern": r"^a\nb$"}, "in a pattern"),
    "a quote by its number": ({"type": "string", "pattern": r"^\x22|[a]$"}, "in a pattern"),
    "a backslash by its number": ({"type": "string", "pattern": r"^\u{5C}$"}, "in a pattern"),
    "a control character in a pattern": ({"type": "string", "pattern": "^\\u000a$"}, "in a pattern"),
    "a quote in a pattern of names": (
        {"type": "object", "patternProperties": {'^\\"': {"type": "string"}}},
        "in a pattern",
    ),
    "a count of open properties": ({"type": "object", "minProperties": 2}, "minProperties"),
}


@pytest.mark.parametrize("schema", KEPT.values(), ids=KEPT)
def test_schemas_that_the_compiler_enforces_are_accepted(schema: Any) -> None:
    check_schema(json.dumps(schema))


@pytest.mark.parametrize(("schema", "reason"), REFUSED.values(), ids=REFUSED)
def test_keywords_that_the_compiler_would_ignore_are_refused_with_their_path(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarRefused, match=reason):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize("text", ['{"type":', '{"items":' * 20_000 + "{}" + "}" * 20_000], ids=["broken", "deep"])
def test_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(GrammarRefused):
        check_schema(text)
    with pytest.raises(GrammarRefused):
        check_structural_tag(text)


def test_schemas_within_structural_tags_are_checked() -> None:
    inner = {"type": "json_schema", "json_schema": {"not": {}}}
    with pytest.raises(GrammarRefused, match="'not'"):
        check_structural_tag(json.dumps({"format": {"type": "tags", "tags": [{"content": inner}]}}))
