"""Parts of `scan_hopper`: its compile-time sizes, the shared memory of chunks, and named groups of arguments.

Annotations are read by Triton: this module evaluates them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.language.core import _aggregate as aggregate

from baton.kernels.hopper.rings import BOX, SLAB, Ring, Value, barrier, record
from baton.kernels.state_batch import CHUNK as CHUNK_TOKENS

from . import intra

CHUNK = gl.constexpr(CHUNK_TOKENS)
VALUES = gl.constexpr(64)  # dimensions of a consumer
FACTORS = gl.constexpr(intra.FACTORS.value)
READ_KEY = gl.constexpr(intra.READ_KEY.value)
READ_QUERY = gl.constexpr(intra.READ_QUERY.value)
WRITE_KEY = gl.constexpr(intra.WRITE_KEY.value)
KEEP = gl.constexpr(intra.KEEP.value)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@aggregate
class ScanShape:
    """The compile-time sizes of a scan, and how its operands lie in registers."""

    NUM_HEADS: gl.constexpr
    GROUP: gl.constexpr
    KEY_DIM: gl.constexpr
    VALUE_DIM: gl.constexpr
    CONSUMERS: gl.constexpr
    PER_DIM: gl.constexpr
    BYTES: gl.constexpr  # of a chunk that the copy engine brings
    VECTORS: gl.constexpr  # of factors of a chunk, beside KEEP
    WIDTH: gl.constexpr  # of such a vector
    STATE: gl.constexpr  # [VALUES, KEY_DIM]
    TOKENS: gl.constexpr  # [VALUES, CHUNK]

    @gluon.constexpr_function
    def __init__(self, NUM_HEADS, GROUP, KEY_DIM, VALUE_DIM, CONSUMERS, PER_DIM):
        self.NUM_HEADS = gl.constexpr(NUM_HEADS)
        self.GROUP = gl.constexpr(GROUP)
        self.KEY_DIM = gl.constexpr(KEY_DIM)
        self.VALUE_DIM = gl.constexpr(VALUE_DIM)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.PER_DIM = gl.constexpr(PER_DIM)
        columns = (3 if PER_DIM else 2) * KEY_DIM + CONSUMERS * VALUES.value + 2 * CHUNK.value
        self.BYTES = gl.constexpr(CHUNK.value * columns * 2)
        self.VECTORS = gl.constexpr(1 if PER_DIM else FACTORS.value - 1)
        self.WIDTH = gl.constexpr(KEY_DIM if PER_DIM else CHUNK.value)
        self.STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEY_DIM, 16]))
        self.TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK.value, 16]))


@record
class Scan:
    """The chunks of one sequence, for one head."""

    head: gl.tensor
    first_chunk: gl.tensor
    end_chunk: gl.tensor
    chunk_start: gl.tensor  # pointers
    checkpoints: gl.tensor
    factors: gl.tensor


@record
class Sources:
    """The tensors that the producer copies."""

    q: Value  # descriptors of boxes
    k: Value
    write_keys: Value  # or None
    v: Value
    mixing: Value
    attention: Value


@record
class Tiles:
    """The shared memory of chunks, all of which arrives and is released together, and of results."""

    keys: Ring
    queries: Ring
    write_keys: Ring
    values: Ring
    mixing: Ring
    attention: Ring
    vectors: gl.shared_memory_descriptor  # [stages * VECTORS, WIDTH]
    results: gl.shared_memory_descriptor  # [consumers, CHUNK, VALUES]


@record
class Output:
    """The states, and the tensor of results."""

    state: gl.tensor  # pointers
    source: gl.tensor  # slots
    target: gl.tensor
    state_stride: Value
    out: gl.tensor
    out_stride: Value
    first_value: gl.tensor  # of the program


@gluon.jit
def new_tiles_ring(dtype: gl.constexpr, columns: gl.constexpr, full, free):
    """Return a ring of tiles [CHUNK, columns] that shares its barriers with others."""
    STAGES: gl.constexpr = full.shape[0]
    slabs = gl.allocate_shared_memory(dtype, [STAGES * (columns // SLAB), CHUNK, SLAB], BOX)
    return Ring(slabs, full, free)


@gluon.jit
def factor(tiles, n, NUMBER: gl.constexpr, TOKENS: gl.constexpr):
    """Return one of a chunk's vectors of factors, [CHUNK]."""
    STAGES: gl.constexpr = tiles.keys.full.shape[0]
    return tiles.vectors.index(n % STAGES * (FACTORS - 1) + NUMBER).load(gl.SliceLayout(0, TOKENS))


@gluon.jit
def clear_behind(ring, n, count):
    """Zero the rows of tile n from `count` on: they are another sequence's, and zero times infinity is not zero."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SLABS: gl.constexpr = ring.slabs.shape[0] // ring.full.shape[0]
    exists = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT)) < count, 1)
    for slab in gl.static_range(SLABS):
        cells = ring.slab(n, slab)
        value = cells.load(LAYOUT)
        cells.store(gl.where(exists, value, gl.zeros_like(value)))
    hopper.fence_async_shared()
    barrier()
