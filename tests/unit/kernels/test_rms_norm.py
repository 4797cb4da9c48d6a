from __future__ import annotations

import pytest
import torch

from baton.kernels.rms_norm import Gating, gated_rms_norm, reference, rms_norm

from .kernel_checks import assert_as_accurate

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (1, 1000), (3, 17), (200, 1024), (4, 5, 48), (64,)])
def test_rows_of_any_width_and_number(dtype: torch.dtype, shape: tuple[int, ...], num_threads: int) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    assert_as_accurate(rms_norm(x, weight, EPS), exact, reference.rms_norm(x, weight, EPS))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1000), (200, 1024), (4, 5, 48)])
def test_the_residual_is_added_before_the_norm_and_returned(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = (torch.randn(size).to(dtype) for size in (shape, shape, shape[-1:]))
    before = residual.clone()
    out, total = rms_norm(x, weight, EPS, residual)
    expected_out, expected_total = reference.rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, expected_total)
    assert torch.equal(residual, before)
    exact = reference.rms_norm(expected_total.double(), weight.double(), EPS)
    assert_as_accurate(out, exact, expected_out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_a_weight_in_float32_is_not_rounded(
    dtype: torch.dtype, with_residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, residual, weight = torch.randn(9, 70).to(dtype), torch.randn(9, 70).to(dtype), 1 + torch.randn(70) / 100
    given = (residual,) if with_residual else ()
    expected = reference.rms_norm(x, weight, EPS, *given)
    rounded = reference.rms_norm(x, weight.to(dtype), EPS, *given)
    monkeypatch.setattr(reference, "rms_norm", lambda *args: pytest.fail("the reference was called"))
    out = rms_norm(x, weight, EPS, *given)
    if with_residual:
        assert torch.equal(out[1], expected[1])
        out, expected, rounded = out[0], expected[0], rounded[0]
    assert (out != expected).float().mean() < 0.01, "results may differ by the order of sums only"
    assert (rounded != expected).float().mean() > 0.1


def test_a_residual_may_have_another_dtype() -> None:
    x, residual, weight = torch.randn(3, 32).bfloat16(), torch.randn(3, 32), torch.randn(32).bfloat16()
    out, _ = rms_norm(x, weight, EPS, residual)
    assert_as_accurate(out, reference.rms_norm(x.double(), weight.double(), EPS, residual.double())[0], out)


def test_a_row_of_zeros_stays_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 32), torch.ones(32), EPS), torch.zeros(2, 32))


def test_rows_may_be_a_view_with_a_stride() -> None:
    wide, weight = torch.randn(10, 100).bfloat16(), torch.randn(32).bfloat16()
    expected = rms_norm(wide[:, 20:52].contiguous(), weight, EPS)
    assert torch.equal(rms_norm(wide[:, 20:52], weight, EPS), expected)
    assert torch.equal(rms_norm(wide.T[20:52].T.contiguous().T.contiguous().T, weight, EPS), expected)


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_row_gives_the_same_bits_alone_as_in_a_batch(with_residual: bool, num_threads: int) -> None:
    x, residual = torch.randn(2, 300, 1024).bfloat16()
    weight = torch.randn(1024).bfloat16()

    def norm(rows: slice) -> torch.Tensor:
        if with_residual:
            return rms_norm(x[rows], weight, EPS, residual[rows])[0]
        return rms_norm(x[rows], weight, EPS)

    together = norm(slice(None))
    for rows in (slice(0, 1), slice(150, 151), slice(290, 300)):
        assert torch.equal(norm(rows), together[rows])


@pytest.mark.parametrize("residual", [None, torch.zeros(3, 32)])
def test_shapes_that_do_not_fit_are_refused(residual: torch.Tensor | None) -> None:
    weight = torch.ones(31) if residual is None else torch.ones(32)
    with pytest.raises(ValueError, match="give weight"):
        rms_norm(torch.zeros(2, 32), weight, EPS, residual)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [40, 128])
def test_heads_are_normed_with_a_gate_behind_or_before(
    dim: int, dtype: torch.dtype, wide_weight: bool, gate_first: bool, gating: Gating
) -> None:
    x, gate = torch.randn(30, 3 * 2 * dim).to(dtype).split(3 * dim, dim=1)
    x, gate = (part.unflatten(1, (3, dim)) for part in (x, 4 * gate))
    weight = torch.randn(3, dim) if gate_first else torch.randn(dim)
    weight = weight if wide_weight else weight.to(dtype)
    out = torch.zeros(30, 4 * dim, dtype=dtype)
    options = {"gating": gating, "gate_first": gate_first}
    view = out[:, dim:].unflatten(1, (3, dim))
    result = gated_rms_norm(x, weight, gate, EPS, out=view, **options)
    exact = reference.gated_rms_norm(x.double(), weight.double(), gate.double(), EPS, **options)
    assert_as_accurate(result, exact, reference.gated_rms_norm(x, weight, gate, EPS, **options))
    assert torch.equal(out[:, dim:], result.flatten(1))
    assert not out[:, :dim].any()
    assert torch.equal(gated_rms_norm(x, weight, gate, EPS, **options), result)


def test_a_normed_head_gives_the_same_bits_alone_as_in_a_batch(num_threads: int) -> None:
    x, gate, weight = torch.randn(300, 4, 64).bfloat16(), torch.randn(300, 4, 64).bfloat16(), torch.randn(64)
    together = gated_rms_norm(x, weight, gate, EPS)
    for rows in (slice(0, 1), slice(290, 300)):
        assert torch.equal(gated_rms_norm(x[rows], weight, gate[rows], EPS), together[rows])
