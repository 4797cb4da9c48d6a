"""The kernels around the model in a step: updates of row tables, the step's inputs, the drawn tokens.

    apply_writes     changes since the last step      ──> tables
    decode_inputs    rows                             ──> token ids, positions, slots, lengths
    chunk_inputs     rows, query_start                ──> the same, for chunks of any length
    decode_states    rows                             ──> slots of recurrent states
    replay_states    rows                             ──> the same with drafts, and the accepted drafts to apply first
    store_tokens     drawn tokens                     ──> tables for the next step, ring for the CPU
    place_drafts     drafts                           ──> tokens of rows, and the row and position of each draw
    accept_tokens    drawn tokens, with drafts        ──> like `store_tokens`, up to the first wrong draft
    replace_tokens   tokens that were drawn again     ──> the same places
    accept_again     the same, with drafts            ──> the same places, up to the first wrong draft

Nothing here synchronizes with the device, and no shape depends on the contents of the tables.
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
    """Set `memory[to : to + count] = values[source : source + count]` for each piece (to, source, count).

    Only the first `num_pieces` [1] int32 of `pieces` [P, 3] int64 are applied; `memory` [N] and `values` [V] are int32.
    No count exceeds `PIECE`, and no two pieces write the same element. All but `memory` may be pinned host memory,
    which the kernel reads directly when it runs, so that a captured call uses its contents at that time.
    """
    _implementation(memory).apply_writes(memory, pieces, values, num_pieces)


def decode_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    """Fill `inputs` for one token of each row: the first that is not computed. For padding, see `StepBuffers`."""
    _implementation(inputs.token_ids).decode_inputs(tables, batch, inputs)


def chunk_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    """Fill `inputs` for the next tokens of each row, as many as `query_start` says."""
    _implementation(inputs.token_ids).chunk_inputs(tables, batch, inputs)


def decode_states(
    table: Tensor, computed: Tensor, batch: StepBatch, entry_tokens: int, sources: Tensor, targets: Tensor
) -> None:
    """Find the state slots for one token of each row, in `table` [num_rows, entries], one per `entry_tokens` tokens.

    The token is the row's first that is not `computed` [num_rows]. Its `sources` become the slot of the state before
    it, -1 if there is none, and its `targets` the slot of the state after it; both are -1 for padding. All int32.
    """
    _implementation(table).decode_states(table, computed, batch, entry_tokens, sources, targets)


def replay_states(
    table: Tensor, computed: Tensor, applied: Tensor, rows: Tensor, states: StateBatch, entry_tokens: int
) -> None:
    """Find the state slots of decodes that may have drafts, and the accepted drafts by which states must advance first.

    Sequence i has row `rows[i]`, -1 for padding. `computed` [num_rows] of the row's tokens are computed, and its state
    includes the first `applied` [num_rows] of these; the `table` has its slot at the last of these tokens. Sources,
    targets and replay of `states` are filled for decodes; for other sequences only the replay, with nothing to apply.
    `applied` is advanced to a decode's first token, or to another sequence's last. All int32.
    """
    _implementation(table).replay_states(table, computed, applied, rows, states, entry_tokens)


def store_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, inputs: StepBuffers, ring: OutputRing) -> None:
    """Append token `drawn[i]` ([S] int64) to its row at `seq_lens[i]`, and copy it to the ring's current page.

    Sequences with `samples[i]` 0 and padding append nothing. The rows' `computed` becomes `seq_lens`, for the next
    step. The ring advances to its next page.
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

    Must be called after `store_tokens`.
    """
    _implementation(drawn).replace_tokens(drawn, index, entries, tables, batch, inputs, ring)


def place_drafts(tables: StepTables, guesses: RowGuesses, batch: StepBatch, places: DrawPlaces) -> None:
    """Write drafts to their rows, as the last tokens of each sequence: one less than its draws in `draw_start`.

    Drafts that are not in `guesses` are token 0. Also fills `places`. Must be called before `chunk_inputs`.
    """
    _implementation(tables.tokens).place_drafts(tables, guesses, batch, places)


def accept_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, ring: OutputRing, max_drafts: int) -> None:
    """Store the draws of each sequence, up to the first that differs from its draft.

    `draw_start` divides `drawn` [D] int64 over sequences. The ring's page gets an entry for each draw, `REJECTED` after
    the first wrong draft. Rows continue after the kept tokens; rows that do not sample continue after their last token.
    No sequence has more than `max_drafts` drafts. The ring advances to its next page.
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
    """Repeat `accept_tokens` for sequences `index` ([J] int64), some of whose `drawn` tokens were drawn again.

    Must be called after `accept_tokens`, whose results for these sequences it overwrites in rows and page.
    """
    _implementation(drawn).accept_again(drawn, index, tables, guesses, batch, inputs, ring, max_drafts)


def _implementation(tensor: Tensor) -> ModuleType:
    if not tensor.is_cuda:
        return reference
    from . import gpu  # needs Triton

    return gpu
