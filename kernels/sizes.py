"""Sizes that launches are made of. Triton's functions of these names take forty times as long on the host."""

from __future__ import annotations


def cdiv(whole: int, part: int) -> int:
    """How many parts hold the whole."""
    return -(-whole // part)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is no smaller than n; of 0, 1."""
    return 1 << (n - 1).bit_length() if n > 0 else 1
