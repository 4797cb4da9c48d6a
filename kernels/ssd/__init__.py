"""Mamba-2: linear attention with a state that decays at a rate per head (structured state-space duality, SSD).

    S   = e^(dt_t A) S + dt_t x_t B_t^T            a state [head_dim, state_dim] per head, in float32
    out = S C_t + D x_t

Dao and Gu, arXiv:2405.21060. The heads of a group share B and C, like keys in attention. A and D are numbers per head;
dt, the time step, is a number per token and head.

    state[slot][head][head_dim][state_dim]         float32; heads are divided over tensor-parallel ranks
"""

from __future__ import annotations

from torch import Tensor

from baton.kernels.state_batch import CHUNK, StateBatch, StateCheckpoint

from . import cpu, reference
from .time_steps import SSDDrafts, TimeSteps

__all__ = ["CHUNK", "SSDDrafts", "StateBatch", "StateCheckpoint", "TimeSteps", "ssd"]


def ssd(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    time_steps: TimeSteps,
    state: Tensor,
    batch: StateBatch,
    *,
    skip: Tensor | None = None,
    drafts: SSDDrafts | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the recurrence over the tokens of `batch`, and return the output of each [T, H, P], in x's dtype.

    x is [T, H, P], b and c are [T, G, N], all of one dtype. Head h has the b and c of group h * G // H. `time_steps`
    has dt and A. `skip` [H] float32 is D; None: nothing is added.

    `state` [slots, H, P, N] float32 is read and written only at the batch's slots (sources, targets, checkpoints). Sums
    are float32; matrix products over chunks have operands in x's dtype. `drafts` stores the inputs of draft tokens, for
    a batch with a `Replay`.

    Tokens may have any stride (views of one tensor); a token's heads are contiguous. On a GPU, P must be a multiple of
    16 up to 128, and N a power of two from 16 to 256. Raises `ValueError` for tensors that do not match.
    """
    _check(x, b, c, time_steps, state, skip, out)
    _check_drafts(x, b, time_steps, batch, drafts)
    run = cpu.ssd if x.is_cpu else reference.ssd
    if x.is_cuda:
        from . import gpu

        run = gpu.ssd
    return run(x, b, c, time_steps, state, batch, skip=skip, drafts=drafts, out=out)


def _check(
    x: Tensor, b: Tensor, c: Tensor, time_steps: TimeSteps, state: Tensor, skip: Tensor | None, out: Tensor | None
) -> None:
    num_tokens, num_heads, head_dim = x.shape
    _, num_groups, state_dim = b.shape
    if c.shape != b.shape or b.shape[0] != num_tokens or num_heads % num_groups:
        raise ValueError(f"x {list(x.shape)}, b {list(b.shape)} and c {list(c.shape)} do not fit each other")
    if b.dtype != x.dtype or c.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, b {b.dtype} and c {c.dtype}: give one dtype")
    if state.shape[1:] != (num_heads, head_dim, state_dim) or not state[0].is_contiguous():
        raise ValueError(f"state {list(state.shape)}: give contiguous [{num_heads}, {head_dim}, {state_dim}] a slot")
    if skip is not None and skip.shape != (num_heads,):
        raise ValueError(f"skip {list(skip.shape)}: give one number for each of {num_heads} heads")
    if out is not None and out.shape != x.shape:
        raise ValueError(f"out {list(out.shape)}: give {list(x.shape)}, as x")
    time_steps.check(num_tokens, num_heads)
    views = (x, b, c, time_steps.raw, *(() if out is None else (out,)))
    if num_tokens and not all(view[0].is_contiguous() for view in views):
        raise ValueError("the heads of a token must be contiguous, in x, b, c, time steps and out")


def _check_drafts(x: Tensor, b: Tensor, time_steps: TimeSteps, batch: StateBatch, drafts: SSDDrafts | None) -> None:
    if (drafts is None) != (batch.replay is None):
        raise ValueError("places of drafts are for batches with a replay, and needed there")
    if drafts is None:
        return
    for places, rows in zip(drafts, (x, b, time_steps.raw), strict=True):
        alike = places.dtype == rows.dtype and places.stride(0) == drafts.x.stride(0)
        if not alike or places.shape[1:] != rows.shape[1:] or not places[0].is_contiguous():
            raise ValueError(f"places {list(places.shape)} of {places.dtype} for {list(rows.shape)} of {rows.dtype}")
