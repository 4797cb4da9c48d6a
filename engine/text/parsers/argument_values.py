"""Argument values as JSON, and the types that a JSON schema allows for a value written as text."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

TYPES = frozenset(["null", "boolean", "number", "string", "array", "object"])  # JSON's types; integers count as numbers
TEXT = frozenset(["string"])
_TYPE_OF: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "number", float: "number"},
    **{str: "string", list: "array", dict: "object"},
}
_PYTHONS = {"True": "true", "False": "false", "None": "null"}  # Python's spellings, which models see in templates
_MAX_DEPTH = 16  # maximal nesting of schemas


def to_json(value: Any) -> str:
    """Write a value as JSON. Raises `ValueError` for NaN and infinities, `TypeError` for other kinds of values."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which must be escaped
        return json.dumps(value)
    return text


def argument_names(parameters: Mapping[str, Any]) -> Collection[str]:
    """Return the argument names that a function's schema lists."""
    match _meant(parameters, parameters):
        case {"properties": dict(known)}:
            return known.keys()
    return ()


def argument_types(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a function's schema allows for an argument; all types if it does not say."""
    match _meant(parameters, parameters):
        case {"properties": dict(known)} if name in known:
            return _types(known[name], parameters, {})
        case {"additionalProperties": dict(schema)}:
            return _types(schema, parameters, {})
    return TYPES


def json_of_text(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument written as `text`: a value of an allowed type if it is one, else a string."""
    words = text.strip()
    takes_text = "string" in types
    try:
        value = json.loads(words if takes_text else _PYTHONS.get(words, words), strict=False, parse_constant=_refuse)
        if not isinstance(value, str) and (not takes_text or _TYPE_OF[type(value)] in types):
            return to_json(value)
    except (ValueError, RecursionError):
        pass
    return to_json(text)


def _types(schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows; all types if a part of it is not understood.

    Schemas come from clients and are not validated. `known` caches results by the identity of parts, which may be
    referenced many times.
    """
    meant = _meant(schema, root)
    if depth > _MAX_DEPTH:
        return TYPES
    if id(meant) not in known:
        known[id(meant)] = TYPES  # in case it refers to itself
        known[id(meant)] = _types_meant(meant, root, known, depth + 1)
    return known[id(meant)]


def _types_meant(schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    match schema:
        case {"enum": list(values)}:
            return frozenset(_TYPE_OF[type(value)] for value in values)
        case {"const": value}:
            return frozenset([_TYPE_OF[type(value)]])
        case {"anyOf": list(choices)} | {"oneOf": list(choices)}:
            return frozenset().union(*(_types(choice, root, known, depth) for choice in choices))
        case {"allOf": list(parts)}:
            return TYPES.intersection(*(_types(part, root, known, depth) for part in parts))
        case {"type": str(name)}:
            return _named(name)
        case {"type": list(names)}:
            return frozenset().union(*(_named(name) for name in names))
    return TYPES


def _named(name: Any) -> frozenset[str]:
    known = "number" if name == "integer" else name
    return frozenset([known]) if isinstance(known, str) and known in TYPES else TYPES


def _meant(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow references like `#/$defs/size`; return None if the target does not exist."""
    for _ in range(_MAX_DEPTH):
        match schema:
            case {"$ref": str(place)}:
                schema = root
                for step in place.removeprefix("#").split("/")[1:]:
                    name = step.replace("~1", "/").replace("~0", "~")
                    schema = schema.get(name) if isinstance(schema, Mapping) else None
            case _:
                return schema
    return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")
