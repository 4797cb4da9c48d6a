"""The shape of one KV block. In memory it is the format on the wire.

    kv[block][kv_head][layer][plane][token][dim]

Planes are keys and values. A model that caches one latent vector a token and layer (multi-head latent attention) has
one KV head and one plane. One block is one contiguous range for all layers, and the share of each KV head is contiguous
inside it.
"""

from __future__ import annotations

import hashlib

import msgspec

LAYOUT_VERSION = 2
BLOCK_SIZE = 16  # tokens
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What two engines must agree on before one may read the other's blocks."""

    model: str  # identity of the weights, not a path: see `engine.model_config`
    num_layers: int
    num_kv_heads: int  # of the whole model, whatever the tensor parallelism
    head_dim: int
    dtype: str  # of what is kept, which may be narrower than what the model computes in
    num_planes: int = 2  # keys and values; 1: a latent
    block_size: int = BLOCK_SIZE
    version: int = LAYOUT_VERSION

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head's share of one block."""
        return self.num_layers * self.num_planes * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        """Of the tensor that holds so many blocks."""
        return (num_blocks, self.num_kv_heads, self.num_layers, self.num_planes, self.block_size, self.head_dim)

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
