"""`StateBatch`: the sequences of one step, for layers with a recurrent state.

    tokens    s0 | s1 s1 s1 s1 s1 s1 s1 s1 | s2 s2 s2 s2 s2         query_start  0 1 9 14
    chunks         [1         5)[5        9)[9           14)        chunk_start  1 5 9 14

s0 is a decode, which is processed token by token. The others are processed chunk by chunk; s1 has a checkpoint after
its first four tokens.

A sequence's state lies in a *slot* of an arena. It is read from slot `sources[i]` before the sequence's first token of
this step, and written to slot `targets[i]` after its last. A checkpoint is a state in between, written to a slot of its
own. Chunks have up to CHUNK tokens, and end at each checkpoint. So a kernel that processes chunk by chunk has every
requested state in its registers at the end of some chunk.

    query lengths ─> Cuts         lists: first tokens of chunks, their sequences, their checkpoints
                  ─> StateBatch   the same on the device

GPU kernels process sequences in parallel. On a CPU and in references, `carry_states` loops over them.

A captured step may have any number of decodes, up to its number of sequences: both kinds of kernels are launched for
all sequences, and skip those of the other kind. An eager step has a fixed number.

If decodes may have drafts after their first token, the state is stored after that token, since it is not known yet
which drafts will be accepted. The inputs of the drafts are stored in *places*, a ring per row. The row's next step
advances the state by the accepted drafts, and then by its own tokens (`Replay`):

    places of a row     [ .. k6 k7 k8 .. ]                 inputs of the drafts after token 5, by position
    accepted: 6 and 7   state after 5 ─ k6 ─ k7 ─ own first token 8 ─> stored ─ own drafts 9, 10 ─> places
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens
LEAST_CUT = 8  # least tokens before a checkpoint: at least a convolution's tail
SOURCE_CUT = 8 * CHUNK  # most tokens before a checkpoint that is written to the sequence's source slot

FIELDS = ("query_start", "sources", "targets", "num_decodes", "chunk_start", "chunk_seqs", "checkpoints", "seq_chunks")


class StateCheckpoint(NamedTuple):
    """A request to keep a state: that of sequence `seq` after the first `num_tokens` of its tokens in this step."""

    seq: int
    num_tokens: int
    slot: int


class Cuts(NamedTuple):
    """The chunks of a step's sequences: the fields of `StateBatch` as lists."""

    query_start: list[int]
    num_decodes: int
    chunk_start: list[int]
    chunk_seqs: list[int]
    checkpoints: list[int]
    seq_chunks: list[int]

    @classmethod
    def of(
        cls,
        query_lens: Sequence[int],
        sources: Sequence[int],
        *,
        checkpoints: Sequence[StateCheckpoint] = (),
        decode_tokens: int = 1,
        num_decodes: int | None = None,
    ) -> Cuts:
        """Cut sequences of `query_lens[i]` tokens into chunks.

        Leading sequences with at most `decode_tokens` tokens are the decodes, or the first `num_decodes` if given.
        Raises `ValueError` for invalid lengths, or for a checkpoint in a decode, outside a sequence's tokens, or after
        fewer than LEAST_CUT tokens unless these are all.
        """
        if min(query_lens, default=0) < 0:
            raise ValueError(f"a sequence has {min(query_lens)} tokens: give 0 or more")
        decodes = num_decodes
        if decodes is None:
            decodes = next((i for i, length in enumerate(query_lens) if length > decode_tokens), len(query_lens))
        kept = _slots_by_position(checkpoints, query_lens, decodes, sources)
        cuts = cls([0], decodes, [], [], [], [0])
        for seq, length in enumerate(query_lens):
            begin = cuts.query_start[-1]
            cuts.query_start.append(begin + length)
            if seq >= decodes:
                slots = kept.get(seq, {})
                for first, end in _chunks(length, sorted(slots)):
                    cuts.chunk_start.append(begin + first)
                    cuts.chunk_seqs.append(seq)
                    cuts.checkpoints.append(slots.get(end, -1))
            cuts.seq_chunks.append(len(cuts.chunk_seqs))
        cuts.chunk_start.append(cuts.query_start[-1])
        return cuts

    def columns(self, sources: Sequence[int], targets: Sequence[int]) -> dict[str, Sequence[int]]:
        """Return all lists of a batch with these slots, by the names in its FIELDS."""
        return {**self._asdict(), "num_decodes": [self.num_decodes], "sources": sources, "targets": targets}

    def padded(self, num_seqs: int, num_chunks: int) -> Cuts:
        """Return the cuts padded with empty sequences and chunks to these numbers."""
        seqs, chunks = num_seqs + 1 - len(self.query_start), num_chunks - len(self.chunk_seqs)
        return Cuts(
            query_start=self.query_start + self.query_start[-1:] * seqs,
            num_decodes=self.num_decodes,
            chunk_start=self.chunk_start + self.chunk_start[-1:] * chunks,
            chunk_seqs=self.chunk_seqs + [0] * chunks,
            checkpoints=self.checkpoints + [-1] * chunks,
            seq_chunks=self.seq_chunks + self.seq_chunks[-1:] * seqs,
        )


