"""Cache groups of a model, and the shape of one block, which is the same in memory and on the wire.

    CacheLayout ── groups ──> GroupLayout: layers that keep the same ── blocks ──> KVLayout: one block of these layers
                                                                             └──> StateLayout: one slot of their states

    kv[block][kv_head][layer][plane][token][dim]          state[slot][layer][part]

There are two planes: keys and values. If keys and values differ in width, there is one plane, and each of its rows is
a key with its value (`kernels.kv_rows`). With multi-head latent attention, where a layer caches one latent vector for
each token, there are one KV head and one plane. A block is one contiguous range of bytes for all layers, and so is each
KV head's part of it. So the part that a tensor-parallel rank keeps, its own heads, is one contiguous range, too:

    one rank     [head 0][head 1][head 2][head 3]
    two ranks    [head 0][head 1] and [head 2][head 3]
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

LAYOUT_VERSION = 2
BLOCK_SIZE = 16  # tokens
CHECKPOINT_TOKENS = 512  # from one checkpoint of a recurrent state to the next; whole blocks
NOT_KEPT = -1  # in a table: nothing is kept for this entry
STATE_ALIGNMENT = 64  # bytes: each part of a state begins on a cache line
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def draft_places(max_drafts: int) -> int:
    """Return how many tokens' inputs to its states a row keeps: the drafts of a step and of the step before.

    The token between them is no draft, but has a place, too, as places go by position: `kernels.state_batch.Replay`.
    """
    return 2 * max_drafts + 1 if max_drafts else 0


class UnevenHeads(ValueError):
    """The number of KV heads is no multiple of the number of tensor-parallel ranks, nor the other way round."""


class SeveralGroups(ValueError):
    """A model with several cache groups was given to something that handles only one."""


class Piece(NamedTuple):
    """A range of bytes in one block."""

    offset: int
    num_bytes: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one block of a group of layers.

    One engine may read another's blocks only if both have the same layout.
    """

    model: str  # identity of the weights, not a path: see `engine.hf_config.model_config`
    num_layers: int  # of the group
    num_kv_heads: int  # of the whole model, without tensor parallelism
    head_dim: int  # width of a plane's rows
    dtype: str  # of the cached values; may be narrower than the dtype of the computation
    num_planes: int = 2  # keys and values; 1: a latent vector, or rows of a key and its value
    block_size: int = BLOCK_SIZE
    version: int = LAYOUT_VERSION

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in one block."""
        return self.num_layers * self.num_planes * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    def shape(self, num_blocks: int, num_heads: int | None = None) -> tuple[int, ...]:
        """Return the shape of a tensor of `num_blocks` blocks, with all KV heads or only `num_heads` of one rank."""
        heads = self.num_kv_heads if num_heads is None else num_heads
        return (num_blocks, heads, self.num_layers, self.num_planes, self.block_size, self.head_dim)

    def heads_of(self, rank: int, size: int) -> range:
        """Return the KV heads that rank `rank` of `size` tensor-parallel ranks keeps; several ranks may keep the same.

        Raises `UnevenHeads` if heads and ranks cannot be divided evenly.
        """
        heads = self.num_kv_heads
        if heads % size and size % heads:
            raise UnevenHeads(
                f"{heads} KV heads cannot be shared out over {size} ranks:"
                f" give a tensor_parallel_size that divides {heads}, or a multiple of it"
            )
        first = rank * heads // size
        return range(first, first + max(1, heads // size))

    def of_rank(self, rank: int, size: int) -> KVLayout:
        """Return the part that one of `size` tensor-parallel ranks keeps. Raises `UnevenHeads`."""
        return msgspec.structs.replace(self, num_kv_heads=len(self.heads_of(rank, size)))

    def bytes_of(self, heads: range) -> int:
        """Return the bytes of a block on a rank that keeps these heads."""
        return len(heads) * self.head_bytes

    def pieces(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return where `heads` lie in a block of a rank that keeps heads `kept`, in as few pieces as possible."""
        return [Piece((heads.start - kept.start) * self.head_bytes, len(heads) * self.head_bytes)]

    def sections(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return the same as `pieces`, since all layers of a head are contiguous."""
        return self.pieces(kept, heads)

    @property
    def fingerprint(self) -> str:
        """Equal if and only if the layouts are equal. 32 hex digits, stable across processes and versions of Python."""
        return _hash_of(self)


class StateRows(msgspec.Struct, frozen=True):
    """Rows of a state that belong to heads, or to groups of heads: `width` rows for each of `count` heads."""

    count: int
    width: int

    def of_ranks(self, size: int) -> StateRows:
        """Return the rows that each of `size` ranks keeps; with fewer heads than ranks, several ranks keep the same.

        Raises `UnevenHeads` if heads and ranks cannot be divided evenly.
        """
        if self.count % size and size % self.count:
            raise UnevenHeads(f"{self.count} heads or groups of a state cannot be shared out over {size} ranks")
        return StateRows(max(1, self.count // size), self.width)

    def of_heads(self, heads: range, num_heads: int) -> range:
        """Return the rows that belong to `heads`, a range of the layout's `num_heads` heads."""
        first = heads.start * self.count // num_heads
        last = -(-heads.stop * self.count // num_heads)
        return range(first * self.width, last * self.width)


class StatePart(msgspec.Struct, frozen=True):
    """One tensor of a layer's state. Its first dimension has the rows of each kind of heads, one kind after another.

    Tensor-parallel ranks divide the heads of each kind among them.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: tuple[StateRows, ...] = ()  # of the first dimension, kind by kind; (): one row for each head or channel

    @property
    def sections(self) -> tuple[StateRows, ...]:
        """The rows of the first dimension, by kind of heads."""
        return self.rows or (StateRows(self.shape[0], 1),)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self.row_bytes

    def of_ranks(self, size: int) -> StatePart:
        """Return the part that each of `size` ranks keeps. Raises `UnevenHeads`."""
        rows = tuple(each.of_ranks(size) for each in self.sections)
        kept = sum(each.count * each.width for each in rows)
        return StatePart((kept, *self.shape[1:]), self.dtype, rows if self.rows else ())


class StateLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one slot of a group of layers with states: `[layer][part]`, aligned to STATE_ALIGNMENT bytes."""

    model: str  # identity of the weights, as in `KVLayout`
    num_layers: int
    parts: tuple[StatePart, ...]  # of each layer
    version: int = LAYOUT_VERSION

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first byte of each part within its layer, and of the next layer."""
        return _aligned(part.num_bytes for part in self.parts)

    @property
    def layer_bytes(self) -> int:
        return self.offsets[-1]

    @property
    def block_bytes(self) -> int:
        """Bytes of one slot."""
        return self.num_layers * self.layer_bytes

    @property
    def fingerprint(self) -> str:
        """Equal if and only if the layouts are equal; see `KVLayout.fingerprint`."""
        return _hash_of(self)

    @property
    def num_heads(self) -> int:
        """The number of "heads" of a slot: the least common multiple of the number of heads of every kind.

        Each of these shares of a slot has whole heads of a kind, or belongs to one head together with others.
        """
        return math.lcm(*(rows.count for part in self.parts for rows in part.sections))

    def heads_of(self, rank: int, size: int) -> range:
        """Return the heads that one of `size` tensor-parallel ranks keeps. Raises `UnevenHeads`."""
        for part in self.parts:
            part.of_ranks(size)
        heads = self.num_heads
        first = rank * heads // size
        return range(first, first + max(1, heads // size))

    def of_rank(self, rank: int, size: int) -> StateLayout:
        """Return the part that one of `size` tensor-parallel ranks keeps. Raises `UnevenHeads`."""
        return msgspec.structs.replace(self, parts=tuple(part.of_ranks(size) for part in self.parts))

    def bytes_of(self, heads: range) -> int:
        """Return the bytes of a slot on a rank that keeps these heads."""
        return self.num_layers * self._offsets_of(heads)[-1]

    def pieces(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return where `heads` lie in a slot of a rank that keeps heads `kept`, in as few pieces as possible."""
        return [Piece(0, self.bytes_of(kept))] if kept == heads else self.sections(kept, heads)

    def sections(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return where `heads` lie in a slot of a rank that keeps heads `kept`: a piece for each layer, part and kind.

        Rows that belong to several heads are returned for each of them.
        """
        pieces, offsets, num_heads = [], self._offsets_of(kept), self.num_heads
        for layer in range(self.num_layers):
            for part, offset in zip(self.parts, offsets, strict=False):
                section = layer * offsets[-1] + offset
                for rows in part.sections:
                    here, wanted = rows.of_heads(kept, num_heads), rows.of_heads(heads, num_heads)
                    first = section + (wanted.start - here.start) * part.row_bytes
                    pieces.append(Piece(first, len(wanted) * part.row_bytes))
                    section += len(here) * part.row_bytes
        return pieces

    def _offsets_of(self, heads: range) -> tuple[int, ...]:
        """Return the `offsets` within a slot of a rank that keeps these heads."""
        num_heads = self.num_heads
        return _aligned(
            sum(len(rows.of_heads(heads, num_heads)) for rows in part.sections) * part.row_bytes for part in self.parts
        )


class CacheKind(enum.StrEnum):
    """A kind of cache, by the part of the sequence that later tokens read."""

    FULL = "full"  # keys and values of all tokens
    WINDOW = "window"  # keys and values; later tokens see only the last `window` tokens
    LATENT = "latent"  # one vector for each token, from which keys and values of all heads are computed
    STATE = "state"  # a recurrent state, whose size does not depend on the sequence's length


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one layer. Layers with equal caches form a group."""

    kind: CacheKind
    num_kv_heads: int  # of the whole model, without tensor parallelism
    head_dim: int
    dtype: str
    num_planes: int = 2  # as in `KVLayout`
    window: int | None = None  # tokens that a query sees, itself included; only of kind `window`


class LayerState(msgspec.Struct, frozen=True):
    """The recurrent state of one layer: everything whose size does not depend on the number of tokens."""

    parts: tuple[StatePart, ...]


# A layer keeps nothing, keys and values, a state, or both of these.
LayerCaches = tuple[()] | tuple[LayerCache | LayerState] | tuple[LayerCache, LayerState]


class CachePlace(msgspec.Struct, frozen=True):
    """The place of a layer's cache: its group, and its index among the layers of the group."""

    group: int
    index: int


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same of a sequence. They share block tables and an arena."""

    kind: CacheKind
    window: int | None
    layers: tuple[int, ...]  # of the model, ascending
    blocks: KVLayout | StateLayout

    @property
    def fingerprint(self) -> str:
        """Equal if and only if two groups keep the same of the same layers: different groups may have equal blocks."""
        return _hash_of(self)

    @property
    def rank(self) -> int:
        """The position of its kind among groups: 0 keeps all tokens, 1 a window of them, 2 a state."""
        return 2 if isinstance(self.blocks, StateLayout) else int(self.window is not None)

    @property
    def kv(self) -> KVLayout:
        """The layout of blocks of tokens. Raises `SeveralGroups` for a group of states."""
        if isinstance(self.blocks, StateLayout):
            raise SeveralGroups("layers with recurrent states keep no blocks of tokens")
        return self.blocks


class CacheLayout(msgspec.Struct, frozen=True):
    """Everything that a model caches of a sequence, by groups of layers; see docs/concepts/cache_groups.md."""

    groups: tuple[GroupLayout, ...]

    @classmethod
    def of_layers(cls, model: str, caches: Sequence[LayerCaches]) -> CacheLayout:
        """Return the groups of a model's layers, given the caches of each. A layer with two caches is in two groups.

        Groups that keep all tokens come first: the first group bounds a prefix hit, and the others shorten it.
        """
        layers: dict[LayerCache | LayerState, list[int]] = {}
        for layer, kept in enumerate(caches):
            for cache in kept:
                layers.setdefault(cache, []).append(layer)
        ordered = sorted(layers, key=_keeps_less)  # stable: equal kinds stay in the order of their first layers
        return cls(tuple(_group_of(model, cache, layers[cache]) for cache in ordered))

    def place_of(self, layer: int) -> CachePlace:
        """Return where the cache of tokens of the layer with this index in the model lies."""
        return self._place_of(layer, KVLayout)

    def state_place_of(self, layer: int) -> CachePlace:
        """Return where the state of the layer with this index in the model lies."""
        return self._place_of(layer, StateLayout)

    def _place_of(self, layer: int, kind: type[KVLayout | StateLayout]) -> CachePlace:
        return next(
            CachePlace(number, group.layers.index(layer))
            for number, group in enumerate(self.groups)
            if layer in group.layers and isinstance(group.blocks, kind)
        )

    @property
    def only(self) -> GroupLayout:
        """The only group, of a model all of whose layers keep the same. Raises `SeveralGroups`."""
        if len(self.groups) != 1:
            raise SeveralGroups(f"the layers of this model keep {len(self.groups)} different kinds of caches")
        return self.groups[0]

    @property
    def fingerprint(self) -> str:
        """Equal if and only if two models' caches are. With one group, the fingerprint of its blocks. 32 hex digits."""
        if len(self.groups) == 1:
            return self.groups[0].kv.fingerprint
        return _hash_of(self)

    def of_rank(self, rank: int, size: int) -> CacheLayout:
        """Return the part that one of `size` tensor-parallel ranks keeps. Raises `UnevenHeads`."""
        return CacheLayout(
            tuple(msgspec.structs.replace(group, blocks=group.blocks.of_rank(rank, size)) for group in self.groups)
        )


def _hash_of(layout: msgspec.Struct) -> str:
    return hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=16).hexdigest()


def _aligned(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the first byte of each of several parts of these sizes, and the byte behind the last one."""
    return tuple(itertools.accumulate((-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in sizes), initial=0))


def _keeps_less(cache: LayerCache | LayerState) -> int:
    """Return the rank of a kind of cache: 0 all tokens, 1 a window of them, 2 a state."""
    return 2 if isinstance(cache, LayerState) else int(cache.window is not None)


def _group_of(model: str, cache: LayerCache | LayerState, layers: list[int]) -> GroupLayout:
    if isinstance(cache, LayerState):
        states = StateLayout(model=model, num_layers=len(layers), parts=cache.parts)
        return GroupLayout(kind=CacheKind.STATE, window=None, layers=tuple(layers), blocks=states)
    blocks = KVLayout(
        model=model,
        num_layers=len(layers),
        num_kv_heads=cache.num_kv_heads,
        num_planes=cache.num_planes,
        head_dim=cache.head_dim,
        dtype=cache.dtype,
    )
    return GroupLayout(kind=cache.kind, window=cache.window, layers=tuple(layers), blocks=blocks)
