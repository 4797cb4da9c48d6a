"""A step as layers see it: its tokens, the caches of their sequences, and the rows of the ranks that run it together.

Importing this module does not import torch, because model files import it where only configs are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.core.layout import CachePlace

if TYPE_CHECKING:
    from torch import Tensor

    from baton.kernels.attention import AttentionBatch
    from baton.kernels.state_batch import StateBatch


@dataclass(frozen=True)
class RankRows:
    """The number of rows of each data-parallel rank in a lockstep step, in rank order."""

    tokens: tuple[int, ...]
    wanted: tuple[int, ...]  # after the attention of the last layer
    seqs: tuple[int, ...]  # after the attention of a draft layer, and in each further draft step


@dataclass(frozen=True)
class TokenRows:
    """The rows of hidden states [T, hidden_size] that go through a feed-forward layer."""

    slots: Tensor  # int64 [T]: where each token's KV went; -1 marks padding
    of_ranks: tuple[int, ...] | None = None  # row counts of all data-parallel ranks; None: T on each
    layer_inputs: Tensor | None = None  # [T, layers * width]: see `layers.decoder`


@dataclass(frozen=True)
class GroupCache:
    """One cache group in a step: its KV cache, and the step's batch with this group's block tables."""

    batch: AttentionBatch
    kv: Tensor  # [num_blocks, num_kv_heads, layers of the group, planes, block_size, width], see `core.layout`


@dataclass(frozen=True)
class StateCache:
    """One cache group of recurrent layers in a step: its slots, and the batch that maps sequences to slots."""

    batch: StateBatch
    slots: Tensor  # bytes [num_slots, slot_bytes], see `core.layout.StateLayout`
    # Bytes [places, place_bytes], see `ModelConfig.draft_inputs`; None: decodes have no drafts.
    draft_inputs: Tensor | None = None


@dataclass(frozen=True)
class LayerContext:
    """A step's inputs that every layer reads, apart from the hidden states."""

    caches: tuple[GroupCache | StateCache, ...]  # one for each cache group
    # For each of `ModelConfig.rotations`, cosines and sines of all positions: see `layers.rotary.cos_sin_table`.
    cos_sin: tuple[Tensor, ...]
    query_factors: Tensor | None = None  # [T, 1, 1], of queries: see `hf_config.rope.QueryGrowth`; None: all are 1
    rows_of_ranks: tuple[int, ...] | None = None  # see `TokenRows.of_ranks`
    layer_inputs: Tensor | None = None  # see `TokenRows.layer_inputs`

    @property
    def slots(self) -> Tensor:
        """The slot of each token's keys and values in the first group, int64 [T]; -1 marks padding."""
        return self.kv_at(CachePlace(0, 0)).batch.slots

    def kv_at(self, place: CachePlace) -> GroupCache:
        cache = self.caches[place.group]
        assert isinstance(cache, GroupCache), "this group keeps states"
        return cache

    def states_at(self, place: CachePlace) -> StateCache:
        cache = self.caches[place.group]
        assert isinstance(cache, StateCache), "this group keeps keys and values"
        return cache


def rows_at(x: Tensor, wanted: Tensor) -> Tensor:
    """Return x[wanted] for x [T] or [T, N] and indices [R] int64. CPU graphs can record it."""
    if not x.is_cpu:
        return x[wanted]
    from baton.kernels.embedding import embedding  # loads torch

    return embedding(wanted, x) if x.dim() == 2 else embedding(wanted, x.unsqueeze(1)).squeeze(1)
