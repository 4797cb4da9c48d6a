"""Digests of blocks, with which a reader checks that it has what the holder has. For debugging: every byte is read.

A digest covers one KV head's part of one block, one contiguous range on every rank that keeps the head. So ranks that
divide the heads in different ways can compare. Digests of several blocks follow each other, block by block:

    [block 0, head 0][block 0, head 1] ... [block 1, head 0] ...          each `DIGEST_BYTES` long

`handoff/digest_check.py` makes and compares them on all ranks of a group.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import xxhash

from baton.engine.core.layout import KVRegion

from .block_copies import device_blocks

DIGEST_BYTES = 8

BlockBytes = Callable[[int], bytes | bytearray | memoryview]  # returns a rank's part of a block


def region_bytes(region: KVRegion) -> BlockBytes:
    """Return a function that reads blocks of a region. A GPU's memory is copied to the host block by block."""
    size = region.block_bytes
    if region.device == "cpu":
        return lambda block: (ctypes.c_char * size).from_address(region.address + block * size).raw
    blocks = device_blocks(region)
    return lambda block: blocks[block].cpu().numpy().tobytes()


def digests_of(read: BlockBytes, blocks: Sequence[int], num_heads: int) -> bytes:
    """Return the digests of a rank's parts of some blocks, in order."""
    return b"".join(_digests_of_block(bytes(read(block)), num_heads) for block in blocks)


def _digests_of_block(content: bytes, num_heads: int) -> bytes:
    size = len(content) // num_heads
    shares = (content[at : at + size] for at in range(0, len(content), size))
    return b"".join(xxhash.xxh3_64_digest(share) for share in shares)
