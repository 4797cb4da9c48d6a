"""The reference of the gated delta rule against that of transformers; the CPU's C++ and torch against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton.kernels.gated_delta import Gate, StateBatch, cpu, gated_delta, reference

from .delta_cases import SCALE, SMALL, DeltaStep, Heads, delta_step
from .state_cases import assert_same_states

CPU = torch.device("cpu")
RAGGED = [1, 1, 0, 63, 64, 65, 200]
ON_CPUS = [gated_delta, cpu.by_spans]
CHECKPOINTS = [(4, 64), (6, 64), (6, 100), (6, 200)]


@pytest.mark.slow
def test_the_definition_agrees_with_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    step = delta_step([20], CPU, heads=Heads(4, 4, 16, 32))
    out, state = step.run(reference.gated_delta)
    g, beta = step.gate.values(torch.float32)
    initial = step.state[step.batch.sources.long()]
    # transformers scales by the head's size. The norm would remove a scale of its input.
    q = step.q * (SCALE * step.q.shape[2] ** 0.5)
    normed_q = reference.normed(step.q, 1e-6) * (SCALE * q.shape[2] ** 0.5)
    expected, expected_state = modeling.torch_recurrent_gated_delta_rule(
        normed_q[None], reference.normed(step.k, 1e-6)[None], step.v[None], g[None], beta[None], initial, True
    )
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[step.batch.targets.long()], expected_state, atol=1e-5, rtol=1e-5)


def test_equal_decays_in_all_dimensions_equal_one_decay_per_head() -> None:
    step = delta_step([50], CPU, raw_gate=False)
    wide = step.gate.decay[..., None].expand(-1, -1, 32)
    out, state = step.run(reference.gated_delta)
    again, again_state = DeltaStep(step.q, step.k, step.v, Gate(wide, step.gate.beta), step.state, step.batch).run(
        reference.gated_delta
    )
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(again_state, state, equal_nan=True)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("heads", "beta_scale"), [(SMALL, 1.0), (Heads(2, 2, 96, 192), 2.0), (Heads(1, 3, 16, 48), 1.0)], ids=str
)
@pytest.mark.parametrize("run", ON_CPUS)
def test_prompts_give_what_single_tokens_give(
    heads: Heads, beta_scale: float, dtype: torch.dtype, per_dim: bool, run: Callable[..., Tensor]
) -> None:
    case = {"heads": heads, "beta_scale": beta_scale, "fresh": [1, 5], "checkpoints": CHECKPOINTS}
    delta_step(RAGGED, CPU, dtype=dtype, per_dim=per_dim, **case).check(run)  # type: ignore[arg-type]


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("run", ON_CPUS)
@pytest.mark.parametrize("in_place", [True, False])
def test_decodes_and_chunks_of_one_token_and_padding_share_a_step(in_place: bool, run: Callable[..., Tensor]) -> None:
    case = {"checkpoints": [(3, 64), (3, 80), (4, 1)], "fresh": [1, 5], "padding": 3, "in_place": in_place}
    delta_step([1, 1, 1, 130, 1, 20], CPU, **case).check(run)  # type: ignore[arg-type]
    delta_step([5, 1, 0, 2, 3], CPU, decode_tokens=5, fresh=[3], in_place=in_place).check(run)


@pytest.mark.parametrize("run", ON_CPUS)
def test_a_checkpoint_may_overwrite_the_state_that_was_read(run: Callable[..., Tensor]) -> None:
    checkpoints = [(0, 8), (1, 64), (2, 100), (2, 200)]
    step = delta_step([65, 130, 270], CPU, checkpoints=checkpoints, in_place=False, keeps_in_source=True)
    assert set(step.batch.sources.tolist()) <= set(step.batch.checkpoints.tolist())
    step.check(run)


@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_token_gives_the_same_bits_however_its_prompt_is_cut_and_in_any_batch(
    dtype: torch.dtype, per_dim: bool, num_threads: int
) -> None:
    heads = Heads(2, 4, 32, 80)
    step = delta_step([70, 150], CPU, heads=heads, dtype=dtype, per_dim=per_dim, fresh=[0])
    whole, whole_state = step.run(gated_delta)
    state, (_, slot) = step.state.clone(), step.batch.targets.tolist()
    first = 70
    for length in (32, 1, 1, 63, 5, 48):
        tokens = slice(first, first + length)
        source, first = slot if first > 70 else step.batch.sources[1].item(), first + length
        batch = StateBatch.plan([length], [source], [slot])
        gate = step.gate.sliced(tokens)
        out = gated_delta(step.q[tokens], step.k[tokens], step.v[tokens], gate, state, batch, scale=SCALE)
        assert torch.equal(out, whole[tokens])
    assert torch.equal(state[slot], whole_state[slot])


def test_tokens_may_have_any_stride() -> None:
    step = delta_step([40, 3], CPU, dtype=torch.bfloat16, in_place=False)
    wide = torch.cat([step.q.flatten(1), step.k.flatten(1), step.v.flatten(1), step.gate.decay, step.gate.beta], 1)
    *heads, decay, beta = wide.split([64, 64, 128, 4, 4], 1)
    q, k, v = (part.unflatten(1, (-1, 32)) for part in heads)
    views = replace(step, q=q, k=k, v=v, gate=replace(step.gate, decay=decay, beta=beta))
    out = torch.zeros(43, 200, dtype=torch.bfloat16)
    result, state = views.run(gated_delta, out=out[:, 8:136].unflatten(1, (-1, 32)))
    expected, expected_state = step.run(gated_delta)
    assert torch.equal(result, expected)
    assert torch.equal(out[:, 8:136].unflatten(1, (-1, 32)), expected)
    assert not out[:, :8].any()
    assert not out[:, 136:].any()
    assert_same_states(state, expected_state)


@pytest.mark.parametrize(
    ("dtype", "heads", "compiled"),
    [
        (torch.bfloat16, SMALL, True),
        (torch.float32, Heads(1, 1, 16, 16), True),
        (torch.float64, SMALL, False),
        (torch.float32, Heads(1, 1, 24, 16), False),
        (torch.float32, Heads(1, 1, 16, 24), False),
    ],
    ids=str,
)
def test_torch_serves_shapes_that_the_native_kernel_does_not(
    dtype: torch.dtype, heads: Heads, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> Tensor:
        raise AssertionError("by spans")

    step = delta_step([4], CPU, heads=heads).converted(dtype)
    if dtype != torch.float64:
        step = replace(step, state=step.state.float(), gate=delta_step([4], CPU, heads=heads).gate)
    monkeypatch.setattr(cpu, "by_spans", refused)
    if compiled:
        step.run(gated_delta)
        return
    with pytest.raises(AssertionError, match="by spans"):
        step.run(gated_delta)


def test_a_beta_scale_multiplies_beta() -> None:
    step = delta_step([20], CPU, beta_scale=2.0)
    out, state = step.run(reference.gated_delta)
    g, beta = Gate(step.gate.decay, step.gate.beta, step.gate.log_rate, step.gate.bias).values(torch.float32)
    plain = DeltaStep(step.q, step.k, step.v, Gate(g, 2 * beta), step.state, step.batch)
    again, again_state = plain.run(reference.gated_delta)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(again_state, state, equal_nan=True)


@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("strength", [0.0, 50.0])
def test_decays_may_be_zero_or_nearly_complete(per_dim: bool, strength: float) -> None:
    step = delta_step([3, 150], CPU, per_dim=per_dim, raw_gate=False, strength=strength, norm_eps=None)
    step.check(gated_delta)
    step.check(cpu.by_spans, slack=100.0)  # a difference of summed decays is only as exact as the sums


@pytest.mark.parametrize("run", [reference.gated_delta, *ON_CPUS])
def test_a_prompt_may_be_cut_anywhere(run: Callable[..., Tensor]) -> None:
    step = delta_step([150], CPU)
    whole, whole_state = step.run(run)
    state = step.state.clone()
    slot = step.batch.sources.tolist()
    for first, end in ((0, 70), (70, 71), (71, 150)):
        tokens = slice(first, end)
        batch = StateBatch.plan([end - first], slot, slot)
        out = run(step.q[tokens], step.k[tokens], step.v[tokens], step.gate.sliced(tokens), state, batch, scale=SCALE)
        torch.testing.assert_close(out, whole[tokens], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[slot], whole_state[slot], atol=1e-5, rtol=1e-5)


def test_a_checkpoint_is_the_state_of_a_shorter_prompt() -> None:
    step = delta_step([120], CPU, checkpoints=[(0, 77)])
    _, state = step.run(gated_delta)
    kept = step.batch.checkpoints.max().item()
    slot = step.batch.sources.tolist()
    short = step.state.clone()
    tokens = slice(0, 77)
    batch = StateBatch.plan([77], slot, slot)
    gated_delta(step.q[tokens], step.k[tokens], step.v[tokens], step.gate.sliced(tokens), short, batch, scale=SCALE)
    torch.testing.assert_close(state[kept], short[slot[0]])


def test_tensors_that_do_not_fit_are_refused() -> None:
    step = delta_step([4], CPU)

    def run(**changes: Tensor | Gate) -> None:
        given = {"q": step.q, "k": step.k, "v": step.v, "gate": step.gate, "state": step.state, **changes}
        gated_delta(*given.values(), step.batch, scale=1.0)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="do not fit each other"):
        run(k=step.k[:, :1])
    with pytest.raises(ValueError, match="give contiguous"):
        run(state=step.state.mT[..., :16])
    with pytest.raises(ValueError, match="give decay"):
        run(gate=Gate(step.gate.decay[:, :1], step.gate.beta))
    with pytest.raises(ValueError, match="give decay"):
        run(gate=Gate(step.gate.decay, step.gate.beta, step.gate.log_rate))
    with pytest.raises(ValueError, match="must be contiguous"):
        run(v=step.v.mT.contiguous().mT)
