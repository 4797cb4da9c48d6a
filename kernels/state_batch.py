"""`StateBatch`: the sequences of one step as layers with a recurrent state see them.

    tokens    s0 | s1 s1 s1 s1 s1 s1 s1 s1 | s2 s2 s2 s2 s2         query_start  0 1 9 14
    chunks         [1         5)[5        9)[9           14)        chunk_start  1 5 9 14

s0 is a decode and goes token by token; the others go chunk by chunk, s1 with a checkpoint behind its first four tokens.

A sequence's state lies in a *slot* of an arena: it is read from the slot `sources[i]` before the sequence's first
token of this step, and written to the slot `targets[i]` behind its last. A checkpoint is the state in between, written
to a slot of its own. Chunks hold up to CHUNK tokens and end where a checkpoint is asked for, so that a kernel that goes
chunk by chunk has every state that is to be kept in its registers, at whatever position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64  # tokens
LEAST_CUT = 8  # tokens before the first checkpoint: no less than a convolution's tail
SOURCE_CUT = 8 * CHUNK  # tokens before one that is written where the sequence's state is read: no more

FIELDS = ("query_start", "sources", "targets", "chunk_start", "chunk_seqs", "checkpoints", "seq_chunks")


class Checkpoint(NamedTuple):
    """A state to keep: that of sequence `seq` behind the first `num_tokens` of its tokens in this step."""

    seq: int
    num_tokens: int
    slot: int


@dataclass(frozen=True)
class StateBatch:
    """Ragged sequences of one step, and the slots of their states. All int32 on the device unless said.

    The first `num_decodes` sequences, of one or few tokens, go token by token; the others chunk by chunk. A sequence of
    no tokens reads and writes nothing. A slot that is written in a step must not be read in it by another sequence; a
    sequence's own source may be its target, or the slot of its first checkpoint, behind at most SOURCE_CUT tokens.

    A step that is padded to the size of a captured graph ends in sequences whose slots are -1: what comes out for their
    tokens is arbitrary but finite, if what went in was.

    Kernels of a GPU read all of it while the kernel before them may still run: between what writes it and the first of
    them there must be one that is launched the ordinary way (see `baton.kernels.pdl`), such as an embedding.
    """

    query_start: Tensor  # [num_seqs + 1]  sequence i's tokens are query_start[i]:query_start[i + 1]
    sources: Tensor  # [num_seqs]  slot that a sequence's state is read from; -1: it begins with zeros
    targets: Tensor  # [num_seqs]  slot that its state is written to; -1: nowhere
    num_decodes: int
    chunk_start: Tensor  # [num_chunks + 1]  chunk c's tokens, CHUNK at most, are chunk_start[c]:chunk_start[c + 1]
    chunk_seqs: Tensor  # [num_chunks]  its sequence
    checkpoints: Tensor  # [num_chunks]  slot that the state behind it is written to; -1: nowhere
    seq_chunks: Tensor  # [num_prefills + 1]  sequence num_decodes + i's chunks are seq_chunks[i]:seq_chunks[i + 1]

    def __post_init__(self) -> None:
        """Check types and strides, since kernels read these by address. Raises `TypeError`."""
        for name in FIELDS:
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise TypeError(f"{name} is {tensor.dtype} with stride {tensor.stride()}: give contiguous int32")

    @property
    def num_seqs(self) -> int:
        return self.sources.shape[0]

    @property
    def num_prefills(self) -> int:
        """Return how many sequences go chunk by chunk."""
        return self.num_seqs - self.num_decodes

    @property
    def num_chunks(self) -> int:
        return self.chunk_seqs.shape[0]

    @classmethod
    def plan(
        cls,
        query_lens: Sequence[int],
        sources: Sequence[int],
        targets: Sequence[int],
        *,
        checkpoints: Sequence[Checkpoint] = (),
        decode_tokens: int = 1,
        device: torch.device | None = None,
    ) -> StateBatch:
        """Return the batch of sequences of `query_lens[i]` tokens; one copy to the device, which is not waited for.

        The first sequences that have at most `decode_tokens` tokens are the decodes. Raises `ValueError` where lengths
        make no sense, or where a checkpoint lies in a sequence that goes token by token, outside its tokens, or
        behind fewer than LEAST_CUT of them and not all.
        """
        if not len(query_lens) == len(sources) == len(targets):
            raise ValueError(
                f"{len(query_lens)} query lengths, {len(sources)} sources and {len(targets)} targets: give one of each "
                "for every sequence"
            )
        if min(query_lens, default=0) < 0:
            raise ValueError(f"a sequence has {min(query_lens)} tokens: give 0 or more")
        decodes = next((i for i, length in enumerate(query_lens) if length > decode_tokens), len(query_lens))
        kept = _slots_by_position(checkpoints, query_lens, decodes, sources)
        query_start, chunk_start, chunk_seqs, chunk_slots, seq_chunks = [0], [], [], [], [0]
        for seq, length in enumerate(query_lens):
            begin = query_start[-1]
            query_start.append(begin + length)
            if seq < decodes:
                continue
            slots = kept.get(seq, {})
            for first, end in _chunks(length, sorted(slots)):
                chunk_start.append(begin + first)
                chunk_seqs.append(seq)
                chunk_slots.append(slots.get(end, -1))
            seq_chunks.append(len(chunk_seqs))
        chunk_start.append(query_start[-1])
        return cls._upload(
            decodes,
            device or torch.device("cpu"),
            (query_start, sources, targets, chunk_start, chunk_seqs, chunk_slots, seq_chunks),
        )

    @classmethod
    def _upload(cls, num_decodes: int, device: torch.device, lists: Sequence[Sequence[int]]) -> StateBatch:
        """Copy all lists, which are in the order of FIELDS, at once; each begins at a multiple of 16 bytes."""
        sizes = [len(values) for values in lists]
        padded = [-(-size // 4) * 4 for size in sizes]
        words = [
            word for values, size in zip(lists, padded, strict=True) for word in (*values, *[0] * (size - len(values)))
        ]
        packed = torch.tensor(words, dtype=torch.int32)
        if device.type == "cuda":
            packed = packed.pin_memory().to(device, non_blocking=True)
        parts = [part[:size] for part, size in zip(packed.split(padded), sizes, strict=True)]
        return cls(num_decodes=num_decodes, **dict(zip(FIELDS, parts, strict=True)))


def _slots_by_position(
    checkpoints: Sequence[Checkpoint], query_lens: Sequence[int], num_decodes: int, sources: Sequence[int]
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
