"""Parts of one softmax are merged to the whole, and the last of several programs learns that it is the last."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

from baton.kernels.arrivals import is_last_to_arrive  # noqa: E402
from baton.kernels.split_kv import LOWEST, merge_part, merge_parts, sum_parts  # noqa: E402

PARTS, ROWS, DIM = 4, 2, 8


@triton.jit
def merge(sums, weights, tops, out, PARTS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, MANY: tl.constexpr):
    """Merge parts [PARTS, ROWS, DIM] one by one, or two at a time (MANY), and write the means [ROWS, DIM]."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    total = tl.zeros([ROWS, DIM], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    if MANY:
        for first in range(0, PARTS, 2):
            part = (first + tl.arange(0, 2))[:, None] * ROWS + row[None, :]
            part_sums = tl.load(sums + part[:, :, None] * DIM + dim[None, None, :])
            total, weight, top = merge_parts(
                total, weight, top, part_sums, tl.load(weights + part), tl.load(tops + part)
            )
    else:
        for number in range(PARTS):
            part = number * ROWS + row
            part_sums = tl.load(sums + part[:, None] * DIM + dim[None, :])
            total, weight, top = merge_part(
                total, weight, top, part_sums, tl.load(weights + part), tl.load(tops + part), 1
            )
    mean = total / tl.where(weight == 0, 1.0, weight)[:, None]
    tl.store(out + row[:, None] * DIM + dim[None, :], mean)


@triton.jit
def merge_row(sums, weights, tops, out, PARTS: tl.constexpr, DIM: tl.constexpr):
    """Merge all parts [PARTS, DIM] of one row at once, and write the mean [DIM]."""
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIM)
    part_sums = tl.load(sums + part[:, None] * DIM + dim[None, :])
    total, weight, _ = sum_parts(part_sums, tl.load(weights + part), tl.load(tops + part))
    tl.store(out + dim, total / weight)


@triton.jit
def count_up(counter, last, num_programs):
    if is_last_to_arrive(counter, num_programs - 1):
        tl.atomic_add(last, 1)


def softmax_in_parts(device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the mean of values weighted by 2^score, [ROWS, DIM], and its parts: sums, weights, maxima of scores."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(ROWS, PARTS, 5, generator=generator) * 20
    scores[1, 2] = float("-inf")  # this row sees no key of this part
    values = torch.randn(PARTS, 5, DIM, generator=generator)
    exact = (scores.flatten(1).double() * torch.log(torch.tensor(2.0))).softmax(1) @ values.flatten(0, 1).double()
    tops = scores.amax(2)  # [ROWS, PARTS]
    weights = torch.where(tops[..., None].isinf(), 0.0, (scores - tops[..., None]).exp2())
    sums = torch.einsum("rpk,pkd->prd", weights, values)
    parts = [sums, weights.sum(2).T, tops.T]
    return exact, [part.contiguous().to(device) for part in parts]


@pytest.mark.parametrize("many", [False, True])
def test_merged_parts_are_the_whole_also_where_a_row_sees_no_key_of_one(
    triton_device: torch.device, many: bool
) -> None:
    exact, parts = softmax_in_parts(triton_device)
    out = torch.full((ROWS, DIM), float("nan"), device=triton_device)
    merge[(1,)](*parts, out, PARTS=PARTS, ROWS=ROWS, DIM=DIM, MANY=many)
    torch.testing.assert_close(out.cpu().double(), exact, atol=1e-5, rtol=1e-5)


def test_all_parts_of_a_row_are_summed_at_once(triton_device: torch.device) -> None:
    exact, (sums, weights, tops) = softmax_in_parts(triton_device)
    out = torch.full((DIM,), float("nan"), device=triton_device)
    merge_row[(1,)](
        sums[:, 0].contiguous(), weights[:, 0].contiguous(), tops[:, 0].contiguous(), out, PARTS=PARTS, DIM=DIM
    )
    torch.testing.assert_close(out.cpu().double(), exact[0], atol=1e-5, rtol=1e-5)


def test_rows_that_see_no_key_at_all_stay_zero(triton_device: torch.device) -> None:
    sums, weights = torch.zeros(PARTS, ROWS, DIM, device=triton_device), torch.zeros(PARTS, ROWS, device=triton_device)
    tops, out = torch.full_like(weights, float("-inf")), torch.full_like(sums[0], float("nan"))
    merge[(1,)](sums, weights, tops, out, PARTS=PARTS, ROWS=ROWS, DIM=DIM, MANY=True)
    assert not out.any()


@pytest.mark.parametrize("num_programs", [1, 7])
def test_one_program_is_the_last_to_arrive_and_leaves_the_counter_for_the_next_launch(
    triton_device: torch.device, num_programs: int
) -> None:
    counter, last = torch.zeros(2, 1, dtype=torch.int32, device=triton_device)
    for launches in (1, 2):
        count_up[(num_programs,)](counter, last, num_programs)
        assert (counter.item(), last.item()) == (0, launches)
