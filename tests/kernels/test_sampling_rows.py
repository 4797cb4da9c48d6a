"""Building a step's batch from rows that persist."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.core.sampling import SamplingParams
from baton.kernels.sampling import SamplingBatch, SamplingRows, sample

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
    """Rows row0, row1, ... in use; stop tokens 0 and 1, prompts of 3 tokens."""
    table = torch.randint(VOCAB, (8, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    rows = SamplingRows(8, VOCAB, table)
    for name, request in requests.items():
        rows.start(int(name[3:]), request, seed=100 + int(name[3:]), prompt_len=3, stop_token_ids=[0, 1])
    return rows, table


def used(batch: SamplingBatch) -> set[str]:
    return {name for name in OPTIONAL if getattr(batch, name) is not None}


def test_a_step_pays_only_for_what_its_rows_use() -> None:
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


def test_stop_tokens_open_with_the_token_after_min_tokens() -> None:
    rows, _ = rows_with(row0=SamplingParams(min_tokens=2, max_tokens=5))
    closed = [rows.batch([0], [position]).banned is not None for position in (3, 4, 5, 6)]
    assert closed == [True, True, False, False]


def test_a_freed_row_leaves_nothing_to_the_next_request() -> None:
    rows, _ = rows_with(row0=EVERYTHING)
    rows.batch([0], [5])
    rows.free(0)
    rows.free(0)
    rows.start(0, SamplingParams(temperature=0.5), seed=3, prompt_len=3, stop_token_ids=[0])
    batch = rows.batch([0], [5])
    assert used(batch) == set()
    assert batch.temperature is not None
    assert batch.temperature.tolist() == [0.5]


def test_what_was_gathered_serves_until_the_rows_change() -> None:
    rows, _ = rows_with(row0=EVERYTHING, row1=SamplingParams())
    first, second = rows.batch([0, 1], [5, 5]), rows.batch([0, 1], [6, 6])
    assert first.seeds is second.seeds
    assert second.positions.tolist() == [6, 6]
    assert rows.batch([1, 0], [6, 6]).seeds.tolist() == [101, 100]
    rows.start(2, SamplingParams(), seed=9, prompt_len=1, stop_token_ids=[])
    assert rows.batch([0, 1], [7, 7]).seeds is not second.seeds


def test_a_row_draws_the_same_alone_and_in_any_company() -> None:
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
