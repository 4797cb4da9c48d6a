"""Reference of the causal convolution: every sequence behind the tail of its inputs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.state_batch import StateBatch


def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    batch: StateBatch,
    *,
    bias: Tensor | None = None,
    silu: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.causal_conv.causal_conv`. Computed in float64 where x is, else in float32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    taps = weight.to(dtype)
    starts, ends = batch.query_start.tolist(), batch.chunk_start.tolist()[1:]
    kept = list(zip(ends, batch.checkpoints.tolist(), batch.chunk_seqs.tolist(), strict=True))
    for seq, (source, target) in enumerate(zip(batch.sources.tolist(), batch.targets.tolist(), strict=True)):
        begin, end = starts[seq], starts[seq + 1]
        if begin == end:
            continue
        tail = torch.zeros_like(state[0]) if source < 0 else state[source]
        inputs = torch.cat([tail.T, x[begin:end].to(state.dtype)])  # [width - 1 + n, C]
        count = end - begin
        wide = inputs.to(dtype)
        total = sum(
            (wide[tap : tap + count] * taps[:, tap] for tap in range(taps.shape[1])), torch.zeros((), dtype=dtype)
        )
        if bias is not None:
            total = total + bias.to(dtype)
        out[begin:end] = (functional.silu(total) if silu else total).to(out.dtype)
        keep = [(position - begin, slot) for position, slot, owner in kept if owner == seq and slot >= 0]
        for position, slot in [*keep, *([(count, target)] if target >= 0 else [])]:
            state[slot] = inputs[position : position + taps.shape[1] - 1].T
    return out
