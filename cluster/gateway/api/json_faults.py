r"""What JSON can say and whoever comes after its parser cannot work with:

"\ud800"        half a surrogate pair: no encoding and no tokenizer has it
1e999           an infinity; and an integer larger than all doubles, in sums and messages a danger of its own
[[[[ ... ]]]]   so deep that another recursion over it, on a higher stack, would not come to its end
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..errors import field_name

MAX_DEPTH = 128
MAX_DIGITS = 308  # of an integer: all of these are less than the largest double

_SUSPECT = re.compile(rb"\\u[dD]|\d{%d}|\d[eE]\+?\d{3}" % (MAX_DIGITS + 1))  # other texts have only their depth

Place = tuple[str | int, ...]  # keys and indices, from the top


class Fault(NamedTuple):
    place: Place
    message: str  # without a full stop; the name of the place goes before it

    @property
    def name(self) -> str | None:
        """None is the whole."""
        return field_name(self.place)


def first_fault(text: bytes, value: Any) -> Fault | None:
    """`value` is what Python's parser made of `text`."""
    may_be_deep = text.count(b"[") + text.count(b"{") > MAX_DEPTH
    return _find(value, ()) if may_be_deep or _SUSPECT.search(text) else None


def _find(value: Any, place: Place) -> Fault | None:
    match value:
        case str() if not _is_text(value):
            return Fault(place, "holds half a surrogate pair, which is not text")
        case int() if abs(value) >= 10**MAX_DIGITS:
            return Fault(place, f"is a number of more than {MAX_DIGITS} digits")
        case float() if math.isinf(value):
            return Fault(place, "is a number larger than all that can be computed with")
        case dict() | list() if len(place) >= MAX_DEPTH:
            return Fault(place[:1], f"is nested more than {MAX_DEPTH} deep")
        case dict() if not all(map(_is_text, value)):
            return Fault(place, "has a key with half a surrogate pair, which is not text")
        case dict():
            return _find_among(value.items(), place)
        case list() if not _are_tokens(value):
            return _find_among(enumerate(value), place)
    return None


def _find_among(items: Iterable[tuple[str | int, Any]], place: Place) -> Fault | None:
    faults = (_find(value, (*place, key)) for key, value in items)
    return next(filter(None, faults), None)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _are_tokens(values: list[Any]) -> bool:
    """There may be millions of these: looked at without a step of Python for each."""
    return set(map(type, values)) == {int} and max(values) < 2**63 and min(values) >= 0
