"""Reference of a step's inputs, and of storing its drawn tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels.state_batch import StateBatch

from .buffers import REJECTED, DrawPlaces, OutputRing, RowGuesses, StepBatch, StepBuffers, StepTables


def apply_writes(memory: Tensor, pieces: Tensor, values: Tensor, num_pieces: Tensor) -> None:
    for to, source, count in pieces[: int(num_pieces)].tolist():
        memory[to : to + count] = values[source : source + count].to(memory.device)


def decode_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    real, starts = batch.rows >= 0, _starts(tables.computed, batch)
    _fill_sequences(batch, inputs, torch.where(real, starts + 1, 0))
    inputs.last_tokens.copy_(torch.arange(len(real), device=real.device))
    _fill_tokens(tables, inputs, batch.rows.clamp(min=0), starts, real)


def chunk_inputs(tables: StepTables, batch: StepBatch, inputs: StepBuffers) -> None:
    real, starts = batch.rows >= 0, _starts(tables.computed, batch)
    ends = batch.query_start[1:]
    lens = ends - batch.query_start[:-1]
    _fill_sequences(batch, inputs, torch.where(real, starts + lens, 0))
    inputs.last_tokens.copy_(torch.where(real, ends - 1, 0))
    tokens = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=real.device)
    owners = torch.searchsorted(ends.contiguous(), tokens, right=True).clamp(max=len(real) - 1)
    positions = starts[owners] + tokens - batch.query_start[owners]
    _fill_tokens(tables, inputs, batch.rows[owners].clamp(min=0), positions, tokens < ends[-1])


def decode_states(
    table: Tensor, computed: Tensor, batch: StepBatch, entry_tokens: int, sources: Tensor, targets: Tensor
) -> None:
    real, rows, starts = batch.rows >= 0, batch.rows.clamp(min=0).long(), _starts(computed, batch)
    before = table[rows, (starts - 1).clamp(min=0) // entry_tokens]
    sources[: len(rows)] = torch.where(real & (starts > 0), before, -1)
    targets[: len(rows)] = torch.where(real, table[rows, starts // entry_tokens], -1)


def replay_states(
    table: Tensor, computed: Tensor, applied: Tensor, rows: Tensor, states: StateBatch, entry_tokens: int
) -> None:
    replay = states.replay
    assert replay is not None, "there are drafts"
    real, row, lens = rows >= 0, rows.clamp(min=0).long(), states.query_start.diff()
    decodes = torch.arange(len(rows), device=rows.device) < states.num_decodes
    starts, before = torch.where(real, computed[row], 0), torch.where(real, applied[row], 0)
    source = torch.where(before > 0, table[row, (before - 1).clamp(min=0) // entry_tokens], -1)
    target = torch.where(real, table[row, starts // entry_tokens], -1)
    states.sources.copy_(torch.where(decodes, source, states.sources))
    states.targets.copy_(torch.where(decodes, target, states.targets))
    replay.rows.copy_(row)
    replay.starts.copy_(starts)
    replay.counts.copy_(torch.where(decodes, starts - before, 0))
    behind = starts + torch.where(decodes, 1, lens)
    applied[row[real]] = behind[real].to(applied.dtype)


def place_drafts(tables: StepTables, guesses: RowGuesses, batch: StepBatch, places: DrawPlaces) -> None:
    starts, query_start = _starts(tables.computed, batch).tolist(), batch.query_start.tolist()
    draw_start, samples = batch.draw_start.tolist(), batch.samples.tolist()
    width = guesses.token_ids.shape[1]
    places.rows.fill_(-1)
    places.positions.zero_()
    places.tokens.zero_()
    for seq, row in enumerate(batch.rows.tolist()):
        if row < 0:
            continue
        first, end = draw_start[seq], draw_start[seq + 1]
        token = query_start[seq + 1] - (end - first)
        position = starts[seq] + token - query_start[seq]
        places.tokens[first:end] = torch.arange(token, query_start[seq + 1])
        if samples[seq]:
            places.rows[first:end] = row
            places.positions[first:end] = torch.arange(position + 1, position + 1 + end - first)
        for draft in range(position + 1, position + end - first):
            number = draft - int(guesses.first[row])
            tables.tokens[row, draft] = guesses.token_ids[row, number] if 0 <= number < width else 0


def accept_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, ring: OutputRing, max_drafts: int) -> None:
    page = ring.pages[int(ring.turn)]
    starts, lens = _starts(tables.computed, batch).tolist(), batch.query_start.diff().tolist()
    draw_start, samples = batch.draw_start.tolist(), batch.samples.tolist()
    for seq, row in enumerate(batch.rows.tolist()):
        if row < 0:
            continue
        first, end = draw_start[seq], draw_start[seq + 1]
        num_drafts = end - first - 1
        position = starts[seq] + lens[seq] - num_drafts
        if not samples[seq]:
            tables.computed[row] = position
            continue
        drafts = tables.tokens[row, position : position + num_drafts].tolist()
        _accept(drawn[first:end].tolist(), drafts, tables, row, position, page[first:end])
    ring.turn.copy_((ring.turn + 1) % len(ring.pages))


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
    page, draw_start = ring.pages[int(ring.turn) - 1], batch.draw_start.tolist()
    width = guesses.token_ids.shape[1]
    for seq in index.tolist():
        row, first, end = int(batch.rows[seq]), draw_start[seq], draw_start[seq + 1]
        num_drafts = end - first - 1
        position = int(inputs.seq_lens[seq]) - num_drafts
        numbers = range(position - int(guesses.first[row]), position - int(guesses.first[row]) + num_drafts)
        drafts = [int(guesses.token_ids[row, number]) if 0 <= number < width else 0 for number in numbers]
        _accept(drawn[first:end].tolist(), drafts, tables, row, position, page[first:end])


def store_tokens(drawn: Tensor, tables: StepTables, batch: StepBatch, inputs: StepBuffers, ring: OutputRing) -> None:
    page = ring.pages[int(ring.turn)]
    stored = ((batch.rows >= 0) & (batch.samples != 0)).nonzero()[:, 0]
    _store(drawn[stored], stored, stored, tables, batch, inputs, page)
    real = (batch.rows >= 0).nonzero()[:, 0]
    tables.computed[batch.rows[real].long()] = inputs.seq_lens[real]
    ring.turn.copy_((ring.turn + 1) % len(ring.pages))


def replace_tokens(
    drawn: Tensor,
    index: Tensor,
    entries: Tensor,
    tables: StepTables,
    batch: StepBatch,
    inputs: StepBuffers,
    ring: OutputRing,
) -> None:
    page = ring.pages[int(ring.turn) - 1]
    _store(drawn, index, entries, tables, batch, inputs, page)


def _accept(draws: list[int], drafts: list[int], tables: StepTables, row: int, position: int, entries: Tensor) -> None:
    """Write the draws, up to the first that differs from its draft, to a row from `position` on."""
    num_right = next((i for i, draft in enumerate(drafts) if draft != draws[i]), len(drafts))
    kept = torch.tensor(draws[: num_right + 1], dtype=torch.int32).clamp(min=0)
    tables.tokens[row, position : position + num_right + 1] = kept.to(tables.tokens.device)
    tables.computed[row] = position + num_right
    draws[num_right + 1 :] = [REJECTED] * (len(drafts) - num_right)
    entries.copy_(torch.tensor(draws, dtype=torch.int32))


def _starts(computed: Tensor, batch: StepBatch) -> Tensor:
    """Return the position at which each sequence begins; 0 for padding."""
    return torch.where(batch.rows >= 0, computed[batch.rows.clamp(min=0).long()], 0)


def _fill_sequences(batch: StepBatch, inputs: StepBuffers, seq_lens: Tensor) -> None:
    inputs.seq_lens.copy_(seq_lens)
    inputs.table_rows.copy_(batch.rows.clamp(min=0))


def _fill_tokens(tables: StepTables, inputs: StepBuffers, rows: Tensor, positions: Tensor, real: Tensor) -> None:
    """Fill the tokens; `rows`, `positions` and `real` are by token and ignored where not real."""
    rows, positions = rows.long(), torch.where(real, positions, 0).long()
    blocks = tables.blocks[:, rows, positions // tables.block_size].long()
    slots = blocks * tables.block_size + positions % tables.block_size
    inputs.token_ids.copy_(torch.where(real, tables.tokens[rows, positions], 0))
    inputs.positions.copy_(positions)
    inputs.slots.copy_(torch.where(real, slots, -1))


def _store(
    drawn: Tensor,
    index: Tensor,
    entries: Tensor,
    tables: StepTables,
    batch: StepBatch,
    inputs: StepBuffers,
    page: Tensor,
) -> None:
    tokens = drawn.to(torch.int32)
    tables.tokens[batch.rows[index].long(), inputs.seq_lens[index].long()] = tokens.clamp(min=0)
    page[entries.to(page.device)] = tokens.to(page.device)
