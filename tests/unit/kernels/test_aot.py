"""A test run on a machine without a GPU both interprets kernels and compiles them for one."""

from __future__ import annotations

import pytest
import torch

from ...helpers.aot import compile_for_h200
from .looping_kernel import add_products
from .spilling_kernel import hold_everything

triton = pytest.importorskip("triton")
tl = triton.language

PRODUCT = {"a": "*bf16", "b": "*bf16", "out": "*fp32"}
EVERYTHING = {"x": "*fp32", "out": "*fp32"}


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    cells = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + cells, tl.dot(tl.load(a + cells), tl.load(b + cells)))


def test_a_product_runs_on_the_warp_group_instructions_and_loads_16_bytes_at_a_time() -> None:
    compiled = compile_for_h200(product, PRODUCT, {"SIZE": 64}, num_warps=4)
    assert compiled.wgmma
    assert compiled.widest_load_bytes == 16
    assert compiled.shared_bytes >= 64 * 64 * 2
    assert 32 < compiled.registers <= 255


def test_a_kernel_that_spills_is_refused_unless_that_much_is_allowed() -> None:
    with pytest.raises(AssertionError, match=r"hold_everything spills \d+ bytes a thread, at \d+ registers: at most 0"):
        compile_for_h200(hold_everything, EVERYTHING, {"SIZE": 16384}, num_warps=1)
    compiled = compile_for_h200(hold_everything, EVERYTHING, {"SIZE": 16384}, num_warps=1, max_spill_bytes=10_000)
    assert compiled.spill_bytes > 0


@pytest.mark.slow
def test_a_kernel_that_needs_too_much_shared_memory_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"product needs \d+ bytes of shared memory"):
        compile_for_h200(product, {**PRODUCT, "a": "*fp32", "b": "*fp32"}, {"SIZE": 256}, max_spill_bytes=1 << 20)


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_branch_that_reads_a_sum_of_products_makes_the_loop_wait_for_each(stages: int, stores: bool) -> None:
    types = {"a": "*bf16", "b": "*bf16", "flags": "*i32", "out": "*fp32", "count": "i32"}
    compiled = compile_for_h200(add_products, types, {"SIZE": 64, "STORES": stores}, num_warps=4, num_stages=stages)
    assert compiled.waits_for_each_product == stores
    assert (compiled.loads_ahead > 0) == (stages > 2)


def test_arguments_that_are_left_out_or_unknown_are_named() -> None:
    with pytest.raises(TypeError, match=r"product: left out \['b', 'out'\], unknown \['c'\]"):
        compile_for_h200(product, {"a": "*bf16", "c": "*bf16"}, {"SIZE": 64})


def test_the_same_kernel_runs(triton_device: torch.device) -> None:
    a, b = (torch.randn(16, 16, device=triton_device) for _ in range(2))
    out = torch.full_like(a, float("nan"))
    product[(1,)](a, b, out, SIZE=16)
    torch.testing.assert_close(out, a @ b, atol=2e-2, rtol=2e-2)  # a GPU multiplies float32 as TF32
