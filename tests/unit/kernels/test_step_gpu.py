"""The step's kernels, interpreted on a CPU or compiled on a GPU, against the references."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch

from baton.kernels.sampling import NO_TOKEN
from baton.kernels.state_batch import Replay, StateBatch
from baton.kernels.step import (
    PIECE,
    REJECTED,
    OutputRing,
    StepBatch,
    StepBuffers,
    StepTables,
    reference,
)

from .step_cases import BATCHES, BLOCK_SIZE, GROUPS, PAGES, ROWS, WITH_DRAFTS, make_drafts, make_step

pytestmark = pytest.mark.exhaustive


@pytest.fixture(params=["reference", "gpu"])
def kernels(request: pytest.FixtureRequest, triton_device: torch.device) -> object:
    if request.param == "reference":
        return reference
    from baton.kernels.step import gpu

    return gpu


@pytest.mark.parametrize(("lens", "num_seqs", "num_tokens"), BATCHES)
def test_chunk_inputs_are_the_tokens_of_each_sequence_one_after_another(
    kernels: object, triton_device: torch.device, lens: list[int], num_seqs: int, num_tokens: int
) -> None:
    step = make_step(triton_device, lens, num_seqs, num_tokens)
    kernels.chunk_inputs(step.tables, step.batch, step.inputs)  # type: ignore[attr-defined]
    tokens, blocks = step.tables.tokens.tolist(), step.tables.blocks.tolist()
    rows = step.batch.rows.tolist()
    starts = [int(step.tables.computed[row]) for row in rows]
    where = [(rows[i], position) for i, n in enumerate(lens) for position in range(starts[i], starts[i] + n)]
    padding = num_tokens - len(where)
    assert step.inputs.token_ids.tolist() == [tokens[row][position] for row, position in where] + [0] * padding
    assert step.inputs.positions.tolist() == [position for _, position in where] + [0] * padding
    for table, slots in zip(blocks, step.inputs.slots.tolist(), strict=True):
        expected = [table[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for row, position in where]
        assert slots == expected + [-1] * padding
    no_seqs = [0] * (num_seqs - len(lens))
    assert step.inputs.seq_lens.tolist() == [starts[i] + n for i, n in enumerate(lens)] + no_seqs
    assert step.inputs.table_rows.tolist() == rows[: len(lens)] + no_seqs
    assert step.inputs.last_tokens.tolist() == [sum(lens[: i + 1]) - 1 for i in range(len(lens))] + no_seqs


@pytest.mark.parametrize(("num_real", "num_seqs"), [(1, 1), (3, 3), (5, 9), (0, 2)])
def test_decode_inputs_are_chunk_inputs_of_one_token_each(
    kernels: object, triton_device: torch.device, num_real: int, num_seqs: int
) -> None:
    step = make_step(triton_device, [1] * num_real, num_seqs, num_seqs)
    other = copy.deepcopy(step)
    kernels.decode_inputs(step.tables, step.batch, step.inputs)  # type: ignore[attr-defined]
    reference.chunk_inputs(other.tables, other.batch, other.inputs)
    for name, tensor in step.tensors().items():
        count = num_real if name.endswith("last_tokens") else len(tensor)  # the draws of padding rows are dropped
        assert torch.equal(tensor[:count], other.tensors()[name][:count]), name
    assert step.inputs.last_tokens.tolist() == list(range(num_seqs))


@pytest.mark.parametrize("num_seqs", [1, 6, 130])
def test_states_of_decodes_are_in_the_entries_of_the_tokens_before_and_at_them(
    kernels: object, triton_device: torch.device, num_seqs: int
) -> None:
    starts = [0, 1, 511, 512, 513, 1024][:num_seqs]
    rows = [3, 0, 4, 1, 2, 5][: len(starts)]
    table = torch.arange(100, 124, dtype=torch.int32, device=triton_device).view(6, 4)
    padding = num_seqs - len(starts)
    batch = StepBatch(
        rows=torch.tensor([*rows, *[-1] * padding], dtype=torch.int32, device=triton_device),
        query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=triton_device),
        samples=torch.ones(num_seqs, dtype=torch.int32, device=triton_device),
        draw_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=triton_device),
    )
    computed = torch.full((6,), 700, dtype=torch.int32, device=triton_device)
    computed[rows] = torch.tensor(starts, dtype=torch.int32, device=triton_device)
    sources, targets = (torch.full((200,), -7, dtype=torch.int32, device=triton_device) for _ in range(2))
    kernels.decode_states(table, computed, batch, 512, sources, targets)  # type: ignore[attr-defined]
    before = [-1 if not start else 100 + 4 * row + (start - 1) // 512 for row, start in zip(rows, starts, strict=True)]
    behind = [100 + 4 * row + start // 512 for row, start in zip(rows, starts, strict=True)]
    assert sources.tolist() == [*before, *[-1] * padding, *[-7] * (200 - num_seqs)]
    assert targets.tolist() == [*behind, *[-1] * padding, *[-7] * (200 - num_seqs)]


@pytest.mark.parametrize("num_decodes", [0, 4, 6])
def test_a_state_continues_from_its_last_token_over_the_accepted_drafts(
    kernels: object, triton_device: torch.device, num_decodes: int
) -> None:
    lens, padding = [1, 3, 1, 4, 2, 5], 130
    applied, computed = [5, 512, 509, 511, 0, 600], [5, 515, 513, 512, 0, 600]
    rows = [3, 0, 4, 1, 2, 5]
    num_seqs = len(rows) + padding
    by_row = torch.full((2, 7), 700, dtype=torch.int32)
    by_row[:, rows] = torch.tensor([applied, computed], dtype=torch.int32)
    done, own = by_row.to(triton_device)
    table = torch.arange(100, 128, dtype=torch.int32, device=triton_device).view(7, 4)
    query_start = torch.tensor([0, *itertools.accumulate(lens), *[sum(lens)] * padding], dtype=torch.int32)
    filled = torch.full((5, num_seqs), -7, dtype=torch.int32, device=triton_device)
    count = torch.tensor([num_decodes], dtype=torch.int32, device=triton_device)
    none = torch.zeros(1, dtype=torch.int32, device=triton_device)
    states = StateBatch(
        query_start=query_start.to(triton_device),
        sources=filled[0],
        targets=filled[1],
        num_decodes=count,
        chunk_start=none,
        chunk_seqs=none[:0],
        checkpoints=none[:0],
        seq_chunks=none.expand(num_seqs + 1).contiguous(),
        least_decodes=0,
        most_decodes=num_seqs,
        replay=Replay(filled[2], filled[3], filled[4], 9),
    )
    real = torch.tensor([*rows, *[-1] * padding], dtype=torch.int32, device=triton_device)
    kernels.replay_states(table, own, done, real, states, 512)  # type: ignore[attr-defined]
    sources, targets, replayed, starts, counts = (column[: len(rows)].tolist() for column in filled)
    first = slice(num_decodes)
    before = [-1 if not n else 100 + 4 * row + (n - 1) // 512 for row, n in zip(rows, applied, strict=True)]
    at = [100 + 4 * row + n // 512 for row, n in zip(rows, computed, strict=True)]
    assert (sources[first], targets[first]) == (before[first], at[first])
    assert set(sources[num_decodes:] + targets[num_decodes:]) <= {-7}
    assert (replayed, starts) == (rows, computed)
    pending = [n - m for n, m in zip(computed, applied, strict=True)]
    assert counts == [*pending[first], *[0] * (len(rows) - num_decodes)]
    behind = [n + (1 if seq < num_decodes else lens[seq]) for seq, n in enumerate(computed)]
    assert done[rows].tolist() == behind
    assert done[6] == 700
    assert not filled[4, len(rows) :].any()


def test_drawn_tokens_are_stored_in_their_rows_and_in_one_page_after_another(
    kernels: object, triton_device: torch.device
) -> None:
    step = make_step(triton_device, [1, 5, 1, 2], 7, 9)
    step.batch.samples.copy_(torch.tensor([1, 0, 1, 1, 1, 1, 1]))
    before = copy.deepcopy(step)
    for turn in range(5):
        kernels.chunk_inputs(step.tables, step.batch, step.inputs)  # type: ignore[attr-defined]
        ends = step.inputs.seq_lens.tolist()
        drawn = torch.arange(100, 107, device=triton_device) + 10 * turn
        kernels.store_tokens(drawn, step.tables, step.batch, step.inputs, step.ring)  # type: ignore[attr-defined]
        rows = before.batch.rows.tolist()
        for i in (0, 2, 3):
            before.tables.tokens[rows[i], ends[i]] = drawn[i]
            before.ring.pages[turn % PAGES, i] = drawn[i]
        assert torch.equal(step.tables.tokens, before.tables.tokens)
        assert torch.equal(step.ring.pages, before.ring.pages)
        assert step.ring.turn.tolist() == [(turn + 1) % PAGES]
        expected = before.tables.computed.clone()
        expected[rows[:4]] = step.inputs.seq_lens[:4]
        assert torch.equal(step.tables.computed, expected)
        step.tables.computed.copy_(before.tables.computed)


def test_redrawn_tokens_replace_the_first_ones(kernels: object, triton_device: torch.device) -> None:
    step = make_step(triton_device, [1, 1, 1, 1], 6, 6)
    step.batch.samples.fill_(1)
    for page in (0, 1, 2, 0):
        kernels.decode_inputs(step.tables, step.batch, step.inputs)  # type: ignore[attr-defined]
        first = torch.arange(50, 56, device=triton_device)
        kernels.store_tokens(first, step.tables, step.batch, step.inputs, step.ring)  # type: ignore[attr-defined]
        expected = copy.deepcopy(step)
        again, index = (torch.tensor(values, device=triton_device) for values in ([900, 901], [3, 1]))
        kernels.replace_tokens(again, index, index, step.tables, step.batch, step.inputs, step.ring)  # type: ignore[attr-defined]
        for i, token in ((3, 900), (1, 901)):
            expected.tables.tokens[step.batch.rows[i], step.inputs.seq_lens[i]] = token
            expected.ring.pages[page, i] = token
        for name, tensor in step.tensors().items():
            assert torch.equal(tensor, expected.tensors()[name]), name


def test_a_row_without_a_token_is_reported_and_its_token_in_the_table_is_valid(
    kernels: object, triton_device: torch.device
) -> None:
    step = make_step(triton_device, [1, 1, 1], 3, 3)
    step.batch.samples.fill_(1)
    kernels.decode_inputs(step.tables, step.batch, step.inputs)  # type: ignore[attr-defined]
    drawn = torch.tensor([7, NO_TOKEN, 9], device=triton_device)
    kernels.store_tokens(drawn, step.tables, step.batch, step.inputs, step.ring)  # type: ignore[attr-defined]
    again, index = torch.tensor([NO_TOKEN], device=triton_device), torch.tensor([2], device=triton_device)
    kernels.replace_tokens(again, index, index, step.tables, step.batch, step.inputs, step.ring)  # type: ignore[attr-defined]
    where = step.batch.rows.long(), step.inputs.seq_lens.long()
    assert step.tables.tokens[where].tolist() == [7, 0, 0]
    assert step.ring.pages[0, :3].tolist() == [7, NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize(("lens", "draws", "num_seqs", "num_draws"), WITH_DRAFTS)
@pytest.mark.parametrize("lag", [0, 2])
def test_guesses_become_tokens_of_their_rows_and_each_draw_has_a_row_and_position(
    kernels: object,
    triton_device: torch.device,
    lens: list[int],
    draws: list[int],
    num_seqs: int,
    num_draws: int,
    lag: int,
) -> None:
    step = make_step(triton_device, lens, num_seqs, sum(lens), draws=draws)
    step.batch.samples.fill_(1)
    if len(lens) > 3:
        step.batch.samples[3] = 0
    guesses, places = make_drafts(step, triton_device, width=4, lag=lag, num_draws=num_draws)
    expected = step.tables.tokens.clone()
    rows, positions, tokens = [], [], []
    for seq, (length, count) in enumerate(zip(lens, draws, strict=True)):
        row = int(step.batch.rows[seq])
        start, end, samples = int(step.tables.computed[row]), sum(lens[: seq + 1]), int(step.batch.samples[seq])
        rows += [row if samples else -1] * count
        positions += [position if samples else 0 for position in range(start + length - count + 1, start + length + 1)]
        tokens += range(end - count, end)
        for position in range(start + length - count + 1, start + length):
            number = position - (start + 1 - lag)
            # A guess that the table does not hold is token 0.
            expected[row, position] = guesses.token_ids[row, number] if number < 4 else 0
    kernels.place_drafts(step.tables, guesses, step.batch, places)  # type: ignore[attr-defined]
    assert torch.equal(step.tables.tokens, expected)
    padding = num_draws - len(rows)
    assert places.rows.tolist() == rows + [-1] * padding
    assert places.positions.tolist() == positions + [0] * padding
    assert places.tokens.tolist() == tokens + [0] * padding


def test_draws_are_kept_up_to_the_first_that_differs_from_its_draft(
    kernels: object, triton_device: torch.device
) -> None:
    draws, right = [4, 1, 3, 3, 2, 1, 1], [3, 0, 1, 0, 0, 0, 0]  # number of right drafts
    lens = [4, 1, 3, 3, 2, 9, 5]  # the last two are in prefill, and only the first of them reaches the prompt's end
    step = make_step(triton_device, lens, 9, 30, draws=draws)
    step.batch.samples.fill_(1)
    step.batch.samples[6] = 0
    guesses, places = make_drafts(step, triton_device, width=4, lag=0, num_draws=16)
    kernels.place_drafts(step.tables, guesses, step.batch, places)  # type: ignore[attr-defined]
    drawn = torch.arange(100, 116, device=triton_device)
    tokens, computed = step.tables.tokens.clone(), step.tables.computed.clone()
    page, first = [-77] * 16, 0
    for seq, (length, count, num_right) in enumerate(zip(lens, draws, right, strict=True)):
        row = int(step.batch.rows[seq])
        position = int(computed[row]) + length - count + 1
        drawn[first : first + num_right] = tokens[row, position : position + num_right]
        if count == 2:
            drawn[first] = NO_TOKEN
        computed[row] = position + num_right
        if step.batch.samples[seq]:
            tokens[row, position + num_right] = max(int(drawn[first + num_right]), 0)
            kept = drawn[first : first + num_right + 1].tolist()
            page[first : first + count] = kept + [REJECTED] * (count - len(kept))
        first += count
    ring = OutputRing(torch.full((PAGES, 16), -77, dtype=torch.int32, device=triton_device), step.ring.turn)
    kernels.accept_tokens(drawn, step.tables, step.batch, ring, 5)  # type: ignore[attr-defined]
    assert torch.equal(step.tables.tokens, tokens)
    assert torch.equal(step.tables.computed, computed)
    assert ring.pages[0, :first].tolist() == page[:first]
    assert (ring.pages[0, first:] == -77).all()
    assert ring.turn.tolist() == [1]


@pytest.mark.parametrize("lag", [0, 2])
def test_drafts_are_accepted_again_after_their_tokens_are_redrawn(
    kernels: object, triton_device: torch.device, lag: int
) -> None:
    lens, draws = [4, 1, 3, 3, 2, 5], [4, 1, 3, 3, 2, 1]  # the last one is in prefill
    before, after = [3, 0, 1, 0, 1, 0], [1, 0, 1, 2, 0, 0]  # numbers of right drafts
    step = make_step(triton_device, lens, 7, 20, draws=draws)
    step.batch.samples.fill_(1)
    guesses, places = make_drafts(step, triton_device, width=4 + lag, lag=lag)
    kernels.place_drafts(step.tables, guesses, step.batch, places)  # type: ignore[attr-defined]
    kernels.chunk_inputs(step.tables, step.batch, step.inputs)  # type: ignore[attr-defined]
    wrong = torch.arange(100, 116, device=triton_device)

    def drawn(right: list[int]) -> torch.Tensor:
        tokens, first = wrong.clone(), 0
        for row, count, num_right in zip(step.batch.rows.tolist(), draws, right, strict=False):
            tokens[first : first + num_right] = guesses.token_ids[row, lag : lag + num_right]
            first += count
        return tokens

    redrawn = [4, 3, 0, 5, 1]  # indices of draws; the third sequence is not redrawn
    twin = copy.deepcopy(step)
    for each, right in ((step, before), (twin, after)):
        ring = OutputRing(torch.full((PAGES, 16), -77, dtype=torch.int32, device=triton_device), each.ring.turn)
        each.ring = ring
        kernels.accept_tokens(drawn(right), each.tables, each.batch, ring, 3)  # type: ignore[attr-defined]
    index = torch.tensor(redrawn, device=triton_device)
    kernels.accept_again(  # type: ignore[attr-defined]
        drawn(after), index, step.tables, guesses, step.batch, step.inputs, step.ring, 3
    )
    assert torch.equal(step.tables.computed, twin.tables.computed)
    assert torch.equal(step.ring.pages, twin.ring.pages)
    assert torch.equal(step.ring.turn, twin.ring.turn)
    for row in step.batch.rows[: len(lens)].tolist():
        known = int(step.tables.computed[row]) + 1
        assert torch.equal(step.tables.tokens[row, :known], twin.tables.tokens[row, :known])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_writes_change_their_targets_and_nothing_else(kernels: object, triton_device: torch.device, count: int) -> None:
    memory = torch.arange(5000, dtype=torch.int32, device=triton_device)
    values = torch.arange(10_000, 13_000, dtype=torch.int32, device=triton_device)
    written = [(3500, 7, PIECE), (0, 2999, 1), (17, 1100, 500)][:count]
    expected = memory.clone()
    for to, source, length in written:
        expected[to : to + length] = values[source : source + length]
    pieces = torch.tensor([*written, *[(9, 9, 9)] * 2], dtype=torch.int64, device=triton_device).view(-1, 3)
    num_pieces = torch.tensor([count], dtype=torch.int32, device=triton_device)
    kernels.apply_writes(memory, pieces, values, num_pieces)  # type: ignore[attr-defined]
    assert torch.equal(memory, expected)


def test_more_pieces_than_programs_are_written(kernels: object, triton_device: torch.device) -> None:
    count = 700
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    pieces = torch.stack([order, torch.arange(count), torch.ones(count, dtype=torch.int64)], 1).to(triton_device)
    values = torch.arange(count, dtype=torch.int32, device=triton_device)
    memory = torch.full((count,), -1, dtype=torch.int32, device=triton_device)
    num_pieces = torch.tensor([count - 1], dtype=torch.int32, device=triton_device)
    kernels.apply_writes(memory, pieces, values, num_pieces)  # type: ignore[attr-defined]
    written = memory[order.to(triton_device)]
    assert torch.equal(written[:-1], values[:-1])
    assert written[-1] == -1


def test_more_sequences_than_one_program_takes_are_stored(kernels: object, triton_device: torch.device) -> None:
    count = PIECE + 3
    zeros = torch.zeros(count, 4, dtype=torch.int32, device=triton_device)
    rows = torch.arange(count, dtype=torch.int32, device=triton_device)
    ones = torch.ones_like(rows)
    tables = StepTables(zeros.clone(), zeros[None], rows.clone(), BLOCK_SIZE)
    batch = StepBatch(rows, rows, ones, rows)
    inputs = StepBuffers(rows, rows, rows, ones, rows, rows)
    ring = OutputRing(torch.zeros(2, count, dtype=torch.int32, device=triton_device), ones[:1].clone())
    kernels.store_tokens(rows.long() + 5, tables, batch, inputs, ring)  # type: ignore[attr-defined]
    assert torch.equal(tables.tokens[:, 1], rows + 5)
    assert torch.equal(ring.pages[1], rows + 5)
    assert not ring.pages[0].any()
    assert torch.equal(tables.computed, ones)


@pytest.mark.gpu
def test_rows_past_four_gibibytes_are_reached() -> None:
    from baton.kernels.step import gpu

    length = 1 << 21
    tokens = torch.zeros(520, length, dtype=torch.int32, device="cuda")  # 4.06 GiB
    blocks = torch.zeros(GROUPS, 520, length // BLOCK_SIZE, dtype=torch.int32, device="cuda")
    tokens[519, length - 2], blocks[:, 519, -1] = 123, 456
    step = make_step(torch.device("cuda"), [1], 1, 1)
    step.batch.rows.fill_(519)
    step.batch.samples.fill_(1)
    computed = torch.full((520,), length - 2, dtype=torch.int32, device="cuda")
    tables = StepTables(tokens, blocks, computed, BLOCK_SIZE)
    fill: Callable[..., None]
    for fill in (gpu.decode_inputs, gpu.chunk_inputs):
        fill(tables, step.batch, step.inputs)
        assert step.inputs.token_ids.tolist() == [123]
        assert step.inputs.slots.tolist() == [[456 * BLOCK_SIZE + 14]] * GROUPS
    gpu.store_tokens(torch.tensor([789], device="cuda"), tables, step.batch, step.inputs, step.ring)
    assert int(tokens[519, length - 1]) == 789
    to = tokens.numel() - 3
    pieces, values = torch.tensor([[to, 0, 3]], device="cuda"), torch.tensor([1, 2, 3], device="cuda").int()
    gpu.apply_writes(tokens.view(-1), pieces, values, torch.ones(1, dtype=torch.int32, device="cuda"))
    assert tokens.view(-1)[-3:].tolist() == [1, 2, 3]


@pytest.mark.gpu
def test_pinned_memory_is_read_and_written_in_place() -> None:
    from baton.kernels.step import gpu

    step = make_step(torch.device("cuda"), [1, 1], 2, 2)
    step.batch.samples.fill_(1)
    pages = torch.zeros(PAGES, ROWS, dtype=torch.int32).pin_memory()
    gpu.decode_inputs(step.tables, step.batch, step.inputs)
    ring = OutputRing(pages, step.ring.turn)
    gpu.store_tokens(torch.tensor([7, 8], device="cuda"), step.tables, step.batch, step.inputs, ring)
    torch.cuda.synchronize()
    assert pages[0, :2].tolist() == [7, 8]
    pieces = torch.tensor([[1, 0, 2]]).pin_memory()
    values = torch.tensor([70, 80], dtype=torch.int32).pin_memory()
    memory = torch.zeros(4, dtype=torch.int32, device="cuda")
    gpu.apply_writes(memory, pieces, values, torch.ones(1, dtype=torch.int32).pin_memory())
    assert memory.tolist() == [0, 70, 80, 0]
