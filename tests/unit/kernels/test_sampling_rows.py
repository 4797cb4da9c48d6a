"""Building a step's batch from persistent rows."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from baton.engine.core.sampling import SamplingParams
from baton.kernels.sampling import SamplingBatch, SamplingRows, encode_row, sample, sample_rows
from baton.kernels.sampling.batch import decode_rows, encode_batch
from baton.kernels.sampling.batch_builder import upload

VOCAB = 40
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=-0.2,
    min_tokens=4,
    max_tokens=9,
    logit_bias={3: 1.5, 8: -2.0},
    allowed_token_ids=list(range(0, VOCAB, 2)),
    bad_words_token_ids=[[4], [6, 8], [1, 2, 10]],
)
OPTIONAL = ("top_k", "top_p", "min_p", "allowed", "bad_words", "banned", "bias", "penalties", "history")


def rows_with(**requests: SamplingParams) -> tuple[SamplingRows, Tensor]:
    """Return rows that use row0, row1, ... with stop tokens 0 and 1 and prompts of 3 tokens, and their token table."""
    table = torch.randint(VOCAB, (8, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rows = SamplingRows(8, VOCAB, table)
    for name, request in requests.items():
        rows.start(int(name[3:]), request, seed=100 + int(name[3:]), prompt_len=3, stop_token_ids=[0, 1])
    return rows, table


def used(batch: SamplingBatch) -> set[str]:
    return {name for name in OPTIONAL if getattr(batch, name) is not None}


def test_a_batch_has_only_the_parameters_that_its_rows_use() -> None:
    rows, _ = rows_with(row0=SamplingParams(), row1=EVERYTHING, row2=SamplingParams(temperature=0))
    assert used(rows.batch([0, 2], [5, 6])) == set()
    assert rows.batch([2], [6]).temperature is None
    assert used(rows.batch([0, 1], [5, 6])) == set(OPTIONAL)
    assert used(rows.batch([0, 2], [6, 7])) == set()


def test_rows_of_the_batch_are_rows_of_the_logits() -> None:
    rows, table = rows_with(row1=EVERYTHING, row5=SamplingParams(seed=1), row7=EVERYTHING)
    batch = rows.batch([7, 5, 1], [9, 8, 4])
    assert batch.seeds.tolist() == [107, 105, 101]
    assert batch.positions.tolist() == [9, 8, 4]
    assert batch.history is not None
    assert batch.history.token_ids is table, "the runner's table is read in place"
    assert batch.history.rows.tolist() == [7, 5, 1]
    assert batch.penalties is not None
    assert batch.penalties.rows.tolist() == [0, 2]
    assert batch.bias is not None
    assert batch.bias.rows.tolist() == [0, 0, 2, 2]
    assert batch.bias.token_ids.tolist() == [3, 8, 3, 8]
    assert batch.bad_words is not None
    assert batch.bad_words.token_ids.tolist()[:3] == [[-1, -1, 4], [-1, 6, 8], [1, 2, 10]]
    assert batch.banned is not None
    assert batch.banned.rows.tolist() == [2, 2], "row 7 has drawn its four tokens"


def test_stop_tokens_are_allowed_after_min_tokens() -> None:
    rows, _ = rows_with(row0=SamplingParams(min_tokens=2, max_tokens=5))
    closed = [rows.batch([0], [position]).banned is not None for position in (3, 4, 5, 6)]
    assert closed == [True, True, False, False]


def test_the_next_request_in_a_freed_row_inherits_nothing() -> None:
    rows, _ = rows_with(row0=EVERYTHING)
    rows.batch([0], [5])
    rows.free(0)
    rows.free(0)
    rows.start(0, SamplingParams(temperature=0.5), seed=3, prompt_len=3, stop_token_ids=[0])
    batch = rows.batch([0], [5])
    assert used(batch) == set()
    assert batch.temperature is not None
    assert batch.temperature.tolist() == [0.5]


def test_gathered_tensors_are_reused_until_the_rows_change() -> None:
    rows, _ = rows_with(row0=EVERYTHING, row1=SamplingParams())
    first, second = rows.batch([0, 1], [5, 5]), rows.batch([0, 1], [6, 6])
    assert first.seeds is second.seeds
    assert second.positions.tolist() == [6, 6]
    assert rows.batch([1, 0], [6, 6]).seeds.tolist() == [101, 100]
    rows.start(2, SamplingParams(), seed=9, prompt_len=1, stop_token_ids=[])
    assert rows.batch([0, 1], [7, 7]).seeds is not second.seeds


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    requests = {f"row{i}": EVERYTHING if i % 2 else SamplingParams(temperature=i / 3) for i in range(6)}
    rows, _ = rows_with(**requests)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    together = sample(logits, rows.batch(list(range(6)), [4, 5, 6, 7, 8, 9]))
    alone = torch.cat([sample(logits[i : i + 1], rows.batch([i], [4 + i])) for i in range(6)])
    assert together.equal(alone)
    order = [4, 1, 3, 0]
    assert sample(logits[order], rows.batch(order, [4 + i for i in order])).equal(together[order])


def test_allowed_tokens_reach_to_the_end_of_the_vocabulary() -> None:
    rows, _ = rows_with(row0=SamplingParams(allowed_token_ids=[31, 32, VOCAB - 1]))
    drawn = {int(sample(torch.zeros(1, VOCAB), rows.batch([0], [position]))) for position in range(3, 60)}
    assert drawn == {31, 32, VOCAB - 1}


@pytest.mark.parametrize(
    "request_",
    [
        SamplingParams(repetition_penalty=1.2),
        SamplingParams(presence_penalty=0.1),
        SamplingParams(logit_bias={1: 1.0}),
        SamplingParams(allowed_token_ids=[1]),
        SamplingParams(bad_words_token_ids=[[1]]),
    ],
)
def test_rows_that_need_edits_of_logits_are_found(request_: SamplingParams) -> None:
    plain = SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1)
    rows, _ = rows_with(row0=plain, row3=request_, row5=plain)
    assert rows.edited([5, 3, 0], [4, 4, 4]) == [1]
    rows.free(3)
    assert rows.edited([5, 0], [5, 5]) == []


def test_rows_need_no_edits_once_their_stop_tokens_are_allowed() -> None:
    rows, _ = rows_with(row0=SamplingParams(), row1=SamplingParams(min_tokens=2, max_tokens=5))
    assert [rows.edited([0, 1], [9, position]) for position in (3, 4, 5)] == [[1], [1], []]


def test_the_encoded_row_has_the_parameters_of_its_batch() -> None:
    requests = [SamplingParams(temperature=i / 4, top_k=7 * i, top_p=1 - i / 9, min_p=i / 50) for i in range(6)]
    rows, _ = rows_with(**{f"row{i}": request for i, request in enumerate(requests)})
    table = torch.stack([torch.from_numpy(encode_row(r, seed=100 + i, prompt_len=3)) for i, r in enumerate(requests)])
    order, positions = [4, 1, 3, 0], [9, 8, 7, 6]
    batch = rows.batch(order, positions)
    decoded = decode_rows(table, torch.tensor(order, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32))
    for name in ("seeds", "positions", "temperature", "top_k", "top_p", "min_p"):
        assert getattr(decoded, name).equal(getattr(batch, name)), name
    assert encode_batch(batch)[:, :6].equal(table[order][:, :6])


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_seeds_of_every_size_fit_an_encoded_row(seed: int) -> None:
    words = torch.from_numpy(encode_row(SamplingParams(top_k=2**31 - 1), seed=seed, prompt_len=1))[None]
    batch = decode_rows(words, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    assert batch.seeds.tolist() == [seed]
    assert encode_batch(batch)[:, :6].equal(words[:, :6])


def test_padding_rows_draw_token_0_and_change_no_other(num_threads: int) -> None:
    table = torch.from_numpy(encode_row(SamplingParams(), seed=5, prompt_len=1)).repeat(4, 1)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[1] = float("nan")
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    tokens = sample_rows(logits, table, rows, torch.tensor([4, 0, 5], dtype=torch.int32))
    alone = sample_rows(logits[[0, 2]], table, rows[[0, 2]], torch.tensor([4, 5]))
    assert tokens.tolist() == [int(alone[0]), 0, int(alone[1])]
    assert sample_rows(logits.bfloat16(), table, rows, torch.tensor([4, 0, 5])).dtype == torch.int64


def test_all_tensors_of_a_batch_are_copied_to_its_device() -> None:
    rows, _ = rows_with(row0=EVERYTHING, row1=EVERYTHING)
    batch = rows.batch([0, 1], [4, 5])
    assert upload(batch, torch.device("cpu")) is batch
    moved = upload(batch, torch.device("meta"))
    assert moved.penalties is not None
    assert moved.bias is not None
    assert batch.bias is not None
    assert {t.device.type for t in (moved.seeds, moved.penalties.presence, moved.bias.rows)} == {"meta"}
    assert (moved.bias.values.dtype, moved.bias.values.shape) == (torch.float32, batch.bias.values.shape)


@pytest.mark.gpu
def test_tensors_on_the_device_equal_those_of_the_host() -> None:
    rows, table = rows_with(row0=EVERYTHING, row1=EVERYTHING)
    batch = rows.batch([0, 1], [4, 5])
    history = replace(batch.history, token_ids=table.cuda()) if batch.history else None
    moved = upload(replace(batch, history=history), torch.device("cuda"))
    assert moved.history is not None
    assert history is not None
    assert moved.history.token_ids is history.token_ids, "tensors that are on the device already must not be copied"
    for name in ("allowed", "bad_words", "banned", "bias", "penalties"):
        ours, theirs = getattr(moved, name), getattr(batch, name)
        for field in fields(theirs):
            assert getattr(ours, field.name).cpu().equal(getattr(theirs, field.name)), field.name


def allowed_in(rows: SamplingRows, wanted: list[int]) -> dict[int, set[int]]:
    """Return the tokens that masked rows may draw, by index in the batch."""
    allowed = rows.batch(wanted, [5] * len(wanted)).allowed
    if allowed is None:
        return {}
    bits = allowed.bits.view(-1, 2, 1) >> torch.arange(32, dtype=torch.int32) & 1
    return {
        row: set(mask.flatten()[:VOCAB].nonzero().flatten().tolist())
        for row, mask in zip(allowed.rows.tolist(), bits, strict=True)
    }


def test_a_mask_holds_for_one_step_and_combines_with_the_requests_allowed_tokens() -> None:
    rows, _ = rows_with(row0=SamplingParams(), row1=SamplingParams(allowed_token_ids=[3, 9, 33]), row2=SamplingParams())
    words = torch.tensor([1 << 9 | 1 << 4, 1 << 1], dtype=torch.int32)  # 9, 4 and 33
    assert allowed_in(rows, [2, 1, 0]) == {1: {3, 9, 33}}
    for _ in range(2):
        rows.mask({(1, 5): words, (2, 5): words})
        assert allowed_in(rows, [2, 1, 0]) == {0: {4, 9, 33}, 1: {9, 33}}
        assert rows.edited([0, 1, 2], [5, 5, 5]) == [1, 2]
        rows.mask({})
        assert allowed_in(rows, [2, 1, 0]) == {1: {3, 9, 33}}
        assert rows.edited([0, 2], [5, 5]) == []


def test_a_mask_changes_no_draw_of_other_rows() -> None:
    requests = {f"row{i}": SamplingParams(temperature=0.9) for i in range(3)}
    rows, _ = rows_with(**requests)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    free = sample(logits, rows.batch([0, 1, 2], [5, 6, 7])).tolist()
    rows.mask({(1, 6): torch.tensor([1 << 4, 0], dtype=torch.int32)})
    assert sample(logits, rows.batch([0, 1, 2], [5, 6, 7])).tolist() == [free[0], 4, free[2]]


def test_draws_of_one_row_have_a_mask_each() -> None:
    rows, _ = rows_with(row0=SamplingParams(), row1=SamplingParams(temperature=0.9))
    words = {token: torch.tensor([1 << token, 0], dtype=torch.int32) for token in (3, 4, 7)}
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    wanted, positions = [0, 1, 1, 1], [9, 5, 6, 7]
    free = sample(logits, rows.batch(wanted, positions)).tolist()
    for last in (7, 3):  # the same rows, other masks
        rows.mask({(1, 5): words[4], (1, 6): words[3], (1, 7): words[last], (0, 5): words[7]})
        assert sample(logits, rows.batch(wanted, positions)).tolist() == [free[0], 4, 3, last]
        assert rows.edited(wanted, positions) == [1, 2, 3]
