"""The layout of a token's key and value in one layer of the paged cache.

    planes of one width      [plane][token][dim]           kv [blocks, KV heads, layers, 2, block_size, D]
    two widths, one plane    [token][key, then value]      kv [blocks, KV heads, layers, 1, block_size, D + value width]

With the second layout, keys and values of different widths need no padding.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KVRows(NamedTuple):
    """Strides within one layer of a block and head, in elements, and the width of values."""

    token_stride: int  # from a token's key to the next token's, and from value to value
    to_value: int  # from a token's key to its value
    value_dim: int


def kv_rows(kv: Tensor, key_dim: int) -> KVRows:
    """Return the layout of keys of width `key_dim`, and their values, in kv. Raises `ValueError` if kv has no such."""
    planes, width = kv.size(3), kv.size(5)
    if planes == 2 and width == key_dim:
        return KVRows(width, kv.stride(3), width)
    if planes == 1 and width > key_dim:
        return KVRows(width, key_dim, width - key_dim)
    raise ValueError(
        f"kv {list(kv.shape)} has no keys of {key_dim} dimensions: give two planes of them, or one of rows"
    )
