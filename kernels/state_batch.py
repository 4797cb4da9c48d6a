"""`StateBatch`: the sequences of one step as layers with a recurrent state see them.

    tokens    s0 | s1 s1 s1 s1 s1 s1 s1 s1 | s2 s2 s2 s2 s2         query_start  0 1 9 14
    chunks         [1         5)[5        9)[9           14)        chunk_start  1 5 9 14

s0 is a decode and goes token by token; the others go chunk by chunk, s1 with a checkpoint behind its first four tokens.

A sequence's state lies in a *slot* of an arena: it is read from the slot `sources[i]` before the sequence's first
token of this step, and written to the slot `targets[i]` behind its last. A checkpoint is the state in between, written
to a slot of its own. Chunks hold up to CHUNK tokens and end where a checkpoint is asked for, so that a kernel that goes
chunk by chunk has every state that is to be kept in its registers, at whatever position.

    query lengths ─> Cuts         where chunks begin, whose they are, which of them end in a checkpoint: lists
                  ─> StateBatch   the same on the device

Kernels of a GPU take sequences side by side. On a CPU and in references, `carry_states` is the loop over them.

A captured step has any number of decodes, up to that of its sequences: both kinds of kernels look at every sequence,
and pass over those that are not theirs. A step that is launched as it is has as many as it has.

Where decodes may have drafts behind their first token, a state is stored behind that token, since nobody knows yet
which drafts are right. The inputs of the drafts are kept in *places*, a ring for each row. The next step of the row
applies those that were accepted to the state, and then its own tokens (`Replay`):

    places of a row     [ .. k6 k7 k8 .. ]                 inputs of the drafts behind token 5, by position
    accepted: 6 and 7   state behind 5 ─ k6 ─ k7 ─ own first token 8 ─> stored ─ own drafts 9, 10 ─> places
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
LEAST_CUT = 8  # tokens before the first checkpoint: no less than a convolution's tail
SOURCE_CUT = 8 * CHUNK  # tokens before one that is written where the sequence's state is read: no more

FIELDS = ("query_start", "sources", "targets", "num_decodes", "chunk_start", "chunk_seqs", "checkpoints", "seq_chunks")


class StateCheckpoint(NamedTuple):
    """A state to keep: that of sequence `seq` behind the first `num_tokens` of its tokens in this step."""

    seq: int
    num_tokens: int
    slot: int


class Cuts(NamedTuple):
    """The chunks into which a step's sequences are cut: lists of what `StateBatch` has on the device."""

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
        """Cut sequences of `query_lens[i]` tokens. The first that have at most `decode_tokens` tokens are the decodes,
        or the first `num_decodes` where that is given.

        Raises `ValueError` where lengths make no sense, or where a checkpoint lies in a sequence that goes token by
        token, outside its tokens, or behind fewer than LEAST_CUT of them and not all.
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
        """Return all lists of a batch with these slots, by the names of its FIELDS."""
        return {**self._asdict(), "num_decodes": [self.num_decodes], "sources": sources, "targets": targets}

    def padded(self, num_seqs: int, num_chunks: int) -> Cuts:
        """Return them with empty sequences and chunks behind the last, so many in all."""
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
    """Return how many chunks so many sequences have at most, together of `num_tokens` tokens.

    Each end of a sequence, and each checkpoint, of which there are some every `checkpoint_tokens`, may end a chunk
    early. Sequences of one token behind the decodes are chunks, too.
    """
    seqs = min(num_seqs, num_tokens)
    checkpoints = min(num_tokens, num_tokens // checkpoint_tokens + seqs)
    return min(num_tokens, num_tokens // CHUNK + seqs + checkpoints)


@dataclass(frozen=True)
class Replay:
    """Accepted drafts of earlier steps that are in no state yet, and where inputs of drafts lie. int32 on the device.

    What a state reads of the token at position p of row r lies in place `r * num_places + p % num_places`. No position
    that is replayed shares a place with a draft of the same step: a row has 2 n + 1 places or more for n drafts.
    """

    rows: Tensor  # [num_seqs]  row of each sequence
    starts: Tensor  # [num_seqs]  tokens of the row before the sequence's first one in this step
    counts: Tensor  # [num_seqs]  of these the last so many are to be applied to the state of the source first
    num_places: int  # of a row

    def pending(self, seq: int) -> list[int]:
        """Return the places of the tokens to apply first, in order."""
        start, count = int(self.starts[seq]), int(self.counts[seq])
        return self._places(seq, range(start - count, start))

    def drafts(self, seq: int, num_tokens: int) -> list[int]:
        """Return the places of the drafts of a sequence that has so many tokens: all but its first one."""
        start = int(self.starts[seq])
        return self._places(seq, range(start + 1, start + num_tokens))

    def _places(self, seq: int, positions: range) -> list[int]:
        first = int(self.rows[seq]) * self.num_places
        return [first + position % self.num_places for position in positions]


@dataclass(frozen=True)
class StateBatch:
    """Ragged sequences of one step, and the slots of their states. All int32 on the device unless said.

    The first sequences, of one or few tokens, go token by token: the decodes. The others go chunk by chunk. With a
    `replay`, all but the first token of a decode are drafts: the state behind that token is written to the target, and
    what states read of the drafts to their places. A sequence of no tokens reads and writes nothing. A slot that is
    written in a step must not be read in it by another sequence; a sequence's own source may be its target, or the slot
    of its first checkpoint, behind at most SOURCE_CUT tokens.

    A step that is padded to the size of a captured graph ends in sequences and chunks of no tokens, or in sequences
    whose slots are -1. What a recurrence gives for their tokens, or for those of no sequence, is arbitrary but finite,
    if what went in was.

    Kernels of a GPU read all of it while the kernel before them may still run: between what writes it and the first of
    them there must be one that is launched the ordinary way (see `baton.kernels.pdl`), such as an embedding.
    """

    query_start: Tensor  # [num_seqs + 1]  sequence i's tokens are query_start[i]:query_start[i + 1]
    sources: Tensor  # [num_seqs]  slot that a sequence's state is read from; -1: it begins with zeros
    targets: Tensor  # [num_seqs]  slot that its state is written to; -1: nowhere
    num_decodes: Tensor  # [1]
    chunk_start: Tensor  # [num_chunks + 1]  chunk c's tokens, CHUNK at most, are chunk_start[c]:chunk_start[c + 1]
    chunk_seqs: Tensor  # [num_chunks]  its sequence
    checkpoints: Tensor  # [num_chunks]  slot that the state behind it is written to; -1: nowhere
    seq_chunks: Tensor  # [num_seqs + 1]  sequence i's chunks are seq_chunks[i]:seq_chunks[i + 1]; a decode has none
    least_decodes: int  # bounds of the number of decodes, which kernels are launched for
    most_decodes: int
    replay: Replay | None = None  # None: no decode has drafts, and the state behind its last token is written

    def __post_init__(self) -> None:
        """Check types and strides, since kernels read these by address. Raises `TypeError`."""
        for name in FIELDS:
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise TypeError(f"{name} is {tensor.dtype} with stride {tensor.stride()}: give contiguous int32")

    @property
    def num_seqs(self) -> int:
        return self.sources.shape[0]

    @functools.cached_property
    def words(self) -> ctypes.Array[ctypes.c_int64]:
        """Numbers and addresses of its lists on a CPU, as C++ reads them: `StateBatch` of native/states.h."""
        lists = [self.query_start, self.sources, self.targets, self.num_decodes]
        lists += [self.chunk_start, self.checkpoints, self.seq_chunks]
        replay, of_replay = self.replay, [0] * 4
        if replay is not None:
            rows, starts, counts = (part.data_ptr() for part in (replay.rows, replay.starts, replay.counts))
            of_replay = [rows, starts, counts, replay.num_places]
        return (ctypes.c_int64 * 12)(self.num_seqs, *(each.data_ptr() for each in lists), *of_replay)

    def keep_drafts(self, *kept: tuple[Tensor, Tensor]) -> None:
        """Write rows [T, ...] of what states read to the places [num_places of all rows, ...] of the step's drafts.

        Each pair is such rows and their places. Waits for the device: kernels of a GPU do the same for themselves.
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
        """Return how many sequences go chunk by chunk, at most."""
        return self.num_seqs - self.least_decodes

    @property
    def num_chunks(self) -> int:
        return self.chunk_seqs.shape[0]

    def empty_like(self, rows: Tensor) -> Tensor:
        """Return memory for what comes out for `rows`, [T, ...], with zeros where they may be of no sequence."""
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
        """Return the batch of these sequences; one copy to the device, which is not waited for.

        Raises `ValueError` as `Cuts.of` does, and where there is not one source and one target for every sequence.
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
    """Return the first token of each chunk and the one behind its last, so that a chunk ends at every cut."""
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
    """Take every sequence's state from its source through its tokens, and write it to its checkpoints and its target.

    `advance(current, tokens)` returns the state, in `dtype`, behind the tokens of a slice that begins behind `current`.
    A slice holds at most `span` tokens; None: a chunk of the batch, or all tokens of a sequence that goes token by
    token.

    `replay(current, place)` returns the state behind the draft whose inputs lie in a place, for a batch with a
    `Replay`. Decodes of such a batch go one token at a time, so that a token that was a draft changes the state by the
    same operations as any other.
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
    """Return the state of a slot, zeros for slot -1."""
    return torch.zeros(state.shape[1:], dtype=dtype, device=state.device) if source < 0 else state[source].to(dtype)
