"""Cache groups, by what layers keep of a sequence, and the shape of one block: in memory it is the format on the wire.

    CacheLayout ── groups ──> GroupLayout: layers that keep the same ── blocks ──> KVLayout: one block of these layers
                                                                             └──> StateLayout: one slot of their states

    kv[block][kv_head][layer][plane][token][dim]          state[slot][layer][part]

Planes are keys and values. Of keys and values that differ in width there is one plane, whose rows are a key and its
value (`kernels.kv_rows`). A model that caches one latent vector a token and layer (multi-head latent attention) has one
KV head and one plane. One block is one contiguous range for all layers, and the share of each KV head is contiguous
inside it. So what a rank of a tensor-parallel group keeps of a block, its own heads, is one contiguous range, too:

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
NOT_KEPT = -1  # in a table: an entry of which nothing is kept
STATE_ALIGNMENT = 64  # bytes: each part of a state begins on a cache line
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def draft_places(max_drafts: int) -> int:
    """Return how many tokens' inputs of states a row keeps: of a step's drafts, and of those of the step before.

    Between these lies one token that is no draft, and places go by position: see `kernels.state_batch.Replay`.
    """
    return 2 * max_drafts + 1 if max_drafts else 0


class UnevenHeads(ValueError):
    """Neither of the numbers of KV heads and tensor-parallel ranks is a multiple of the other."""


class SeveralGroups(ValueError):
    """Something that handles one group of layers was given a model that has several."""


class Piece(NamedTuple):
    """A range of bytes in one block."""

    offset: int
    num_bytes: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one block of a group of layers.

    Two engines must agree on it before one may read the other's blocks.
    """

    model: str  # identity of the weights, not a path: see `engine.hf_config.model_config`
    num_layers: int  # of the group
    num_kv_heads: int  # of the whole model, whatever the tensor parallelism
    head_dim: int  # of a plane's rows
    dtype: str  # of what is kept, which may be narrower than what the model computes in
    num_planes: int = 2  # keys and values; 1: a latent, or rows of a key and a value of another width
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
        """Return the KV heads that one of `size` tensor-parallel ranks keeps; where heads are few, some keep the same.

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

    def of_rank(self, rank: int, size: int) -> KVLayout:
        """Return the part that one of `size` tensor-parallel ranks keeps. Raises `UnevenHeads`."""
        return msgspec.structs.replace(self, num_kv_heads=len(self.heads_of(rank, size)))

    def bytes_of(self, heads: range) -> int:
        """Return the bytes of a block of a rank that keeps these heads."""
        return len(heads) * self.head_bytes

    def pieces(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return where `heads` lie in a block of a rank that keeps `kept`, in as few pieces as possible."""
        return [Piece((heads.start - kept.start) * self.head_bytes, len(heads) * self.head_bytes)]

    def sections(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return the same as `pieces`: all layers of a head lie side by side."""
        return self.pieces(kept, heads)

    @property
    def fingerprint(self) -> str:
        """Equal exactly where two layouts are equal; 32 hex digits, stable across processes and versions of Python."""
        return _hash_of(self)


class StateRows(msgspec.Struct, frozen=True):
    """Rows of a state that belong to heads, or to groups of heads: `count` of them with `width` rows each."""

    count: int
    width: int

    def of_ranks(self, size: int) -> StateRows:
        """Return what each of `size` ranks keeps; several keep the same one where there are fewer than ranks.

        Raises `UnevenHeads` where they cannot be shared out evenly.
        """
        if self.count % size and size % self.count:
            raise UnevenHeads(f"{self.count} heads or groups of a state cannot be shared out over {size} ranks")
        return StateRows(max(1, self.count // size), self.width)

    def of_heads(self, heads: range, num_heads: int) -> range:
        """Return the rows that belong to some of the `num_heads` heads of the layout."""
        first = heads.start * self.count // num_heads
        last = -(-heads.stop * self.count // num_heads)
        return range(first * self.width, last * self.width)


class StatePart(msgspec.Struct, frozen=True):
    """One tensor of a layer's state. Its first dimension has the rows of each kind of heads one after another.

    Tensor-parallel ranks divide the heads of each kind.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: tuple[StateRows, ...] = ()  # of the first dimension; (): one of each head or channel

    @property
    def sections(self) -> tuple[StateRows, ...]:
        """The rows of the first dimension, by what they belong to."""
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
        """The first byte of each part in its layer, and of the next layer."""
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
        """Equal exactly where two layouts are equal; as that of a `KVLayout`."""
        return _hash_of(self)

    @property
    def num_heads(self) -> int:
        """The number of shares of a slot such that each has whole heads of every kind, or one that others have, too."""
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
        """Return the bytes of a slot of a rank that keeps these heads."""
        return self.num_layers * self._offsets_of(heads)[-1]

    def pieces(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return where `heads` lie in a slot of a rank that keeps `kept`, in as few pieces as possible."""
        return [Piece(0, self.bytes_of(kept))] if kept == heads else self.sections(kept, heads)

    def sections(self, kept: range, heads: range) -> Sequence[Piece]:
        """Return where `heads` lie in a slot of a rank that keeps `kept`: rows of each section, part and layer.

        Rows that belong to several heads are with each of them.
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
        """Return `offsets` in a slot of a rank that keeps these heads."""
        num_heads = self.num_heads
        return _aligned(
            sum(len(rows.of_heads(heads, num_heads)) for rows in part.sections) * part.row_bytes for part in self.parts
        )


class CacheKind(enum.StrEnum):
    """A kind of cache: which part of it later tokens read."""

    FULL = "full"  # keys and values of all tokens
    WINDOW = "window"  # keys and values, of which later tokens see the last `window` only
    LATENT = "latent"  # one vector a token, from which keys and values of all heads come
    STATE = "state"  # a recurrent state, which does not grow with the sequence


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one layer. Layers that keep the same of every token are a group."""

    kind: CacheKind
    num_kv_heads: int  # of the whole model, whatever the tensor parallelism
    head_dim: int
    dtype: str
    num_planes: int = 2  # as in `KVLayout`
    window: int | None = None  # tokens that a query sees, itself included; only of kind `window`


class LayerState(msgspec.Struct, frozen=True):
    """The recurrent state of one layer, and whatever else is as large after one token as after many."""

    parts: tuple[StatePart, ...]


# What one layer keeps: nothing, keys and values, a state, or both of these.
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
        """Equal exactly where two groups keep the same of the same layers: blocks of two groups may be alike."""
        return _hash_of(self)

    @property
    def rank(self) -> int:
        """The place of its kind among groups: 0 keeps all tokens, 1 a window of them, 2 a state."""
        return 2 if isinstance(self.blocks, StateLayout) else int(self.window is not None)

    @property
    def kv(self) -> KVLayout:
        """The blocks of a group that keeps something of each token. Raises `SeveralGroups` for states."""
        if isinstance(self.blocks, StateLayout):
            raise SeveralGroups("layers with recurrent states keep no blocks of tokens")
        return self.blocks


class CacheLayout(msgspec.Struct, frozen=True):
    """All that a model keeps of a sequence, as groups of layers; see docs/concepts/cache_groups.md."""

    groups: tuple[GroupLayout, ...]

    @classmethod
    def of_layers(cls, model: str, caches: Sequence[LayerCaches]) -> CacheLayout:
        """Return the groups of a model's layers, given what each keeps. A layer that keeps two things is in two groups.

        Groups that keep all tokens come first: a prefix hit is bounded by the first group, and cut shorter by the
        others.
        """
        layers: dict[LayerCache | LayerState, list[int]] = {}
        for layer, kept in enumerate(caches):
            for cache in kept:
                layers.setdefault(cache, []).append(layer)
        ordered = sorted(layers, key=_keeps_less)  # stable: else by their first layers
        return cls(tuple(_group_of(model, cache, layers[cache]) for cache in ordered))

    def place_of(self, layer: int) -> CachePlace:
        """Return where the layer with this index in the model finds what it keeps of each token."""
        return self._place_of(layer, KVLayout)

    def state_place_of(self, layer: int) -> CachePlace:
        """Return where the layer with this index in the model finds its state."""
        return self._place_of(layer, StateLayout)

    def _place_of(self, layer: int, kind: type[KVLayout | StateLayout]) -> CachePlace:
        return next(
            CachePlace(number, group.layers.index(layer))
            for number, group in enumerate(self.groups)
            if layer in group.layers and isinstance(group.blocks, kind)
        )

    @property
    def only(self) -> GroupLayout:
        """The group of a model all of whose layers keep the same. Raises `SeveralGroups`."""
        if len(self.groups) != 1:
            raise SeveralGroups(f"the layers of this model keep {len(self.groups)} different kinds of caches")
        return self.groups[0]

    @property
    def fingerprint(self) -> str:
        """Equal exactly where two models' caches are; of one group that of its blocks. 32 hex digits."""
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
    """Return the first byte of each part of these sizes, and the byte behind the last one."""
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
