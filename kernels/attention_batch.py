"""`AttentionBatch`: the sequences of one step, described once for all layers' attention, MLA and KV writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHORT_CONTEXTS = (1024, 4096)  # tokens: single decodes up to these lengths have special kernels

FIELD_TYPES = {
    "query_start": torch.int32,
    "seq_lens": torch.int32,
    "block_tables": torch.int32,
    "table_rows": torch.int32,
    "positions": torch.int64,
    "slots": torch.int64,
}


@dataclass(frozen=True)
class AttentionBatch:
    """The ragged sequences of one step. Tensors are int32 on the device unless stated otherwise.

    The last `query_start[i + 1] - query_start[i]` of sequence i's `seq_lens[i]` tokens are in this step; the KV of the
    earlier ones is already in its blocks. Sequences with exactly one token (decodes) come first.

    GPU kernels read all of these tensors while the previous kernel may still run. So between the kernels that write
    them and the first that reads them, there must be a kernel launched without programmatic dependent launch (see
    `baton.kernels.pdl`), such as an embedding.

    A step that is padded to the size of a captured graph ends with sequences of length 0 and tokens of slot -1. Nothing
    is read or written for them, and their results are arbitrary but finite. `max_query_len` and `max_seq_len` are then
    upper bounds.
    """

    query_start: Tensor  # [num_seqs + 1]  sequence i's tokens are query_start[i]:query_start[i + 1]
    seq_lens: Tensor  # [num_seqs]  tokens of KV, including this step's
    block_tables: Tensor  # [num_seqs or more rows, max_blocks]
    positions: Tensor  # [num_tokens]  int64: position of each token in its sequence
    slots: Tensor  # [num_tokens]  int64: block * block_size + offset where the token's KV goes; -1: nowhere
    max_query_len: int
    max_seq_len: int
    num_decodes: int  # the first num_decodes sequences have one query token each; this step writes no other KV of them
    table_rows: Tensor | None = None  # [num_seqs]  sequence i's blocks are block_tables[table_rows[i]]; None: row i
    num_kv_tokens: int | None = None  # upper bound of the keys of all sequences after the decodes; None: unknown
    # True if all sequences are decodes, perhaps with drafts: a few query tokens each; this step writes no other KV.
    drafted: bool = False
    prepared: object | None = None  # the plan that `prepare` has made for the kernels of the step's device

    def __post_init__(self) -> None:
        """Check dtypes and strides, since kernels read tensors by address. Raises `TypeError`."""
        for name, dtype in FIELD_TYPES.items():
            tensor: Tensor | None = getattr(self, name)
            if tensor is None:
                continue
            if tensor.dtype != dtype or (tensor.numel() > 1 and tensor.stride(-1) != 1):
                raise TypeError(f"{name} is {tensor.dtype} with stride {tensor.stride()}: give contiguous {dtype}")

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    @classmethod
    def plan(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Tensor,
        block_size: int,
    ) -> AttentionBatch:
        """Return the batch of sequences whose last `query_lens[i]` of `seq_lens[i]` tokens run in this step.

        `block_tables` is int32 [num_seqs, max_blocks]; the batch is on its device. This synchronizes with the device,
        so it is for tests and benchmarks, not for serving. Raises `ValueError` for an invalid length, or a table that
        is too narrow.
        """
        if not len(query_lens) == len(seq_lens) == block_tables.shape[0]:
            raise ValueError(
                f"{len(query_lens)} query lengths, {len(seq_lens)} sequence lengths and {block_tables.shape[0]} block "
                "tables: give one of each for every sequence"
            )
        for index, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            if not 1 <= query_len <= seq_len:
                raise ValueError(
                    f"sequence {index} has {query_len} query tokens of {seq_len}: give from 1 to the sequence's length"
                )
        max_seq_len = max(seq_lens, default=0)
        if max_seq_len > block_tables.shape[1] * block_size:
            raise ValueError(
                f"a sequence of {max_seq_len} tokens does not fit {block_tables.shape[1]} blocks of {block_size}: "
                "widen the block tables"
            )
        device = block_tables.device
        query = torch.tensor(query_lens, dtype=torch.int64)
        ends = query.cumsum(0)
        seq = torch.tensor(seq_lens, dtype=torch.int64)
        owner = torch.repeat_interleave(torch.arange(len(query)), query)
        positions = torch.arange(len(owner)) + (seq - ends)[owner]
        blocks = block_tables.cpu()[owner, positions // block_size].to(torch.int64)
        decodes = next((i for i, length in enumerate(query_lens) if length != 1), len(query_lens))
        return cls(
            query_start=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32),
            seq_lens=seq.to(device, torch.int32),
            block_tables=block_tables,
            positions=positions.to(device),
            slots=(blocks * block_size + positions % block_size).to(device),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max_seq_len,
            num_decodes=decodes,
            num_kv_tokens=sum(seq_lens[decodes:]),
        )
