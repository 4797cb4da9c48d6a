"""The gated activation in Triton: interpreted in CI, compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.silu_and_mul import reference

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate

gpu = pytest.importorskip("baton.kernels.silu_and_mul.gpu")


def check(gate_up: torch.Tensor) -> None:
    exact = reference.silu_and_mul(gate_up.double())
    assert_as_accurate(gpu.silu_and_mul(gate_up), exact, reference.silu_and_mul(gate_up))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 16), (1, 1), (3, 33), (2, 512), (2, 700)])
def test_any_number_of_tokens_and_width(
    dtype: torch.dtype, num_tokens: int, width: int, triton_device: torch.device
) -> None:
    check((torch.randn(num_tokens, 2 * width) * 4).to(triton_device, dtype))


def test_programs_of_large_batches_are_wider(monkeypatch: pytest.MonkeyPatch, triton_device: torch.device) -> None:
    monkeypatch.setattr(gpu, "FEW_VALUES", 10)
    check(torch.randn(3, 2 * 2500, device=triton_device))


def test_extreme_gates_give_the_limits(triton_device: torch.device) -> None:
    gate_up = torch.tensor([[3e38, -3e38, 0.0, -200.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0]], device=triton_device)
    largest, zero, also_zero, tiny, unknown = gpu.silu_and_mul(gate_up)[0].tolist()
    assert largest == pytest.approx(3e38)
    assert (zero, also_zero, tiny) == (0, 0, 0)
    assert unknown != unknown, "not a number stays visible"


def test_the_result_goes_where_it_is_wanted(triton_device: torch.device) -> None:
    wide = torch.randn(6, 100, device=triton_device)
    out = torch.full((6, 32), float("nan"), device=triton_device)
    assert gpu.silu_and_mul(wide[:, 10:74], out) is out
    assert torch.equal(out, gpu.silu_and_mul(wide[:, 10:74].contiguous()))


@pytest.mark.parametrize("out", [torch.empty(5, 31), torch.empty(5, 32, dtype=torch.bfloat16), torch.empty(32, 5).T])
def test_an_output_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="give contiguous"):
        gpu.silu_and_mul(torch.zeros(5, 64), out)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 \* width"):
        gpu.silu_and_mul(torch.zeros(5, 63))


def test_loads_are_wide() -> None:
    types = {"gate_up": "*bf16", "out": "*bf16", "stride": "i32:16"}
    for columns, num_warps in ((512, 2), (2048, 4)):
        constants = {"WIDTH": 12288, "COLUMNS": columns}
        compiled = compile_for_h200(gpu._silu_and_mul_kernel, types, constants, num_warps=num_warps)
        assert compiled.widest_load_bytes == 16


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", [(1, 3072), (256, 12288), (1000, 1408)])
def test_bfloat16_on_the_device(shape: tuple[int, int]) -> None:
    check((torch.randn(shape[0], 2 * shape[1]) * 4).to("cuda", torch.bfloat16))


@pytest.mark.gpu
def test_rows_past_4_gib_are_found() -> None:
    rows = (1 << 32) // 8192 // 2 + 5
    gate_up = torch.zeros(rows, 8192, dtype=torch.bfloat16, device="cuda")
    gate_up[-2:] = torch.randn(2, 8192)
    assert torch.equal(gpu.silu_and_mul(gate_up)[-2:], gpu.silu_and_mul(gate_up[-2:].clone()))
