"""The decode kernel, compiled for an H200."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import tuned
from baton.kernels.attention import tuning
from baton.kernels.attention.gpu import decode, decode_combine, decode_fp8_hopper, decode_options

from ...helpers.aot import Compiled, compile_for_h200
from .decode_attention_inputs import decodes

pytest.importorskip("triton")
pytestmark = pytest.mark.exhaustive

SIGNATURE = {
    **dict.fromkeys(("q", "kv", "out"), "*bf16"),
    **dict.fromkeys(("words", "arrivals", "seq_lens", "block_tables", "table_rows"), "*i32"),
    **dict.fromkeys(("sums", "tops"), "*fp32"),
    **dict.fromkeys(("layer", "window", "num_shares", "table_stride"), "i32"),
    "query_start": "*i32",
    **dict.fromkeys(("num_seqs", "num_tokens"), "i32"),
    **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    **{f"{name}_stride": "i32:16" for name in ("q_token", "kv_block", "kv_head", "kv_layer")},
    "to_value": "i32:16",
}
SHAPE = {"HEADS": 8, "BLOCK_SIZE": 16}


def compile_decode(
    signature: dict[str, str],
    *,
    options: dict[str, int] = decode_options.DEFAULT,
    group: int = 4,
    dim: int = 128,
    value_dim: int | None = None,
    num_queries: int = 1,
    spill_bytes: int = 0,
    **constexprs: object,
) -> Compiled:
    """Compile the kernel for a `group` that is a power of two, at most 16."""
    values = {"VALUE_DIM": dim, "PADDED_VALUE_DIM": dim, "TOKEN_STRIDE": dim}
    if value_dim is not None:
        values = {"VALUE_DIM": value_dim, "PADDED_VALUE_DIM": value_dim, "TOKEN_STRIDE": dim + value_dim}
    absent = {name: None for name in ("sinks", "k_scale", "v_scale") if name not in signature}
    return compile_for_h200(
        decode.attend_share,
        signature,
        {
            **SHAPE,
            "DIM": dim,
            "PADDED_DIM": 1 << (dim - 1).bit_length(),
            **values,
            **absent,
            "GROUP": group,
            "QUERIES": num_queries,
            "ROWS": max(16, group * num_queries),
            "PADDED_ROWS": group * num_queries,
            "PARTS": max(1, decode.ELEMENTS_AT_ONCE // (group * num_queries * values["VALUE_DIM"])),
            "UNIT": options["unit_tokens"],
            "EARLY_UNITS": options["early_units"],
            "APART": bool(options["apart"]),
            "HAS_CAP": False,
            **constexprs,
        },
        num_warps=options["num_warps"],
        num_stages=options["num_stages"],
        max_spill_bytes=spill_bytes,
    )


def test_pages_are_read_16_bytes_at_a_time_and_ahead_of_their_use() -> None:
    compiled = compile_decode(SIGNATURE)
    assert compiled.widest_load_bytes == 16
    assert "cp.async" in compiled.ptx
    assert compiled.shared_bytes < 113 * 1024  # two programs per multiprocessor


TUNED = [(entry.key["group"], entry.config) for entry in tuned.entries("attention", "NVIDIA_H200")]
RUN = {
    (group, *options.items()): (group, options) for group, options in [*((8, o) for o in tuning.FEW_CANDIDATES), *TUNED]
}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "options"), RUN.values())
def test_as_many_programs_fit_a_multiprocessor_as_the_options_say(group: int, options: dict[str, int]) -> None:
    assert options.keys() == decode_options.DEFAULT.keys()
    compiled = compile_decode(SIGNATURE, options=options, group=group)
    threads = 32 * options["num_warps"] * options["programs"]
    assert -(-compiled.registers // 8) * 8 * threads <= 65536  # registers are allocated to a thread in units of eight
    assert (compiled.shared_bytes + 1024) * options["programs"] <= 228 * 1024


@pytest.mark.parametrize("num_queries", [1, 4])
def test_every_option_together_spills_nothing(num_queries: int) -> None:
    options = dict.fromkeys(("sinks", "k_scale", "v_scale"), "*fp32")
    compile_decode({**SIGNATURE, **options, "kv": "*fp8e4nv"}, num_queries=num_queries, HAS_CAP=True)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize("group", [1, 8])
def test_a_program_of_heads_of_512_fits_a_multiprocessor_and_nothing_spills(cache: str, group: int) -> None:
    options = decode_options.DEFAULT_OF_WIDEST_HEADS
    compiled = compile_decode({**SIGNATURE, "kv": f"*{cache}"}, options=options, group=group, dim=512)
    assert compiled.shared_bytes < 227 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bf16", "fp8e4nv"])
def test_two_programs_of_keys_wider_than_values_fit_a_multiprocessor(cache: str) -> None:
    options = decode_options.DEFAULT_OF_WIDE_HEADS
    signature = {**SIGNATURE, "kv": f"*{cache}", "sinks": "*fp32"}
    compiled = compile_decode(signature, options=options, group=16, dim=192, value_dim=128)
    assert compiled.shared_bytes < 113 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bf16", "fp8e4nv"])
@pytest.mark.parametrize("group", [1, 2, 8])
def test_two_programs_of_wide_heads_fit_a_multiprocessor_and_nothing_spills(cache: str, group: int) -> None:
    options = decode_options.DEFAULT_OF_WIDE_HEADS
    compiled = compile_decode({**SIGNATURE, "kv": f"*{cache}"}, options=options, group=group, dim=256, HAS_CAP=True)
    assert compiled.widest_load_bytes == 16
    assert -(-compiled.registers // 8) * 8 * 32 * options["num_warps"] * options["programs"] <= 65536
    assert (compiled.shared_bytes + 1024) * options["programs"] <= 228 * 1024


def test_plans_of_wide_heads_have_smaller_units() -> None:
    batch = decodes(torch.device("cpu"), [40, 5]).batch
    heads = {"num_heads": 4, "num_kv_heads": 2}
    plans = [decode_options.plan_decode(batch, **heads, head_dim=dim, value_dim=dim) for dim in (128, 256)]
    assert [plan.unit_tokens for plan in plans] == [64, 32]


def test_the_general_kernel_has_shared_memory_for_the_units_of_plans_for_fp8_caches() -> None:
    """The general kernel serves steps whose queries the kernel of the plan does not support."""
    options = decode_options.DEFAULT | {"unit_tokens": decode_fp8_hopper.UNIT.value, "early_units": 0}
    signature = {**SIGNATURE, **dict.fromkeys(("q", "out"), "*fp32"), "kv": "*fp8e4nv"}
    compile_decode(signature, options=options, spill_bytes=1 << 16)


def test_the_kernel_that_adds_up_parts_loads_many_at_once() -> None:
    signature = dict.fromkeys(("sinks", "v_scale", "sums", "tops"), "*fp32") | {"out": "*bf16"}
    signature |= dict.fromkeys(("words", "seq_lens"), "*i32")
    signature |= dict.fromkeys(("num_seqs", "num_shares", "window", "num_heads"), "i32")
    constants = {"SEQS": 8, "DIM": 128, "PADDED_DIM": 128, "UNIT": 64, "PARTS": decode_combine.PARTS_AT_ONCE}
    compiled = compile_for_h200(decode_combine.add_parts_kernel, signature, constants, num_warps=4)
    assert compiled.widest_load_bytes == 16
    assert compiled.registers <= 128
