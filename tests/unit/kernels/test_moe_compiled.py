"""The GPU's MoE kernels, compiled for an H200 without having one."""

from __future__ import annotations

import pytest

from baton.kernels.activation import Pointwise
from baton.kernels.moe import SILU

from ...helpers.aot import compile_for_h200
from .moe_cases import GPT_OSS

pytest.importorskip("triton")
from triton import next_power_of_2

from baton.kernels.moe import bench
from baton.kernels.moe.gpu import alignment, gemv, grouped_gemm
from baton.kernels.moe.gpu.elementwise import activation_constants
from baton.kernels.moe.gpu.grouped_gemm import COMBINE_BLOCK, COMBINE_WARPS, combine_kernel
from baton.kernels.moe.gpu.options import GemvOptions, MoeShape, ProductOptions, default_grouped
from baton.kernels.moe.gpu.router import route_kernel

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

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
        grouped_gemm.gate_up_kernel,
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
        grouped_gemm.down_kernel,
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
        route_kernel,
        {"logits": "*bf16", "slots": "*i64", "expert_ids": "*i32", "weights": "*fp32", "num_tokens": "i32"}
        | {"logits_stride": "i32:16", "scale": "fp32"},
        {
            "bias": None,
            "expert_scale": None,
            "GROUPS": 1,
            "GROUP_SIZE": 128,
            "TOP_GROUPS": 1,
            "TOP_TWO": False,
            "TOP_K": top_k,
        }
        | {"SIGMOID": False, "RENORMALIZE": True, "GROUPS_PADDED": 1, "MEMBERS": 128, "PLACES": 8, "BLOCK_TOKENS": 4},
        num_warps=1,
    )
    for block_tokens, chunks, warps in ((16, 1, 1), (alignment.CHUNK_TOKENS, 16, 8)):
        chunk = {"TOP_K": top_k, "PLACES": 8, "EXPERTS": 128, "BLOCK_TOKENS": block_tokens}
        counted = {"expert_ids": "*i32", "counts": "*i32", "num_tokens": "i32"}
        compile_for_h200(alignment.count_kernel, counted, chunk, num_warps=warps)
        compile_for_h200(
            alignment.place_kernel,
            {**counted, **TILE_TYPES, "num_experts": "i32", "num_chunks": "i32"},
            {**chunk, "BLOCK_ROWS": 16, "CHUNKS": chunks},
            num_warps=warps,
        )
    compiled = compile_for_h200(
        combine_kernel,
        {"outputs": "*bf16", "expert_ids": "*i32", "out": "*bf16", "out_stride": "i32:16"},
        {"SIZE": hidden_size, "TOP_K": top_k, "PLACES": 8, "BLOCK": COMBINE_BLOCK, "ADD": True},
        num_warps=COMBINE_WARPS,
    )
    assert compiled.widest_load_bytes == 16
    assert compiled.shared_bytes == 0  # threads exchange nothing


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_for_few_tokens_compile_to_wide_loads(shape: str) -> None:
    hidden_size, width, top_k = SHAPES[shape]
    options = GemvOptions()
    gate_up = compile_for_h200(
        gemv.gate_up_few_kernel,
        {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "expert_ids": "*i32", "out": "*bf16", "x_stride": "i32:16"},
        {"scale": None, "COLUMNS": 2 * width, "DEPTH": hidden_size, "TOP_K": top_k, **activation_constants(GPT_OSS)}
        | {"BLOCK_COLUMNS": options.gate_up_columns, "BLOCK_DEPTH": options.gate_up_depth},
        num_warps=options.gate_up_warps,
    )
    down = compile_for_h200(
        gemv.down_few_kernel,
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
    """The sizes are those of Nemotron 3: 128 experts of width 1856, 6 experts per token."""
    sizes = {"scale": None, "bias": None, "COLUMNS": 1856, "DEPTH": 2688, "TOP_K": 6}
    activation = activation_constants(Pointwise.RELU2)
    types = {"x": "*bf16", "x_stride": "i64:16", "out": "*bf16"}
    few = GemvOptions()
    blocks = {"BLOCK_COLUMNS": few.gate_up_columns, "BLOCK_DEPTH": few.gate_up_depth}
    compiled = compile_for_h200(
        gemv.gate_up_few_kernel,
        {**types, "weight": "*bf16", "expert_ids": "*i32"},
        {**sizes, **activation, **blocks},
        num_warps=few.gate_up_warps,
    )
    assert compiled.widest_load_bytes == 16
    many = ProductOptions(block_columns=128, block_depth=64, warps=8, stages=4)
    compiled = compile_for_h200(
        grouped_gemm.gate_up_kernel,
        {**types, "weight": "tensordesc<bf16[128, 64]>", **TILE_TYPES},
        {**sizes, **activation, "BLOCK_ROWS": 64, "SHORT_ROWS": 64, **upper(many)},
        **lower(many),
    )
    assert compiled.wgmma
    assert compiled.widest_load_bytes == 16


@pytest.mark.slow
def test_experts_without_gates_in_8_bits_compile_for_a_device() -> None:
    """The sizes are those of Nemotron 3, whose width ends within a block of scales."""
    sizes = {"bias": None, "COLUMNS": 1856, "DEPTH": 2688, "TOP_K": 6, **activation_constants(Pointwise.RELU2)}
    types = {"x": "*bf16", "scale": "*fp32", "out": "*bf16"}
    few = GemvOptions()
    compiled = compile_for_h200(
        gemv.gate_up_few_kernel,
        {**types, "x_stride": "i32:16", "weight": "*fp8e4nv", "expert_ids": "*i32"},
        {**sizes, "BLOCK_COLUMNS": few.gate_up_columns, "BLOCK_DEPTH": few.gate_up_depth},
        num_warps=few.gate_up_warps,
    )
    assert compiled.widest_load_bytes == 16
    chosen = default_grouped(MoeShape(2048, 128, 6, 2688, 1856, True))
    options = chosen.gate_up
    compiled = compile_for_h200(
        grouped_gemm.gate_up_kernel,
        {**types, "x_stride": "i64:16", **TILE_TYPES}
        | {"weight": f"tensordesc<fp8e4nv[{options.block_columns}, {options.block_depth}]>"},
        {**sizes, "BLOCK_ROWS": chosen.block_rows, "SHORT_ROWS": chosen.short_rows, **upper(options)},
        **lower(options),
    )
    assert compiled.wgmma


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES_IN_8_BITS)
@pytest.mark.parametrize("block_rows", [16, 64, 128])
def test_weights_in_8_bits_go_to_warp_groups_through_registers(shape: str, block_rows: int) -> None:
    hidden_size, width, top_k = SHAPES_IN_8_BITS[shape]
    rows_per_expert = block_rows * 0.7 if block_rows < 128 else 64
    chosen = default_grouped(MoeShape(int(rows_per_expert * 32 / top_k), 32, top_k, hidden_size, width, True))
    assert chosen.block_rows == block_rows
    options = chosen.gate_up
    weight = f"tensordesc<fp8e4nv[{options.block_columns}, {options.block_depth}]>"
    rows = f"tensordesc<bf16[{block_rows}, {options.block_depth}]>"
    common = {"weight": weight, "scale": "*fp32", "out": "*bf16", **TILE_TYPES}
    gate_up = compile_for_h200(
        grouped_gemm.gate_up_kernel,
        {"x": "*bf16", "x_stride": "i64:16", **common},
        {"bias": None, "COLUMNS": 2 * width, "DEPTH": hidden_size, "TOP_K": top_k, "BLOCK_ROWS": block_rows}
        | {"SHORT_ROWS": chosen.short_rows, **upper(options), **activation_constants(SILU)},
        **lower(options),
    )
    down = compile_for_h200(
        grouped_gemm.down_kernel,
        {"rows": rows, "few_rows": rows, "routing_weights": "*fp32", **common},
        {"bias": None, "COLUMNS": hidden_size, "DEPTH": width, "BLOCK_ROWS": block_rows}
        | {"SHORT_ROWS": chosen.short_rows, **upper(options)},
        **lower(options),
    )
    for compiled in (gate_up, down):
        assert compiled.wgmma
        assert "f8E4M3FN, #ttg.dot_op" in compiled.ttgir  # loaded from shared memory in the layout of an operand


@pytest.mark.parametrize("shape", SHAPES_IN_8_BITS)
def test_the_kernels_for_few_tokens_read_8_bits_in_wide_loads(shape: str) -> None:
    hidden_size, width, top_k = SHAPES_IN_8_BITS[shape]
    options = GemvOptions()
    gate_up = compile_for_h200(
        gemv.gate_up_few_kernel,
        {"x": "*bf16", "weight": "*fp8e4nv", "scale": "*fp32", "expert_ids": "*i32", "out": "*bf16"}
        | {"x_stride": "i32:16"},
        {"bias": None, "COLUMNS": 2 * width, "DEPTH": hidden_size, "TOP_K": top_k, **activation_constants(SILU)}
        | {"BLOCK_COLUMNS": options.gate_up_columns, "BLOCK_DEPTH": options.gate_up_depth},
        num_warps=options.gate_up_warps,
    )
    down = compile_for_h200(
        gemv.down_few_kernel,
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
