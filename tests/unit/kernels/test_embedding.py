"""The embedding op: rows of a table by token id."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from baton.kernels.embedding import embedding


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_copied_bit_for_bit(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    weight, ids = torch.randn(50, 24).to(dtype), torch.tensor([0, 49, 7, 7], dtype=ids_dtype)
    assert torch.equal(embedding(ids, weight), weight[ids.long()])
    assert embedding(ids[:0], weight).shape == (0, 24)


def test_ids_and_tables_of_any_stride_give_the_same() -> None:
    weight, ids = torch.randn(50, 48), torch.arange(20)
    for wide, some in ((weight[:, :24], ids), (weight, ids[::3])):
        assert torch.equal(embedding(some, wide), functional.embedding(some, wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("width", [24, 48])
def test_rows_are_scaled_and_rounded_once(dtype: torch.dtype, width: int) -> None:
    weight, ids = torch.randn(50, 48).to(dtype)[:, :width], torch.tensor([0, 49, 7, 7])
    assert torch.equal(embedding(ids, weight, 55.5), weight[ids] * 55.5)


def test_an_id_outside_the_vocabulary_has_no_plausible_row() -> None:
    weight = torch.randn(50, 24).bfloat16()
    for scale in (1.0, 2.0):
        rows = embedding(torch.tensor([-1, 3, 50]), weight, scale)
        assert rows[[0, 2]].isnan().all()
        assert torch.equal(rows[1], weight[3] * scale)
