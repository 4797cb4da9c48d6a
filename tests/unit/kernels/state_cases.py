"""Steps of layers with states for the tests: shuffled slots, and NaN in every slot that may not be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.kernels.gated_delta import Checkpoint, Gate, StateBatch, reference

from .kernel_checks import assert_as_accurate

NO_SLOT = -1
SCALE = 0.3


@dataclass(frozen=True)
class Heads:
    keys: int = 2
    values: int = 4
    key_dim: int = 32
    value_dim: int = 32


SMALL = Heads()


@dataclass(frozen=True)
class DeltaStep:
    q: Tensor
    k: Tensor
    v: Tensor
    gate: Gate
    state: Tensor
    batch: StateBatch
    norm_eps: float | None = 1e-6

    def run(self, op: Callable[..., Tensor], **options: object) -> tuple[Tensor, Tensor]:
        """What an op gives, and the states that it leaves."""
        state = self.state.clone()
        out = op(self.q, self.k, self.v, self.gate, state, self.batch, scale=SCALE, norm_eps=self.norm_eps, **options)
        return out, state

    def converted(self, dtype: torch.dtype) -> DeltaStep:
        gate = Gate(*(None if part is None else part.to(dtype) for part in vars(self.gate).values()))  # type: ignore[arg-type]
        q, k, v, state = (part.to(dtype) for part in (self.q, self.k, self.v, self.state))
        return replace(self, q=q, k=k, v=v, state=state, gate=gate)

    @property
    def written(self) -> list[int]:
        """The slots that the step writes."""
        lengths = self.batch.query_start.diff().tolist()
        targets = [slot for slot, length in zip(self.batch.targets.tolist(), lengths, strict=True) if length]
        return [slot for slot in (*targets, *self.batch.checkpoints.tolist()) if slot != NO_SLOT]

    def check(self, op: Callable[..., Tensor], slack: float = 4.0, **options: object) -> None:
        """As accurate as inputs in this precision allow, and no slot touched that is not written."""
        out, state = self.run(op, **options)
        exact, exact_state = self.converted(torch.float64).run(reference.gated_delta)
        same, same_state = self.run(reference.gated_delta)
        assert_as_accurate(out, exact, same, slack, terms=4.0)
        slots = self.written
        terms = torch.finfo(self.q.dtype).eps / torch.finfo(torch.float32).eps * 100  # of decays, which add up
        assert_as_accurate(state[slots], exact_state[slots], same_state[slots], slack, terms=terms)
        others = [slot for slot in range(len(state)) if slot not in slots]
        assert torch.equal(state[others].nan_to_num(7.0), self.state[others].nan_to_num(7.0))


def delta_step(
    query_lens: Sequence[int],
    device: torch.device,
    *,
    heads: Heads = SMALL,
    dtype: torch.dtype = torch.float32,
    per_dim: bool = False,
    fresh: Sequence[int] = (),
    in_place: bool = True,
    checkpoints: Sequence[tuple[int, int]] = (),
    decode_tokens: int = 1,
    raw_gate: bool = True,
    norm_eps: float | None = 1e-6,
    strength: float = 1.0,
    first_slot: int = 0,
    seed: int = 0,
) -> DeltaStep:
    """Sequences of which those in `fresh` begin with zeros; `checkpoints` are pairs of sequence and tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    num_seqs, num_tokens = len(query_lens), sum(query_lens)
    num_slots = 2 * num_seqs + len(checkpoints) + 2
    free = (torch.randperm(num_slots, generator=generator) + first_slot).tolist()
    sources = [NO_SLOT if seq in fresh else free.pop() for seq in range(num_seqs)]
    targets = [source if in_place and source != NO_SLOT else free.pop() for source in sources]
    state = torch.full((first_slot + num_slots, heads.values, heads.key_dim, heads.value_dim), float("nan"))
    for source in sources:
        if source != NO_SLOT:
            state[source] = draw(*state.shape[1:])
    kept = [Checkpoint(seq, tokens, free.pop()) for seq, tokens in checkpoints]
    batch = StateBatch.plan(query_lens, sources, targets, checkpoints=kept, decode_tokens=decode_tokens, device=device)
    q, k = (draw(num_tokens, heads.keys, heads.key_dim) for _ in range(2))
    if norm_eps is None:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    gates = (heads.values, heads.key_dim) if per_dim else (heads.values,)
    if raw_gate:
        gate = Gate(draw(num_tokens, *gates), draw(num_tokens, heads.values), draw(heads.values), draw(*gates))
    else:
        gate = Gate(-strength * draw(num_tokens, *gates).abs(), draw(num_tokens, heads.values).sigmoid())
    decay, beta = gate.decay.to(device, dtype), gate.beta.to(device, dtype)
    if not raw_gate:
        decay, beta = gate.decay.to(device), gate.beta.to(device)
    log_rate, bias = (None if part is None else part.to(device) for part in (gate.log_rate, gate.bias))
    v = draw(num_tokens, heads.values, heads.value_dim)
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return DeltaStep(q, k, v, Gate(decay, beta, log_rate, bias), state.to(device), batch, norm_eps)
