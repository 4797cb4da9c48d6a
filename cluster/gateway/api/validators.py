"""Shared validators of request models: strict types, no unknown fields, and unions discriminated by `type`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ..errors import excerpt
from .json_body import JsonPath

TEXT_ALONE = ". This server reads text only"  # advice in errors about images, audio or files

# Names of JSON's types; `bool` comes before `int`, of which it is a subclass.
_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer", float: "a number"}

_NULL = {"type": "null"}


class FieldError(ValueError):
    """An error in a field inside the value that a validator checks. The message is written after the field's name."""

    def __init__(self, place: JsonPath, message: str) -> None:
        super().__init__(message)
        self.place = place


class RequestModel(BaseModel):
    """A model that accepts no strings or booleans as numbers, and no unknown fields.

    An optional field that is null counts as absent, as in OpenAI's API.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add to the schema that optional fields may be null."""
        described = handler(schema)
        model = handler.resolve_ref_schema(described)
        for name, field in model["properties"].items():
            if name not in model.get("required", ()) and _NULL not in field.get("anyOf", ()):
                default = field.pop("default")
                model["properties"][name] = {"anyOf": [field, _NULL], "default": default}
        return described

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        optional = {field.alias or name for name, field in cls.model_fields.items() if not field.is_required()}
        return {key: field for key, field in value.items() if field is not None or key not in optional}


class ReplayedModel(RequestModel):
    """A part of a conversation, which clients store and send again: null fields are ignored, even unknown ones."""

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add to the schema that null fields are ignored."""
        described = super().__get_pydantic_json_schema__(schema, handler)
        handler.resolve_ref_schema(described)["additionalProperties"] = _NULL
        return described

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return without_nulls(value)


def without_nulls(value: Any) -> Any:
    """Return an object without its null fields; return anything else unchanged."""
    return {key: field for key, field in value.items() if field is not None} if isinstance(value, dict) else value


def _by_value(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_by_value)]  # JSON may write 16 as 16.0


def json_type_name(value: Any) -> str:
    """Return the name of a value's JSON type."""
    return next((name for kind, name in _KINDS.items() if isinstance(value, kind)), "null")


def one_of(names: Sequence[str]) -> str:
    """Return the names as `'a', 'b' or 'c'`."""
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last


def kind(value: Any) -> Any:
    """Return an object's `type`; None if it has none, or is not an object."""
    return value.get("type") if isinstance(value, dict) else None


def tag(name: str) -> Tag:
    """Tag a member of a union. Error paths omit the tag, since clients know no such level."""
    return Tag(f"<{name}>")


def tag_of(value: Any) -> str:
    """Return an object's tag by its `type`, and `<word>` for anything else."""
    return f"<{kind(value)}>" if isinstance(value, dict) else "<word>"


def object_of_type(kinds: Sequence[str], advice: str = "", type_of: Callable[[Any], Any] = kind) -> BeforeValidator:
    """Return a validator that drops null fields, and refuses objects of other types by their `type`."""

    def check(value: Any) -> Any:
        if isinstance(value, BaseModel):  # made by the gateway, not read from a body
            return value
        if not isinstance(value, dict):
            raise ValueError(f"must be an object, not {json_type_name(value)}")
        fields = without_nulls(value)
        given = type_of(fields)
        if given not in kinds:
            but = f", not {excerpt(given)}" if isinstance(given, str) else ""
            raise FieldError(("type",), f"must be {one_of(kinds)}{but}{advice}")
        return fields

    return BeforeValidator(check)


def string_or_object(kinds: Sequence[str]) -> BeforeValidator:
    """Return the same validator for values that may also be a string; strings are left to another validator."""
    check: Callable[[Any], Any] = object_of_type(kinds).func  # type: ignore[assignment]
    return BeforeValidator(lambda value: check(value) if isinstance(value, dict) else value)
