"""Ring buffers in shared memory between TMA producers and warp-group consumers, and names that depend on the version
of Triton.

    producer   await_free(n) -> expect(n) -> copies into slab(n, i), reported to barrier(n)
    consumer   await_full(n) -> products read slab(n, i) or tile(n) -> release(n)      tile n is at stage n % stages

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from typing import dataclass_transform

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate
from triton.language.core import base_value

RENAMED = gl.constexpr(hasattr(tma, "async_load"))  # Triton 3.6 has other names for three functions
async_load = tma.async_load if RENAMED.value else tma.async_copy_global_to_shared
SLAB = gl.constexpr(64)  # columns of 16 bits
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))  # a swizzle of 128 bytes, the widest possible
IN_16_BITS = (torch.bfloat16, torch.float16)
barrier = gl.barrier if RENAMED.value else gl.thread_barrier  # synchronizes the warps of one partition
Value = base_value  # the type of a field that may hold a tensor, a constant or None, as a launch specializes it


@dataclass_transform()
def record(cls):
    """Make an aggregate of a class with annotated fields. Its constructor takes their values in order."""
    names = tuple(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))

    cls.__init__ = gluon.constexpr_function(__init__)
    return aggregate(cls)


def cache_fits_boxes(kv: Tensor, dtypes: tuple[torch.dtype, ...] = IN_16_BITS) -> bool:
    """Return whether TMA can read the cache page by page: one of these dtypes, and pages that fit a box and a tile.

    TMA coordinates have 32 bits, which must suffice for the rows of the whole cache.
    """
    block_size, dim = kv.shape[4:]
    return (
        kv.dtype in dtypes
        and block_size in (8, 16, 32, 64)
        and kv.is_contiguous()
        and kv.numel() // dim < 2**31 - block_size
        and kv.data_ptr() % 16 == 0
    )


@gluon.jit
def view(memory, shape: gl.constexpr, layout: gl.constexpr):
    """Return the same shared memory as a tensor of another shape."""
    return view_as(memory.dtype, memory, shape, layout)


@gluon.jit
def view_as(dtype: gl.constexpr, memory, shape: gl.constexpr, layout: gl.constexpr):
    """Return the same shared memory as a tensor of another type and shape."""
    return memory.reinterpret(dtype, shape, layout) if RENAMED else memory._reinterpret(dtype, shape, layout)


@record
class Ring:
    """A ring buffer of tiles between TMA and the consuming warp groups. Each tile is stored in slabs of a few columns.

    A slab's rows have the width of the swizzle: at most 128 bytes.
    """

    slabs: gl.shared_memory_descriptor  # [stages * slabs of a tile, rows, columns of a slab]
    full: gl.shared_memory_descriptor  # [stages, 1] barriers
    free: gl.shared_memory_descriptor

    @gluon.jit
    def slab(self, n, index: gl.constexpr):
        """Return [rows, columns of a slab] of tile n."""
        STAGES: gl.constexpr = self.full.shape[0]
        return self.slabs.index(n % STAGES * (self.slabs.shape[0] // STAGES) + index)

    @gluon.jit
    def tile(self, n):
        """Return [rows, columns] of tile n."""
        STAGES: gl.constexpr = self.full.shape[0]
        TILES: gl.constexpr = [STAGES, self.slabs.shape[1], self.slabs.shape[0] // STAGES * self.slabs.shape[2]]
        LAYOUT: gl.constexpr = self.slabs.layout
        return view(self.slabs, TILES, LAYOUT).index(n % STAGES)

    @gluon.jit
    def part(self, n, index: gl.constexpr, PARTS: gl.constexpr):
        """Return [rows, columns / PARTS]: one of PARTS equal parts of the columns of tile n."""
        STAGES: gl.constexpr = self.full.shape[0]
        COLUMNS: gl.constexpr = self.slabs.shape[0] // (STAGES * PARTS) * self.slabs.shape[2]
        SHAPE: gl.constexpr = [STAGES * PARTS, self.slabs.shape[1], COLUMNS]
        LAYOUT: gl.constexpr = self.slabs.layout
        return view(self.slabs, SHAPE, LAYOUT).index(n % STAGES * PARTS + index)

    @gluon.jit
    def barrier(self, n):
        """Return the barrier that copies into tile n report to."""
        return self.full.index(n % self.full.shape[0])

    @gluon.jit
    def await_free(self, n):
        STAGES: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.free.index(n % STAGES), (n // STAGES & 1) ^ 1)

    @gluon.jit
    def await_full(self, n):
        STAGES: gl.constexpr = self.full.shape[0]
        mbarrier.wait(self.full.index(n % STAGES), n // STAGES & 1)

    @gluon.jit
    def expect(self, n):
        """Expect the bytes of a whole tile n at its barrier, before its copies are issued."""
        STAGES: gl.constexpr = self.full.shape[0]
        SLAB_BYTES: gl.constexpr = self.slabs.shape[1] * self.slabs.layout.swizzle_byte_width
        mbarrier.expect(self.full.index(n % STAGES), self.slabs.shape[0] // STAGES * SLAB_BYTES)

    @gluon.jit
    def release(self, n):
        mbarrier.arrive(self.free.index(n % self.full.shape[0]))


@gluon.jit
def new_barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """Return barriers that complete after `arrivals` arrivals. The caller must fence before other warps use them."""
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(barriers.index(index), count=arrivals)
    return barriers


@gluon.jit
def new_ring(
    dtype: gl.constexpr,
    stages: gl.constexpr,
    rows: gl.constexpr,
    columns: gl.constexpr,
    consumers: gl.constexpr,
    layout: gl.constexpr = BOX,
):
    """Return a ring of `stages` tiles [rows, columns], each released by `consumers`. A slab is as wide as a swizzle."""
    SLAB_COLUMNS: gl.constexpr = layout.swizzle_byte_width * 8 // dtype.primitive_bitwidth
    slabs = gl.allocate_shared_memory(dtype, [stages * (columns // SLAB_COLUMNS), rows, SLAB_COLUMNS], layout)
    return Ring(slabs, new_barriers(stages, 1), new_barriers(stages, consumers))


@gluon.jit
def clear_tail(
    values,
    n,
    num_keys,
    PAGE: gl.constexpr,
    WARPS: gl.constexpr = 4,
    PART: gl.constexpr = 0,
    PARTS: gl.constexpr = 1,
):
    """Zero the rows of tile n after the last of `num_keys` keys, in the last page of a ring of 16-bit pages.

    They may be infinite or NaN, and zero times infinity is not zero. Each consumer, of WARPS warps, does it itself, so
    that none has to wait for another. A consumer that reads one of PARTS parts of the columns does it for PART.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    PAGES: gl.constexpr = values.slabs.shape[1] // PAGE
    SLABS: gl.constexpr = values.slabs.shape[0] // (values.full.shape[0] * PARTS)
    tail = num_keys % PAGE
    if tail > 0:
        values.await_full(n)
        page = num_keys // PAGE % PAGES
        exists = gl.expand_dims(gl.arange(0, PAGE, gl.SliceLayout(1, LAYOUT)) < tail, 1)
        for slab in gl.static_range(SLABS):
            box = view(values.slab(n, PART * SLABS + slab), [PAGES, PAGE, SLAB], BOX).index(page)
            value = box.load(LAYOUT)
            box.store(gl.where(exists, value, gl.zeros_like(value)))
        hopper.fence_async_shared()
        barrier()
