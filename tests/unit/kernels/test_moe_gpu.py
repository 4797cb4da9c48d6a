"""The GPU's MoE kernels: interpreted in CI, compiled on machines with a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.kernels.moe import ExpertWeights, fused_experts, reference

from .kernel_checks import assert_as_accurate
from .moe_cases import KINDS, Inputs, Mixture, in_8_bits, mixture

pytest.importorskip("triton")

from baton.kernels.moe import bench, gpu, tuning
from baton.kernels.moe.gpu import gemv
from baton.kernels.moe.gpu.options import GemvOptions, GroupedOptions, MoeShape, ProductOptions

pytestmark = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_outputs")
@KINDS
@pytest.mark.parametrize(
    ("block_rows", "short_rows", "num_tokens", "top_k", "hidden_size", "width", "padding"),
    [
        (16, 16, 1, 2, 32, 16, 0),
        (16, 16, 13, 3, 48, 40, 4),
        (32, 32, 40, 2, 64, 32, 0),
        (32, 16, 40, 2, 64, 32, 0),
        (16, 4, 13, 3, 48, 40, 4),
    ],
)
def test_grouped_products_equal_the_loop_over_experts(
    block_rows: int,
    short_rows: int,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    width: int,
    padding: int,
    kind: dict[str, bool],
    triton_device: torch.device,
) -> None:
    case = mixture(num_tokens, 5, top_k, hidden_size, width, padding=padding, **kind)
    case = case.to(triton_device)
    product = ProductOptions(block_columns=32, block_depth=32, warps=4, stages=2)
    result = gpu.grouped_experts(*case.inputs, GroupedOptions(block_rows, short_rows, product, product))
    assert_as_accurate(
        result, reference.fused_experts(*case.to(torch.float64).inputs), reference.fused_experts(*case.inputs)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_outputs")
@KINDS
@pytest.mark.parametrize("adding", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size", "width", "padding"),
    [(1, 3, 32, 16, 0), (3, 4, 40, 24, 1), (2, 1, 64, 48, 2)],
)
def test_few_tokens_equal_the_loop_over_experts(
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    width: int,
    padding: int,
    adding: bool,
    kind: dict[str, bool],
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = mixture(num_tokens, 6, top_k, hidden_size, width, padding=padding, **kind)
    case = case.to(triton_device)
    monkeypatch.setattr(gemv, "MOST_PRELOADED", 2)  # one or two blocks of depth, fewer than some experts have
    options = GemvOptions(gate_up_columns=4, gate_up_depth=16, down_columns=2, down_depth=16, down_warps=1)

    def inputs(case: Mixture) -> Inputs:
        return case.inputs if adding else (*case.inputs[:-1], None)

    exact = reference.fused_experts(*inputs(case.to(torch.float64)))
    result = gemv.fused_experts(*inputs(case), options)
    assert_as_accurate(result, exact, reference.fused_experts(*inputs(case)))


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("rows", [None, (16, 16), (32, 32), (32, 2)])
@pytest.mark.parametrize(
    ("hidden_size", "width", "depth", "gated"),
    [(144, 272, 256, True), (256, 128, 64, True), (144, 272, 256, False)],
)
def test_experts_in_8_bits_equal_their_definition(
    rows: tuple[int, int] | None, hidden_size: int, width: int, depth: int, gated: bool, triton_device: torch.device
) -> None:
    case = mixture(5, 4, 2, hidden_size, width, padding=1, like_gpt_oss=True, gated=gated)
    case = replace(case, experts=in_8_bits(case.experts)).to(triton_device)
    if rows is None:
        options = GemvOptions(gate_up_columns=32, gate_up_depth=depth, down_columns=16, down_depth=depth)
        result = gemv.fused_experts(*case.inputs, options)
    else:
        product = ProductOptions(block_columns=64, block_depth=depth // 2, warps=4, stages=2)
        result = gpu.grouped_experts(*case.inputs, GroupedOptions(*rows, product, product))
    exact = reference.fused_experts(*case.to(torch.float64).inputs)
    assert_as_accurate(result, exact, reference.fused_experts(*case.inputs), slack=4.0)


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "top_k"), [(0, 2), (2, 2), (30, 3)])
def test_the_op_takes_any_number_of_tokens(num_tokens: int, top_k: int, triton_device: torch.device) -> None:
    case = mixture(num_tokens, 4, top_k, 128, 32).to(triton_device)
    torch.testing.assert_close(
        gpu.fused_experts(*case.inputs), reference.fused_experts(*case.inputs), rtol=1e-4, atol=1e-5
    )


def test_rows_that_are_no_multiple_of_16_bytes_are_refused(triton_device: torch.device) -> None:
    case = mixture(3, 4, 2, 32, 17).to(triton_device)
    with pytest.raises(ValueError, match="a GPU takes multiples of 4 of"):
        gpu.fused_experts(*case.inputs)


@pytest.mark.parametrize("model", bench.LARGE)
def test_every_shape_has_options_to_measure(model: str) -> None:
    num_experts, top_k, hidden_size, width = bench.LARGE[model]
    for num_tokens in tuning.TOKENS:
        shape = MoeShape(num_tokens, num_experts, top_k, hidden_size, width, bench.is_in_8_bits(model))
        candidates = list(tuning.grouped_candidates(shape))
        assert candidates
        assert all(GroupedOptions.from_flat(options).flat() == options for options in candidates)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("like_gpt_oss", [False, True], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("num_tokens", [1, 3, 9, 64, 700, 5000])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden_size", "width"), [(16, 4, 512, 256), (64, 6, 256, 1408), (8, 4, 2880, 2880)]
)
def test_in_bfloat16_experts_are_as_accurate_as_their_definition(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, width: int, like_gpt_oss: bool
) -> None:
    case = mixture(
        num_tokens, num_experts, top_k, hidden_size, width, padding=num_tokens // 3, like_gpt_oss=like_gpt_oss
    ).to(torch.device("cuda"))
    case = replace(case.to(torch.bfloat16), weights=case.weights)
    exact = reference.fused_experts(*case.to(torch.float64).inputs)
    *inputs, add_to = case.inputs
    result = fused_experts(*inputs, add_to=add_to)
    assert_as_accurate(result, exact, reference.fused_experts(*case.inputs), slack=2.5)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("num_tokens", [1, 3, 9, 64, 700, 5000])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "hidden_size", "width", "gated"),
    [(16, 4, 512, 256, True), (64, 6, 256, 1408, True), (8, 4, 2048, 2048, True), (16, 6, 2688, 1856, False)],
)
def test_in_8_bits_experts_are_as_accurate_as_their_definition(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, width: int, gated: bool
) -> None:
    case = mixture(num_tokens, num_experts, top_k, hidden_size, width, padding=num_tokens // 3, gated=gated)
    case = replace(case, experts=in_8_bits(case.experts)).to(torch.device("cuda"))
    case = replace(case.to(torch.bfloat16), weights=case.weights)
    scales = {name: getattr(case.experts, name).float() for name in ("gate_up_scale", "down_scale")}
    case = replace(case, experts=replace(case.experts, **scales))
    exact = reference.fused_experts(*case.to(torch.float64).inputs)
    # Dequantized weights are rounded once more, to the values of a checkpoint of plain weights.
    wide = [case.experts.matrices(expert, torch.bfloat16) for expert in range(num_experts)]
    matrices = (torch.stack(of_each) for of_each in zip(*wide, strict=True))
    plain = ExpertWeights(*matrices, activation=case.experts.activation)
    *inputs, add_to = case.inputs
    result = fused_experts(*inputs, add_to=add_to)
    rounded = reference.fused_experts(*replace(case, experts=plain).inputs)
    assert_as_accurate(result, exact, rounded, slack=2.5)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_an_expert_may_start_beyond_four_gibibytes(num_tokens: int) -> None:
    num_experts, hidden_size, width = 1400, 2048, 768
    case = mixture(num_tokens, 1, 1, hidden_size, width).to(torch.device("cuda")).to(torch.bfloat16)
    gate_up = torch.empty(num_experts, 2 * width, hidden_size, dtype=torch.bfloat16, device="cuda")
    down = torch.empty(num_experts, hidden_size, width, dtype=torch.bfloat16, device="cuda")
    assert down.nbytes > 1 << 32
    gate_up[-1], down[-1] = case.experts.gate_up[0], case.experts.down[0]
    weights = case.weights.float()
    alone = fused_experts(case.x, case.experts, case.expert_ids, weights)
    last = fused_experts(case.x, ExpertWeights(gate_up, down), case.expert_ids + num_experts - 1, weights)
    assert torch.equal(alone, last)
