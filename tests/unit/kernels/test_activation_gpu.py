"""The gated activations and the soft cap in Triton: interpreted in CI, compiled on machines with a GPU."""

from __future__ import annotations

import pytest
import torch

from baton.kernels.activation import Activation, Pointwise, reference

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate

gpu = pytest.importorskip("baton.kernels.activation.gpu")

pytestmark = pytest.mark.exhaustive


EVERY = pytest.mark.parametrize("activation", Activation)


def check(gate_up: torch.Tensor, activation: Activation) -> None:
    exact = reference.activation_and_mul(gate_up.double(), activation)
    same = reference.activation_and_mul(gate_up, activation)
    assert_as_accurate(gpu.activation_and_mul(gate_up, activation), exact, same)


def check_cap(logits: torch.Tensor, cap: float) -> None:
    exact, same = reference.soft_cap(logits.double(), cap), reference.soft_cap(logits.clone(), cap)
    given = logits.clone()
    assert gpu.soft_cap(given, cap) is given
    assert_as_accurate(given, exact, same, slack=max(2.0, cap / 4))  # the error of tanh is relative to the cap


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 16), (1, 1), (3, 33), (2, 512), (2, 700)])
@EVERY
def test_any_number_of_tokens_and_width(
    activation: Activation, dtype: torch.dtype, num_tokens: int, width: int, triton_device: torch.device
) -> None:
    check((torch.randn(num_tokens, 2 * width) * 4).to(triton_device, dtype), activation)


def test_programs_of_large_batches_are_wider(monkeypatch: pytest.MonkeyPatch, triton_device: torch.device) -> None:
    monkeypatch.setattr(gpu, "FEW_VALUES", 10)
    check(torch.randn(3, 2 * 2500, device=triton_device), Activation.SILU)


@EVERY
def test_extreme_gates_give_the_limits(activation: Activation, triton_device: torch.device) -> None:
    gate_up = torch.tensor([[3e38, -3e38, 0.0, -200.0, float("nan"), 1.0, 1.0, 1.0, 1.0, 1.0]], device=triton_device)
    largest, zero, also_zero, tiny, unknown = gpu.activation_and_mul(gate_up, activation)[0].tolist()
    assert largest == pytest.approx(3e38)
    assert (zero, also_zero, tiny) == (0, 0, 0)
    assert unknown != unknown, "NaN must propagate"


def test_the_result_is_written_to_out(triton_device: torch.device) -> None:
    wide = torch.randn(6, 100, device=triton_device)
    out = torch.full((6, 32), float("nan"), device=triton_device)
    assert gpu.activation_and_mul(wide[:, 10:74], Activation.SILU, out) is out
    assert torch.equal(out, gpu.activation_and_mul(wide[:, 10:74].contiguous(), Activation.SILU))


@pytest.mark.parametrize("out", [torch.empty(5, 31), torch.empty(5, 32, dtype=torch.bfloat16), torch.empty(32, 5).T])
def test_an_output_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="give contiguous"):
        gpu.activation_and_mul(torch.zeros(5, 64), Activation.SILU, out)


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 \* width"):
        gpu.activation_and_mul(torch.zeros(5, 63), Activation.SILU)


@EVERY
def test_loads_are_wide(activation: Activation) -> None:
    types = {"gate_up": "*bf16", "out": "*bf16", "stride": "i32:16"}
    for columns, num_warps in ((512, 2), (2048, 4)):
        constants = {"WIDTH": 12288, "COLUMNS": columns, "ACTIVATION": activation.value}
        compiled = compile_for_h200(gpu.activation_and_mul_kernel, types, constants, num_warps=num_warps)
        assert compiled.widest_load_bytes == 16


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", [(1, 3072), (256, 12288), (1000, 1408)])
@EVERY
def test_bfloat16_on_the_device(activation: Activation, shape: tuple[int, int]) -> None:
    check((torch.randn(shape[0], 2 * shape[1]) * 4).to("cuda", torch.bfloat16), activation)


@pytest.mark.gpu
def test_rows_past_4_gib_are_found() -> None:
    rows = (1 << 32) // 8192 // 2 + 5
    gate_up = torch.zeros(rows, 8192, dtype=torch.bfloat16, device="cuda")
    gate_up[-2:] = torch.randn(2, 8192)
    last = gpu.activation_and_mul(gate_up[-2:].clone(), Activation.SILU)
    assert torch.equal(gpu.activation_and_mul(gate_up, Activation.SILU)[-2:], last)


# ---- without gates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 16), (1, 1), (3, 33), (2, 700)])
def test_squares_of_any_number_and_width(
    dtype: torch.dtype, num_rows: int, width: int, triton_device: torch.device
) -> None:
    wide = (torch.randn(num_rows, width + 8) * 4).to(triton_device, dtype)
    x, behind = wide[:, :width], wide[:, width:].clone()
    exact = reference.activate_each(x.double(), Pointwise.RELU2)
    same = reference.activate_each(x.clone(), Pointwise.RELU2)
    assert gpu.activate_each(x, Pointwise.RELU2) is x
    assert_as_accurate(x, exact, same)
    assert torch.equal(wide[:, width:], behind)


