"""The sizes of arenas: how the memory for blocks is divided between cache groups. No torch.

    full load     max_num_seqs sequences of full length, one of which is in prefill

    group         blocks at full load
    full, latent  all blocks of every sequence
    window        all blocks of the sequence in prefill; of the others, those that a window can span
    state         slots for every sequence: two while it runs, and checkpoints, one for each CHECKPOINT_SPACING tokens

Each arena holds at least one sequence of full length. The rest is divided without knowing the lengths of sequences:
those of 1000 tokens fill windows, those of 100 000 fill full layers. A group's *maximum* is the most memory that it
would hold if all sequences had the same length, the one for which it needs most, and as many ran as fit. Each group
gets memory in proportion to its maximum. Then for any length, the number of sequences that run at once is at least that
of the best division for this length, times memory / sum of all maxima.

Memory that full load does not need caches prefixes of requests that have ended. It is divided in the same way, as if
more sequences ran.
"""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from ..core.layout import BLOCK_SIZE, CacheKind, CacheLayout, GroupLayout, draft_places
from ..core.speculation.config import SpeculativeConfig
from ..hf_config.model_config import ModelConfig

CHECKPOINT_SPACING = 4096  # tokens: states are large, and tokens after the last checkpoint are soon computed again
LEAST_SLOTS = 3  # of states: one that is read, one that is written, one that a step in flight still uses
_SPARE_BLOCKS = 3  # of each sequence, beside the whole blocks in its window: partial ones at its ends, one not yet back
_RUNNING_SLOTS = 2  # of each sequence: the one that it writes, and one that a step in flight still reads


class ArenaNeeds(abc.ABC):
    """The blocks that one group needs, by its kind."""

    def __init__(self, group: GroupLayout) -> None:
        self.block_bytes = group.blocks.block_bytes

    @abc.abstractmethod
    def least(self, num_tokens: int) -> int:
        """Return the fewest blocks with which a sequence of `num_tokens` can be read."""

    @abc.abstractmethod
    def while_running(self, num_tokens: int) -> int:
        """Return how many blocks a request of `num_tokens` holds, or may keep, once its prompt has been read."""

    @abc.abstractmethod
    def at_full_load(self, max_num_seqs: int, max_model_len: int) -> int:
        """Return the most blocks that the group can use."""

    @abc.abstractmethod
    def longest_sequence(self, num_blocks: int) -> float:
        """Return the tokens of the longest sequence that `num_blocks` hold."""

    @abc.abstractmethod
    def requests_at_once(self, num_blocks: int, num_tokens: int) -> int:
        """Return how many requests of `num_tokens` each can run at once with `num_blocks`, one of them in prefill."""


class BlockNeeds(ArenaNeeds):
    """Blocks of all tokens; or, with a window, of the tokens in it once the prompt has been read."""

    def __init__(self, group: GroupLayout) -> None:
        super().__init__(group)
        self._in_window = None if group.window is None else group.window // BLOCK_SIZE + _SPARE_BLOCKS

    @property
    def keeps_all(self) -> bool:
        return self._in_window is None

    def least(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE)

    def while_running(self, num_tokens: int) -> int:
        whole = self.least(num_tokens)
        return whole if self._in_window is None else min(whole, self._in_window)

    def at_full_load(self, max_num_seqs: int, max_model_len: int) -> int:
        return self.least(max_model_len) + (max_num_seqs - 1) * self.while_running(max_model_len)

    def longest_sequence(self, num_blocks: int) -> float:
        return num_blocks * BLOCK_SIZE

    def requests_at_once(self, num_blocks: int, num_tokens: int) -> int:
        left = num_blocks - self.least(num_tokens)
        return 0 if left < 0 else 1 + left // self.while_running(num_tokens)


