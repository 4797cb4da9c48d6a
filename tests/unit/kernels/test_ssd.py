"""The reference of Mamba-2's recurrence against its dual form; the CPU's C++ and torch against the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.ssd import StateBatch, TimeSteps, cpu, reference, ssd

from .ssd_cases import SMALL, Sizes, ssd_step

CPU = torch.device("cpu")
RAGGED = [1, 1, 0, 63, 64, 65, 200]
ON_CPUS = [ssd, cpu.by_chunks]
CHECKPOINTS = [(4, 64), (6, 64), (6, 100), (6, 200)]


def test_the_definition_is_attention_without_softmax_whose_weights_decay() -> None:
    """Equation 6 of the paper has one matrix for the whole sequence instead of a recurrent state."""
    step = ssd_step([40], CPU, fresh=[0], sizes=Sizes(4, 2, 8, 16)).converted(torch.float64)
    out, state = step.run(reference.ssd)
    dt = functional.softplus(step.time_steps.raw + step.time_steps.bias)
    b, c = (rows.repeat_interleave(2, dim=1) for rows in (step.b, step.c))
    for head in range(4):
        a = -math.exp(step.time_steps.log_rate[head])
        decays = torch.zeros(40, 40, dtype=torch.float64)
        for i in range(40):
            for j in range(i + 1):
                decays[i, j] = math.exp(a * dt[j + 1 : i + 1, head].sum())
        weights = decays * (c[:, head] @ b[:, head].T) * dt[:, head]
        expected = weights @ step.x[:, head] + step.skip[head] * step.x[:, head]
        torch.testing.assert_close(out[:, head], expected)
        last = (step.x[:, head] * (dt[:, head] * decays[-1])[:, None]).T @ b[:, head]
        torch.testing.assert_close(state[step.batch.targets.item(), head], last)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("run", ON_CPUS)
def test_prompts_give_what_single_tokens_give(run: Callable[..., Tensor], dtype: torch.dtype) -> None:
    ssd_step(RAGGED, CPU, dtype=dtype, fresh=[1, 5], checkpoints=CHECKPOINTS).check(run)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_head_dimensions_need_not_be_powers_of_two(dtype: torch.dtype) -> None:
    step = ssd_step(RAGGED, CPU, sizes=Sizes(3, 1, 20, 48), dtype=dtype, fresh=[1, 5], checkpoints=CHECKPOINTS)
    step.check(ssd)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("run", ON_CPUS)
@pytest.mark.parametrize("in_place", [True, False])
def test_decodes_and_chunks_of_one_token_and_padding_share_a_step(in_place: bool, run: Callable[..., Tensor]) -> None:
    case = {"checkpoints": [(3, 64), (3, 80), (4, 1)], "fresh": [1, 5], "padding": 3, "in_place": in_place}
    ssd_step([1, 1, 1, 130, 1, 20], CPU, **case).check(run)  # type: ignore[arg-type]
    ssd_step([5, 1, 0, 2, 3], CPU, decode_tokens=5, fresh=[3], in_place=in_place, with_bias=False).check(run)
    ssd_step([70, 90], CPU, in_place=in_place, with_skip=False).check(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_token_gives_the_same_bits_however_its_prompt_is_cut_and_in_any_batch(
    dtype: torch.dtype, num_threads: int
) -> None:
    step = ssd_step([70, 150], CPU, sizes=Sizes(4, 2, 20, 32), dtype=dtype, fresh=[0])
    whole, whole_state = step.run(ssd)
    state, (_, slot), source, first = step.state, step.batch.targets.tolist(), step.batch.sources[1].item(), 70
    for length in (32, 1, 1, 63, 5, 48):
        tokens = slice(first, first + length)
        batch = StateBatch.plan([length], [source], [slot])
        out, state = dataclasses.replace(step.sliced(tokens, batch), state=state).run(ssd)
        assert torch.equal(out, whole[tokens])
        first, source = first + length, slot
    assert torch.equal(state[slot], whole_state[slot])


@pytest.mark.parametrize(
    ("sizes", "compiled"), [(SMALL, True), (Sizes(2, 1, 18, 32), False), (Sizes(2, 1, 32, 24), False)]
)
def test_torch_serves_shapes_that_the_native_kernel_does_not(
    sizes: Sizes, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Tensor:
        raise AssertionError("by chunks")

    monkeypatch.setattr(cpu, "by_chunks", refused)
    step = ssd_step([4], CPU, sizes=sizes)
    if compiled:
        step.run(ssd)
        return
    with pytest.raises(AssertionError, match="by chunks"):
        step.run(ssd)


@pytest.mark.parametrize("log_rate", [-20.0, 6.0])
def test_decays_may_be_zero_or_nearly_complete(log_rate: float) -> None:
    step = ssd_step([3, 150], CPU, log_rate=log_rate)
    step.check(ssd)
    step.check(cpu.by_chunks, slack=100.0)  # only as exact as the sums of decays


@pytest.mark.parametrize("limits", [(0.0, 0.05), (0.2, 0.3)])
def test_time_steps_are_clamped_to_their_limits(limits: tuple[float, float]) -> None:
    step = ssd_step([1, 70], CPU, limits=limits)
    step.check(ssd)
    step.check(cpu.by_chunks)
    dt, _ = step.time_steps.values(torch.float32)
    assert dt.min() == pytest.approx(limits[0], abs=0.02)
    assert dt.max() == pytest.approx(limits[1])


@pytest.mark.parametrize("run", [reference.ssd, *ON_CPUS])
def test_a_prompt_may_be_cut_anywhere(run: Callable[..., Tensor]) -> None:
    step = ssd_step([150], CPU)
    whole, whole_state = step.run(run)
    state, slot = step.state.clone(), step.batch.sources.tolist()
    for first, end in ((0, 70), (70, 71), (71, 150)):
        part = dataclasses.replace(
            step.sliced(slice(first, end), StateBatch.plan([end - first], slot, slot)), state=state
        )
        out, state = part.run(run)
        torch.testing.assert_close(out, whole[first:end], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[slot], whole_state[slot], atol=1e-5, rtol=1e-5)


def test_a_checkpoint_is_the_state_of_a_shorter_prompt() -> None:
    step = ssd_step([120], CPU, checkpoints=[(0, 77)])
    _, state = step.run(ssd)
    slot = step.batch.sources.tolist()
    _, short = step.sliced(slice(0, 77), StateBatch.plan([77], slot, slot)).run(ssd)
    torch.testing.assert_close(state[step.batch.checkpoints.max()], short[slot[0]])


def test_tensors_that_do_not_fit_are_refused() -> None:
    step = ssd_step([4], CPU)

    def run(**changes: Tensor | TimeSteps) -> None:
        dataclasses.replace(step, **changes).run(ssd)  # type: ignore[arg-type]

    steps = step.time_steps
    with pytest.raises(ValueError, match="do not fit each other"):
        run(c=step.c[:, :1])
    with pytest.raises(ValueError, match="give one dtype"):
        run(b=step.b.double())
    with pytest.raises(ValueError, match="give contiguous"):
        run(state=step.state[..., :16])
    with pytest.raises(ValueError, match="one number for each of 4 heads"):
        run(skip=torch.ones(3))
    with pytest.raises(ValueError, match="give raw"):
        run(time_steps=dataclasses.replace(steps, raw=steps.raw[:, :1]))
    with pytest.raises(ValueError, match="limits of 0 or more, in order"):
        run(time_steps=dataclasses.replace(steps, limits=(1.0, 0.5)))
    with pytest.raises(ValueError, match="must be contiguous"):
        run(x=step.x.mT.contiguous().mT)
