"""Refuses JSON schemas that xgrammar would silently not enforce. The error names the path, and the keyword or pattern.

Keywords that xgrammar ignores with a warning are refused in `compiler_process.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..core.grammar import GrammarRefused

_NEVER_KEPT = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems", "$dynamicRef", "$recursiveRef"),
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_NEEDS_TYPE = {  # keyword -> types; it is enforced only if the schema has one of them
    **dict.fromkeys(_NUMBERS, ("integer", "number")),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems"), ("array",)),
    **dict.fromkeys(("minProperties", "maxProperties", "required"), ("object",)),
}
_OBJECTS = ("properties", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties")
_CONSTRAINTS = frozenset([*_NEEDS_TYPE, *_OBJECTS, "items", "prefixItems", "unevaluatedItems", "type", "format"])
_ALONE = (
    "$ref",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
)  # xgrammar enforces the first of these keywords in a schema, and ignores the rest
# Formats that xgrammar 0.2.9 enforces, in place of a pattern beside them. Others it ignores, as the standard allows.
_FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
)
_NOT_EMPTY = ("type", "anyOf")  # lists that would allow nothing, and of which xgrammar makes something else
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties", "unevaluatedItems")
# The elements of a pattern: classes in brackets, escapes, and characters.
_ELEMENT = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\(?:x..|u\{[^}]*\}|u....|c.|.)|.", re.DOTALL)
# Elements for a character that JSON writes as an escape: a quote, a backslash, a control character. xgrammar 0.2.8
# writes the character itself, which is not JSON; from classes it leaves these characters out.
_UNESCAPED = re.compile(
    r'["\x00-\x1f]|\\["\\0tnvfr]|\\c.|\\(?:x|u00|u\{0*)(?:[01][\da-fA-F]|22|5[cC])\}?|\\u\{0*[\da-fA-F]?\}', re.DOTALL
)

_JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def check_schema(text: str) -> None:
    """Raise `GrammarRefused` for a schema that xgrammar would not fully enforce."""
    try:
        _check(json.loads(text), "#")
    except json.JSONDecodeError as error:
        raise GrammarRefused(f"the schema is not JSON: {error}") from None
    except RecursionError:
        raise GrammarRefused("the schema is nested too deeply") from None


def check_structural_tag(text: str) -> None:
    """Check the schemas in a structural tag like `check_schema`. xgrammar checks the tag's own structure."""
    try:
        for place, part in parts_of(text):
            try:
                _check(part.get("json_schema"), "#")
            except GrammarRefused as refused:
                raise GrammarRefused(str(refused), place) from None
    except json.JSONDecodeError as error:
        raise GrammarRefused(f"the structural tag is not JSON: {error}") from None
    except RecursionError:
        raise GrammarRefused("the structural tag is nested too deeply") from None


def parts_of(tag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas, patterns and grammars in a structural tag, with their paths, such as `.format.elements[0]`."""
    yield from _parts_in(json.loads(tag), "")


def _parts_in(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    match value:
        case {"type": "json_schema" | "regex" | "grammar"}:
            yield place, value
        case dict():
            for key, part in value.items():
                yield from _parts_in(part, f"{place}.{key}")
        case list():
            for index, part in enumerate(value):
                yield from _parts_in(part, f"{place}[{index}]")


def _check(schema: Any, place: str) -> None:
    if not isinstance(schema, dict):
        return  # true, false, or a value that xgrammar refuses
    for keyword in _NEVER_KEPT:
        if schema.get(keyword, False) is not False:
            raise GrammarRefused(f"{place}: {keyword!r} is not supported")
    for keyword in _NOT_EMPTY:
        if schema.get(keyword) == []:
            raise GrammarRefused(f"{place}: {keyword!r} must not be empty")
    _check_alone(schema, place)
    _check_types(schema, place)
    _check_object(schema, place)
    if "pattern" in schema and (named := schema.get("format")) in _FORMATS:
        raise GrammarRefused(f"{place}: 'pattern' beside 'format': {named!r} is not supported")
    for pattern in (schema.get("pattern"), *_map(schema.get("patternProperties"))):
        _check_pattern(pattern, place)
    for key in _SCHEMAS:
        _check(schema.get(key), f"{place}/{key}")
    for key in _SCHEMA_LISTS:
        for index, part in enumerate(_list(schema.get(key))):
            _check(part, f"{place}/{key}/{index}")
    for key in _SCHEMA_MAPS:
        for name, part in _map(schema.get(key)).items():
            _check(part, f"{place}/{key}/{name}")


def _check_alone(schema: Mapping[str, Any], place: str) -> None:
    deciding = [key for key in _ALONE if key in schema]
    if not deciding:
        return
    ignored = sorted((_CONSTRAINTS & schema.keys()) | set(deciding[1:]))
    if deciding[0] in ("enum", "const") and ignored == ["type"]:
        values = _list(schema["enum"]) if "enum" in schema else [schema["const"]]
        wrong = [value for value in values if not _has_type(value, schema["type"])]
        if wrong:
            raise GrammarRefused(f"{place}: {wrong[0]!r} is not of type {schema['type']!r}")
    elif ignored:
        raise GrammarRefused(f"{place}: {ignored[0]!r} beside {deciding[0]!r} is not supported")


def _check_types(schema: Mapping[str, Any], place: str) -> None:
    types = schema.get("type", "object" if "properties" in schema else None)
    given = types if isinstance(types, list) else [types]
    for keyword, needed in _NEEDS_TYPE.items():
        if keyword in schema and not set(needed) & {each for each in given if isinstance(each, str)}:
            raise GrammarRefused(f'{place}: {keyword!r} needs "type": "{needed[0]}" beside it')


def _check_object(schema: Mapping[str, Any], place: str) -> None:
    known = _map(schema.get("properties"))
    for name in _list(schema.get("required")):
        if not isinstance(name, str) or name not in known:
            raise GrammarRefused(f"{place}: {name!r} is required, so it must be in 'properties'")
    for keyword in ("patternProperties", "propertyNames"):
        if known and keyword in schema:
            raise GrammarRefused(f"{place}: {keyword!r} beside 'properties' is not supported")
    is_open = schema.get("additionalProperties") or schema.get("unevaluatedProperties") or not known
    if "minProperties" in schema and is_open:
        raise GrammarRefused(f"{place}: 'minProperties' needs properties that are all named")


def _check_pattern(pattern: Any, place: str) -> None:
    if not isinstance(pattern, str):
        return
    for element in _ELEMENT.findall(pattern):
        if _UNESCAPED.fullmatch(element):
            raise GrammarRefused(
                f"{place}: {element!r} in a pattern is not supported: JSON writes that character as an escape"
            )


def _has_type(value: Any, types: Any) -> bool:
    named = [each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)]
    return any(_JSON_TYPES[each](value) for each in named if each in _JSON_TYPES)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
