"""Numbers of things in messages for people."""

from __future__ import annotations


def pluralize(number: float, thing: str) -> str:
    """Return `1 rank`, `2 ranks` or `0.5 GPUs`, for a thing whose plural ends with an s."""
    return f"{number:.12g} {thing}" + "s" * (number != 1)