class StateNeeds(ArenaNeeds):
    """Slots of states: a fixed number for each sequence, and checkpoints."""

    def least(self, num_tokens: int) -> int:
        return LEAST_SLOTS

    def while_running(self, num_tokens: int) -> int:
        return _RUNNING_SLOTS + -(-num_tokens // CHECKPOINT_SPACING)

    def at_full_load(self, max_num_seqs: int, max_model_len: int) -> int:
        return LEAST_SLOTS + max_num_seqs * self.while_running(max_model_len)

    def longest_sequence(self, num_blocks: int) -> float:
        return 0 if num_blocks < LEAST_SLOTS else math.inf

    def requests_at_once(self, num_blocks: int, num_tokens: int) -> int:
        return num_blocks // _RUNNING_SLOTS


def needs_of(group: GroupLayout) -> ArenaNeeds:
    return StateNeeds(group) if group.kind is CacheKind.STATE else BlockNeeds(group)


def divide_blocks(caches: CacheLayout, num_blocks: int, max_num_seqs: int, max_model_len: int) -> Sequence[int]:
    """Return `num_blocks` for each group that keeps all tokens, and for others no more than full load needs."""
    return [
        num_blocks
        if isinstance(needs, BlockNeeds) and needs.keeps_all
        else min(num_blocks, needs.at_full_load(max_num_seqs, max_model_len))
        for needs in map(needs_of, caches.groups)
    ]


class EngineCaches(NamedTuple):
    """The cache groups of a model and of its draft model, in one engine."""

    layout: CacheLayout
    of_model: tuple[int, ...]  # numbers of the model's groups, in its own order
    of_draft_model: tuple[int, ...]

    def on_each_rank(self, tensor_parallel_size: int) -> CacheLayout:
        """Return one rank's part of the layout: all ranks' parts are of equal size."""
        return self.layout.of_rank(0, tensor_parallel_size)


def engine_caches(model: ModelConfig) -> EngineCaches:
    """Return the cache groups of an engine: the model's and its draft model's, ordered by kind."""
    own = model.caches.groups
    groups = own if model.draft_model is None else (*own, *model.draft_model.caches.groups)
    order = sorted(range(len(groups)), key=lambda number: groups[number].rank)
    places = [order.index(number) for number in range(len(groups))]
    layout = CacheLayout(tuple(groups[number] for number in order))
    return EngineCaches(layout, tuple(places[: len(own)]), tuple(places[len(own) :]))


def draft_bytes(
    model: ModelConfig, speculation: SpeculativeConfig | None, max_num_seqs: int, tensor_parallel_size: int
) -> int:
    """Return the bytes in which a rank keeps its state layers' inputs of drafts; 0 without such layers."""
    places = max_num_seqs * draft_places(0 if speculation is None else speculation.num_speculative_tokens)
    return sum(places * layout.of_rank(0, tensor_parallel_size).block_bytes for layout in model.draft_inputs.values())


def longest_sequence(caches: CacheLayout, blocks_by_group: Sequence[int]) -> int:
    """Return the tokens of the longest sequence that all arenas hold; 0 if one of them holds none."""
    pairs = zip(caches.groups, blocks_by_group, strict=True)
    return int(min(needs_of(group).longest_sequence(num_blocks) for group, num_blocks in pairs))


def least_blocks(caches: CacheLayout, num_tokens: int) -> int:
    """Return how many blocks in each arena hold one sequence of so many tokens."""
    return max(needs_of(group).least(num_tokens) for group in caches.groups)


def least_bytes(caches: CacheLayout, num_tokens: int) -> int:
    """Return the bytes of arenas that hold one sequence of `num_tokens`."""
    return sum(needs.least(num_tokens) * needs.block_bytes for needs in map(needs_of, caches.groups))


def divide_memory(
    caches: CacheLayout, num_bytes: int, max_num_seqs: int, max_model_len: int, cache_blocks: int = 0
) -> Sequence[int]:
    """Return the blocks of each group's arena: as many as fit into `num_bytes` together.

    An arena has at most the blocks of full load, or `cache_blocks` if that is more. If the memory cannot hold one
    sequence of `max_model_len`, all arenas hold the same shorter one.
    """
    groups = [needs_of(group) for group in caches.groups]
    left = num_bytes - least_bytes(caches, max_model_len)
    if left < 0:
        for_tokens = max(0, num_bytes - least_bytes(caches, 0))
        shorter = for_tokens // sum(needs.block_bytes for needs in groups if isinstance(needs, BlockNeeds))
        return [needs.least(shorter * BLOCK_SIZE) for needs in groups]
    least = [needs.least(max_model_len) for needs in groups]
    loads = [needs.at_full_load(max_num_seqs, max_model_len) for needs in groups]
    limits = [(load - fewest) * needs.block_bytes for needs, load, fewest in zip(groups, loads, least, strict=True)]
    shares = _divide(left, limits, _most_bytes(groups, left, max_num_seqs, max_model_len))
    spare = left - sum(shares)
    if shares == limits and cache_blocks:
        spares = [max(0, cache_blocks - load) * needs.block_bytes for needs, load in zip(groups, loads, strict=True)]
        more = _divide(spare, spares, _most_bytes(groups, spare, sys.maxsize, max_model_len))
        shares = [share + other for share, other in zip(shares, more, strict=True)]
    return [fewest + share // needs.block_bytes for needs, fewest, share in zip(groups, least, shares, strict=True)]


def _most_bytes(groups: Sequence[ArenaNeeds], num_bytes: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Return each group's maximum (see the module), over all lengths of sequences, with as many as fit."""
    most = [0] * len(groups)
    lengths = [1 << bits for bits in range(BLOCK_SIZE.bit_length() - 1, max_model_len.bit_length())]
    for length in (*lengths, max_model_len):
        held = [needs.while_running(length) * needs.block_bytes for needs in groups]
        of_all = min(num_bytes, max_num_seqs * sum(held))
        most = [max(before, of_all * each // sum(held)) for before, each in zip(most, held, strict=True)]
    return most


def _divide(num_bytes: int, limits: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Return shares of `num_bytes` in proportion to the weights, none above its limit."""
    shares = list(limits)
    open_to_more = set(range(len(limits)))
    while open_to_more:
        left = num_bytes - sum(shares[index] for index in range(len(limits)) if index not in open_to_more)
        total = max(1, sum(weights[index] for index in open_to_more))
        fair = {index: left * weights[index] // total for index in open_to_more}
        limited = {index for index in open_to_more if fair[index] >= limits[index]}
        if not limited:
            for index, share in fair.items():
                shares[index] = share
            break
        open_to_more -= limited
    return shares
