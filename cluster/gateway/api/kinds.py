"""Objects whose `type` says what they are: members of unions that are told apart by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BeforeValidator, Tag

from ..errors import excerpt
from .strict import FieldError, described, spelled, without_nulls


def kind(value: Any) -> Any:
    """Return an object's `type`; None where it has none, or is no object."""
    return value.get("type") if isinstance(value, dict) else None


def tag(name: str) -> Tag:
    """Mark a member of a union. Clients know no such level, so errors do not show it."""
    return Tag(f"<{name}>")


def tag_of(value: Any) -> str:
    """Return the tag of an object by its `type`, and `<word>` for anything else."""
    return f"<{kind(value)}>" if isinstance(value, dict) else "<word>"


def only(kinds: Sequence[str], advice: str = "", kind_of: Callable[[Any], Any] = kind) -> BeforeValidator:
    """Take objects of these types, without their null fields, and refuse another type by name."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"must be an object, not {described(value)}")
        said = without_nulls(value)
        given = kind_of(said)
        if given not in kinds:
            but = f", not {excerpt(given)}" if isinstance(given, str) else ""
            raise FieldError(("type",), f"must be {spelled(kinds)}{but}{advice}")
        return said

    return BeforeValidator(check)


def word_or(kinds: Sequence[str]) -> BeforeValidator:
    """The same for a value that may also be a word, which another validator checks."""
    check: Callable[[Any], Any] = only(kinds).func  # type: ignore[assignment]
    return BeforeValidator(lambda value: check(value) if isinstance(value, dict) else value)