def test_squares_of_extreme_values(triton_device: torch.device) -> None:
    x = torch.tensor([[-3e38, -0.0, 3.0, float("inf"), -float("inf"), float("nan")]], device=triton_device)
    *limits, unknown = gpu.activate_each(x, Pointwise.RELU2)[0].tolist()
    assert limits == [0.0, 0.0, 9.0, float("inf"), 0.0]
    assert unknown != unknown, "NaN must propagate"


def test_loads_of_squares_are_wide() -> None:
    constants = {"WIDTH": 21_504, "COLUMNS": 2048, "ACTIVATION": "relu2"}
    compiled = compile_for_h200(gpu.activate_each_kernel, {"x": "*bf16", "stride": "i32:16"}, constants, num_warps=4)
    assert compiled.widest_load_bytes == 16


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 3072), (256, 12_288)])
def test_squares_in_bfloat16_on_the_device(shape: tuple[int, int]) -> None:
    x = torch.randn(shape).to("cuda", torch.bfloat16)
    expected = reference.activate_each(x.clone(), Pointwise.RELU2)
    assert torch.equal(gpu.activate_each(x, Pointwise.RELU2), expected)


# ---- the soft cap ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 16), (1, 1), (3, 33), (2, 700)])
@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logits_of_any_number_and_width_are_capped(
    cap: float, dtype: torch.dtype, num_rows: int, width: int, triton_device: torch.device
) -> None:
    check_cap((torch.randn(num_rows, width) * 20).to(triton_device, dtype), cap)


def test_rows_of_logits_may_have_a_stride_and_nothing_between_them_changes(triton_device: torch.device) -> None:
    wide = torch.randn(4, 50, device=triton_device) * 40
    before = wide.clone()
    gpu.soft_cap(wide[:, 10:40], 30.0)
    torch.testing.assert_close(wide[:, 10:40], 30 * torch.tanh(before[:, 10:40] / 30))
    assert torch.equal(wide[:, :10], before[:, :10])
    assert torch.equal(wide[:, 40:], before[:, 40:])


def test_extreme_logits_become_the_cap(triton_device: torch.device) -> None:
    logits = torch.tensor([[float("inf"), -float("inf"), 3e38, -3e38, 0.0, float("nan")]], device=triton_device)
    *capped, unknown = gpu.soft_cap(logits, 30.0)[0].tolist()
    assert capped == [30.0, -30.0, 30.0, -30.0, 0.0]
    assert unknown != unknown, "NaN must propagate"


def test_loads_of_logits_are_wide() -> None:
    types = {"x": "*bf16", "stride": "i32:16", "cap": "fp32"}
    compiled = compile_for_h200(gpu.soft_cap_kernel, types, {"WIDTH": 256_000, "COLUMNS": 2048}, num_warps=4)
    assert compiled.widest_load_bytes == 16


@pytest.mark.gpu
def test_a_captured_graph_caps_later_logits() -> None:
    logits = torch.zeros(4, 256_000, dtype=torch.bfloat16, device="cuda")
    gpu.soft_cap(logits.clone(), 30.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu.soft_cap(logits, 30.0)
    given = torch.randn(4, 256_000, device="cuda").bfloat16() * 40
    logits.copy_(given)
    graph.replay()
    assert_as_accurate(logits, reference.soft_cap(given.double(), 30.0), reference.soft_cap(given.clone(), 30.0))


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("num_tokens", "heads", "dim"), [(0, 2, 16), (1, 1, 700), (3, 4, 40), (2, 3, 256)])
def test_heads_are_gated_in_a_strided_view(
    num_tokens: int, heads: int, dim: int, adds: bool, each: bool, dtype: torch.dtype, triton_device: torch.device
) -> None:
    """The gates of a head follow its queries in one tensor; results are in another tensor."""
    both = (torch.randn(num_tokens, heads, 2 * dim) * 3).to(triton_device, dtype)
    gate = both[..., dim:] if each else both[..., dim : dim + 1]
    add_to = torch.randn(num_tokens, heads * dim).to(triton_device, dtype) if adds else None

    def run(module: object, dtype: torch.dtype) -> torch.Tensor:
        target = None if add_to is None else add_to.to(dtype, copy=True)
        x = both[..., :dim].to(dtype).clone()
        given = module.gate_heads(x, gate.to(dtype), target)  # type: ignore[attr-defined]
        assert given is (x if target is None else target)
        return given.flatten(1)

    assert_as_accurate(run(gpu, dtype), run(reference, torch.float64), run(reference, dtype))


def test_a_gate_changes_nothing_between_heads(triton_device: torch.device) -> None:
    both = torch.randn(3, 2, 24, device=triton_device)
    before = both.clone()
    gpu.gate_heads(both[..., :16], both[..., 16:17])
    assert torch.equal(both[..., 16:], before[..., 16:])
    torch.testing.assert_close(both[..., :16], before[..., :16] * before[..., 16:17].sigmoid())
