"""The scan for Hopper, warp-specialized: the copy engine fills rings, and products follow each other directly.

    producer, 1 warp     copies each chunk's keys, queries, values and matrices, and stores its factors beside them
    consumers, 4 warps   64 value dimensions each, in one chain of products from chunk to chunk; they share the tiles

A consumer's state, and whatever it multiplies, stays in its registers. While the products with the state run, it writes
the outputs of the chunk before.

Annotations are read by Triton: this module evaluates them.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.hopper.rings import BOX, IN_16_BITS, SLAB, async_load, barrier, new_barriers
from baton.kernels.launch import is_hopper
from baton.kernels.pdl import launch_options, let_next_start, wait_for_previous
from baton.kernels.state_batch import CHUNK as CHUNK_TOKENS
from baton.kernels.state_batch import StateBatch

from .options import Shape
from .scan_tiles import (
    CHUNK,
    FACTORS,
    KEEP,
    READ_KEY,
    READ_QUERY,
    VALUES,
    VECTOR,
    WRITE_KEY,
    Output,
    Scan,
    ScanShape,
    Sources,
    Tiles,
    clear_behind,
    factor,
    new_tiles_ring,
)

KEY_DIM = 128


def serves(q: Tensor, k: Tensor, v: Tensor, shape: Shape) -> bool:
    """Return true for tensors that the copy engine reads: 16-bit types, 128 key dimensions, rows at 16 bytes."""
    return (
        is_hopper(q.device)
        and q.dtype in IN_16_BITS
        and shape.key_dim == KEY_DIM
        and shape.value_dim % VALUES.value == 0
        and all(x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (q, k, v))
    )


def scan_chunks(
    q: Tensor,
    k: Tensor,
    write_keys: Tensor | None,
    v: Tensor,
    mixing: Tensor,
    attention: Tensor,
    factors: Tensor,
    state: Tensor,
    batch: StateBatch,
    out: Tensor,
    shape: Shape,
    *,
    consumers: int,
    stages: int,
) -> None:
    """Run the scan over all sequences that go chunk by chunk: see `scan.scan_chunks`; `consumers` is 1 or 2."""
    values = consumers * VALUES.value
    scan_heads[(shape.value_dim // values, shape.num_heads, batch.num_prefills)](
        _boxes(q, shape.per_dim),
        _boxes(k, shape.per_dim),
        None if write_keys is None else _boxes(write_keys, shape.per_dim),
        _boxes(v, False),
        _boxes(mixing, True),
        _boxes(attention, True),
        factors,
        state,
        batch.sources,
        batch.targets,
        batch.chunk_start,
        batch.checkpoints,
        batch.seq_chunks,
        out,
        batch.num_decodes,
        state.stride(0),
        out.stride(0),
        NUM_HEADS=shape.num_heads,
        GROUP=shape.group,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        CONSUMERS=consumers,
        STAGES=stages,
        PER_DIM=shape.per_dim,
        num_warps=4,
        **launch_options(),
    )


def _boxes(x: Tensor, in_chunks: bool) -> TensorDescriptor:
    """Describe x in boxes of a chunk and 64 columns: [T, heads, dims] in rows of a token, or chunks x heads of rows."""
    rows = x.view(-1, x.shape[-1]) if in_chunks else x.flatten(1)
    return TensorDescriptor.from_tensor(rows, [CHUNK_TOKENS, SLAB.value], BOX.value)


@gluon.jit
def _produce(scan, sources, tiles, first_column, shape):
    """Copy chunk after chunk into the rings."""
    WORDS: gl.constexpr = gl.BlockedLayout([shape.WIDTH // 32], [32], [1], [0])
    STAGES: gl.constexpr = tiles.keys.full.shape[0]
    HELD: gl.constexpr = shape.KEY_DIM if shape.PER_DIM else FACTORS * CHUNK
    word = gl.arange(0, shape.WIDTH, WORDS)
    key_column = scan.head // shape.GROUP * shape.KEY_DIM
    value_column = scan.head * shape.VALUE_DIM + first_column
    row = gl.load(scan.chunk_start + scan.first_chunk)
    wait_for_previous()
    for chunk in range(scan.first_chunk, scan.end_chunk):
        n = chunk - scan.first_chunk
        next_row = gl.load(scan.chunk_start + chunk + 1)
        place = chunk * shape.NUM_HEADS + scan.head
        vector = scan.factors + place.to(gl.int64) * HELD + word
        loaded = ()
        for index in gl.static_range(shape.VECTORS):
            loaded = loaded + (gl.load(vector + index * shape.WIDTH),)
        tiles.keys.await_free(n)
        for index in gl.static_range(shape.VECTORS):
            tiles.vectors.index(n % STAGES * shape.VECTORS + index).store(loaded[index])
        barrier()
        full = tiles.keys.barrier(n)
        mbarrier.expect(full, shape.BYTES)
        square = place * CHUNK
        for slab in gl.static_range(shape.KEY_DIM // SLAB):
            if shape.PER_DIM:
                async_load(sources.k, [square, slab * SLAB], full, tiles.keys.slab(n, slab))
                async_load(sources.q, [square, slab * SLAB], full, tiles.queries.slab(n, slab))
                async_load(sources.write_keys, [square, slab * SLAB], full, tiles.write_keys.slab(n, slab))
            else:
                async_load(sources.k, [row, key_column + slab * SLAB], full, tiles.keys.slab(n, slab))
                async_load(sources.q, [row, key_column + slab * SLAB], full, tiles.queries.slab(n, slab))
        for slab in gl.static_range(shape.CONSUMERS):
            async_load(sources.v, [row, value_column + slab * SLAB], full, tiles.values.slab(n, slab))
        async_load(sources.mixing, [square, 0], full, tiles.mixing.slab(n, 0))
        async_load(sources.attention, [square, 0], full, tiles.attention.slab(n, 0))
        row = next_row


@gluon.jit
def _consume(scan, tiles, output, INDEX: gl.constexpr, shape):
    """Carry VALUES dimensions of the state through the chunks."""
    STATE: gl.constexpr = shape.STATE
    TOKENS: gl.constexpr = shape.TOKENS
    LEFT: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    LEFT_OF_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    STAGES: gl.constexpr = tiles.keys.full.shape[0]
    dtype: gl.constexpr = tiles.keys.slabs.dtype
    let_next_start()
    value = output.first_value + INDEX * VALUES + gl.arange(0, VALUES, gl.SliceLayout(1, STATE))
    dim = gl.arange(0, shape.KEY_DIM, gl.SliceLayout(0, STATE))
    inner = scan.head * (shape.KEY_DIM * shape.VALUE_DIM)
    inner = inner + gl.expand_dims(value, 1).to(gl.int64) + gl.expand_dims(dim, 0).to(gl.int64) * shape.VALUE_DIM
    column = gl.arange(0, CHUNK, gl.SliceLayout(0, TOKENS))
    empty = gl.zeros([VALUES, CHUNK], gl.float32, TOKENS)
    kept = gl.zeros([VALUES, shape.KEY_DIM], gl.float32, STATE)
    begin = gl.load(scan.chunk_start + scan.first_chunk)
    end = gl.load(scan.chunk_start + scan.first_chunk + 1, mask=scan.first_chunk < scan.end_chunk, other=0)
    wait_for_previous()
    if output.source >= 0:
        kept = gl.load(output.state + output.source.to(gl.int64) * output.state_stride + inner)
    memory = tiles.results.index(INDEX)
    written_begin = begin
    written_count = begin * 0
    for chunk in range(scan.first_chunk, scan.end_chunk):
        n = chunk - scan.first_chunk
        count = end - begin
        next_end = gl.load(scan.chunk_start + chunk + 2, mask=chunk + 1 < scan.end_chunk, other=0)
        checkpoint = gl.load(scan.checkpoints + chunk)
        tiles.keys.await_full(n)
        if not shape.PER_DIM:
            place = (chunk * shape.NUM_HEADS + scan.head).to(gl.int64)
            keep = gl.load(scan.factors + (place * FACTORS + KEEP) * CHUNK)
            if count < CHUNK:
                clear_behind(tiles.keys, n, count)
        rounded = gl.convert_layout(kept.to(dtype), LEFT)
        keys = tiles.keys.tile(n).permute((1, 0))
        read = hopper.warpgroup_mma(rounded, keys, empty, use_acc=False, is_async=True)
        values = gl.convert_layout(tiles.values.slab(n, INDEX).permute((1, 0)).load(LEFT), TOKENS)
        _write_results(memory, written_begin, written_count, scan, output, INDEX, shape)
        read = hopper.warpgroup_mma_wait(0, deps=[read])
        if not shape.PER_DIM:
            read = read * gl.expand_dims(factor(tiles, n, READ_KEY, TOKENS), 0)
        error = values.to(gl.float32) - read
        if count < CHUNK:
            error = gl.where(gl.expand_dims(column < count, 0), error, 0.0)
        left = gl.convert_layout(error.to(dtype), LEFT)
        mixing = tiles.mixing.slab(n, 0).permute((1, 0))
        queries = tiles.queries.tile(n).permute((1, 0))
        changes = hopper.warpgroup_mma(left, mixing, empty, use_acc=False, is_async=True)
        result = hopper.warpgroup_mma(rounded, queries, empty, use_acc=False, is_async=True)
        changes, left = hopper.warpgroup_mma_wait(1, deps=[changes, left])
        plain = gl.convert_layout(changes.to(dtype), LEFT)
        if shape.PER_DIM:
            written = gl.convert_layout(changes.to(dtype), LEFT_OF_STATE)
            faded = tiles.vectors.index(n % STAGES).load(gl.SliceLayout(0, STATE))
            kept = kept * gl.expand_dims(faded, 0)
            writers = tiles.write_keys.tile(n)
        else:
            changes = changes * gl.expand_dims(factor(tiles, n, WRITE_KEY, TOKENS), 0)
            written = gl.convert_layout(changes.to(dtype), LEFT_OF_STATE)
            kept = kept * keep
            writers = tiles.keys.tile(n)
        kept = hopper.warpgroup_mma(written, writers, kept, is_async=True)
        result, rounded = hopper.warpgroup_mma_wait(1, deps=[result, rounded])
        if not shape.PER_DIM:
            result = result * gl.expand_dims(factor(tiles, n, READ_QUERY, TOKENS), 0)
        attention = tiles.attention.slab(n, 0).permute((1, 0))
        result = hopper.warpgroup_mma(plain, attention, result, is_async=True)
        barrier()  # all warps have read their values, their factors and the results before
        kept, result, written, plain = hopper.warpgroup_mma_wait(0, deps=[kept, result, written, plain])
        tiles.keys.release(n)
        memory.permute((1, 0)).store(result.to(dtype))
        written_begin = begin
        written_count = count
        if checkpoint >= 0:
            gl.store(output.state + checkpoint.to(gl.int64) * output.state_stride + inner, kept)
        begin = end
        end = next_end
    _write_results(memory, written_begin, written_count, scan, output, INDEX, shape)
    if (output.target >= 0) & (scan.first_chunk < scan.end_chunk):
        gl.store(output.state + output.target.to(gl.int64) * output.state_stride + inner, kept)


@gluon.jit
def _write_results(memory, begin, count, scan, output, INDEX: gl.constexpr, shape):
    """Write the results of a chunk's first `count` tokens, which the warps have put into shared memory."""
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    barrier()  # all warps have
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, STORE))
    column = gl.arange(0, VALUES, gl.SliceLayout(0, STORE))
    token = gl.expand_dims((begin + row).to(gl.int64), 1)
    place = token * output.out_stride + scan.head * shape.VALUE_DIM + output.first_value + INDEX * VALUES
    known = gl.expand_dims(row < count, 1)
    gl.store(output.out + place + gl.expand_dims(column, 0), memory.load(STORE), mask=known)


