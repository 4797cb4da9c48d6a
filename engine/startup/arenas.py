"""The sizes of arenas: how the memory for blocks is divided between cache groups. No torch.

    full load     max_num_seqs sequences of full length, one of which is being read

    group         blocks at full load
    full, latent  all blocks of every sequence
    window        all blocks of the one that is read, of the others those that a window can span

Each arena holds one sequence of full length at least; what is left is divided in the proportion of what each group
would hold beyond that at full load.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.layout import BLOCK_SIZE, CacheLayout, GroupLayout

_SPARE_BLOCKS = 3  # of each sequence, beside whole blocks of its window: begun at either end, and given back in a step


def blocks_at_full_load(group: GroupLayout, max_num_seqs: int, max_model_len: int) -> int:
    """Return how many blocks a group can hold at most, and use."""
    whole = -(-max_model_len // BLOCK_SIZE)
    return whole + (max_num_seqs - 1) * _blocks_while_running(group, max_model_len)


def arenas_of(caches: CacheLayout, num_blocks: int, max_num_seqs: int, max_model_len: int) -> Sequence[int]:
    """Return `num_blocks` for each group, and for one with a window no more than full load needs."""
    return [
        num_blocks if group.window is None else min(num_blocks, blocks_at_full_load(group, max_num_seqs, max_model_len))
        for group in caches.groups
    ]


def requests_at_once(group: GroupLayout, num_blocks: int, num_tokens: int) -> int:
    """Return how many requests of `num_tokens` each can run at once with so many blocks, one of them being read."""
    whole = -(-num_tokens // BLOCK_SIZE)
    if num_blocks < whole:
        return 0
    return 1 + (num_blocks - whole) // _blocks_while_running(group, num_tokens)


def _blocks_while_running(group: GroupLayout, num_tokens: int) -> int:
    """Return how many blocks a request of `num_tokens` holds whose prompt has been read."""
    whole = -(-num_tokens // BLOCK_SIZE)
    return whole if group.window is None else min(whole, group.window // BLOCK_SIZE + _SPARE_BLOCKS)


def divide_memory(caches: CacheLayout, num_bytes: int, max_num_seqs: int, max_model_len: int) -> Sequence[int]:
    """Return the blocks of each group's arena that fit into `num_bytes` together, as many as full load needs at most.

    Where they do not hold one sequence of `max_model_len`, all arenas hold the same shorter one.
    """
    sizes = [group.blocks.block_bytes for group in caches.groups]
    whole = -(-max_model_len // BLOCK_SIZE)
    left = num_bytes - whole * sum(sizes)
    if left < 0:
        return [num_bytes // sum(sizes)] * len(sizes)
    beyond = [blocks_at_full_load(group, max_num_seqs, max_model_len) - whole for group in caches.groups]
    wanted = sum(count * size for count, size in zip(beyond, sizes, strict=True))
    shared = min(left, wanted)
    return [whole + (count * shared // wanted if wanted else 0) for count in beyond]
