"""The kernels around the model in a step on a device: row table updates, the step's inputs, the drawn tokens.

    apply_writes     what changed since the last step ──> tables
    decode_inputs    rows                             ──> token ids, positions, slots, lengths
    chunk_inputs     rows, query_start                ──> the same, for chunks of any length
    decode_states    rows                             ──> slots of recurrent states
    store_tokens     drawn tokens                     ──> tables for the next step, ring for the CPU
    replace_tokens   tokens that were drawn again     ──> the same places

None of it waits for the device, and none of its shapes depends on what the tables hold.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from . import reference
from .buffers import PIECE, REJECTED, OutputRing, StepBatch, StepBuffers, StepTables

__all__ = [
    "PIECE",
    "REJECTED",
    "OutputRing",
    "StepBatch",
    "StepBuffers",
    "StepTables",
    "apply_writes",
    "chunk_inputs",
    "decode_inputs",
    "decode_states",
    "replace_tokens",
    "store_tokens",
]


def apply_writes(memory: Tensor, pieces: Tensor, values: Tensor, num_pieces: Tensor) -> None:
    """Copy `memory[to : to + count] = values[source : source + count]` for the first `num_pieces` of (to, source,
    count).

    `memory` [N] and `values` [V] are int32, `pieces` [P, 3] is int64, `num_pieces` [1] int32; no count exceeds `PIECE`,
    no two pieces write the same element. All but `memory` may be pinned memory of the CPU, which a device reads in
    place, when it comes to it: a captured call serves whatever lies there then.
    """
    _implementation(memory).apply_writes(memory, pieces, values, num_pieces)


def decode_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    """Fill `inputs` for one token of each row: the first that is not computed; for padding see `StepBuffers`."""
    _implementation(inputs.token_ids).decode_inputs(tables, batch, inputs)


def chunk_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    """Fill `inputs` for the tokens of each row that are computed next, as many as `query_start` says."""
    _implementation(inputs.token_ids).chunk_inputs(tables, batch, inputs)


def decode_states(
    table: Tensor, computed: Tensor, batch: StepBatch, entry_tokens: int, sources: Tensor, targets: Tensor
) -> None:
    """Find the slots of one token of each row, in a `table` [num_rows, entries] whose entries stand for `entry_tokens`.

    The first values of `sources` become the slots behind the token before, -1 where there is none, those of `targets`
    the slots behind the token itself, the first that is not `computed` [num_rows]; of padding both are -1. All int32.
    """
    _implementation(table).decode_states(table, computed, batch, entry_tokens, sources, targets)


def store_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, inputs: StepBuffers, ring: OutputRing) -> None:
    """Append token `drawn[i]` ([S] int64) to its row at `seq_lens[i]`, and copy it to the CPU's ring of pages.

    Only where `samples[i]` is not 0, and never for padding. `computed` of the rows becomes `seq_lens`, so that they are
    ready to go on; the ring turns to its next page.
    """
    _implementation(drawn).store_tokens(drawn, tables, batch, inputs, ring)


def replace_tokens(
    drawn: Tensor, index: Tensor, tables: StepTables, batch: StepBatch, inputs: StepBuffers, ring: OutputRing
) -> None:
    """Replace token `index[j]` ([J] int64) by `drawn[j]` ([J] int64), after `store_tokens` of the same step."""
    _implementation(drawn).replace_tokens(drawn, index, tables, batch, inputs, ring)


def _implementation(tensor: Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    from . import gpu  # needs Triton

    return gpu
