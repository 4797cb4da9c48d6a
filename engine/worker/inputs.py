"""What one step feeds to the model, gathered from the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton.kernels.attention import AttentionBatch

from ..core.layout import BLOCK_SIZE
from ..core.step import Chunk
from .block_tables import BlockTables
from .rows import Rows


@dataclass(frozen=True)
class StepInputs:
    """One step's tokens, chunk after chunk, and whose hidden states are wanted.

    A chunk that samples wants its last token's, one with prompt logprobs those of all its tokens, any other none. Those
    of chunk i end at `wanted_ends[i]`.
    """

    token_ids: torch.Tensor  # [num_tokens] int32
    attention: AttentionBatch
    wanted: torch.Tensor | None  # [num_wanted] int64, indices of tokens; None: all
    wanted_ends: NDArray[np.int64]  # [num_chunks]
    rows: NDArray[np.int64]  # [num_chunks]
    ends: NDArray[np.int64]  # [num_chunks] tokens of each row whose KV exists after the step

    @classmethod
    def padding(cls) -> StepInputs:
        """Of an empty step (`core.step.PADDING`): one token of no sequence, whose KV goes nowhere."""
        nothing = torch.zeros(1, dtype=torch.int32)
        attention = AttentionBatch(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=nothing,
            block_tables=nothing[:, None],
            positions=nothing.long(),
            slots=torch.tensor([-1]),
            max_query_len=1,
            max_seq_len=1,
            num_decodes=1,
        )
        none = np.zeros(0, np.int64)
        return cls(nothing, attention, None, none, none, none)

    @classmethod
    def gather(cls, chunks: Sequence[Chunk], rows: Rows, tables: BlockTables) -> StepInputs:
        num_chunks = len(chunks)
        row_ids = np.fromiter((chunk.row for chunk in chunks), np.int64, num_chunks)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, num_chunks)
        lens = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, num_chunks)
        ends = starts + lens
        query_start = np.zeros(num_chunks + 1, np.int32)
        np.cumsum(lens, out=query_start[1:])
        max_query_len = int(lens.max())
        if max_query_len == 1:
            token_rows, positions = row_ids, starts
        else:
            token_rows = np.repeat(row_ids, lens)
            positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lens)
        max_seq_len = int(ends.max())
        token_blocks = tables.table[token_rows, positions // BLOCK_SIZE].astype(np.int64)
        attention = AttentionBatch(
            query_start=torch.from_numpy(query_start),
            seq_lens=torch.from_numpy(ends.astype(np.int32)),
            block_tables=torch.from_numpy(tables.table[row_ids, : -(-max_seq_len // BLOCK_SIZE)]),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(token_blocks * BLOCK_SIZE + positions % BLOCK_SIZE),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            num_decodes=_leading_ones(lens),
        )
        token_ids = torch.from_numpy(rows.tokens[token_rows, positions])
        wanted, wanted_ends = _wanted(chunks, query_start)
        return cls(token_ids, attention, wanted, wanted_ends, row_ids, ends)


def _wanted(chunks: Sequence[Chunk], query_start: NDArray[np.int32]) -> tuple[torch.Tensor | None, NDArray[np.int64]]:
    """The last so many tokens of each chunk: indices of all, and where those of each chunk end.

    Where no chunk wants any, the step's last token goes on: the last layer's all-reduce must wait for every rank, or
    rank 0 would call the step done before the others have written their keys and values.
    """
    counts = [chunk.num_tokens if chunk.prompt_logprobs else int(chunk.samples) for chunk in chunks]
    ends = np.cumsum(counts)
    if not ends[-1]:
        return torch.from_numpy(query_start[-1:] - 1).to(torch.int64), ends
    if ends[-1] == query_start[-1]:
        return None, ends
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(query_start[1:] - ends, counts)), ends


def _leading_ones(lens: NDArray[np.int64]) -> int:
    longer = lens != 1
    return int(longer.argmax()) if longer.any() else len(lens)
