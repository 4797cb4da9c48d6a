"""Numbers of things, spelled for people."""

from __future__ import annotations


def pluralize(number: float, thing: str) -> str:
    """Return `1 rank`, `2 ranks` or `0.5 GPUs`, for a noun whose plural ends in s."""
    return f"{number:.12g} {thing}" + "s" * (number != 1)
