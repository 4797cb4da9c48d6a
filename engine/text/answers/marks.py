"""Marks in text that arrives in pieces: what must be held back until the next piece tells."""

from __future__ import annotations

# Between the parts of a mark. What may be one is looked at again with each piece of text, so all its parts have an end.
BLANKS = r"\s{0,99}+"


def first_of(text: str, *marks: str) -> tuple[int, str] | None:
    """The mark that comes first, and where."""
    return min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)


def undecided(text: str, *marks: str) -> int:
    """How many characters at the end of `text` may belong to a mark that follows: blanks, and its beginning."""
    return len(text) - len(text[: len(text) - begun(text, *marks)].rstrip())


def begun(text: str, *marks: str) -> int:
    """How many characters at the end of `text` are the beginning of one of the `marks`."""
    return max(_begun(text, mark) for mark in marks)


def _begun(text: str, mark: str) -> int:
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0
