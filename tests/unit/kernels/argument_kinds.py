"""A kernel with one argument of every kind that a launch can pass, for tests of ahead-of-time compilation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.kernels import pdl

SIDE = 16


@triton.jit(do_not_specialize=["anything"])
def _every_kind(
    out_ptr,
    descriptor,  # of [SIDE, SIDE]
    pair,  # a pointer, a number
    absent_ptr,
    one,
    multiple,
    anything,
    scale,
    DTYPE: tl.constexpr,
    SIDE: tl.constexpr,
    FLAG: tl.constexpr,
):
    pdl.let_next_start()
    pdl.wait_for_previous()
    at = tl.arange(0, SIDE)
    tile = descriptor.load([0, 0]).to(DTYPE) * scale
    tile += (tl.load(pair[0] + at) + pair[1] + one + multiple + anything)[None, :]
    if absent_ptr is not None:
        tile += tl.load(absent_ptr + at)[None, :]
    if FLAG:
        tile += 1
    tl.store(out_ptr + at[:, None] * SIDE + at[None, :], tile)


def launch_every_kind(flag: bool = True) -> None:
    square = torch.zeros(SIDE, SIDE)
    descriptor = TensorDescriptor.from_tensor(square, [SIDE, SIDE])
    _every_kind[(1,)](
        square.clone(),
        descriptor,
        (torch.zeros(SIDE), 5),
        None,
        1,
        32,
        7,
        0.5,
        DTYPE=tl.float32,
        SIDE=SIDE,
        FLAG=flag,
        num_warps=2,
        enable_fp_fusion=False,
        **pdl.launch_options(),
    )
