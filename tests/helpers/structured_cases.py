"""Constraints on outputs, each with a check that an output keeps it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from baton.engine import StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
        }
    },
}
COLOR = {"enum": ["red", "green"]}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": COLOR}, "end": "</f>"},
}
_CALLS = {
    "type": "triggered_tags",
    "triggers": ["<f>"],
    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": COLOR}, "end": "</f>"}],
}
_THOUGHTS = {
    "type": "sequence",
    "elements": [
        {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "f>"},
        {"type": "json_schema", "json_schema": COLOR},
    ],
}
WITH_TEXT = {  # constraints that leave a part of the output free
    name: StructuredOutputsParams(structural_tag=json.dumps({"type": "structural_tag", "format": form}))
    for name, form in (("calls in a text", _CALLS), ("thoughts before", _THOUGHTS))
}
CHOICES = ["yes", "no", 'naïve "quotes"', "a\nline", "back\\slash", "😀"]


PATTERN = r"[a-c]{2,5}-(\d\d|é{1,3}x)"


@dataclass(frozen=True)
class Case:
    asked: StructuredOutputsParams
    check: Callable[[str], object]  # raises, or returns something false, for a text that does not fit


def fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CASES = {
    "json": Case(StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), fits_schema),
    "regex": Case(StructuredOutputsParams(regex=PATTERN), re.compile(PATTERN).fullmatch),
    "choice": Case(StructuredOutputsParams(choice=CHOICES), CHOICES.__contains__),
    "grammar": Case(
        StructuredOutputsParams(grammar='root ::= "<" (inner | word) ">"\ninner ::= "(" word ")"\nword ::= [a-z]{1,3}'),
        re.compile(r"<(\([a-z]{1,3}\)|[a-z]{1,3})>").fullmatch,
    ),
    "structural_tag": Case(
        StructuredOutputsParams(structural_tag=json.dumps(TAG)),
        re.compile('<f>"(red|green)"</f>').fullmatch,
    ),
    "json_object": Case(
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        lambda text: isinstance(json.loads(text), dict),
    ),
}
