"""A step applies the accepted drafts of the previous step to states, as if they had never been guesses.

Two steps with drafts are compared with one run of the same tokens without: by the device's own op, in torch, and in
Triton, which is interpreted without a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from baton.kernels import causal_conv, gated_delta, ssd
from baton.kernels.state_batch import Replay, StateBatch

pytestmark = pytest.mark.exhaustive

MOST = 4  # drafts per step
NUM_PLACES = 2 * MOST + 1
Run = Callable[[Tensor, Tensor, StateBatch, tuple[Tensor, ...] | None, object], Tensor]


class Drafted(NamedTuple):
    """One row in two steps: the start of the first, both numbers of drafts, and how many of the first are accepted."""

    row: int
    start: int
    drafts: int
    accepted: int
    drafts_then: int


STEPS = [
    Drafted(2, 17, 4, 4, 4),
    Drafted(0, 8, 4, 2, 0),
    Drafted(4, 0, 3, 0, 3),
    Drafted(1, 35, 0, 0, 2),
    Drafted(5, 9, 2, 1, 4),
]


class Op(NamedTuple):
    """An op with a state: `run(tokens, state, batch, places, impl)` takes a token's inputs side by side in one row."""

    widths: Sequence[tuple[int, ...]]  # shapes of a token's inputs
    kept: Sequence[int]  # indices of the inputs that are kept for drafts
    state: tuple[int, ...]
    run: Run


