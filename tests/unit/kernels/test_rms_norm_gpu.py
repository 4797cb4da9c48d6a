"""RMSNorm in Triton: interpreted in CI, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.rms_norm import reference

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate

gpu = pytest.importorskip("baton.kernels.rms_norm.gpu")

EPS = 1e-6


def check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> None:
    expected = reference.rms_norm(x, weight, EPS, residual)
    result = gpu.rms_norm(x, weight, EPS, residual)
    if residual is None:
        assert_as_accurate(result, reference.rms_norm(x.double(), weight.double(), EPS), expected)
        return
    assert torch.equal(result[1], expected[1])
    assert_as_accurate(result[0], reference.rms_norm(expected[1].double(), weight.double(), EPS), expected[0])


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 17), (2, 1000), (2, 3, 48), (64,), (1025, 16)])
def test_rows_of_any_width_and_number(
    dtype: torch.dtype, with_residual: bool, shape: tuple[int, ...], triton_device: torch.device
) -> None:
    x, residual, weight = (torch.randn(size).to(triton_device, dtype) for size in (shape, shape, shape[-1:]))
    check(x, weight, residual if with_residual else None)


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_weight_in_float32_is_not_rounded(with_residual: bool, triton_device: torch.device) -> None:
    x, residual = torch.randn(2, 3, 70).to(triton_device, torch.float16)
    weight = 1 + torch.randn(70, device=triton_device) / 100
    check(x, weight, residual if with_residual else None)
    result = gpu.rms_norm(x, weight, EPS)
    assert (result != gpu.rms_norm(x, weight.half(), EPS)).any()


def test_rows_may_be_a_view_with_a_stride(triton_device: torch.device) -> None:
    wide, weight = torch.randn(10, 100, device=triton_device), torch.randn(32, device=triton_device)
    check(wide[:, 20:52], weight, wide[:, 60:92])
    check(wide.T[20:52, :32].T.contiguous().T[:, :10].T, weight, None)


def test_a_row_of_zeros_stays_zero(triton_device: torch.device) -> None:
    zeros, ones = torch.zeros(2, 32, device=triton_device), torch.ones(32, device=triton_device)
    assert torch.equal(gpu.rms_norm(zeros, ones, EPS), zeros)


@pytest.mark.parametrize("residual", [None, torch.zeros(3, 32)])
def test_shapes_that_do_not_fit_are_refused(residual: torch.Tensor | None) -> None:
    weight = torch.ones(31) if residual is None else torch.ones(32)
    with pytest.raises(ValueError, match="give weight"):
        gpu.rms_norm(torch.zeros(2, 32), weight, EPS, residual)


@pytest.mark.parametrize("weight", ["*bf16", "*fp32"])
def test_loads_are_wide_and_a_row_stays_in_registers(weight: str) -> None:
    types = {**dict.fromkeys(("x", "residual", "out", "total"), "*bf16"), "weight": weight}
    sizes = {"num_rows": "i32", "x_stride": "i32:16", "residual_stride": "i32:16", "eps": "fp32"}
    for width in (1024, 4096, 16384):
        _, num_warps = gpu._shape(1, width)
        constants = {"WIDTH": width, "COLUMNS": width, "ROWS": 1}
        compiled = compile_for_h200(gpu._rms_norm_kernel, {**types, **sizes}, constants, num_warps=num_warps)
        assert compiled.widest_load_bytes == 16
        assert "griddepcontrol.wait" in compiled.ptx


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 1024), (256, 128), (3, 5120), (1024, 4096), (1500, 2560), (2, 16384)])
def test_bfloat16_on_the_device(with_residual: bool, shape: tuple[int, ...]) -> None:
    x, residual, weight = (torch.randn(size).to("cuda", torch.bfloat16) for size in (shape, shape, shape[-1:]))
    check(x, weight, residual if with_residual else None)


@pytest.mark.gpu
def test_rows_past_4_gib_are_found() -> None:
    rows = (1 << 32) // 4096 // 2 + 5
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(4096, dtype=torch.bfloat16, device="cuda")
    x[-2:] = torch.randn(2, 4096)
    assert torch.equal(gpu.rms_norm(x, weight, EPS)[-2:], gpu.rms_norm(x[-2:].clone(), weight, EPS))
