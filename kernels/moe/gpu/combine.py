"""The sum over the experts of each token, always in the same order: no atomics, the same bits every time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.sizes import cdiv, next_power_of_2

# A thread holds 8 columns of all rows of a token: as many loads of 16 bytes in flight as the token has experts, and
# sums that never leave the thread.
WARPS = 4
BLOCK = WARPS * 32 * 8


def combine(outputs: Tensor, expert_ids: Tensor, add_to: Tensor | None) -> Tensor:
    """outputs [T * K, H], weighted -> [T, H], in place where there is an `add_to`. Pairs of expert -1 do not count."""
    num_tokens, top_k = expert_ids.shape
    size = outputs.shape[1]
    out = torch.empty((num_tokens, size), dtype=outputs.dtype, device=outputs.device) if add_to is None else add_to
    _combine[(num_tokens, cdiv(size, BLOCK))](
        outputs,
        expert_ids,
        out,
        out.stride(0),
        SIZE=size,
        TOP_K=top_k,
        PLACES=next_power_of_2(top_k),
        BLOCK=BLOCK,
        ADD=add_to is not None,
        num_warps=WARPS,
        **launch_options(),
    )
    return out


@triton.jit
def _combine(
    outputs,  # [T * TOP_K, SIZE]
    expert_ids,  # [T, TOP_K]
    out,  # [T, SIZE], rows out_stride apart
    out_stride,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,  # TOP_K, filled up to a power of two
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    let_next_start()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    inside = column < SIZE
    wait_for_previous()
    pair = token * TOP_K + place
    routed = tl.load(expert_ids + pair, mask=place < TOP_K, other=-1) >= 0
    output = outputs + pair[:, None] * SIZE + column[None, :]
    total = tl.sum(tl.load(output, mask=routed[:, None] & inside[None, :], other=0.0).to(tl.float32), 0)
    to = out + token * out_stride + column
    if ADD:
        total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, total.to(out.dtype.element_ty), mask=inside)
