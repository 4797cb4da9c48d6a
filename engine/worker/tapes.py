"""Steps without the model's Python: what captured graphs are to a GPU.

    at start-up      the model's calls are recorded, once for each size of step (`kernels.native.cpu_graph`)
    a step           writes its inputs where the calls of its size or the next read them, and has them made;
                     sequences and tokens beyond its own are padding, and products leave them out

Decodes have tapes by their number of sequences; steps with chunks of prompts, up to some hundred tokens, by tokens:
from there on the calls take so long that the Python between them does not matter. A model that does more than call
native functions (torch's own products, collectives, experts) has no tapes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.kernels.attention import AttentionBatch
from baton.kernels.native.calls import NotRecordable
from baton.kernels.native.cpu_graph import CpuGraph, Workspace, record

from .block_tables import BlockTables
from .inputs import StepInputs
from .step_sizes import at_least, decode_sizes

logger = logging.getLogger(__name__)

CHUNK_SIZES = (64, 128, 256, 512)  # tokens

# Token ids [T], their batch, indices [R] of wanted tokens or None -> hidden states [T or R, hidden_size].
Forward = Callable[[Tensor, AttentionBatch, Tensor | None], Tensor]


@dataclass(frozen=True)
class _Inputs:
    """Of steps of one size: room for so many tokens, sequences and wanted tokens. Stays where it is."""

    token_ids: Tensor  # [tokens] int32
    batch: AttentionBatch
    wanted: Tensor | None  # [wanted] int64; None: all tokens

    @classmethod
    def of(cls, num_tokens: int, num_seqs: int, num_wanted: int | None, tables: BlockTables) -> _Inputs:
        """All of them padding. As many sequences as tokens: one token each."""
        batch = AttentionBatch(
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32),
            seq_lens=torch.zeros(num_seqs, dtype=torch.int32),
            block_tables=torch.from_numpy(tables.table),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            slots=torch.full((num_tokens,), -1, dtype=torch.int64),
            max_query_len=num_tokens - num_seqs + 1,
            max_seq_len=tables.max_tokens,
            num_decodes=num_seqs if num_seqs == num_tokens else 0,
            table_rows=torch.zeros(num_seqs, dtype=torch.int32),
        )
        wanted = None if num_wanted is None else torch.zeros(num_wanted, dtype=torch.int64)
        return cls(torch.zeros(num_tokens, dtype=torch.int32), batch, wanted)

    def write(self, inputs: StepInputs) -> None:
        step, batch, num_seqs, num_tokens = inputs.attention, self.batch, len(inputs.rows), len(inputs.token_ids)
        assert batch.table_rows is not None
        self.token_ids[:num_tokens] = inputs.token_ids
        batch.positions[:num_tokens] = step.positions
        batch.slots[:num_tokens] = step.slots
        batch.seq_lens[:num_seqs] = step.seq_lens
        if num_tokens < batch.num_tokens:
            batch.slots[num_tokens:] = -1
        if num_seqs < batch.num_seqs:
            batch.seq_lens[num_seqs:] = 0
        batch.table_rows[:num_seqs] = torch.from_numpy(inputs.rows.astype(np.int32))
        if self.wanted is not None and inputs.wanted is not None:  # chunks, not one token for each sequence
            batch.query_start[: num_seqs + 1] = step.query_start
            batch.query_start[num_seqs + 1 :] = num_tokens
            self.wanted[: len(inputs.wanted)] = inputs.wanted


@dataclass(frozen=True)
class StepTape:
    """Steps of one size, or smaller ones."""

    _inputs: _Inputs
    _tape: CpuGraph
    _hidden: Tensor  # [T or R, hidden_size], what the tape gives

    @classmethod
    def record(cls, forward: Forward, inputs: _Inputs, workspace: Workspace) -> StepTape:
        """Raises `NotRecordable` where the model does what no tape can."""
        sizes = [len(rows) for rows in (inputs.token_ids, inputs.wanted) if rows is not None]
        recording = record(lambda: forward(inputs.token_ids, inputs.batch, inputs.wanted), workspace, sizes)
        return cls(inputs, recording.graph, recording.answer)

    def has_room(self, wanted: Tensor) -> bool:
        return self._inputs.wanted is not None and len(wanted) <= len(self._inputs.wanted)

    def forward(self, inputs: StepInputs) -> Tensor:
        """Hidden states [wanted tokens, hidden_size], until any tape's next step."""
        self._inputs.write(inputs)
        num_tokens = len(inputs.token_ids)
        if inputs.wanted is None:
            self._tape.replay(num_tokens)
            return self._hidden[:num_tokens]
        self._tape.replay(num_tokens, len(inputs.wanted))
        return self._hidden[: len(inputs.wanted)]


class StepTapes:
    """One for each size of step."""

    def __init__(self, forward: Forward, tables: BlockTables, max_num_seqs: int) -> None:
        """Records what `forward` does for every size, as far as it can be recorded. Computes nothing."""
        workspace = Workspace()
        decodes = {size: _Inputs.of(size, size, None, tables) for size in decode_sizes(max_num_seqs)}
        # No tape has as many wanted tokens as tokens: their rows are told apart by number.
        chunks = {size: _Inputs.of(size, max_num_seqs, min(max_num_seqs, size - 1), tables) for size in CHUNK_SIZES}
        self._decodes = _recorded(forward, decodes, workspace, "decodes")
        self._chunks = _recorded(forward, chunks, workspace, "tokens")
        self._decode_sizes, self._chunk_sizes = list(self._decodes), list(self._chunks)

    def find(self, inputs: StepInputs) -> StepTape | None:
        """The one that serves a step like this; None where none does."""
        if inputs.wanted is None:
            if inputs.attention.max_query_len != 1:
                return None
            size = at_least(self._decode_sizes, len(inputs.token_ids))
            return None if size is None else self._decodes[size]
        size = at_least(self._chunk_sizes, len(inputs.token_ids))
        return self._chunks[size] if size is not None and self._chunks[size].has_room(inputs.wanted) else None


def _recorded(forward: Forward, of_sizes: dict[int, _Inputs], workspace: Workspace, unit: str) -> dict[int, StepTape]:
    """By size, ascending: as many as can be."""
    tapes: dict[int, StepTape] = {}
    for size, inputs in of_sizes.items():
        try:
            tapes[size] = StepTape.record(forward, inputs, workspace)
        except NotRecordable as obstacle:
            logger.info("steps of %d %s or more run through Python: the model needs %s", size, unit, obstacle)
            break
    return tapes
