"""The sizes of arenas: how the memory for blocks is divided between cache groups. No torch.

    full load     max_num_seqs sequences of full length, one of which is being read

    group         blocks at full load
    full, latent  all blocks of every sequence
    window        all blocks of the one that is read, of the others those that a window can span
    state         slots of every sequence: two while it runs, and checkpoints, one for each CHECKPOINT_SPACING tokens

Each arena holds one sequence of full length at least; what is left is divided in the proportion of what each group
would hold beyond that at full load.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.layout import BLOCK_SIZE, CacheKind, CacheLayout, GroupLayout

CHECKPOINT_SPACING = 4096  # tokens: states are large, and what comes behind the last of few is soon computed again
LEAST_SLOTS = 3  # of states: one that is read, one that is written, one that a step in flight still uses
_SPARE_BLOCKS = 3  # of each sequence, beside whole blocks of its window: begun at either end, and given back in a step
_RUNNING_SLOTS = 2  # of each sequence: the one that it writes, and one that a step in flight still reads


def blocks_at_full_load(group: GroupLayout, max_num_seqs: int, max_model_len: int) -> int:
    """Return how many blocks a group can hold at most, and use."""
    whole = _least_blocks(group, -(-max_model_len // BLOCK_SIZE))
    running = _blocks_while_running(group, max_model_len)
    if group.kind is CacheKind.STATE:
        return whole + max_num_seqs * running
    return whole + (max_num_seqs - 1) * running


def arenas_of(caches: CacheLayout, num_blocks: int, max_num_seqs: int, max_model_len: int) -> Sequence[int]:
    """Return `num_blocks` for each group, and for one that keeps less no more than full load needs."""
    return [
        num_blocks
        if group.window is None and group.kind is not CacheKind.STATE
        else min(num_blocks, blocks_at_full_load(group, max_num_seqs, max_model_len))
        for group in caches.groups
    ]


def longest_sequence(caches: CacheLayout, arenas: Sequence[int]) -> int:
    """Return the tokens of the longest sequence that all arenas hold; 0 where one of them holds none."""
    tokens = []
    for group, num_blocks in zip(caches.groups, arenas, strict=True):
        if group.kind is not CacheKind.STATE:
            tokens.append(num_blocks * BLOCK_SIZE)
        elif num_blocks < LEAST_SLOTS:
            return 0
    return min(tokens)


def least_bytes(caches: CacheLayout, whole: int) -> int:
    """Return the bytes of arenas that hold one sequence of `whole` blocks."""
    return sum(_least_blocks(group, whole) * group.blocks.block_bytes for group in caches.groups)


def requests_at_once(group: GroupLayout, num_blocks: int, num_tokens: int) -> int:
    """Return how many requests of `num_tokens` each can run at once with so many blocks, one of them being read."""
    if group.kind is CacheKind.STATE:
        return num_blocks // _RUNNING_SLOTS
    whole = -(-num_tokens // BLOCK_SIZE)
    if num_blocks < whole:
        return 0
    return 1 + (num_blocks - whole) // _blocks_while_running(group, num_tokens)


def _least_blocks(group: GroupLayout, whole: int) -> int:
    return LEAST_SLOTS if group.kind is CacheKind.STATE else whole


def _blocks_while_running(group: GroupLayout, num_tokens: int) -> int:
    """Return how many blocks a request of `num_tokens` holds whose prompt has been read; of states, and may keep."""
    if group.kind is CacheKind.STATE:
        return _RUNNING_SLOTS + -(-num_tokens // CHECKPOINT_SPACING)
    whole = -(-num_tokens // BLOCK_SIZE)
    return whole if group.window is None else min(whole, group.window // BLOCK_SIZE + _SPARE_BLOCKS)


def divide_memory(caches: CacheLayout, num_bytes: int, max_num_seqs: int, max_model_len: int) -> Sequence[int]:
    """Return the blocks of each group's arena that fit into `num_bytes` together, as many as full load needs at most.

    Where they do not hold one sequence of `max_model_len`, all arenas hold the same shorter one.
    """
    whole = -(-max_model_len // BLOCK_SIZE)
    left = num_bytes - least_bytes(caches, whole)
    if left < 0:
        of_tokens = [group for group in caches.groups if group.kind is not CacheKind.STATE]
        for_tokens = max(0, num_bytes - least_bytes(caches, 0))
        shorter = for_tokens // sum(group.blocks.block_bytes for group in of_tokens)
        return [_least_blocks(group, shorter) for group in caches.groups]
    least = [_least_blocks(group, whole) for group in caches.groups]
    beyond = [
        blocks_at_full_load(group, max_num_seqs, max_model_len) - fewest
        for group, fewest in zip(caches.groups, least, strict=True)
    ]
    wanted = sum(count * group.blocks.block_bytes for count, group in zip(beyond, caches.groups, strict=True))
    shared = min(left, wanted)
    return [fewest + (count * shared // wanted if wanted else 0) for fewest, count in zip(least, beyond, strict=True)]