def most_chunks(num_seqs: int, num_tokens: int, checkpoint_tokens: int) -> int:
    """Return the largest number of chunks of `num_seqs` sequences with `num_tokens` tokens in all.

    A chunk may end early at the end of a sequence, or at a checkpoint, of which there is one every `checkpoint_tokens`.
    Sequences of one token after the decodes are chunks, too.
    """
    seqs = min(num_seqs, num_tokens)
    checkpoints = min(num_tokens, num_tokens // checkpoint_tokens + seqs)
    return min(num_tokens, num_tokens // CHUNK + seqs + checkpoints)


@dataclass(frozen=True)
class Replay:
    """Accepted drafts of earlier steps that states do not include yet, and the places of drafts' inputs. int32, device.

    The inputs of the token at position p of row r are at place `r * num_places + p % num_places`. A row has at least
    2 n + 1 places for n drafts, so that replayed positions and drafts of the same step do not share places.
    """

    rows: Tensor  # [num_seqs]  row of each sequence
    starts: Tensor  # [num_seqs]  number of tokens of the row before the sequence's first one in this step
    counts: Tensor  # [num_seqs]  how many of these, the last ones, the source's state does not include yet
    num_places: int  # places of a row

    def pending(self, seq: int) -> list[int]:
        """Return the places of the tokens by which the source's state must first advance, in order."""
        start, count = int(self.starts[seq]), int(self.counts[seq])
        return self._places(seq, range(start - count, start))

    def drafts(self, seq: int, num_tokens: int) -> list[int]:
        """Return the places of the drafts of a sequence with `num_tokens` tokens: of all but its first one."""
        start = int(self.starts[seq])
        return self._places(seq, range(start + 1, start + num_tokens))

    def _places(self, seq: int, positions: range) -> list[int]:
        first = int(self.rows[seq]) * self.num_places
        return [first + position % self.num_places for position in positions]


@dataclass(frozen=True)
class StateBatch:
    """Ragged sequences of one step, and the slots of their states. Tensors are int32 on the device unless stated.

    The first sequences, of one or few tokens, are the decodes, processed token by token. The others are processed chunk
    by chunk. With a `replay`, all but the first token of a decode are drafts: the state after that token is written to
    the target, and the drafts' inputs to their places. A sequence without tokens reads and writes nothing. A slot that
    a sequence writes must not be read by another sequence in the same step. A sequence's source may also be its target,
    or the slot of its first checkpoint, after at most SOURCE_CUT tokens.

    A step that is padded to the size of a captured graph ends with sequences and chunks without tokens, or with
    sequences whose slots are -1. Outputs for their tokens are arbitrary but finite, if inputs are. Outputs for tokens
    of no sequence are undefined; nothing for other tokens may depend on them.

    GPU kernels read all of these tensors while the previous kernel may still run. So between the kernels that write
    them and the first that reads them, there must be a kernel launched without programmatic dependent launch (see
    `baton.kernels.pdl`), such as an embedding.
    """

    query_start: Tensor  # [num_seqs + 1]  sequence i's tokens are query_start[i]:query_start[i + 1]
    sources: Tensor  # [num_seqs]  slot that a sequence's state is read from; -1: it begins with zeros
    targets: Tensor  # [num_seqs]  slot that its state is written to; -1: nowhere
    num_decodes: Tensor  # [1]
    chunk_start: Tensor  # [num_chunks + 1]  chunk c's tokens, CHUNK at most, are chunk_start[c]:chunk_start[c + 1]
    chunk_seqs: Tensor  # [num_chunks]  each chunk's sequence
    checkpoints: Tensor  # [num_chunks]  slot that the state after the chunk is written to; -1: nowhere
    seq_chunks: Tensor  # [num_seqs + 1]  sequence i's chunks are seq_chunks[i]:seq_chunks[i + 1]; a decode has none
    least_decodes: int  # bounds of the number of decodes, for the sizes of launches
    most_decodes: int
    replay: Replay | None = None  # None: decodes have no drafts, and their states are written after the last token

    def __post_init__(self) -> None:
        """Check dtypes and strides, since kernels read tensors by address. Raises `TypeError`."""
        for name in FIELDS:
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise TypeError(f"{name} is {tensor.dtype} with stride {tensor.stride()}: give contiguous int32")

    @property
    def num_seqs(self) -> int:
        return self.sources.shape[0]

    @functools.cached_property
    def words(self) -> ctypes.Array[ctypes.c_int64]:
        """Sizes and addresses for C++, of a batch on a CPU: `StateBatch` of native/states.h."""
        lists = [self.query_start, self.sources, self.targets, self.num_decodes]
        lists += [self.chunk_start, self.checkpoints, self.seq_chunks]
        replay, of_replay = self.replay, [0] * 4
        if replay is not None:
            rows, starts, counts = (part.data_ptr() for part in (replay.rows, replay.starts, replay.counts))
            of_replay = [rows, starts, counts, replay.num_places]
        return (ctypes.c_int64 * 12)(self.num_seqs, *(each.data_ptr() for each in lists), *of_replay)

    def keep_drafts(self, *kept: tuple[Tensor, Tensor]) -> None:
        """Store the inputs of the step's drafts: each pair is the inputs [T, ...] and the places [all places, ...].

        Synchronizes with the device; GPU kernels store them themselves.
        """
        if self.replay is None:
            return
        starts, num_decodes = self.query_start.tolist(), int(self.num_decodes)
        for seq, (begin, end) in enumerate(itertools.pairwise(starts[: num_decodes + 1])):
            if end - begin > 1:
                index = torch.tensor(self.replay.drafts(seq, end - begin), device=self.sources.device)
                for rows, places in kept:
                    places[index] = rows[begin + 1 : end].to(places.dtype)

    @property
    def most_prefills(self) -> int:
        """The largest possible number of sequences that are processed chunk by chunk."""
        return self.num_seqs - self.least_decodes

    @property
    def num_chunks(self) -> int:
        return self.chunk_seqs.shape[0]

    def empty_like(self, rows: Tensor) -> Tensor:
        """Return memory for the outputs of `rows` [T, ...]: zeros in a captured step of any mix, else uninitialized."""
        is_padded = self.least_decodes < self.most_decodes
        make = torch.zeros if is_padded else torch.empty
        return make(rows.shape, dtype=rows.dtype, device=rows.device)

    @classmethod
    def plan(
        cls,
        query_lens: Sequence[int],
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        checkpoints: Sequence[StateCheckpoint] = (),
        decode_tokens: int = 1,
        device: torch.device | None = None,
    ) -> StateBatch:
        """Return the batch of these sequences, with one asynchronous copy to the device.

        Raises `ValueError` as `Cuts.of` does, and if there is not one source and one target per sequence.
        """
        if not len(query_lens) == len(sources) == len(targets):
            raise ValueError(
                f"{len(query_lens)} query lengths, {len(sources)} sources and {len(targets)} targets: give one of each "
                "for every sequence"
            )
        cuts = Cuts.of(query_lens, sources, checkpoints=checkpoints, decode_tokens=decode_tokens)
        return cls.of_cuts(cuts, sources, targets, device)

    @classmethod
    def of_cuts(
        cls, cuts: Cuts, sources: Sequence[int], targets: Sequence[int], device: torch.device | None = None
    ) -> StateBatch:
        """Copy all lists to the device at once; each begins at a multiple of 16 bytes."""
        columns = cuts.columns(sources, targets)
        lists = [columns[name] for name in FIELDS]
        sizes = [len(values) for values in lists]
        padded = [-(-size // 4) * 4 for size in sizes]
        words = [
            word for values, size in zip(lists, padded, strict=True) for word in (*values, *[0] * (size - len(values)))
        ]
        packed = torch.tensor(words, dtype=torch.int32)
        if device is not None and device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        parts = [part[:size] for part, size in zip(packed.split(padded), sizes, strict=True)]
        tensors = dict(zip(FIELDS, parts, strict=True))
        return cls(**tensors, least_decodes=cuts.num_decodes, most_decodes=cuts.num_decodes)


def _slots_by_position(
    checkpoints: Sequence[StateCheckpoint], query_lens: Sequence[int], num_decodes: int, sources: Sequence[int]
) -> dict[int, dict[int, int]]:
    """Return {sequence: {number of tokens: slot}}."""
    kept: dict[int, dict[int, int]] = {}
    for seq, num_tokens, slot in checkpoints:
        if not num_decodes <= seq < len(query_lens):
            raise ValueError(f"a checkpoint of sequence {seq}: give one of {num_decodes} to {len(query_lens) - 1}")
        length = query_lens[seq]
        if not min(LEAST_CUT, length) <= num_tokens <= length:
            raise ValueError(
                f"a checkpoint behind {num_tokens} of sequence {seq}'s {length} tokens: give from {LEAST_CUT} to all"
            )
        kept.setdefault(seq, {})[num_tokens] = slot
    for seq, slots in kept.items():
        first = min(slots)
        if any(slot == sources[seq] and (cut > first or cut > SOURCE_CUT) for cut, slot in slots.items()):
            raise ValueError(
                f"a checkpoint in slot {sources[seq]}, which sequence {seq} reads, must be its first, behind at most "
                f"{SOURCE_CUT} tokens"
            )
    return kept


def _chunks(length: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (first token, end) of each chunk, so that a chunk ends at every cut."""
    ends = [*cuts, *([length] if length and (not cuts or cuts[-1] < length) else [])]
    begins = [0, *ends][:-1]
    return [
        (first, min(first + CHUNK, end))
        for begin, end in zip(begins, ends, strict=True)
        for first in range(begin, end, CHUNK)
    ]


def carry_states(
    state: Tensor,
    batch: StateBatch,
    dtype: torch.dtype,
    advance: Callable[[Tensor, slice], Tensor],
    *,
    span: int | None = None,
    replay: Callable[[Tensor, int], Tensor] | None = None,
) -> None:
    """Advance every sequence's state from its source over its tokens, and write it to its checkpoints and target.

    `advance(current, tokens)` returns the state, in `dtype`, after a slice of tokens, given the state before them. A
    slice has at most `span` tokens; None: it is a chunk of the batch, or all tokens of a decode.

    `replay(current, place)` returns the state after the draft whose inputs are at `place`, for a batch with a `Replay`.
    Decodes of such a batch advance one token at a time, so that drafts change the state by the same operations as other
    tokens.
    """
    num_replaying = int(batch.num_decodes) if batch.replay is not None else 0
    starts, sources, targets = batch.query_start.tolist(), batch.sources.tolist(), batch.targets.tolist()
    bounds, checkpoints, first_chunks = (
        part.tolist() for part in (batch.chunk_start, batch.checkpoints, batch.seq_chunks)
    )
    for seq, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if starts[seq] == starts[seq + 1]:
            continue
        chunks = [(starts[seq], starts[seq + 1], -1)]
        if numbers := range(*first_chunks[seq : seq + 2]):
            chunks = [(bounds[chunk], bounds[chunk + 1], checkpoints[chunk]) for chunk in numbers]
        current = initial_state(state, source, dtype)
        if seq < num_replaying:
            assert batch.replay is not None
            assert replay is not None
            for place in batch.replay.pending(seq):
                current = replay(current, place)
            for token in range(starts[seq], starts[seq + 1]):
                current = advance(current, slice(token, token + 1))
                if token == starts[seq] and target >= 0:
                    state[target] = current.to(state.dtype)
            continue
        for begin, end, checkpoint in chunks:
            for first in range(begin, end, span or end - begin):
                current = advance(current, slice(first, min(first + span, end) if span else end))
            if checkpoint >= 0:
                state[checkpoint] = current.to(state.dtype)
        if target >= 0:
            state[target] = current.to(state.dtype)


def initial_state(state: Tensor, source: int, dtype: torch.dtype) -> Tensor:
    """Return the state in a slot; zeros for slot -1."""
    return torch.zeros(state.shape[1:], dtype=dtype, device=state.device) if source < 0 else state[source].to(dtype)
