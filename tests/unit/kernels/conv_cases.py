"""Convolutions of ragged sequences for the tests: shuffled slots, and NaN in every slot that may not be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.kernels.causal_conv import Checkpoint, StateBatch, reference

from .kernel_checks import assert_as_accurate

NO_SLOT = -1


@dataclass(frozen=True)
class ConvStep:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    batch: StateBatch
    silu: bool = True

    def run(self, op: Callable[..., Tensor], **options: object) -> tuple[Tensor, Tensor]:
        state = self.state.clone()
        out = op(self.x, self.weight, state, self.batch, bias=self.bias, silu=self.silu, **options)
        return out, state

    def check(self, op: Callable[..., Tensor], **options: object) -> None:
        """As accurate as the definition in the same precision, and the same states to the last bit."""
        out, state = self.run(op, **options)
        same, same_state = self.run(reference.causal_conv)
        bias = None if self.bias is None else self.bias.double()
        wide = replace(self, x=self.x.double(), weight=self.weight.double(), state=self.state.double(), bias=bias)
        assert_as_accurate(out, wide.run(reference.causal_conv)[0], same, slack=4.0)
        assert torch.equal(state.nan_to_num(7.0), same_state.nan_to_num(7.0))


def conv_step(
    query_lens: Sequence[int],
    device: torch.device,
    *,
    channels: int = 80,
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    fresh: Sequence[int] = (),
    in_place: bool = True,
    with_bias: bool = True,
    checkpoints: Sequence[tuple[int, int]] = (),
    decode_tokens: int = 1,
    first_slot: int = 0,
) -> ConvStep:
    """Sequences of which those in `fresh` begin with zeros; `checkpoints` are pairs of sequence and tokens."""
    generator = torch.Generator().manual_seed(0)
    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    num_slots = 2 * num_seqs + len(checkpoints) + 2
    free = (torch.randperm(num_slots, generator=generator) + first_slot).tolist()
    sources = [NO_SLOT if seq in fresh else free.pop() for seq in range(num_seqs)]
    targets = [source if in_place and source != NO_SLOT else free.pop() for source in sources]
    state = torch.full((first_slot + num_slots, channels, width - 1), float("nan"))
    for source in sources:
        if source != NO_SLOT:
            state[source] = torch.randn(channels, width - 1, generator=generator)
    kept = [Checkpoint(seq, tokens, free.pop()) for seq, tokens in checkpoints]
    batch = StateBatch.plan(query_lens, sources, targets, checkpoints=kept, decode_tokens=decode_tokens, device=device)
    wide = torch.randn(num_tokens, channels + 16, generator=generator).to(device, dtype)
    weight = torch.randn(channels, width, generator=generator).to(device, dtype)
    bias = torch.randn(channels, generator=generator).to(device, dtype) if with_bias else None
    return ConvStep(wide[:, 8 : 8 + channels], weight, bias, state.to(device, dtype), batch)
