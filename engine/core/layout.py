"""The shape of one KV block. In memory it is the format on the wire.

    kv[block][kv_head][layer][K,V][token][dim]

One block is one contiguous range for all layers, and the share of each KV head is contiguous inside it.
"""

from __future__ import annotations

import hashlib

import msgspec

LAYOUT_VERSION = 1
BLOCK_SIZE = 16  # tokens
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What two engines must agree on before one may read the other's blocks."""

    model: str  # identity of the weights, not a path: see `engine.model_config`
    num_layers: int
    num_kv_heads: int  # of the whole model, whatever the tensor parallelism
    head_dim: int
    dtype: str
    block_size: int = BLOCK_SIZE
    version: int = LAYOUT_VERSION

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head's share of one block."""
        return self.num_layers * 2 * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def fingerprint(self) -> str:
        """Equal exactly where two layouts are equal; 32 hex digits, stable across processes and versions of Python."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()


class KVRegion(msgspec.Struct, frozen=True):
    """Where an engine's blocks lie. Block b is the `layout.block_bytes` bytes at `address + b * layout.block_bytes`."""

    address: int
    num_blocks: int
    device: str  # "cpu" or "cuda:N"
    layout: KVLayout
