"""The FP8 kernels: interpreted, compiled for an H200, and run on one."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import fp8
from baton.kernels.fp8 import BLOCK, Fp8Weight, reference
from baton.kernels.linear import RowNorm
from baton.kernels.rms_norm.reference import rms_norm
from baton.kernels.tuned import Options

from ...helpers.aot import compile_for_h200
from .fp8_cases import exact_input, group_of, random_weight
from .kernel_checks import assert_as_accurate

pytest.importorskip("triton")

from baton.kernels.fp8 import gpu
from baton.kernels.fp8.gpu import gemm, quantization

pytestmark = pytest.mark.exhaustive

TURNED: Options = {"TOKENS": 16, "COLUMNS": 64, "GROUPS": 2, "TURNED": 1, "SPLIT": 3, "STAGES": 3, "num_warps": 4}
UPRIGHT: Options = {"TOKENS": 16, "COLUMNS": 32, "GROUPS": 1, "TURNED": 0, "SPLIT": 1, "STAGES": 3, "num_warps": 4}


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("group", [128, 384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_input_is_quantized_as_by_the_reference(
    triton_device: torch.device, dtype: torch.dtype, group: int, strided: bool
) -> None:
    x = exact_input(5, 384, group, dtype, triton_device)
    if strided:
        x = torch.cat([x, x], 1)[:, :384]
    quantized, scale = quantization.quantize(x, group)
    expected, expected_scale = reference.quantize(x, group)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 7])
def test_quantized_rows_can_be_filled_up_to_a_multiple(triton_device: torch.device, tokens: int, normed: bool) -> None:
    """As torch's product needs them, which takes four tokens, or eight, if scales are per block."""
    x = torch.randn(tokens, 256, device=triton_device)
    norm = RowNorm(torch.rand(256, device=triton_device), 1e-6) if normed else None
    expected, expected_scale = quantization.quantize(x, 128, norm)
    quantized, scale = quantization.quantize(x, 128, norm, multiple_of=4)
    assert quantized.shape == (-(-tokens // 4) * 4, 256)
    assert scale.T.shape == (len(quantized), 2)
    assert scale.is_contiguous()
    torch.testing.assert_close(quantized[:tokens].float(), expected.float(), rtol=0, atol=0)
    torch.testing.assert_close(scale[:, :tokens], expected_scale, rtol=0, atol=0)


@pytest.mark.parametrize("options", [TURNED, UPRIGHT], ids=["turned and split", "upright"])
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(("tokens", "columns", "depth"), [(1, 64, 256), (21, 200, 384)])
def test_a_product_is_as_exact_as_the_reference(
    triton_device: torch.device, tokens: int, columns: int, depth: int, in_blocks: bool, options: Options
) -> None:
    weight = random_weight(columns, depth, in_blocks=in_blocks, device=triton_device)
    bias = torch.randn(columns, device=triton_device)
    quantized, scale = reference.quantize(torch.randn(tokens, depth, device=triton_device), group_of(weight))
    out = torch.full((tokens, columns), float("nan"), device=triton_device)
    gemm.product(quantized, scale, weight, bias, out, options)
    x = reference.dequantize(quantized, scale).double()
    exact = x @ weight.dequantize(torch.float64).T + bias.double()
    assert ((out.double() - exact).abs().max() / exact.abs().max()).item() < 1e-3


def test_a_depth_that_is_no_multiple_of_a_step_is_filled_with_zeros(triton_device: torch.device) -> None:
    weight = random_weight(64, 144, in_blocks=False, device=triton_device)
    quantized, scale = reference.quantize(torch.randn(3, 144, device=triton_device), 144)
    out = gemm.product(quantized, scale, weight, None, torch.empty(3, 64, device=triton_device), TURNED)
    exact = reference.dequantize(quantized, scale).double() @ weight.dequantize(torch.float64).T
    torch.testing.assert_close(out.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("group", [128, 384])
def test_a_normed_input_is_quantized_as_by_the_reference(triton_device: torch.device, group: int) -> None:
    x = torch.randn(3, 384, device=triton_device) * torch.tensor([[0.1], [1.0], [30.0]], device=triton_device)
    norm = RowNorm(torch.rand(384, device=triton_device) + 0.5, 1e-6)
    quantized, scale = quantization.quantize(x, group, norm)
    normed = rms_norm(x, norm.weight, norm.eps)
    assert isinstance(normed, torch.Tensor)
    _, expected_scale = reference.quantize(normed, group)
    torch.testing.assert_close(scale, expected_scale)
    if triton_device.type == "cuda":  # the interpreter rounds to FP8 wrongly
        values = reference.dequantize(quantized, scale)
        assert ((values - normed).abs() <= normed.abs() / 15 + expected_scale.max() * 2.0**-9).all()


@pytest.mark.parametrize("options", [TURNED, UPRIGHT], ids=["turned and split", "upright"])
def test_a_product_can_be_added_to_out(triton_device: torch.device, options: Options) -> None:
    weight = random_weight(64, 256, in_blocks=True, device=triton_device)
    quantized, scale = reference.quantize(torch.randn(3, 256, device=triton_device), BLOCK)
    before = torch.randn(3, 64, device=triton_device)
    product = gemm.product(quantized, scale, weight, None, torch.empty_like(before), options)
    out = gemm.product(quantized, scale, weight, None, before.clone(), options, add=True)
    torch.testing.assert_close(out, before + product)


def test_no_tokens_give_no_rows(triton_device: torch.device) -> None:
    weight = random_weight(64, 128, in_blocks=True, device=triton_device)
    assert gpu.linear(torch.empty(0, 128, device=triton_device), weight).shape == (0, 64)


@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("options", [*gemm.OPTIONS.values(), {**gemm.OPTIONS[16], "SPLIT": 4}])
def test_every_default_compiles_to_8_bit_products_without_spills(options: Options, in_blocks: bool) -> None:
    compiled = compile_for_h200(
        gemm.gemm_kernel,
        {
            "x": "*fp8e4nv",
            "x_scale": "*fp32",
            "weight": "*fp8e4nv",
            "weight_scale": "*fp32",
            "out": "*bf16",
            **({"partial": "*fp32", "arrived": "*i32"} if options["SPLIT"] > 1 else {}),
            "num_tokens": "i32",
            "num_columns": "i32:16",
            "depth": "i32:16",
            "out_stride": "i32:16",
        },
        {
            "bias": None,
            **({} if options["SPLIT"] > 1 else {"partial": None, "arrived": None}),
            **{name: value for name, value in options.items() if name != "num_warps"},
            "ADD": False,
            "IN_BLOCKS": in_blocks,
            "WHOLE_STEPS": True,
            "BLOCK": BLOCK,
            "BAND": gemm.BAND,
        },
        num_warps=options["num_warps"],
    )
    assert ".f32.e4m3.e4m3" in compiled.ptx
    assert compiled.widest_load_bytes == 16


@pytest.mark.gpu
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, 17, 64, 129, 200, 303, 2046, 2048])
@pytest.mark.parametrize(("columns", "depth"), [(4096, 4096), (576, 2048)])
def test_a_bfloat16_layer_is_as_exact_as_the_reference(tokens: int, columns: int, depth: int, in_blocks: bool) -> None:
    weight = random_weight(columns, depth, in_blocks=in_blocks, device="cuda")
    x = torch.randn(tokens, depth, dtype=torch.bfloat16, device="cuda")
    bias = torch.randn(columns, dtype=torch.bfloat16, device="cuda")
    out = torch.full((tokens, columns), float("nan"), dtype=torch.bfloat16, device="cuda")
    fp8.linear(x, weight, bias, out=out)
    exact = reference.linear(x.double(), weight, bias.double())
    # Tensor cores keep about 14 bits of the sum of an FP8 product.
    assert_as_accurate(out, exact, reference.linear(x, weight, bias), slack=4.0)
    before = torch.randn_like(out)
    added = fp8.linear(x, weight, bias, add_to=before.clone())
    assert_as_accurate(added, exact + before, reference.linear(x, weight, bias, add_to=before.clone()), slack=4.0)


@pytest.mark.gpu
def test_a_weight_beyond_4_gib_is_read_at_its_end() -> None:
    rows, depth = 530_000, 8192
    data = torch.zeros(rows, depth, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    data[-1] = 1.0
    weight = Fp8Weight(data, torch.ones(rows, device="cuda"))
    out = fp8.linear(torch.ones(2, depth, dtype=torch.bfloat16, device="cuda"), weight)
    assert out[:, -1].tolist() == [8192.0, 8192.0]
    assert not out[:, :-1].any()


@pytest.mark.gpu
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("tokens", [4, 300])
def test_a_layer_can_be_captured(tokens: int, in_blocks: bool) -> None:
    weight = random_weight(1024, 1024, in_blocks=in_blocks, device="cuda")
    x = torch.randn(tokens, 1024, dtype=torch.bfloat16, device="cuda")
    expected = fp8.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8.linear(x, weight)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)
