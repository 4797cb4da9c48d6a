"""The definition of the gated delta rule against another one, and the CPU's chunks against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from baton.kernels.gated_delta import Gate, StateBatch, cpu, gated_delta, reference

from .delta_cases import SCALE, SMALL, DeltaStep, Heads, delta_step

CPU = torch.device("cpu")
RAGGED = [1, 1, 0, 63, 64, 65, 200]
CHECKPOINTS = [(4, 64), (6, 64), (6, 100), (6, 200)]


def test_the_definition_agrees_with_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    step = delta_step([20], CPU, heads=Heads(4, 4, 16, 32))
    out, state = step.run(reference.gated_delta)
    g, beta = step.gate.values(torch.float32)
    initial = step.state[step.batch.sources.long()]
    q = step.q * (SCALE * step.q.shape[2] ** 0.5)  # that one scales by the head's size; normed, it would be lost
    normed_q = reference.normed(step.q, 1e-6) * (SCALE * q.shape[2] ** 0.5)
    expected, expected_state = modeling.torch_recurrent_gated_delta_rule(
        normed_q[None], reference.normed(step.k, 1e-6)[None], step.v[None], g[None], beta[None], initial, True
    )
    torch.testing.assert_close(out, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[step.batch.targets.long()], expected_state, atol=1e-5, rtol=1e-5)


def test_a_decay_that_is_the_same_in_all_dimensions_is_one_a_head() -> None:
    step = delta_step([50], CPU, raw_gate=False)
    wide = step.gate.decay[..., None].expand(-1, -1, 32)
    out, state = step.run(reference.gated_delta)
    again, again_state = DeltaStep(step.q, step.k, step.v, Gate(wide, step.gate.beta), step.state, step.batch).run(
        reference.gated_delta
    )
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(again_state, state, equal_nan=True)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("heads", "beta_scale"), [(SMALL, 1.0), (Heads(2, 2, 96, 192), 2.0)], ids=str)
def test_chunks_give_what_single_tokens_do(heads: Heads, beta_scale: float, dtype: torch.dtype, per_dim: bool) -> None:
    case = {"heads": heads, "beta_scale": beta_scale, "fresh": [1, 5], "checkpoints": CHECKPOINTS}
    delta_step(RAGGED, CPU, dtype=dtype, per_dim=per_dim, **case).check(gated_delta)  # type: ignore[arg-type]


def test_a_scale_of_beta_multiplies_what_is_written_for_a_key() -> None:
    step = delta_step([20], CPU, beta_scale=2.0)
    out, state = step.run(reference.gated_delta)
    g, beta = Gate(step.gate.decay, step.gate.beta, step.gate.log_rate, step.gate.bias).values(torch.float32)
    plain = DeltaStep(step.q, step.k, step.v, Gate(g, 2 * beta), step.state, step.batch)
    again, again_state = plain.run(reference.gated_delta)
    torch.testing.assert_close(again, out)
    torch.testing.assert_close(again_state, state, equal_nan=True)


@pytest.mark.parametrize("per_dim", [False, True])
@pytest.mark.parametrize("strength", [0.0, 50.0])
def test_decays_may_be_nothing_or_nearly_all(per_dim: bool, strength: float) -> None:
    step = delta_step([3, 150], CPU, per_dim=per_dim, raw_gate=False, strength=strength, norm_eps=None)
    step.check(gated_delta, slack=100.0)  # differences of sums of decays are as exact as these sums


@pytest.mark.parametrize("run", [reference.gated_delta, cpu.gated_delta])
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
