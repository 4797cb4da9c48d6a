"""Byte ranges are copied whole between addresses, and no other bytes change."""

from __future__ import annotations

import random

import pytest
import torch

from baton.kernels.block_copy.gpu import MAX_RANGES, copy_ranges

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU interprets the kernel
UNIT = 16


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths", [[UNIT], [16384], [16384 + UNIT], [UNIT, 3 * 16384, 48, 16384 - UNIT], [160] * 700], ids=len
)
def test_ranges_of_any_length_arrive_and_nothing_else_changes(lengths: list[int]) -> None:
    rng = random.Random(len(lengths))
    size = 2 * sum(lengths) + UNIT
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.zeros_like(source)
    expected = target.clone()
    rows, at = [], 0
    for length in lengths:
        start = rng.randrange(0, size - length + 1, UNIT)
        rows.append([source.data_ptr() + start, target.data_ptr() + at, length])
        expected[at : at + length] = source[start : start + length]
        at += 2 * length  # a gap after each range
    table = torch.tensor([*rows, [0, 0, 0]], dtype=torch.int64, device=DEVICE)
    copy_ranges(table, len(rows))
    assert torch.equal(target, expected)


def test_no_ranges_are_no_launch() -> None:
    copy_ranges(torch.zeros((1, 3), dtype=torch.int64), 0)


@pytest.mark.parametrize(
    ("table", "count", "reason"),
    [
        (torch.zeros((2, 3), dtype=torch.int32), 1, "int64"),
        (torch.zeros((2, 4), dtype=torch.int64), 1, r"\[n, 3\]"),
        (torch.zeros((3, 2), dtype=torch.int64).T, 1, "contiguous"),
        (torch.zeros((2, 3), dtype=torch.int64), 3, "a table of 2"),
        (torch.zeros((1, 3), dtype=torch.int64).expand(MAX_RANGES + 1, 3).contiguous(), MAX_RANGES + 1, "at most"),
    ],
)
def test_a_table_of_another_kind_is_refused(table: torch.Tensor, count: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        copy_ranges(table, count)


@pytest.mark.gpu
def test_a_table_in_pinned_memory_is_read_in_place() -> None:
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)
    table = torch.tensor([[source.data_ptr(), target.data_ptr(), 1 << 20]], dtype=torch.int64).pin_memory()
    copy_ranges(table, 1)
    assert torch.equal(target, source)
