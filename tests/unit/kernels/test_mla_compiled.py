"""The MLA kernels, compiled for an H200."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton.kernels.mla.gpu import absorbed, absorbed_hopper, dense, latent_cache

from ...helpers.aot import Compiled, compile_for_h200

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

SIZES = {"RANK": 512, "ROPE": 64, "PAGE": 16}
NUMBERS = dict.fromkeys(("items_ptr", "starts_ptr", "shares_ptr", "tables_ptr", "key_start_ptr"), "*i32") | {
    "parts_ptr": "*fp32",
    "softmax_ptr": "*fp32",
    "scale": "fp32",
}


def signature(kernel: Any, constexprs: dict[str, object], **others: str) -> dict[str, str]:
    """Return the types of a kernel's arguments by name. Those that are not in `NUMBERS` are bfloat16 tensors."""
    names = [name for name in kernel.arg_names if name not in constexprs]
    known = {**NUMBERS, **others}
    plain = {name: "*bf16" if name.endswith("_ptr") else "i32:16" if "stride" in name else "i32" for name in names}
    return {name: known.get(name, plain[name]) for name in names}


def test_latents_and_rotated_pairs_are_read_and_written_side_by_side() -> None:
    constexprs = {**SIZES, "HEADS": 16}
    types = dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64")
    types |= {"cos_sin_ptr": "*fp32", "layer_offset": "i32:16", "block_stride": "i32:16", "eps": "fp32"}
    kernel = latent_cache.latent_and_cache_kernel
    compiled = compile_for_h200(kernel, signature(kernel, constexprs, **types), constexprs, num_warps=4)
    assert compiled.widest_load_bytes == 16
    narrow = re.findall(r"(?:ld|st)\.global[\w.:]*\.b16 ", compiled.ptx)
    assert narrow == ["st.global.b16 "]  # the key's rotary part has fewer values than there are threads


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "num_stages"), [(16, 3), (64, 2)])
def test_pages_are_read_16_bytes_at_a_time_and_ahead_of_their_use(rows: int, num_stages: int) -> None:
    constexprs = {**SIZES, "ROWS": rows, "HEADS": 16, "TILE": 64}
    compiled = compile_for_h200(
        absorbed.latent_attention_kernel,
        signature(absorbed.latent_attention_kernel, constexprs, layer_offset="i32:16"),
        constexprs,
        num_warps=8,
        num_stages=num_stages,
        max_spill_bytes=700,  # addresses that are needed once per item
    )
    assert compiled.widest_load_bytes == 16
    assert "cp.async" in compiled.ptx


@pytest.mark.parametrize(("nope", "value"), [(128, 128), (192, 256)])
def test_long_prompts_run_on_warp_groups_with_tiles_fetched_by_the_copy_engine(nope: int, value: int) -> None:
    rest = dense.parts_of(nope)[1]
    constexprs = {"NOPE": 128, "REST": rest, "ROPE": 64, "VALUE": value, "QUERIES": 128, "KEYS": dense.KEYS}
    boxes = {
        "q_nope_boxes": (128, 128),
        "q_rest_boxes": (128, 64),
        "q_rope_boxes": (128, 64),
        "k_nope_boxes": (dense.KEYS, 128),
        "k_rest_boxes": (dense.KEYS, 64),
        "value_boxes": (dense.KEYS, value),
        "k_rope_boxes": (dense.KEYS, 64),
    }
    types = {name: f"tensordesc<bf16[{rows}, {columns}]>" for name, (rows, columns) in boxes.items()}
    compiled = compile_for_h200(
        dense.dense_attention_kernel,
        signature(dense.dense_attention_kernel, constexprs, **types),
        constexprs,
        num_warps=dense.NUM_WARPS,
        num_stages=dense.num_stages(nope, value),
    )
    assert compiled.wgmma
    assert "cp.async.bulk.tensor" in compiled.ptx


BOXES = "swizzle_byte_width=128, element_bitwidth=16, rank={}, transposed=False, fp4_padded=False, cga_layout=[]"


def boxes(*shape: int) -> str:
    """Return the type of a tensor descriptor with boxes of this shape, for TMA in Gluon."""
    return f"tensordesc<bf16[{','.join(map(str, shape))}],NVMMASharedLayout({BOXES.format(len(shape))})>"


HOPPER_SIGNATURE = {
    "out": "*bf16",
    **dict.fromkeys(("sums", "softmax"), "*fp32"),
    **dict.fromkeys(("arrivals", "items", "starts", "shares", "block_tables"), "*i32"),
    "slots": "*i64",
    "scale": "fp32",
    **dict.fromkeys(("layer", "num_layers", "num_heads", "num_padded_tokens", "max_items", "num_decodes"), "i32"),
    "table_stride": "i32:16",
    "pages": boxes(16, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("rows", "max_spill_bytes"), [(16, 0), (32, 208)])
def test_on_hopper_the_copy_engine_fetches_and_a_program_leaves_registers_to_others(
    rows: int, max_spill_bytes: int, apart: bool
) -> None:
    compiled = compiled_for_hopper(1, rows, apart, absorbed_hopper.REGISTERS, max_spill_bytes)
    assert compiled.registers * 256 <= 0.6 * 65536


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "heads"), [(4, 16), (1, 64)])
def test_on_hopper_two_warp_groups_hold_the_sums_of_several_queries(queries: int, heads: int) -> None:
    compiled_for_hopper(queries, heads, True, absorbed_hopper.WIDE_REGISTERS, 128)  # spills happen once per item


def compiled_for_hopper(queries: int, heads: int, apart: bool, registers: int, max_spill_bytes: int) -> Compiled:
    constexprs = {"QUERIES": queries, "HEADS": heads, "RANK": 512, "PAGE": 16, "APART": apart}
    types = HOPPER_SIGNATURE | dict.fromkeys(("q_latents", "q_ropes"), boxes(queries, heads, 64))
    options = {"num_warps": 8 if queries * heads > 32 else 4, "maxnreg": registers, "max_spill_bytes": max_spill_bytes}
    compiled = compile_for_h200(absorbed_hopper.attend_share, types, constexprs, **options)
    assert compiled.wgmma
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
    assert "setmaxnreg" in compiled.ptx
    return compiled
