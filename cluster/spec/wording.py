"""What pydantic refuses, in the words of our other errors: where, what was given, what is allowed."""

from __future__ import annotations

import re
import reprlib
from typing import Any

import pydantic

SECRET = "api_keys"  # nobody prints them
_AN_INSTANCE = re.compile(r" or instance of \w+$")
ITS_WORDS = {
    "be a valid dictionary": "be a mapping",
    "be a valid list": "be a list",
    "be a valid string": "be a text",
    "be a valid integer": "be a whole number",  # and what the given one is instead
    "be a valid number": "be a number",
    "be less than or equal to ": "be at most ",
    "be greater than or equal to ": "be at least ",
    "be less than ": "be below ",
    "be greater than ": "be above ",
}


def lines_of(error: pydantic.ValidationError) -> str:
    """A line for each problem."""
    return "\n".join(_line(each["loc"], each["type"], each["msg"], each["input"]) for each in error.errors())


def _line(loc: tuple[int | str, ...], kind: str, message: str, given: Any) -> str:
    _, should, allowed = message.partition(" should ")
    if kind == "missing":
        what = "is missing"
    elif kind == "extra_forbidden":
        loc, what = loc[:-1], f"unknown key {loc[-1]!r}"
    elif should and kind != "value_error":
        what = f"is {_shown(given, SECRET in loc)}, must {_in_our_words(allowed)}"
    else:
        what = message.removeprefix("Value error, ")
    where = ".".join(str(part) for part in loc)
    return f"{where}: {what}" if where else what


def _in_our_words(allowed: str) -> str:
    """`be a valid integer, unable to parse string as an integer` as `be a whole number`."""
    allowed = _AN_INSTANCE.sub("", allowed)
    for theirs, ours in ITS_WORDS.items():
        if allowed.startswith(theirs):
            return ours + allowed.removeprefix(theirs).partition(",")[0]
    return allowed


def _shown(given: Any, is_secret: bool) -> str:
    match given:
        case None:
            return "empty"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str() if not is_secret:
            return reprlib.repr(given)
    return "something else" if is_secret else str(given)
