"""FP8 weights and inputs: quantized values are near the original ones, and nothing is read past the ends."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import fp8
from baton.kernels.fp8 import BLOCK, Fp8Weight, dequantize, quantize_weight, reference

from .fp8_cases import exact_input, random_weight

CPU = torch.device("cpu")
STEP = 1 / 16  # half of the distance between two neighbouring E4M3 values, relative to the lower one


@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("rows", [128, 200])
def test_a_quantized_weight_is_within_half_a_step_of_the_original(rows: int, in_blocks: bool) -> None:
    weight = torch.randn(rows, 256) * torch.rand(rows, 1)
    quantized = quantize_weight(weight, in_blocks=in_blocks)
    error = (quantized.dequantize(torch.float32) - weight).abs()
    smallest = 2.0**-10 * quantized.scale.max()
    assert (error <= weight.abs() * STEP * 1.001 + smallest).all()


def test_every_block_has_a_scale_of_its_own() -> None:
    weight = torch.ones(256, 256)
    weight[128:, :128] = 1000.0
    quantized = quantize_weight(weight, in_blocks=True)
    torch.testing.assert_close(quantized.scale * 448, torch.tensor([[1.0, 1.0], [1000.0, 1.0]]))
    torch.testing.assert_close(quantized.dequantize(torch.float32), weight)


def test_zeros_stay_zeros() -> None:
    for in_blocks in (True, False):
        assert not quantize_weight(torch.zeros(128, 128), in_blocks=in_blocks).dequantize(torch.float32).any()
    quantized, scale = reference.quantize(torch.zeros(2, 128), BLOCK)
    assert not reference.dequantize(quantized, scale).any()


@pytest.mark.parametrize("group", [128, 384])
def test_an_input_that_fp8_can_represent_is_quantized_exactly(group: int) -> None:
    x = exact_input(5, 384, group, torch.float32, CPU)
    quantized, scale = reference.quantize(x, group)
    assert scale.shape == (384 // group, 5)
    assert torch.equal(reference.dequantize(quantized, scale), x)


@pytest.mark.parametrize("in_blocks", [True, False])
def test_the_product_is_that_of_the_dequantized_values(in_blocks: bool) -> None:
    weight = random_weight(200, 256, in_blocks=in_blocks)
    x, bias = exact_input(7, 256, 128, torch.float32, CPU), torch.randn(200)
    expected = x.double() @ weight.dequantize(torch.float64).T + bias
    out = torch.full((7, 200), float("nan"))
    given = fp8.linear(x, weight, bias, out=out)
    assert given is out
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=1e-3 * expected.abs().max().item())


def test_a_weight_that_is_dequantized_may_end_within_a_block() -> None:
    data = torch.randn(130, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    plain = dequantize(data, scale, torch.float32)
    assert torch.equal(plain[129, 199], data[129, 199].float() * 4)
    assert torch.equal(plain[127, 128], data[127, 128].float() * 2)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(64), r"scales \[64\] of a weight \[128, 256\]: give one of \[\(128,\), \(1, 2\)\]"),
        (torch.ones(2, 1), "scales"),
        (torch.ones(128, dtype=torch.bfloat16), "give float8_e4m3fn and float32"),
        (torch.ones(256)[::2], "contiguous"),
    ],
)
def test_scales_that_do_not_belong_to_the_weight_are_refused(scale: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp8Weight(torch.zeros(128, 256).to(torch.float8_e4m3fn), scale)


def test_inputs_that_do_not_fit_are_refused_by_name() -> None:
    weight = random_weight(128, 256, in_blocks=True)
    with pytest.raises(ValueError, match=r"x is \[3, 128\]: give \[tokens, 256\]"):
        fp8.linear(torch.zeros(3, 128), weight)
    with pytest.raises(ValueError, match=r"bias is \[3\]: give \[128\]"):
        fp8.linear(torch.zeros(3, 256), weight, torch.zeros(3))
    with pytest.raises(ValueError, match="out is"):
        fp8.linear(torch.zeros(3, 256), weight, out=torch.zeros(3, 256))
