"""The shape of one KV block. In memory it is the format on the wire.

    kv[block][kv_head][layer][plane][token][dim]

Planes are keys and values. A model that caches one latent vector a token and layer (multi-head latent attention) has
one KV head and one plane. One block is one contiguous range for all layers, and the share of each KV head is contiguous
inside it. So what a rank of a tensor-parallel group keeps of a block, its own heads, is one contiguous range, too:

    one rank     [head 0][head 1][head 2][head 3]
    two ranks    [head 0][head 1] and [head 2][head 3]
"""

from __future__ import annotations

import hashlib

import msgspec

LAYOUT_VERSION = 2
BLOCK_SIZE = 16  # tokens
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class UnevenHeads(ValueError):
    """Neither of the numbers of KV heads and tensor-parallel ranks is a multiple of the other."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout on which two engines must agree before one may read the other's blocks."""

    model: str  # identity of the weights, not a path: see `engine.hf_config.model_config`
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

    def shape(self, num_blocks: int, num_heads: int | None = None) -> tuple[int, ...]:
        """Return the shape of a tensor of so many blocks, of all KV heads or as many of them as one rank keeps."""
        heads = self.num_kv_heads if num_heads is None else num_heads
        return (num_blocks, heads, self.num_layers, self.num_planes, self.block_size, self.head_dim)

    def heads_of(self, rank: int, size: int) -> range:
        """The KV heads that one of `size` tensor-parallel ranks keeps; several ranks keep the same where heads are few.

        Raises `UnevenHeads` where they cannot be shared out evenly.
        """
        heads = self.num_kv_heads
        if heads % size and size % heads:
            raise UnevenHeads(
                f"{heads} KV heads cannot be shared out over {size} ranks:"
                f" give a tensor_parallel_size that divides {heads}, or a multiple of it"
            )
        first = rank * heads // size
        return range(first, first + max(1, heads // size))

    @property
    def fingerprint(self) -> str:
        """Equal exactly where two layouts are equal; 32 hex digits, stable across processes and versions of Python."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()


class KVRegion(msgspec.Struct, frozen=True):
    """The memory that holds one rank's share of an engine's blocks.

    Share of block b is the `block_bytes` bytes at `address + b * block_bytes`.
    """

    address: int
    num_blocks: int
    device: str  # "cpu" or "cuda:N"
    layout: KVLayout  # the whole model's
    first_head: int  # of the model's KV heads, the first that this rank keeps
    num_heads: int

    @property
    def heads(self) -> range:
        return range(self.first_head, self.first_head + self.num_heads)

    @property
    def block_bytes(self) -> int:
        return self.num_heads * self.layout.head_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes
