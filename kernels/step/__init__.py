"""The kernels around the model in a step on a device: row table updates, the step's inputs, the drawn tokens.

    apply_writes     what changed since the last step ──> tables
    decode_inputs    rows                             ──> token ids, positions, slots, lengths
    chunk_inputs     rows, query_start                ──> the same, for chunks of any length
    decode_states    rows                             ──> slots of recurrent states
    replay_states    rows                             ──> the same where there are drafts, and which are to be applied
    store_tokens     drawn tokens                     ──> tables for the next step, ring for the CPU
    place_drafts     guesses                          ──> tokens of rows, where each draw belongs
    accept_tokens    drawn tokens of steps with drafts ──> as `store_tokens`, up to the first wrong draft
    replace_tokens   tokens that were drawn again     ──> the same places
    accept_again     the same, of steps with drafts   ──> the same places, up to the first wrong draft

None of it waits for the device, and none of its shapes depends on what the tables hold.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from baton.kernels.state_batch import StateBatch

from . import reference
from .buffers import PIECE, REJECTED, DrawPlaces, OutputRing, RowGuesses, StepBatch, StepBuffers, StepTables

__all__ = [
    "PIECE",
    "REJECTED",
    "DrawPlaces",
    "OutputRing",
    "RowGuesses",
    "StepBatch",
    "StepBuffers",
    "StepTables",
    "accept_again",
    "accept_tokens",
    "apply_writes",
    "chunk_inputs",
    "decode_inputs",
    "decode_states",
    "place_drafts",
    "replace_tokens",
    "replay_states",
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


def replay_states(
    table: Tensor, computed: Tensor, applied: Tensor, rows: Tensor, states: StateBatch, entry_tokens: int
) -> None:
    """Find the slots of decodes that may have drafts, and the accepted drafts that are to be applied before them.

    Row `rows[i]` of sequence i, -1 for padding, has `computed` [num_rows] tokens, of which the first `applied`
    [num_rows] are in its state: that of the slot which the `table` has for the last of these. Sources, targets and the
    replay of `states` are filled for its decodes; of other sequences only the replay, which has nothing to apply.
    `applied` moves on to the first token of a decode, and to the end of another sequence. All int32.
    """
    _implementation(table).replay_states(table, computed, applied, rows, states, entry_tokens)


def store_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, inputs: StepBuffers, ring: OutputRing) -> None:
    """Append token `drawn[i]` ([S] int64) to its row at `seq_lens[i]`, and copy it to the CPU's ring of pages.

    Only where `samples[i]` is not 0, and never for padding. `computed` of the rows becomes `seq_lens`, so that they are
    ready to go on; the ring turns to its next page.
    """
    _implementation(drawn).store_tokens(drawn, tables, batch, inputs, ring)


def replace_tokens(
    drawn: Tensor,
    index: Tensor,
    entries: Tensor,
    tables: StepTables,
    batch: StepBatch,
    inputs: StepBuffers,
    ring: OutputRing,
) -> None:
    """Replace the token of sequence `index[j]` by `drawn[j]`, also in entry `entries[j]` of the page. All [J] int64.

    To be called after `store_tokens`.
    """
    _implementation(drawn).replace_tokens(drawn, index, entries, tables, batch, inputs, ring)


def place_drafts(tables: StepTables, guesses: RowGuesses, batch: StepBatch, places: DrawPlaces) -> None:
    """Make guesses tokens of their rows: the last tokens of each sequence, one less than `draw_start` gives it.

    Guesses that the table does not hold are token 0. Also fills `places`. To be called before `chunk_inputs`.
    """
    _implementation(tables.tokens).place_drafts(tables, guesses, batch, places)


def accept_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, ring: OutputRing, max_drafts: int) -> None:
    """Store draws up to the first that differs from its draft. `drawn` ([D] int64) has those that `draw_start` counts.

    The page of the ring gets all of them, with `REJECTED` for those behind the first wrong draft; the rows go on from
    what was kept, and those that do not sample from their last token. No sequence has more than `max_drafts` drafts.
    The ring turns to its next page.
    """
    _implementation(drawn).accept_tokens(drawn, tables, batch, ring, max_drafts)


def accept_again(
    drawn: Tensor,
    index: Tensor,
    tables: StepTables,
    guesses: RowGuesses,
    batch: StepBatch,
    inputs: StepBuffers,
    ring: OutputRing,
    max_drafts: int,
) -> None:
    """Accept the drafts of sequences `index` ([J] int64) once more: of their `drawn` tokens some were drawn again.

    To be called after `accept_tokens`, in whose page and rows it takes back what these sequences kept or lost there.
    """
    _implementation(drawn).accept_again(drawn, index, tables, guesses, batch, inputs, ring, max_drafts)


def _implementation(tensor: Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    from . import gpu  # needs Triton

    return gpu
