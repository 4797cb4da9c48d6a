"""Moving KV blocks: the reference on a CPU, Triton interpreted or on a GPU."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from baton.kernels import block_copy
from baton.kernels.block_copy import cpu, reference

from ...helpers.aot import compile_for_h200

NUM_BLOCKS, HEADS = 6, 4
IDS = [4, 0, -1, 5]


@pytest.fixture(params=["reference", "cpu", "triton"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    modules = {"reference": reference, "cpu": cpu}
    return modules.get(request.param) or pytest.importorskip("baton.kernels.block_copy.gpu")


def blocks_of(count: int, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random bits: the copy must keep every pattern, NaN included."""
    shape = (count, heads, 3, 2, 4, 8 * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype).to(device)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [slice(0, 4), slice(0, 1), slice(1, 3)], ids=str)
def test_blocks_are_gathered_and_scattered(
    ops: ModuleType, dtype: torch.dtype, heads: slice, triton_device: torch.device
) -> None:
    kv = blocks_of(NUM_BLOCKS, HEADS, dtype, triton_device)
    staging = blocks_of(len(IDS), heads.stop - heads.start, dtype, triton_device)
    before, staged_before, ids = kv.clone(), staging.clone(), torch.tensor(IDS, dtype=torch.int32, device=triton_device)
    assert ops.gather_blocks(kv, ids, staging, heads.start) is staging
    for index, block in enumerate(IDS):
        source = staged_before[index] if block < 0 else kv[block, heads]
        assert same_bits(staging[index], source)
    assert same_bits(kv, before)

    fresh = blocks_of(len(IDS), heads.stop - heads.start, dtype, triton_device)
    ops.scatter_blocks(fresh, ids, kv, heads.start)
    for index, block in enumerate(IDS):
        if block >= 0:
            before[block, heads] = fresh[index]
    assert same_bits(kv, before)


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64], ids=str)
def test_blocks_are_copied_within_the_cache(ops: ModuleType, id_type: torch.dtype, triton_device: torch.device) -> None:
    kv = blocks_of(NUM_BLOCKS, HEADS, torch.float16, triton_device)
    expected = kv.clone()
    expected[0], expected[5] = kv[3], kv[2]
    sources, targets = torch.tensor([[3, 2, -1, 1], [0, 5, 4, -1]], dtype=id_type, device=triton_device)
    ops.copy_blocks(kv, sources, targets)
    assert same_bits(kv, expected)


def test_blocks_of_many_programs_arrive_whole(
    ops: ModuleType, monkeypatch: pytest.MonkeyPatch, triton_device: torch.device
) -> None:
    if hasattr(ops, "WORDS"):
        monkeypatch.setattr(ops, "WORDS", 256)
    kv = blocks_of(NUM_BLOCKS, HEADS, torch.float32, triton_device)
    staging = blocks_of(2, HEADS, torch.float32, triton_device)
    ids = torch.tensor([1, 4], device=triton_device)
    assert same_bits(ops.gather_blocks(kv, ids, staging, 0), kv[[1, 4]])


def test_no_blocks_are_moved_without_error(ops: ModuleType, triton_device: torch.device) -> None:
    kv = blocks_of(2, HEADS, torch.float16, triton_device)
    before, none = kv.clone(), torch.empty(0, dtype=torch.int32, device=triton_device)
    ops.gather_blocks(kv, none, kv[:0].clone(), 0)
    ops.scatter_blocks(kv[:0].clone(), none, kv, 0)
    ops.copy_blocks(kv, none, none)
    assert same_bits(kv, before)


def test_the_public_ops_serve_a_cpu() -> None:
    kv = blocks_of(NUM_BLOCKS, HEADS, torch.bfloat16, torch.device("cpu"))
    ids = torch.tensor([5, 1], dtype=torch.int32)
    staging = block_copy.gather_blocks(kv, ids, torch.empty_like(kv[:2, 1:3]).contiguous(), first_head=1)
    assert same_bits(staging, kv[[5, 1], 1:3])
    block_copy.scatter_blocks(staging.flip(0).contiguous(), ids, kv, first_head=1)
    assert same_bits(kv[[1, 5], 1:3], staging)
    block_copy.copy_blocks(kv, ids, torch.tensor([0, 2], dtype=torch.int32))
    assert same_bits(kv[[0, 2]], kv[[5, 1]])


def test_buffers_that_do_not_fit_are_refused() -> None:
    kv, ids = torch.zeros(4, 2, 1, 2, 4, 8), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="staging is"):
        block_copy.gather_blocks(kv, ids, torch.zeros(3, 2, 1, 2, 4, 8))
    with pytest.raises(ValueError, match="staging is"):
        block_copy.scatter_blocks(torch.zeros(2, 2, 1, 2, 4, 8).half(), ids, kv)
    with pytest.raises(ValueError, match="heads 1 to 2"):
        block_copy.gather_blocks(kv, ids, torch.zeros(2, 2, 1, 2, 4, 8), first_head=1)
    with pytest.raises(ValueError, match="one for one"):
        block_copy.copy_blocks(kv, ids, ids[:1])


def test_loads_are_wide() -> None:
    ops = pytest.importorskip("baton.kernels.block_copy.gpu")
    types = {"source": "*i32", "target": "*i32", "source_ids": "*i32"}
    types |= {f"{side}_{name}": "i32:16" for side in ("source", "target") for name in ("stride", "offset")}
    constants = {"target_ids": None, "NUM_WORDS": 36 * 8192, "WORDS": ops.WORDS}
    compiled = compile_for_h200(ops.copy_kernel, types, constants, num_warps=ops.NUM_WARPS)
    assert compiled.widest_load_bytes == 16
    assert "st.global.v4" in compiled.ptx


@pytest.mark.gpu
def test_blocks_past_4_gib_are_found() -> None:
    ops = pytest.importorskip("baton.kernels.block_copy.gpu")
    far = (1 << 32) // (4 * 36 * 2 * 16 * 128) + 3
    kv = torch.empty(far + 1, 4, 36, 2, 16, 128, dtype=torch.bfloat16, device="cuda")
    kv[far] = torch.randn(kv.shape[1:])
    ids = torch.tensor([far], device="cuda")
    staging = torch.empty_like(kv[:1, 1:3]).contiguous()
    assert torch.equal(ops.gather_blocks(kv, ids, staging, 1), kv[far:, 1:3])
    ops.scatter_blocks(-staging, ids, kv, 1)
    assert torch.equal(kv[far:, 1:3], -staging)
    ops.copy_blocks(kv, ids, torch.zeros_like(ids))
    assert torch.equal(kv[0], kv[far])


@pytest.mark.gpu
def test_staging_may_be_pinned_memory_of_the_host() -> None:
    ops = pytest.importorskip("baton.kernels.block_copy.gpu")
    kv = blocks_of(NUM_BLOCKS, HEADS, torch.bfloat16, torch.device("cuda"))
    staging = torch.empty_like(kv[:2], device="cpu").pin_memory()
    ops.gather_blocks(kv, torch.tensor([3, 1], device="cuda"), staging, 0)
    torch.cuda.synchronize()
    assert same_bits(staging, kv[[3, 1]].cpu())
