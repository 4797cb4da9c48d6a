"""Hashes of prefixes: the hash of a full block stands for all tokens up to the block's end.

    root = H(cache salt)    hash[0] = H(root, tokens of block 0)    hash[i] = H(hash[i - 1], tokens of block i)

Hashes are equal in all processes and on all machines, so routers and engines can compare them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

HASH_BYTES = 16

BlockHash = bytes


def prefix_root(cache_salt: str = "") -> BlockHash:
    """Return the start of a hash chain. Requests with different salts never share a block."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=HASH_BYTES).digest()


def extend_block_hashes(
    hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], num_blocks: int, block_size: int
) -> None:
    """Append hashes until each of the first `num_blocks` blocks of `token_ids`, all full, has one."""
    pack = _packer(block_size)
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, num_blocks * block_size, block_size):
        block = parent + pack(*token_ids[start : start + block_size])
        parent = hashlib.blake2b(block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def block_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[BlockHash]:
    """Return one hash for each full block of `token_ids`."""
    hashes: list[BlockHash] = []
    root = prefix_root(cache_salt)
    extend_block_hashes(hashes, root, token_ids, len(token_ids) // block_size, block_size)
    return hashes


@lru_cache
def _packer(block_size: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{block_size}I").pack
