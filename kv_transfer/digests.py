"""Digests of blocks, by which a reader proves that it has what the holder has. For debugging: it reads every byte.

A digest is that of one KV head's share of one block, which is one contiguous range on whichever rank keeps the head. So
ranks that divide the heads in different ways can compare. Those of several blocks follow each other, block by block:

    [block 0, head 0][block 0, head 1] ... [block 1, head 0] ...          each `DIGEST_BYTES` long

`proofs.py` makes and compares them on all ranks of a group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import xxhash

from baton.engine.core.layout import KVRegion

from .copies.device_blocks import device_blocks

DIGEST_BYTES = 8

BlockBytes = Callable[[int], bytes | bytearray | memoryview]  # what a rank keeps of a block


def region_bytes(region: KVRegion) -> BlockBytes:
    """Reads a region where it lies. Memory of a GPU is copied to the host, block by block."""
    size = region.block_bytes
    if region.device == "cpu":
        return lambda block: (ctypes.c_char * size).from_address(region.address + block * size).raw
    blocks = device_blocks(region)
    return lambda block: blocks[block].cpu().numpy().tobytes()


def digests_of(read: BlockBytes, blocks: Sequence[int], num_heads: int) -> bytes:
    return b"".join(_digests_of_block(bytes(read(block)), num_heads) for block in blocks)


def _digests_of_block(content: bytes, num_heads: int) -> bytes:
    size = len(content) // num_heads
    shares = (content[at : at + size] for at in range(0, len(content), size))
    return b"".join(xxhash.xxh3_64_digest(share) for share in shares)