@gluon.jit(do_not_specialize=["first_seq"])
def scan_heads(
    q,
    k,
    write_keys,
    v,
    mixing,
    attention,
    factors,
    state,
    sources,
    targets,
    chunk_start,
    checkpoints,
    seq_chunks,
    out,
    first_seq,
    state_stride,
    out_stride,
    NUM_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    PER_DIM: gl.constexpr,
):
    """Scan one sequence for CONSUMERS * VALUES value dimensions of one head."""
    shape = ScanShape(NUM_HEADS, GROUP, KEY_DIM, VALUE_DIM, CONSUMERS, PER_DIM)
    dtype: gl.constexpr = v.dtype
    full = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, CONSUMERS)
    hopper.fence_async_shared()
    keys = new_tiles_ring(dtype, KEY_DIM, full, free)
    queries = new_tiles_ring(dtype, KEY_DIM, full, free)
    writers = keys
    if PER_DIM:
        writers = new_tiles_ring(dtype, KEY_DIM, full, free)
    tiles = Tiles(
        keys,
        queries,
        writers,
        new_tiles_ring(dtype, CONSUMERS * VALUES, full, free),
        new_tiles_ring(dtype, CHUNK, full, free),
        new_tiles_ring(dtype, CHUNK, full, free),
        gl.allocate_shared_memory(gl.float32, [STAGES * shape.VECTORS, shape.WIDTH], VECTOR),
        gl.allocate_shared_memory(dtype, [CONSUMERS, CHUNK, VALUES], BOX),
    )
    seq = gl.program_id(2)
    scan = Scan(
        gl.program_id(1),
        gl.load(seq_chunks + seq),
        gl.load(seq_chunks + seq + 1),
        chunk_start,
        checkpoints,
        factors,
    )
    first_value = gl.program_id(0) * (CONSUMERS * VALUES)
    seq = seq + first_seq
    output = Output(state, gl.load(sources + seq), gl.load(targets + seq), state_stride, out, out_stride, first_value)
    origin = Sources(q, k, write_keys, v, mixing, attention)
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (scan, tiles, output, 0, shape)),
                (_consume, (scan, tiles, output, 1, shape)),
                (_produce, (scan, origin, tiles, first_value, shape)),
            ],
            [4, 1],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (scan, tiles, output, 0, shape)),
                (_produce, (scan, origin, tiles, first_value, shape)),
            ],
            [1],
            [40],
        )
