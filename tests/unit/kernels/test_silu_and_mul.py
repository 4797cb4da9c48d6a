from __future__ import annotations

import pytest
import torch

from baton.kernels.silu_and_mul import reference, silu_and_mul

from .kernel_checks import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 16), (1, 1), (1, 3072), (7, 33), (50, 1040), (64, 1024)])
def test_any_number_of_tokens_and_width(dtype: torch.dtype, num_tokens: int, width: int, num_threads: int) -> None:
    gate_up = (torch.randn(num_tokens, 2 * width) * 4).to(dtype)
    exact = reference.silu_and_mul(gate_up.double())
    assert_as_accurate(silu_and_mul(gate_up), exact, reference.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_gates_give_the_limits(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    gate_up = torch.tensor([[largest, -largest, 0.0, -200.0, 1.0, 1.0, 1.0, 1.0]]).to(dtype)
    result = silu_and_mul(gate_up)[0].double()
    assert result[0] == largest
    assert abs(result[1]) == 0
    assert result[2] == 0
    assert abs(result[3]) < 1e-30


def test_not_a_number_stays_visible() -> None:
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]])
    assert silu_and_mul(gate_up).isnan().all()


def test_the_result_goes_where_it_is_wanted() -> None:
    gate_up, out = torch.randn(5, 64), torch.full((5, 32), float("nan"))
    assert silu_and_mul(gate_up, out) is out
    assert torch.equal(out, silu_and_mul(gate_up))


def test_rows_may_be_a_view_with_a_stride() -> None:
    wide = torch.randn(6, 100)
    assert torch.equal(silu_and_mul(wide[:, 10:74]), silu_and_mul(wide[:, 10:74].contiguous()))


@pytest.mark.parametrize("out", [torch.empty(5, 31), torch.empty(5, 32, dtype=torch.bfloat16), torch.empty(32, 5).T])
def test_an_output_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="give contiguous"):
        silu_and_mul(torch.zeros(5, 64), out)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 \* width"):
        silu_and_mul(torch.zeros(5, 63))
