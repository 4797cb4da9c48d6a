"""The decode kernels for Hopper: their compiled code, and the caches that they read. Nothing runs on a device."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch

from baton.kernels.attention import AttentionRule, gpu
from baton.kernels.attention.gpu import decode_fp8_hopper, decode_hopper, paged_attention, prepare
from baton.kernels.attention.gpu.decode_plan import DecodePlan

from ...helpers.aot import Compiled, compile_for_h200
from .attention_tma_cases import KERNELS, NARROW, WIDE, either_cache, queries_for, rule_for
from .decode_attention_inputs import LAYER, decodes, queries
from .kernel_checks import PagedSequences

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

BOXES = "swizzle_byte_width={}, element_bitwidth={}, rank=2, transposed=False, fp4_padded=False, cga_layout=[]"
SIGNATURE = {
    **dict.fromkeys(("q", "out"), "*bf16"),
    **dict.fromkeys(("words", "arrivals", "seq_lens", "query_start", "block_tables", "table_rows"), "*i32"),
    **dict.fromkeys(("sums", "tops"), "*fp32"),
    **dict.fromkeys(("layer", "window", "num_layers", "num_shares", "num_seqs", "num_tokens", "table_stride"), "i32"),
    **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    "q_token_stride": "i32:16",
}
SCALES = dict.fromkeys(("k_scale", "v_scale"), "*fp32")


def compile_fetched(
    kernel: ModuleType,
    more: dict[str, str],
    *,
    dim: int = 128,
    group: int = 4,
    num_queries: int = 1,
    spill_bytes: int = 0,
    **constexprs: object,
) -> Compiled:
    """Compile the kernel with the arguments `more`; optional arguments that are not in `more` are None."""
    fitting, is_narrow = kernel.FITTINGS.of(dim, group * num_queries), kernel is decode_fp8_hopper
    box = f"fp8e4nv[16,{dim}],NVMMASharedLayout({BOXES.format(dim, 8)})"
    if not is_narrow:
        box = f"bf16[16,64],NVMMASharedLayout({BOXES.format(128, 16)})"
    optional = ("sinks", *SCALES) if is_narrow else ("sinks",)
    absent = {name: None for name in optional if name not in more}
    signature = {**SIGNATURE, "pages": f"tensordesc<{box}>", **more}
    rows = max(8, group * num_queries)
    constants = {"HEADS": 8, "GROUP": group, "QUERIES": num_queries, "ROWS": rows, "DIM": dim, "PAGE": 16}
    constants |= {"STAGES": fitting.stages, "APART": False, "HAS_CAP": False, **absent, **constexprs}
    options = {"num_warps": 4, "maxnreg": fitting.registers, "max_spill_bytes": spill_bytes}
    return compile_for_h200(kernel.attend_share, signature, constants, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "dim", "group", "num_queries"),
    [
        *((decode_hopper, dim, group, 1) for dim, group in ((64, 8), (128, 2), (128, 4), (128, 16), (256, 2))),
        *((decode_fp8_hopper, dim, group, 1) for dim, group in ((64, 8), (64, 16), (128, 2), (128, 4), (128, 16))),
        *((decode_hopper, dim, group, 4) for dim, group in ((64, 8), (128, 2), (128, 4), (128, 8), (256, 4))),
        *((decode_fp8_hopper, dim, group, 4) for dim, group in ((64, 8), (128, 2), (128, 4), (128, 8))),
    ],
)
def test_as_many_programs_fit_a_multiprocessor_as_the_plan_says(
    kernel: ModuleType, dim: int, group: int, num_queries: int
) -> None:
    more = SCALES if kernel is decode_fp8_hopper else {}
    few_spills = 64 if (kernel, dim, group * num_queries) == (decode_fp8_hopper, 128, 32) else 0
    compiled = compile_fetched(kernel, more, dim=dim, group=group, num_queries=num_queries, spill_bytes=few_spills)
    fitting = kernel.FITTINGS.of(dim, group * num_queries)
    assert compiled.wgmma
    assert "cp.async.bulk.tensor.2d" in compiled.ptx
    assert "mma.sync" not in compiled.ptx
    assert (compiled.shared_bytes + 1024) * fitting.programs <= 228 * 1024
    assert -(-fitting.registers // 8) * 8 * 256 * fitting.programs <= 65536  # units of eight; six warps count as eight


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
def test_every_option_together_spills_nothing(apart: bool) -> None:
    compile_fetched(decode_hopper, {"sinks": "*fp32"}, HAS_CAP=True, APART=apart)
    compile_fetched(decode_fp8_hopper, {"sinks": "*fp32", **SCALES}, HAS_CAP=True, APART=apart)
    compile_fetched(decode_hopper, {}, dim=256, group=2, HAS_CAP=True, APART=apart)


@pytest.mark.slow
def test_every_option_together_spills_nothing_with_a_few_queries() -> None:
    compile_fetched(decode_hopper, {"sinks": "*fp32"}, num_queries=4, HAS_CAP=True)
    compile_fetched(decode_fp8_hopper, {"sinks": "*fp32", **SCALES}, num_queries=4, HAS_CAP=True)


def test_fp8_values_are_loaded_in_pairs_and_no_product_is_fp8() -> None:
    """Transposing loads work on 16-bit units; FP8 tensor cores accumulate with too few bits."""
    compiled = compile_fetched(decode_fp8_hopper, {})
    loads = compiled.ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans")
    assert loads >= 8
    assert "e4m3.e4m3" not in compiled.ptx


# ---- which caches it reads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [decode_hopper, decode_fp8_hopper])
@pytest.mark.parametrize(
    ("num_heads", "shape"),
    [
        (4, {"dtype": torch.float32}),
        (4, {"head_dim": 80}),
        (4, {"head_dim": 64, "block_size": 128}),
        (66, {"head_dim": 64}),
    ],
    ids=str,
)
def test_other_caches_are_not_served(kernel: ModuleType, num_heads: int, shape: dict[str, Any]) -> None:
    own = WIDE if kernel is decode_hopper else NARROW
    sequences = decodes(torch.device("cpu"), [40, 5], **{"dtype": own, **shape})
    assert kernel.plan_tma_decode(sequences.batch, sequences.kv, num_heads) is None


@either_cache
def test_each_kernel_reads_caches_of_its_dtype_only(cache: torch.dtype) -> None:
    sequences = decodes(torch.device("cpu"), [40, 5], dtype=cache)
    planning = [kernel for kernel in (decode_hopper, decode_fp8_hopper) if plan_for(kernel, sequences)]
    assert planning == [KERNELS[cache]]
    sequences = decodes(torch.device("cpu"), [40, 5], dtype=cache, head_dim=256)
    assert (plan_for(KERNELS[cache], sequences) is None) == (cache == NARROW)


def plan_for(kernel: ModuleType, sequences: PagedSequences) -> DecodePlan | None:
    plan: DecodePlan | None = kernel.plan_tma_decode(sequences.batch, sequences.kv, 4)
    return plan


def test_queries_of_another_dtype_and_scaled_caches_of_16_bits_are_not_served() -> None:
    sequences = decodes(torch.device("cpu"), [40, 5], dtype=WIDE)
    q, rule = queries(sequences, 4), AttentionRule(1.0)
    assert decode_hopper.serves(q, sequences.kv, rule)
    assert not decode_hopper.serves(q.half(), sequences.kv, rule)
    for scaled in ("k_scale", "v_scale"):
        assert not decode_hopper.serves(q, sequences.kv, dataclasses.replace(rule, **{scaled: torch.ones(1)}))


def test_the_fp8_kernel_serves_queries_of_16_bits_and_fp8_caches_only() -> None:
    sequences = decodes(torch.device("cpu"), [40, 5], dtype=NARROW)
    q = queries_for(sequences, 4)
    assert decode_fp8_hopper.serves(q, sequences.kv)
    assert decode_fp8_hopper.serves(q.half(), sequences.kv)
    assert not decode_fp8_hopper.serves(q.float(), sequences.kv)
    assert not decode_fp8_hopper.serves(q, sequences.kv.bfloat16())


@pytest.mark.parametrize(
    ("cache", "asked_in", "options", "kernel"),
    [
        (WIDE, WIDE, {}, "decode_hopper"),
        (WIDE, WIDE, {"k_scale": torch.ones(1)}, "decode"),
        (WIDE, torch.float16, {}, "decode"),
        (NARROW, WIDE, {}, "decode_fp8_hopper"),
        (NARROW, torch.float16, {"k_scale": None, "v_scale": None}, "decode_fp8_hopper"),
        (NARROW, torch.float32, {}, "decode"),
    ],
    ids=str,
)
def test_a_step_on_hopper_uses_the_kernel_that_supports_its_cache_and_queries(
    cache: torch.dtype,
    asked_in: torch.dtype,
    options: dict[str, Any],
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = []
    monkeypatch.setattr(gpu, "is_hopper", lambda _: True)
    for name, owner, function in (
        ("decode", gpu, "paged_decode"),
        ("decode_hopper", decode_hopper, "tma_decode"),
        ("decode_fp8_hopper", decode_fp8_hopper, "tma_decode"),
    ):
        monkeypatch.setattr(owner, function, lambda *_, name=name, **__: launched.append(name))
    sequences = decodes(torch.device("cpu"), [40, 5], dtype=cache)
    batch = prepare(sequences.batch, sequences.kv, num_heads=4)
    q = queries(sequences, 4, asked_in)
    paged_attention(q, sequences.kv, LAYER, batch, rule_for(sequences, **options), out=None)
    assert launched == [kernel]
