"""The GPU's mixture of experts: interpreted in CI, for real where there is a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.kernels.activation import Pointwise
from baton.kernels.moe import SILU, ExpertWeights, RoutingRule, fused_experts, reference, router_logits

from ...helpers.aot import compile_for_h200
from .kernel_checks import assert_as_accurate
from .moe_cases import GPT_OSS, KINDS, Inputs, Mixture, in_8_bits, mixture

pytest.importorskip("triton")
from triton import next_power_of_2

from baton.kernels.moe import bench, gpu, tuning
from baton.kernels.moe.gpu import alignment, gemv, grouped_gemm
from baton.kernels.moe.gpu.elementwise import activation_constants
from baton.kernels.moe.gpu.grouped_gemm import COMBINE_BLOCK, COMBINE_WARPS, _combine
from baton.kernels.moe.gpu.options import GemvOptions, GroupedOptions, MoeShape, ProductOptions, _default_grouped
from baton.kernels.moe.gpu.router import _route

RULES = {
    "softmax": (RoutingRule(3), 12),
    "renormalized": (RoutingRule(4, renormalize=True, scale=2.5), 8),
    "one expert": (RoutingRule(1), 2),
    "all experts": (RoutingRule(5), 5),
    "best groups": (RoutingRule(3, num_groups=4, top_groups=2, scale=16.0), 20),
    "sigmoid": (RoutingRule(3, scoring="sigmoid", renormalize=True), 10),
    "sigmoid, groups": (RoutingRule(4, "sigmoid", True, 2.5, 8, 4, "top2"), 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_routing_equals_its_definition(
    name: str, num_tokens: int, dtype: torch.dtype, triton_device: torch.device
) -> None:
    rule, num_experts = RULES[name]
    wide = torch.randn(num_tokens, num_experts + 3, dtype=torch.float64).to(triton_device, dtype)
    logits = wide[:, :num_experts]
    bias = torch.randn(num_experts, device=triton_device) if rule.scoring == "sigmoid" else None
    slots = torch.tensor([3, -1, 0, 7, -1], device=triton_device)[:num_tokens]
    expert_ids, weights = gpu.route(logits, rule, bias=bias, slots=slots)
    expected_ids, expected_weights = reference.route(logits, rule, bias=bias, slots=slots)
    assert (expert_ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(expert_ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_of_equal_scores_the_first_expert_wins(triton_device: torch.device) -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0, 1.0]], device=triton_device)
    assert gpu.route(logits, RoutingRule(3), bias=None, slots=None)[0].tolist() == [[1, 2, 4]]
    assert reference.route(logits, RoutingRule(3))[0].tolist() == [[1, 2, 4]]


def test_many_tokens_are_routed_several_to_a_program(triton_device: torch.device) -> None:
    logits = torch.randn(515, 6, device=triton_device)
    ids, weights = gpu.route(logits, RoutingRule(2, renormalize=True), bias=None, slots=None)
    expected_ids, expected_weights = reference.route(logits, RoutingRule(2, renormalize=True))
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("block_rows", [1, 4, 16])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "padding"),
    [(1, 4, 1, 0), (40, 6, 3, 0), (40, 6, 3, 11), (3, 6, 2, 3), (70, 3, 1, 0)],
)
def test_tiles_hold_every_pair_once_by_expert_in_order(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    padding: int,
    block_rows: int,
    triton_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(alignment, "CHUNK_TOKENS", 16)
    expert_ids = mixture(num_tokens, num_experts, top_k, 4, 4, padding=padding).expert_ids.to(triton_device)
    check_tiles(expert_ids, num_experts, block_rows)


def test_a_token_may_name_an_expert_twice(triton_device: torch.device) -> None:
    check_tiles(torch.tensor([[2, 2, 0], [0, 2, 0]], dtype=torch.int32, device=triton_device), 4, 2)


def check_tiles(expert_ids: torch.Tensor, num_experts: int, block_rows: int) -> None:
    made = alignment.align(expert_ids, num_experts, block_rows)
    flat = expert_ids.flatten().tolist()
    expected_order = sorted((p for p in range(len(flat)) if flat[p] >= 0), key=lambda p: (flat[p], p))
    expected_table = []
    for expert in range(num_experts):
        rows = [row for row, pair in enumerate(expected_order) if flat[pair] == expert]
        expected_table += [[expert, row, rows[-1] + 1] for row in rows[::block_rows]]
    assert made.order[: len(expected_order)].tolist() == expected_order
    assert made.count.item() == len(expected_table) <= made.most
    assert made.table[: len(expected_table)].tolist() == expected_table


@pytest.mark.parametrize("counts", [[9, 0, 0], [3, 3, 3], [1, 4, 4], [2, 7, 0], [8, 1, 0]])
@pytest.mark.parametrize("block_rows", [1, 2, 4, 16])
def test_no_routing_makes_more_tiles_than_there_is_room_for(counts: list[int], block_rows: int) -> None:
    made = sum(-(-count // block_rows) for count in counts)
    assert made <= alignment.most_tiles(sum(counts), len(counts), block_rows)


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
    monkeypatch.setattr(gemv, "MOST_PRELOADED", 2)  # one or two blocks of depth: less than some experts have
    options = GemvOptions(gate_up_columns=4, gate_up_depth=16, down_columns=2, down_depth=16, down_warps=1)

    def inputs(case: Mixture) -> Inputs:
        return case.inputs if adding else (*case.inputs[:-1], None)

    exact = reference.fused_experts(*inputs(case.to(torch.float64)))
    result = gemv.fused_experts(*inputs(case), options)
    assert_as_accurate(result, exact, reference.fused_experts(*inputs(case)))


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("rows", [None, (16, 16), (32, 32), (32, 2)])
@pytest.mark.parametrize(("hidden_size", "width", "depth"), [(144, 272, 256), (256, 128, 64)])
def test_experts_in_8_bits_equal_their_definition(
    rows: tuple[int, int] | None, hidden_size: int, width: int, depth: int, triton_device: torch.device
) -> None:
    case = mixture(5, 4, 2, hidden_size, width, padding=1, like_gpt_oss=True)
    case = replace(case, experts=in_8_bits(case.experts)).to(triton_device)
    if rows is None:
        options = GemvOptions(gate_up_columns=32, gate_up_depth=depth, down_columns=16, down_depth=depth)
        result = gemv.fused_experts(*case.inputs, options)
    else:
        product = ProductOptions(block_columns=64, block_depth=depth // 2, warps=4, stages=2)
        result = gpu.grouped_experts(*case.inputs, GroupedOptions(*rows, product, product))
    exact = reference.fused_experts(*case.to(torch.float64).inputs)
    assert_as_accurate(result, exact, reference.fused_experts(*case.inputs), slack=4.0)


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
def test_some_options_are_there_to_be_measured_at_every_shape(model: str) -> None:
    num_experts, top_k, hidden_size, width = bench.LARGE[model]
    for num_tokens in tuning.TOKENS:
        shape = MoeShape(num_tokens, num_experts, top_k, hidden_size, width, bench.is_in_8_bits(model))
        candidates = list(tuning._grouped_candidates(shape))
        assert candidates
        assert all(GroupedOptions.from_flat(options).flat() == options for options in candidates)


# Hidden size, width of an expert, top k
SIZES = {name: (hidden_size, width, top_k) for name, (_, top_k, hidden_size, width) in bench.LARGE.items()}
SHAPES = {name: sizes for name, sizes in SIZES.items() if not bench.is_in_8_bits(name)}
SHAPES_IN_8_BITS = {name: sizes for name, sizes in SIZES.items() if bench.is_in_8_bits(name)}
TILE_TYPES = {"order": "*i32", "table": "*i32", "count": "*i32"}


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize(
    ("block_rows", "short_rows", "columns", "warps"),
    [(16, 16, 128, 4), (64, 64, 256, 8), (64, 16, 256, 8), (128, 128, 256, 8)],
)
def test_grouped_products_compile_to_wide_loads_and_warp_groups(
    shape: str, block_rows: int, short_rows: int, columns: int, warps: int
) -> None:
    hidden_size, width, top_k = SHAPES[shape]
    options = ProductOptions(block_columns=columns, block_depth=64, warps=warps, stages=4)
    common = {"weight": f"tensordesc<bf16[{columns}, 64]>", "bias": "*bf16", "out": "*bf16", **TILE_TYPES}
    gate_up = compile_for_h200(
        grouped_gemm._gate_up,
        {"x": "*bf16", "x_stride": "i64:16", **common},
        {
            "scale": None,
            "COLUMNS": 2 * width,
            "DEPTH": hidden_size,
            "TOP_K": top_k,
            "BLOCK_ROWS": block_rows,
            "SHORT_ROWS": short_rows,
            **upper(options),
        }
        | activation_constants(GPT_OSS),
        **lower(options),
    )
    down = compile_for_h200(
        grouped_gemm._down,
        {"rows": f"tensordesc<bf16[{block_rows}, 64]>", "few_rows": f"tensordesc<bf16[{short_rows}, 64]>"}
        | {"routing_weights": "*fp32", **common},
        {"scale": None, "COLUMNS": hidden_size, "DEPTH": width, "BLOCK_ROWS": block_rows, "SHORT_ROWS": short_rows}
        | upper(options),
        **lower(options),
    )
    assert gate_up.widest_load_bytes == 16
    for compiled in (gate_up, down):
        assert compiled.wgmma == (block_rows >= 64)
        assert ("mma.sync" in compiled.ptx) == (short_rows < 64)
        assert "cp.async.bulk.tensor" in compiled.ptx


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_kernels_around_the_products_compile_for_a_device(shape: str) -> None:
    hidden_size, _, top_k = SHAPES[shape]
    compile_for_h200(
        _route,
        {"logits": "*bf16", "slots": "*i64", "expert_ids": "*i32", "weights": "*fp32", "num_tokens": "i32"}
        | {"logits_stride": "i32:16", "scale": "fp32"},
        {"bias": None, "GROUPS": 1, "GROUP_SIZE": 128, "TOP_GROUPS": 1, "TOP_TWO": False, "TOP_K": top_k}
        | {"SIGMOID": False, "RENORMALIZE": True, "GROUPS_PADDED": 1, "MEMBERS": 128, "PLACES": 8, "BLOCK_TOKENS": 4},
        num_warps=1,
    )
    for block_tokens, chunks, warps in ((16, 1, 1), (alignment.CHUNK_TOKENS, 16, 8)):
        chunk = {"TOP_K": top_k, "PLACES": 8, "EXPERTS": 128, "BLOCK_TOKENS": block_tokens}
        counted = {"expert_ids": "*i32", "counts": "*i32", "num_tokens": "i32"}
        compile_for_h200(alignment._count, counted, chunk, num_warps=warps)
        compile_for_h200(
            alignment._place,
            {**counted, **TILE_TYPES, "num_experts": "i32", "num_chunks": "i32"},
            {**chunk, "BLOCK_ROWS": 16, "CHUNKS": chunks},
            num_warps=warps,
        )
    compiled = compile_for_h200(
        _combine,
        {"outputs": "*bf16", "expert_ids": "*i32", "out": "*bf16", "out_stride": "i32:16"},
        {"SIZE": hidden_size, "TOP_K": top_k, "PLACES": 8, "BLOCK": COMBINE_BLOCK, "ADD": True},
        num_warps=COMBINE_WARPS,
    )
    assert compiled.widest_load_bytes == 16
    assert compiled.shared_bytes == 0  # no sum leaves its thread


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_for_few_tokens_compile_to_wide_loads(shape: str) -> None:
    hidden_size, width, top_k = SHAPES[shape]
    options = GemvOptions()
    gate_up = compile_for_h200(
        gemv._gate_up_few,
        {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "expert_ids": "*i32", "out": "*bf16", "x_stride": "i32:16"},
        {"scale": None, "COLUMNS": 2 * width, "DEPTH": hidden_size, "TOP_K": top_k, **activation_constants(GPT_OSS)}
        | {"BLOCK_COLUMNS": options.gate_up_columns, "BLOCK_DEPTH": options.gate_up_depth},
        num_warps=options.gate_up_warps,
    )
    down = compile_for_h200(
        gemv._down_few,
        {"activations": "*bf16", "weight": "*bf16", "bias": "*bf16", "expert_ids": "*i32", "routing_weights": "*fp32"}
        | {"out": "*bf16", "out_stride": "i32:16"},
        {"scale": None, "COLUMNS": hidden_size, "DEPTH": width, "TOP_K": top_k, "PLACES": next_power_of_2(top_k)}
        | {"BLOCK_COLUMNS": options.down_columns, "BLOCK_DEPTH": options.down_depth, "ADD": True}
        | {"PRELOADED": gemv.preloaded(width, top_k, options)},
        num_warps=options.down_warps,
    )
    assert gate_up.widest_load_bytes == down.widest_load_bytes == 16


@pytest.mark.slow
def test_experts_without_gates_compile_to_wide_loads_and_warp_groups() -> None:
    """At the sizes of Nemotron 3: 128 experts of 1856, 6 of them a token."""
    sizes = {"scale": None, "bias": None, "COLUMNS": 1856, "DEPTH": 2688, "TOP_K": 6}
    activation = activation_constants(Pointwise.RELU2)
    types = {"x": "*bf16", "x_stride": "i64:16", "out": "*bf16"}
    few = GemvOptions()
    blocks = {"BLOCK_COLUMNS": few.gate_up_columns, "BLOCK_DEPTH": few.gate_up_depth}
    compiled = compile_for_h200(
        gemv._gate_up_few,
        {**types, "weight": "*bf16", "expert_ids": "*i32"},
        {**sizes, **activation, **blocks},
        num_warps=few.gate_up_warps,
    )
    assert compiled.widest_load_bytes == 16
    many = ProductOptions(block_columns=128, block_depth=64, warps=8, stages=4)
    compiled = compile_for_h200(
        grouped_gemm._gate_up,
        {**types, "weight": "tensordesc<bf16[128, 64]>", **TILE_TYPES},
        {**sizes, **activation, "BLOCK_ROWS": 64, "SHORT_ROWS": 64, **upper(many)},
        **lower(many),
    )
    assert compiled.wgmma
    assert compiled.widest_load_bytes == 16


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES_IN_8_BITS)
@pytest.mark.parametrize("block_rows", [16, 64, 128])
def test_weights_in_8_bits_go_to_warp_groups_through_registers(shape: str, block_rows: int) -> None:
    hidden_size, width, top_k = SHAPES_IN_8_BITS[shape]
    rows_per_expert = block_rows * 0.7 if block_rows < 128 else 64
    chosen = _default_grouped(MoeShape(int(rows_per_expert * 32 / top_k), 32, top_k, hidden_size, width, True))
    assert chosen.block_rows == block_rows
    options = chosen.gate_up
    weight = f"tensordesc<fp8e4nv[{options.block_columns}, {options.block_depth}]>"
    rows = f"tensordesc<bf16[{block_rows}, {options.block_depth}]>"
    common = {"weight": weight, "scale": "*fp32", "out": "*bf16", **TILE_TYPES}
    gate_up = compile_for_h200(
        grouped_gemm._gate_up,
        {"x": "*bf16", "x_stride": "i64:16", **common},
        {"bias": None, "COLUMNS": 2 * width, "DEPTH": hidden_size, "TOP_K": top_k, "BLOCK_ROWS": block_rows}
        | {"SHORT_ROWS": chosen.short_rows, **upper(options), **activation_constants(SILU)},
        **lower(options),
    )
    down = compile_for_h200(
        grouped_gemm._down,
        {"rows": rows, "few_rows": rows, "routing_weights": "*fp32", **common},
        {"bias": None, "COLUMNS": hidden_size, "DEPTH": width, "BLOCK_ROWS": block_rows}
        | {"SHORT_ROWS": chosen.short_rows, **upper(options)},
        **lower(options),
    )
    for compiled in (gate_up, down):
        assert compiled.wgmma
        assert "f8E4M3FN, #ttg.dot_op" in compiled.ttgir  # read from shared memory as the operand that it will be


@pytest.mark.parametrize("shape", SHAPES_IN_8_BITS)
def test_the_kernels_for_few_tokens_read_8_bits_in_wide_loads(shape: str) -> None:
    hidden_size, width, top_k = SHAPES_IN_8_BITS[shape]
    options = GemvOptions()
    gate_up = compile_for_h200(
        gemv._gate_up_few,
        {"x": "*bf16", "weight": "*fp8e4nv", "scale": "*fp32", "expert_ids": "*i32", "out": "*bf16"}
        | {"x_stride": "i32:16"},
        {"bias": None, "COLUMNS": 2 * width, "DEPTH": hidden_size, "TOP_K": top_k, **activation_constants(SILU)}
        | {"BLOCK_COLUMNS": options.gate_up_columns, "BLOCK_DEPTH": options.gate_up_depth},
        num_warps=options.gate_up_warps,
    )
    down = compile_for_h200(
        gemv._down_few,
        {"activations": "*bf16", "weight": "*fp8e4nv", "scale": "*fp32", "expert_ids": "*i32"}
        | {"routing_weights": "*fp32", "out": "*bf16", "out_stride": "i32:16"},
        {"bias": None, "COLUMNS": hidden_size, "DEPTH": width, "TOP_K": top_k, "PLACES": next_power_of_2(top_k)}
        | {"BLOCK_COLUMNS": options.down_columns, "BLOCK_DEPTH": options.down_depth, "ADD": True}
        | {"PRELOADED": gemv.preloaded(width, top_k, options)},
        num_warps=options.down_warps,
    )
    assert gate_up.widest_load_bytes == down.widest_load_bytes == 16


def upper(options: ProductOptions) -> dict[str, object]:
    return {name: value for name, value in options.meta(2).items() if name.isupper()}


def lower(options: ProductOptions) -> dict[str, object]:
    return {name: value for name, value in options.meta(2).items() if name.islower()}


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
    ("num_experts", "top_k", "hidden_size", "width"), [(16, 4, 512, 256), (64, 6, 256, 1408), (8, 4, 2048, 2048)]
)
def test_in_8_bits_experts_are_as_accurate_as_their_definition(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, width: int
) -> None:
    case = mixture(num_tokens, num_experts, top_k, hidden_size, width, padding=num_tokens // 3)
    case = replace(case, experts=in_8_bits(case.experts)).to(torch.device("cuda"))
    case = replace(case.to(torch.bfloat16), weights=case.weights)
    scales = {name: getattr(case.experts, name).float() for name in ("gate_up_scale", "down_scale")}
    case = replace(case, experts=replace(case.experts, **scales))
    exact = reference.fused_experts(*case.to(torch.float64).inputs)
    # Weights multiplied out are rounded once more: to what a checkpoint of plain weights would hold.
    wide = [case.experts.matrices(expert, torch.bfloat16) for expert in range(num_experts)]
    plain = ExpertWeights(*(torch.stack(matrices) for matrices in zip(*wide, strict=True)))
    *inputs, add_to = case.inputs
    result = fused_experts(*inputs, add_to=add_to)
    rounded = reference.fused_experts(*replace(case, experts=plain).inputs)
    assert_as_accurate(result, exact, rounded, slack=2.5)


@pytest.mark.gpu
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 3000])
def test_router_logits_keep_float32_on_a_device(num_tokens: int, with_bias: bool) -> None:
    x, weight = (torch.randn(rows, 2048, device="cuda").bfloat16() for rows in (num_tokens, 128))
    bias = torch.randn(128, device="cuda").bfloat16() if with_bias else None
    logits = router_logits(x, weight, bias)
    assert logits.dtype == torch.float32
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_an_expert_may_lie_past_the_first_four_gibibytes(num_tokens: int) -> None:
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
