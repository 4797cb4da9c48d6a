"""Steps of Mamba-2 layers for the tests: shuffled slots, and NaN in every slot that may not be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.kernels.ssd import Checkpoint, StateBatch, TimeSteps, reference

from .kernel_checks import assert_as_accurate

NO_SLOT = -1


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    groups: int = 2
    head_dim: int = 32
    state_dim: int = 32


SMALL = Sizes()


@dataclass(frozen=True)
class SSDStep:
    x: Tensor
    b: Tensor
    c: Tensor
    time_steps: TimeSteps
    state: Tensor
    batch: StateBatch
    skip: Tensor | None

    def run(self, op: Callable[..., Tensor], **options: object) -> tuple[Tensor, Tensor]:
        """What an op gives, and the states that it leaves."""
        state = self.state.clone()
        out = op(self.x, self.b, self.c, self.time_steps, state, self.batch, skip=self.skip, **options)
        return out, state

    def sliced(self, tokens: slice, batch: StateBatch) -> SSDStep:
        """Some of the tokens, as a step of their own."""
        x, b, c = (rows[tokens] for rows in (self.x, self.b, self.c))
        return replace(self, x=x, b=b, c=c, time_steps=self.time_steps.sliced(tokens), batch=batch)

    def converted(self, dtype: torch.dtype) -> SSDStep:
        steps = self.time_steps
        bias = None if steps.bias is None else steps.bias.to(dtype)
        time_steps = TimeSteps(steps.raw.to(dtype), steps.log_rate.to(dtype), bias, steps.limits)
        x, b, c, state = (part.to(dtype) for part in (self.x, self.b, self.c, self.state))
        skip = None if self.skip is None else self.skip.to(dtype)
        return replace(self, x=x, b=b, c=c, time_steps=time_steps, state=state, skip=skip)

    @property
    def written(self) -> list[int]:
        """The slots that the step writes."""
        lengths = self.batch.query_start.diff().tolist()
        targets = [slot for slot, length in zip(self.batch.targets.tolist(), lengths, strict=True) if length]
        return [slot for slot in (*targets, *self.batch.checkpoints.tolist()) if slot != NO_SLOT]

    def check(self, op: Callable[..., Tensor], slack: float = 4.0, **options: object) -> None:
        """As accurate as inputs in this precision allow, and no slot touched that is not written."""
        out, state = self.run(op, **options)
        exact, exact_state = self.converted(torch.float64).run(reference.ssd)
        same, same_state = self.run(reference.ssd)
        assert_as_accurate(out, exact, same, slack, terms=4.0)
        slots = self.written
        terms = torch.finfo(self.x.dtype).eps / torch.finfo(torch.float32).eps * 16  # products take rounded operands
        assert_as_accurate(state[slots], exact_state[slots], same_state[slots], slack, terms=terms)
        others = [slot for slot in range(len(state)) if slot not in slots]
        assert torch.equal(state[others].nan_to_num(7.0), self.state[others].nan_to_num(7.0))


def ssd_step(
    query_lens: Sequence[int],
    device: torch.device,
    *,
    sizes: Sizes = SMALL,
    dtype: torch.dtype = torch.float32,
    fresh: Sequence[int] = (),
    in_place: bool = True,
    checkpoints: Sequence[tuple[int, int]] = (),
    decode_tokens: int = 1,
    with_bias: bool = True,
    with_skip: bool = True,
    limits: tuple[float, float] = (0.0, math.inf),
    log_rate: float | None = None,
    first_slot: int = 0,
    seed: int = 0,
) -> SSDStep:
    """Sequences of which those in `fresh` begin with zeros; `checkpoints` are pairs of sequence and tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_seqs, num_tokens, heads = len(query_lens), sum(query_lens), sizes.heads
    num_slots = 2 * num_seqs + len(checkpoints) + 2
    free = (torch.randperm(num_slots, generator=generator) + first_slot).tolist()
    sources = [NO_SLOT if seq in fresh else free.pop() for seq in range(num_seqs)]
    targets = [source if in_place and source != NO_SLOT else free.pop() for source in sources]
    state = torch.full((first_slot + num_slots, heads, sizes.head_dim, sizes.state_dim), float("nan"), device=device)
    for source in sources:
        if source != NO_SLOT:
            state[source] = draw(*state.shape[1:])
    kept = [Checkpoint(seq, tokens, free.pop()) for seq, tokens in checkpoints]
    batch = StateBatch.plan(query_lens, sources, targets, checkpoints=kept, decode_tokens=decode_tokens, device=device)
    x = draw(num_tokens, heads, sizes.head_dim)
    b, c = (draw(num_tokens, sizes.groups, sizes.state_dim) for _ in range(2))
    rates = draw(heads) if log_rate is None else torch.full((heads,), log_rate)
    bias, skip = draw(heads) - 2, draw(heads)
    time_steps = TimeSteps(
        draw(num_tokens, heads).to(device, dtype),
        rates.to(device),
        bias.to(device) if with_bias else None,
        limits,
    )
    x, b, c = (rows.to(device, dtype) for rows in (x, b / sizes.state_dim**0.5, c))
    return SSDStep(x, b, c, time_steps, state, batch, skip.to(device) if with_skip else None)
