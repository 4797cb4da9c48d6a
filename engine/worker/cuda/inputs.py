"""The tensors that a step's kernels fill and its model reads, at fixed addresses."""

from __future__ import annotations

import torch

from baton.kernels.attention import AttentionBatch
from baton.kernels.step import StepBuffers, chunk_inputs, decode_inputs

from .shapes import StepShape
from .tables import DeviceTables


class StepInputs:
    """Room for the largest step; each step uses the front of it."""

    def __init__(self, tables: DeviceTables, *, max_num_seqs: int, max_num_tokens: int) -> None:
        self._tables = tables

        def zeros(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=tables.memory.device)

        self._whole = StepBuffers(
            token_ids=zeros(max_num_tokens, torch.int32),
            positions=zeros(max_num_tokens, torch.int64),
            slots=zeros(max_num_tokens, torch.int64),
            seq_lens=zeros(max_num_seqs, torch.int32),
            table_rows=zeros(max_num_seqs, torch.int32),
            last_tokens=zeros(max_num_seqs, torch.int64),
        )
        self._one_each = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=tables.memory.device)

    def of(self, shape: StepShape) -> StepBuffers:
        """Those of a step of this shape."""
        whole, seqs, tokens = self._whole, shape.num_seqs, shape.num_tokens
        return StepBuffers(
            token_ids=whole.token_ids[:tokens],
            positions=whole.positions[:tokens],
            slots=whole.slots[:tokens],
            seq_lens=whole.seq_lens[:seqs],
            table_rows=whole.table_rows[:seqs],
            last_tokens=whole.last_tokens[:seqs],
        )

    def fill(self, shape: StepShape) -> None:
        """From the tables, on the device."""
        fill = decode_inputs if shape.is_decode else chunk_inputs
        fill(self._tables.step, self._tables.batch(shape.num_seqs), self.of(shape))

    def attention(self, shape: StepShape) -> AttentionBatch:
        """What attention reads of them."""
        buffers = self.of(shape)
        query_start = self._one_each if shape.is_decode else self._tables.query_start.tensor[0]
        return AttentionBatch(
            query_start=query_start[: shape.num_seqs + 1],
            seq_lens=buffers.seq_lens,
            block_tables=self._tables.blocks.tensor,
            positions=buffers.positions,
            slots=buffers.slots,
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            num_decodes=shape.num_decodes,
            table_rows=buffers.table_rows,
            num_kv_tokens=shape.num_kv_tokens,
        )
