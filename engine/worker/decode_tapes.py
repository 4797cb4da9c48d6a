"""Decode steps without the model's Python: what captured graphs are to a GPU.

    at start-up      the model's calls are recorded, once for each size of step (`kernels.native.tape`)
    a step           writes its inputs where the calls of its size or the next read them, and has them made;
                     rows beyond its sequences are padding

A model that does more than call native functions (torch's own products, collectives, experts) has no tapes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.native.calls import Obstacle
from baton.kernels.native.tape import Tape, Workspace, record

from .block_tables import BlockTables
from .inputs import StepInputs
from .step_sizes import at_least, decode_sizes

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, AttentionBatch], Tensor]  # token ids [T] and their batch -> hidden states [T, hidden_size]


@dataclass(frozen=True)
class _Inputs:
    """Of steps of as many sequences as it has rows, one token each. Stays where it is."""

    token_ids: Tensor  # [n] int32
    batch: AttentionBatch

    @classmethod
    def of(cls, num_seqs: int, tables: BlockTables) -> _Inputs:
        """All of them padding."""
        batch = AttentionBatch(
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_seqs, dtype=torch.int32),
            block_tables=torch.from_numpy(tables.table),
            positions=torch.zeros(num_seqs, dtype=torch.int64),
            slots=torch.full((num_seqs,), -1, dtype=torch.int64),
            max_query_len=1,
            max_seq_len=tables.max_tokens,
            num_decodes=num_seqs,
            table_rows=torch.zeros(num_seqs, dtype=torch.int32),
        )
        return cls(torch.zeros(num_seqs, dtype=torch.int32), batch)

    def write(self, inputs: StepInputs) -> None:
        step, batch, count = inputs.attention, self.batch, len(inputs.rows)
        assert batch.table_rows is not None
        self.token_ids[:count] = inputs.token_ids
        batch.seq_lens[:count] = step.seq_lens
        batch.positions[:count] = step.positions
        batch.slots[:count] = step.slots
        batch.table_rows[:count] = torch.from_numpy(inputs.rows.astype(np.int32))
        if count < batch.num_seqs:
            batch.seq_lens[count:] = 0
            batch.slots[count:] = -1


@dataclass(frozen=True)
class DecodeTape:
    """Steps of one size, or of fewer sequences."""

    _inputs: _Inputs
    _tape: Tape
    _hidden: Tensor  # [n, hidden_size], what the tape gives

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [sequences, hidden_size], until any tape's next step."""
        self._inputs.write(inputs)
        self._tape.replay()
        return self._hidden[: len(inputs.rows)]


class DecodeTapes:
    """One for each size of step."""

    def __init__(self, forward: Forward, tables: BlockTables, max_num_seqs: int) -> None:
        """Records what `forward` does for every size, as far as it can be recorded. Computes nothing."""
        self._tapes: dict[int, DecodeTape] = {}  # by size, ascending
        workspace = Workspace()
        try:
            for size in decode_sizes(max_num_seqs):
                inputs = _Inputs.of(size, tables)
                recording = record(functools.partial(forward, inputs.token_ids, inputs.batch), workspace)
                self._tapes[size] = DecodeTape(inputs, recording.tape, recording.answer)
        except Obstacle as obstacle:
            logger.info("decode steps of %d sequences or more run through Python: the model needs %s", size, obstacle)
        self._sizes = list(self._tapes)

    def find(self, inputs: StepInputs) -> DecodeTape | None:
        """The one that serves a step like this: one token a sequence, all of them wanted. None where none does."""
        if inputs.attention.max_query_len != 1 or inputs.wanted is not None:
            return None
        size = at_least(self._sizes, len(inputs.rows))
        return None if size is None else self._tapes[size]
