from __future__ import annotations

import pytest
import torch

from baton.kernels.activation import (
    Activation,
    Pointwise,
    activate_each,
    activation_and_mul,
    gate_heads,
    reference,
    soft_cap,
)

from .kernel_checks import assert_as_accurate

pytestmark = pytest.mark.exhaustive

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MANY = 64  # tokens: for a single value the reference may be exact by chance
EVERY = pytest.mark.parametrize("activation", Activation)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 16), (1, 1), (1, 3072), (7, 33), (50, 1040), (64, 1024)])
@EVERY
def test_any_number_of_tokens_and_width(
    activation: Activation, dtype: torch.dtype, num_tokens: int, width: int, num_threads: int
) -> None:
    gate_up = (torch.randn(MANY, 2 * width) * 4).to(dtype)
    exact = reference.activation_and_mul(gate_up.double(), activation)
    same = reference.activation_and_mul(gate_up, activation)
    whole = activation_and_mul(gate_up, activation)
    assert_as_accurate(whole, exact, same)
    assert torch.equal(activation_and_mul(gate_up[:num_tokens], activation), whole[:num_tokens])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EVERY
def test_extreme_gates_give_the_limits(activation: Activation, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    gate_up = torch.tensor([[largest, -largest, 0.0, -200.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    result = activation_and_mul(gate_up, activation)[0].double()
    assert result[0] == largest
    assert abs(result[1]) == 0
    assert result[2] == 0
    assert abs(result[3]) < 1e-30


@EVERY
def test_nan_propagates(activation: Activation) -> None:
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]])
    assert activation_and_mul(gate_up, activation).isnan().all()


def test_the_result_is_written_to_out() -> None:
    gate_up, out = torch.randn(5, 64), torch.full((5, 32), float("nan"))
    assert activation_and_mul(gate_up, Activation.SILU, out) is out
    assert torch.equal(out, activation_and_mul(gate_up, Activation.SILU))


def test_rows_may_be_a_view_with_a_stride() -> None:
    wide = torch.randn(6, 100)
    contiguous = activation_and_mul(wide[:, 10:74].contiguous(), Activation.SILU)
    assert torch.equal(activation_and_mul(wide[:, 10:74], Activation.SILU), contiguous)


@pytest.mark.parametrize("out", [torch.empty(5, 31), torch.empty(5, 32, dtype=torch.bfloat16), torch.empty(32, 5).T])
def test_an_output_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="give contiguous"):
        activation_and_mul(torch.zeros(5, 64), Activation.SILU, out)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 \* width"):
        activation_and_mul(torch.zeros(5, 63), Activation.SILU)


def test_the_activations_are_those_of_their_names() -> None:
    gate = torch.linspace(-6, 6, 100)
    gate_up = torch.cat([gate, torch.ones(100)])[None]
    silu, gelu = (activation_and_mul(gate_up, activation)[0] for activation in (Activation.SILU, Activation.GELU_TANH))
    torch.testing.assert_close(silu, torch.nn.functional.silu(gate))
    torch.testing.assert_close(gelu, torch.nn.functional.gelu(gate, approximate="tanh"))
    assert (gelu - torch.nn.functional.gelu(gate)).abs().max() > 1e-4, "GELU_TANH must not be the exact GELU"


# ---- without gates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 16), (1, 1), (3, 33), (20, 5000)])
@pytest.mark.parametrize("activation", Pointwise)
def test_values_of_any_number_and_width_are_activated(
    activation: Pointwise, dtype: torch.dtype, num_rows: int, width: int
) -> None:
    x = (torch.randn(num_rows, width) * 4).to(dtype)
    exact, same = reference.activate_each(x.double(), activation), reference.activate_each(x.clone(), activation)
    assert activate_each(x, activation) is x
    assert_as_accurate(x, exact, same)


def test_squared_relu_is_the_formula() -> None:
    x = torch.tensor([[-3.0, -0.0, 0.5, 3.0, float("inf"), -float("inf"), float("nan")]])
    activated = activate_each(x, Pointwise.RELU2)[0]
    assert activated[:6].tolist() == [0.0, 0.0, 0.25, 9.0, float("inf"), 0.0]
    assert activated[6].isnan()


def test_columns_of_values_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        activate_each(torch.zeros(3, 2).T, Pointwise.RELU2)


# ---- the soft cap ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 16), (1, 1), (3, 33), (20, 5000)])
@pytest.mark.parametrize("cap", [0.5, 30.0, 1e5])
def test_logits_of_any_number_and_width_are_capped(
    cap: float, dtype: torch.dtype, num_rows: int, width: int, num_threads: int
) -> None:
    logits = (torch.randn(num_rows, width) * 20).to(dtype)
    exact = reference.soft_cap(logits.double(), cap)
    same = reference.soft_cap(logits.clone(), cap)
    given = logits.clone()
    assert soft_cap(given, cap) is given
    assert_as_accurate(given, exact, same)
    assert given.numel() == 0 or given.abs().max() <= cap


def test_extreme_logits_become_the_cap_and_nan_propagates() -> None:
    capped = soft_cap(torch.tensor([[float("inf"), -float("inf"), 3e38, -3e38, 0.0, float("nan")]]), 30.0)[0]
    assert capped[:5].tolist() == [30.0, -30.0, 30.0, -30.0, 0.0]
    assert capped[5].isnan()


def test_small_logits_keep_their_digits() -> None:
    logits = torch.tensor([[1e-30, -1e-5, 3e-3, 0.7, 3.7, 3.8, -3.7501]])
    torch.testing.assert_close(
        soft_cap(logits.clone(), 30.0).double(),
        30 * torch.tanh(logits.double() / 30),
        rtol=2e-6,
        atol=0.0,
        check_dtype=False,
    )


def test_rows_of_logits_may_have_a_stride_and_nothing_between_them_changes() -> None:
    wide = torch.randn(4, 50) * 40
    before = wide.clone()
    soft_cap(wide[:, 10:40], 30.0)
    torch.testing.assert_close(wide[:, 10:40], 30 * torch.tanh(before[:, 10:40] / 30))
    assert torch.equal(wide[:, :10], before[:, :10])
    assert torch.equal(wide[:, 40:], before[:, 40:])


@pytest.mark.parametrize("cap", [0.0, -1.0, float("nan")])
def test_a_cap_that_is_not_positive_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="more than 0"):
        soft_cap(torch.zeros(2, 3), cap)


def test_columns_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        soft_cap(torch.zeros(3, 2).T, 30.0)


def test_gates_of_heads_that_do_not_fit_are_refused() -> None:
    x = torch.randn(3, 2, 16)
    for gate in (torch.randn(3, 2, 8), torch.randn(3, 1, 16), torch.randn(2, 2, 16)):
        with pytest.raises(ValueError, match="or one value a head"):
            gate_heads(x, gate)
    with pytest.raises(ValueError, match="must be contiguous"):
        gate_heads(x, torch.randn(3, 2, 32)[..., ::2])
    with pytest.raises(ValueError, match=r"give contiguous \[3, 32\]"):
        gate_heads(x, x, torch.randn(3, 16))
