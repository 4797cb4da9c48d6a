"""Numbers of things, in words for people."""

from __future__ import annotations


def counted(number: float, thing: str) -> str:
    """`1 rank`, `2 ranks`, `0.5 GPUs`: of things whose plural ends with an s."""
    return f"{number:.12g} {thing}" + "s" * (number != 1)
