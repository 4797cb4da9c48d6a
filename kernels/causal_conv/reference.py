"""Reference of the causal convolution: the tail and the tokens of each sequence, concatenated and convolved."""

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
    drafts: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `baton.kernels.causal_conv.causal_conv`. Computes in float32 (float64 if x is)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    taps = weight.to(dtype)
    starts, ends = batch.query_start.tolist(), batch.chunk_start.tolist()[1:]
    kept = list(zip(ends, batch.checkpoints.tolist(), batch.chunk_seqs.tolist(), strict=True))
    num_replaying = int(batch.num_decodes) if batch.replay is not None else 0
    for seq, (source, target) in enumerate(zip(batch.sources.tolist(), batch.targets.tolist(), strict=True)):
        begin, end = starts[seq], starts[seq + 1]
        if begin == end:
            continue
        inputs = torch.zeros_like(state[0]).T if source < 0 else state[source].T
        keep = [(position - begin, slot) for position, slot, owner in kept if owner == seq and slot >= 0]
        if seq < num_replaying:
            assert batch.replay is not None
            assert drafts is not None
            inputs = torch.cat([inputs, drafts[batch.replay.pending(seq)].to(state.dtype)])[1 - taps.shape[1] :]
            keep.append((1, target))
        else:
            keep.append((end - begin, target))
        inputs = torch.cat([inputs, x[begin:end].to(state.dtype)])  # [width - 1 + n, C]
        wide = inputs.to(dtype)
        # Tokens of decodes are computed one at a time: results must not depend on how many are computed together.
        for first, count in [(at, 1) for at in range(end - begin)] if seq < num_replaying else [(0, end - begin)]:
            out[begin + first : begin + first + count] = _convolved(wide[first:], count, taps, bias, silu).to(out.dtype)
        for position, slot in keep:
            if slot >= 0:
                state[slot] = inputs[position : position + taps.shape[1] - 1].T
    if drafts is not None:
        batch.keep_drafts((x, drafts))
    return out


def _convolved(inputs: Tensor, count: int, taps: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Return the first `count` outputs [count, C] over inputs [width - 1 + count or more, C]."""
    total = sum(
        (inputs[tap : tap + count] * taps[:, tap] for tap in range(taps.shape[1])), torch.zeros((), dtype=taps.dtype)
    )
    if bias is not None:
        total = total + bias.to(taps.dtype)
    return functional.silu(total) if silu else total
