"""The MLA kernels, compiled for an H200."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from baton.kernels.mla import gpu
from baton.kernels.mla.gpu import absorbed, absorbed_narrow, absorbed_wide, dense, latent_cache

from ...helpers.aot import Compiled, compile_for_h200, compile_launches
from .mla_cases import DEEPSEEK_V2_LITE, latent_step

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

SIZES = {"RANK": 512, "ROPE": 64, "PAGE": 16}
NUMBERS = dict.fromkeys(("items_ptr", "starts_ptr", "shares_ptr", "tables_ptr", "key_start_ptr"), "*i32") | {
    "lse_ptr": "*fp32",
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


def attend(queries: int, num_seqs: int) -> None:
    step = latent_step(
        [queries] * num_seqs, [40] * num_seqs, torch.device("cpu"), shape=DEEPSEEK_V2_LITE, dtype=torch.bfloat16
    )
    with mock.patch("baton.kernels.mla.gpu.work_list.multiprocessors", return_value=132):  # as an H200 has
        step.attend(gpu.prepare, gpu.mla_attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "num_seqs", "products"),
    [
        (1, 2, ["_multiply_to_latents", "_combine", "_multiply"]),
        (1, 64, ["_multiply_to_latents", "_multiply_to_values"]),
        (4, 64, ["_multiply_to_latents", "_multiply_to_values"]),
        (4, 3, ["_multiply_to_latents", "_combine", "_multiply_to_values"]),
        (1, 300, ["_combine"]),
    ],
)
def test_all_kernels_of_a_step_compile(queries: int, num_seqs: int, products: list[str]) -> None:
    launched = compile_launches(attend, queries, num_seqs)
    assert [name for name in launched if name not in ("plan_work_kernel", "latent_attention_kernel")] == products


BOXES = "swizzle_byte_width=128, element_bitwidth=16, rank={}, transposed=False, fp4_padded=False, cga_layout=[]"


def boxes(*shape: object) -> str:
    """Return the type of a tensor descriptor with boxes of this shape, for TMA in Gluon."""
    return f"tensordesc<bf16[{','.join(map(str, shape))}],NVMMASharedLayout({BOXES.format(len(shape))})>"


HOPPER_SIGNATURE = {
    "results": "*bf16",
    "lse": "*fp32",
    **dict.fromkeys(("items", "starts", "shares", "block_tables"), "*i32"),
    "scale": "fp32",
    **dict.fromkeys(("layer", "num_layers", "num_heads", "num_whole_rows"), "i32"),
    "table_stride": "i32:16",
    "pages": boxes(16, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "max_spill_bytes"), [(16, 0), (32, 208)])
def test_on_hopper_the_copy_engine_fetches_and_a_program_leaves_registers_to_others(
    heads: int, max_spill_bytes: int
) -> None:
    constexprs = {"QUERIES": 1, "HEADS": heads, "RANK": 512, "PAGE": 16}
    compiled = compiled_for_hopper(absorbed_narrow, constexprs, max_spill_bytes)
    assert compiled.registers * 256 <= 0.6 * 65536


@pytest.mark.slow
@pytest.mark.parametrize(("queries", "heads"), [(4, 16), (8, 8), (1, 64)])
def test_on_hopper_two_warp_groups_take_turns_with_the_tiles_of_several_queries(queries: int, heads: int) -> None:
    constexprs = {"QUERIES": queries, "HEADS": heads, "RANK": 512, "PAGE": 16}
    compiled = compiled_for_hopper(absorbed_wide, constexprs, 256)  # spills happen once per item
    waits = re.findall(r"wgmma.wait_group.sync.aligned\s+(\d)", compiled.ptx)
    assert "1" in waits, "a group's scores run beside the sums of the other group's tile"


def compiled_for_hopper(kernel: ModuleType, constexprs: dict[str, object], max_spill_bytes: int) -> Compiled:
    query_boxes = dict.fromkeys(("q_latents", "q_ropes"), boxes(constexprs["QUERIES"], constexprs["HEADS"], 64))
    compiled = compile_for_h200(
        kernel.attend_share,
        HOPPER_SIGNATURE | query_boxes,
        constexprs,
        num_warps=4,
        maxnreg=kernel.REGISTERS,
        max_spill_bytes=max_spill_bytes,
    )
    assert compiled.wgmma
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
    assert "setmaxnreg" in compiled.ptx
    return compiled
