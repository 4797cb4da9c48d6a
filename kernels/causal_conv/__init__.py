"""Depthwise causal convolution over the tokens of each sequence. Its state is the sequence's last inputs (the tail).

out[t, c] = silu(bias[c] + sum over i of weight[c, i] x[t - width + 1 + i, c])          width 2, 3 or 4

state[slot][channel][width - 1]        the last inputs, oldest first; channels are divided over tensor-parallel ranks
                                       like the heads that they belong to
"""

from __future__ import annotations

from torch import Tensor

from baton.kernels.state_batch import StateBatch, StateCheckpoint

from . import cpu, reference

__all__ = ["WIDTHS", "StateBatch", "StateCheckpoint", "causal_conv"]

WIDTHS = (2, 3, 4)


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
    """Convolve the tokens of `batch`, x [T, C], with weight [C, width] and return [T, C] in x's dtype.

    Inputs before a sequence's first token are read from its source slot, or are zeros. The last width - 1 inputs are
    written to its target slot, and those before each checkpoint to the checkpoint's slot. `state` is
    [slots, C, width - 1] of x's dtype. Sums are float32, rounded once. `silu` applies x * sigmoid(x) to the sum.
    `drafts` [places, C] of x's dtype stores the inputs of draft tokens, for a batch with a `Replay`.

    Tokens of x and out may have any stride; a token's channels are contiguous. Raises `ValueError` for tensors that do
    not match.
    """
    num_tokens, channels = x.shape
    width = weight.shape[1]
    if width not in WIDTHS or weight.shape[0] != channels or not weight.is_contiguous():
        raise ValueError(f"weight {list(weight.shape)} of {channels} channels: give contiguous [{channels}, 2 to 4]")
    if state.shape[1:] != (channels, width - 1) or not state[0].is_contiguous():
        raise ValueError(f"state {list(state.shape)}: give contiguous [{channels}, {width - 1}] a slot")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias {list(bias.shape)}: give [{channels}]")
    if num_tokens and not (x[0].is_contiguous() and (out is None or out[0].is_contiguous())):
        raise ValueError("the channels of a token must be contiguous, in x and out")
    if (drafts is None) != (batch.replay is None):
        raise ValueError("places of drafts are for batches with a replay, and needed there")
    if drafts is not None and (drafts.shape[1:] != (channels,) or drafts.dtype != x.dtype or drafts.stride(1) != 1):
        raise ValueError(f"places {list(drafts.shape)} of {drafts.dtype}: give [places, {channels}] of {x.dtype}")
    run = cpu.causal_conv if x.is_cpu else reference.causal_conv
    if x.is_cuda:
        from . import gpu

        run = gpu.causal_conv
    return run(x, weight, state, batch, bias=bias, silu=silu, drafts=drafts, out=out)
