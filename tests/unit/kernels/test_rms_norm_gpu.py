"""RMSNorm in Triton: interpreted in CI, compiled on machines with a GPU."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.rms_norm import Gating, gated_rms_norm, reference

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate

gpu = pytest.importorskip("baton.kernels.rms_norm.gpu")

pytestmark = pytest.mark.exhaustive

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


def check_gated(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, gating: Gating, *, gate_first: bool = False
) -> None:
    order = {"gating": gating, "gate_first": gate_first}
    result = gpu.gated_rms_norm(x, weight, gate, EPS, **order)
    exact = reference.gated_rms_norm(x.double(), weight.double(), gate.double(), EPS, **order)
    assert_as_accurate(result, exact, reference.gated_rms_norm(x, weight, gate, EPS, **order))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("gating", list(Gating), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 2, 64), (1, 1, 1), (5, 3, 48), (70, 4, 128), (2, 1, 5000)])
def test_gated_heads_of_any_width_and_number(
    shape: tuple[int, ...], dtype: torch.dtype, gating: Gating, triton_device: torch.device
) -> None:
    x, gate = (torch.randn(shape).to(triton_device, dtype) for _ in range(2))
    check_gated(x, torch.randn(shape[2], device=triton_device), gate, gating)


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(0, 2, 64), (5, 3, 48), (40, 1, 200), (2, 1, 5000)])
def test_each_group_has_a_weight_and_the_gate_comes_before_or_behind(
    shape: tuple[int, ...], dtype: torch.dtype, gate_first: bool, triton_device: torch.device
) -> None:
    x, gate = (torch.randn(shape).to(triton_device, dtype) for _ in range(2))
    weight = torch.randn(shape[1:]).to(triton_device, dtype)
    check_gated(x, weight, gate, Gating.SILU, gate_first=gate_first)


def test_a_gate_before_the_norm_is_the_formula() -> None:
    x, gate, weight = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(2, 8)
    gated = x * torch.nn.functional.silu(gate)
    expected = torch.nn.functional.rms_norm(gated, (8,), eps=EPS) * weight
    torch.testing.assert_close(gated_rms_norm(x, weight, gate, EPS, gate_first=True), expected)


def test_gates_may_be_a_view_of_a_wider_projection(triton_device: torch.device) -> None:
    wide, weight = torch.randn(7, 6 * 32, device=triton_device), torch.randn(32, device=triton_device)
    x, gate = wide[:, :64].unflatten(1, (2, 32)), wide[:, 96:160].unflatten(1, (2, 32))
    check_gated(x, weight, gate, Gating.SILU)
    out = torch.empty(7, 3, 32, device=triton_device)[:, :2]
    assert gpu.gated_rms_norm(x, weight, gate, EPS, out=out) is out
    assert torch.equal(out, gpu.gated_rms_norm(x, weight, gate, EPS))


def test_gates_that_do_not_fit_are_refused() -> None:
    x, weight = torch.zeros(2, 3, 8), torch.ones(8)
    with pytest.raises(ValueError, match="give x and gate"):
        gated_rms_norm(x, weight, x[:, :1], EPS)
    with pytest.raises(ValueError, match="must be contiguous"):
        gated_rms_norm(x, weight, x.mT.contiguous().mT, EPS)


@pytest.mark.slow
@pytest.mark.parametrize("weight", ["*bf16", "*fp32"])
def test_loads_are_wide_and_a_row_stays_in_registers(weight: str) -> None:
    types = {**dict.fromkeys(("x", "residual", "out", "total"), "*bf16"), "weight": weight}
    sizes = {"num_rows": "i32", "x_stride": "i32:16", "residual_stride": "i32:16", "eps": "fp32"}
    for width in (1024, 4096, 16384):
        _, num_warps = gpu.launch_shape(1, width)
        constants = {"WIDTH": width, "COLUMNS": width, "ROWS": 1}
        compiled = compile_for_h200(gpu.rms_norm_kernel, {**types, **sizes}, constants, num_warps=num_warps)
        assert compiled.widest_load_bytes == 16
        assert "griddepcontrol.wait" in compiled.ptx


def test_gated_heads_are_loaded_16_bytes_at_a_time() -> None:
    types = {**dict.fromkeys(("x", "gate", "out"), "*bf16"), "weight": "*fp32", "num_rows": "i32", "eps": "fp32"}
    strides = dict.fromkeys(("x_stride", "gate_stride", "out_stride"), "i32:16")
    words = {"HEADS": 32, "WIDTH": 128, "COLUMNS": 128, "ROWS": 32, "SIGMOID": False}
    for of_heads in (False, True):
        order = {"GATE_FIRST": of_heads, "WEIGHT_OF_HEADS": of_heads}
        compiled = compile_for_h200(gpu.gated_rms_norm_kernel, {**types, **strides}, {**words, **order}, num_warps=4)
        assert compiled.widest_load_bytes == 16


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", [(1, 32, 128), (700, 32, 128), (5, 3, 200)])
def test_gated_bfloat16_on_the_device(shape: tuple[int, ...]) -> None:
    x, gate = (torch.randn(shape).to("cuda", torch.bfloat16) for _ in range(2))
    check_gated(x, torch.randn(shape[2], device="cuda"), gate, Gating.SILU)
    check_gated(x, torch.randn(shape[1:], device="cuda"), gate, Gating.SILU, gate_first=True)


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