def split(rows: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = rows.split([torch.Size(shape).numel() for shape in shapes], dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def delta_op(per_dim: bool) -> Op:
    heads, key_heads, key_dim, value_dim = 4, 2, 16, 32
    if per_dim:
        key_heads = heads
    keys, gates = (key_heads, key_dim), (heads, key_dim) if per_dim else (heads,)
    widths = [keys, keys, (heads, value_dim), gates, (heads,)]
    generator = torch.Generator().manual_seed(3)
    rates, bias = torch.randn(heads, generator=generator), torch.randn(*gates, generator=generator)

    def run(
        tokens: Tensor, state: Tensor, batch: StateBatch, places: tuple[Tensor, ...] | None, impl: object
    ) -> Tensor:
        q, k, v, decay, beta = split(tokens, widths)
        gate = gated_delta.Gate(decay, beta, rates.to(tokens.device), bias.to(tokens.device))
        drafts = None if places is None else gated_delta.DeltaDrafts(*places)
        return impl.gated_delta(q, k, v, gate, state, batch, scale=0.3, drafts=drafts)  # type: ignore[attr-defined, no-any-return]

    return Op(widths, [1, 2, 3, 4], (heads, key_dim, value_dim), run)


def ssd_op() -> Op:
    heads, groups, head_dim, state_dim = 4, 2, 32, 16
    widths = [(heads, head_dim), (groups, state_dim), (groups, state_dim), (heads,)]
    generator = torch.Generator().manual_seed(4)
    rates, bias, skip = (torch.randn(heads, generator=generator) for _ in range(3))

    def run(
        tokens: Tensor, state: Tensor, batch: StateBatch, places: tuple[Tensor, ...] | None, impl: object
    ) -> Tensor:
        x, b, c, raw = split(tokens, widths)
        device = tokens.device
        steps = ssd.TimeSteps(raw, rates.to(device), bias.to(device) - 2)
        drafts = None if places is None else ssd.SSDDrafts(*places)
        return impl.ssd(x, b, c, steps, state, batch, skip=skip.to(device), drafts=drafts)  # type: ignore[attr-defined, no-any-return]

    return Op(widths, [0, 1, 3], (heads, head_dim, state_dim), run)


def conv_op(width: int) -> Op:
    channels = 40
    generator = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(channels, width, generator=generator), torch.randn(channels, generator=generator)

    def run(
        tokens: Tensor, state: Tensor, batch: StateBatch, places: tuple[Tensor, ...] | None, impl: object
    ) -> Tensor:
        drafts, device = None if places is None else places[0], tokens.device
        return impl.causal_conv(tokens, weight.to(device), state, batch, bias=bias.to(device), drafts=drafts)  # type: ignore[attr-defined, no-any-return]

    return Op([(channels,)], [0], (channels, width - 1), run)


OPS = {
    "decays a head": (delta_op(per_dim=False), gated_delta),
    "decays a dimension": (delta_op(per_dim=True), gated_delta),
    "mamba": (ssd_op(), ssd),
    "tail of 1": (conv_op(2), causal_conv),
    "tail of 2": (conv_op(3), causal_conv),
    "tail of 3": (conv_op(4), causal_conv),
}


IN_TORCH = SimpleNamespace(
    gated_delta=gated_delta.cpu.by_spans, ssd=ssd.cpu.by_chunks, causal_conv=causal_conv.reference.causal_conv
)


@pytest.fixture(params=["device's own", "torch", "triton", "reference"])
def impl_of(request: pytest.FixtureRequest) -> Callable[[object], object]:
    """Return the implementation of an op: that of the device, of torch, of Triton, or the reference."""
    if request.param == "device's own":
        return lambda op: op
    if request.param == "torch":
        return lambda _: IN_TORCH
    name = "gpu" if request.param == "triton" else "reference"
    if name == "gpu":
        pytest.importorskip("triton")
    return lambda op: importlib.import_module(f"{op.__name__}.{name}")  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_two_steps_with_drafts_equal_one_run_of_the_accepted_tokens(
    name: str, in_place: bool, impl_of: Callable[[object], object], triton_device: torch.device
) -> None:
    op, module = OPS[name]
    impl, device = impl_of(module), triton_device
    generator = torch.Generator().manual_seed(1)
    width = sum(torch.Size(shape).numel() for shape in op.widths)

    def draw(lens: Sequence[int]) -> list[Tensor]:
        return [torch.randn(length, width, generator=generator).to(device) for length in lens]

    slots = 2 * len(STEPS) + 1
    state = torch.full((slots, *op.state), float("nan"), device=device)
    state[: len(STEPS)] = torch.randn(len(STEPS), *op.state, generator=generator).to(device)
    begin = list(range(len(STEPS)))
    begin[2] = -1  # starts from a zero state
    behind = list(range(len(STEPS), 2 * len(STEPS)))
    lone = [behind[seq] if source == -1 or not in_place else source for seq, source in enumerate(begin)]
    shapes = [op.widths[part] for part in op.kept]
    memory = torch.full((6 * NUM_PLACES, sum(torch.Size(shape).numel() for shape in shapes) + 8), float("nan"))
    places = tuple(split(memory.to(device)[:, :-8], shapes))
    first, second = draw([1 + each.drafts for each in STEPS]), draw([1 + each.drafts_then for each in STEPS])
    expected_state = state.clone()

    def step(
        rows: list[Tensor], sources: list[int], targets: list[int], starts: list[int], counts: list[int]
    ) -> Tensor:
        lens = [len(each) for each in rows]
        batch = StateBatch.plan(lens, sources, targets, decode_tokens=MOST + 1, device=device)
        numbers = [[each.row for each in STEPS], starts, counts]
        replay = Replay(*torch.tensor(numbers, dtype=torch.int32, device=device), num_places=NUM_PLACES)
        return op.run(torch.cat(rows), state, replace(batch, replay=replay), places, impl)

    starts, counts = [each.start for each in STEPS], [each.accepted for each in STEPS]
    step(first, begin, lone, starts, [0] * len(STEPS))
    then = [start + 1 + count for start, count in zip(starts, counts, strict=True)]
    out = step(second, lone, lone, then, counts)

    kept = [torch.cat([rows[: 1 + count], more]) for rows, count, more in zip(first, counts, second, strict=True)]
    cut = [rows[: 2 + count] for rows, count in zip(kept, counts, strict=True)]
    whole = StateBatch.plan([len(rows) for rows in kept], begin, [-1] * len(STEPS), decode_tokens=99, device=device)
    is_exact = impl is module and device.type == "cpu"  # a CPU runs decodes token by token, in any batch
    judge = impl if is_exact else importlib.import_module(f"{module.__name__}.reference")
    close = {"atol": 0.0, "rtol": 0.0} if is_exact else {"atol": 1e-4, "rtol": 1e-4}
    expected = op.run(torch.cat(kept), expected_state, whole, None, judge)
    own = torch.cat(
        [part[1 + count :] for part, count in zip(expected.split([len(rows) for rows in kept]), counts, strict=True)]
    )
    torch.testing.assert_close(out, own, **close)
    known = StateBatch.plan([len(rows) for rows in cut], begin, lone, decode_tokens=99, device=device)
    op.run(torch.cat(cut), expected_state, known, None, judge)
    torch.testing.assert_close(state[lone], expected_state[lone], **close)
    others = [slot for slot in range(slots) if slot not in lone]
    assert torch.equal(state[others].nan_to_num(7.0), expected_state[others].nan_to_num(7.0))


def test_places_without_a_replay_are_refused_and_a_replay_without_places() -> None:
    op, module = OPS["tail of 3"]
    batch = StateBatch.plan([1], [0], [0])
    x, state = torch.zeros(1, 40), torch.zeros(1, *op.state)
    with pytest.raises(ValueError, match="with a replay"):
        op.run(x, state, batch, (torch.zeros(9, 40),), module)
    numbers = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="needed there"):
        op.run(x, state, replace(batch, replay=Replay(*numbers, num_places=9)), None, module)
