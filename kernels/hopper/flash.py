"""Flash attention for Hopper, warp-specialized, so that TMA, tensor cores and exponentials work concurrently.

    producer, 1 warp     copies queries, keys and values into rings                      defined by each kernel
    consumers, 4 warps   scores = q K^T -> softmax -> sum += weights V                   64 rows of a query tile each

The two consumers take turns in issuing their products, so that the softmax of one runs while the other multiplies. Each
issues the scores of the next tile of keys together with the weighted values of the previous one.

Programs are persistent: when the producer has finished a tile of queries, it takes the next one from the plan's queue,
longest first. It sends the tile's `tile_info` to the consumers along with the queries.

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from baton.kernels.query_tiles import FIRST_POSITION, FIRST_TOKEN, ITEM_WORDS, NUM_TOKENS, TABLE_ROW
from baton.kernels.split_kv import LOG2_E

from .rings import SLAB, Ring, Value, async_load, barrier, clear_tail, new_barriers, new_ring, record, view

ROWS = gl.constexpr(64)  # rows of one consumer
STAGES = gl.constexpr(2)  # tiles of keys, and of values, in shared memory
QUERY_BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))  # [tokens, heads, SLAB]
TILE_INFO = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FIRST_HEAD = TABLE_ROW  # a word of `tile_info`: consumers need the first head of a tile, not its block table


@aggregate
class FlashShape:
    """The compile-time sizes of a kernel."""

    PACK: gl.constexpr  # query heads in a tile
    TOKENS: gl.constexpr  # tokens of one consumer
    KEYS: gl.constexpr  # keys of a tile
    KEY_SLABS: gl.constexpr
    VALUE: gl.constexpr  # dimensions of a value: a power of two
    VALUE_SLABS: gl.constexpr
    BLOCK_SIZE: gl.constexpr  # size of pages that may hold NaN after the last key; None: all values are finite
    HAS_WINDOW: gl.constexpr
    HAS_CAP: gl.constexpr
    STORES_SUMS: gl.constexpr  # results are stored in the layout of sums: to change it takes shared memory

    @gluon.constexpr_function
    def __init__(self, PACK, KEYS, DIM, VALUE, BLOCK_SIZE, HAS_WINDOW, HAS_CAP, STORES_SUMS=False):
        self.PACK = gl.constexpr(PACK)
        self.TOKENS = gl.constexpr(ROWS.value // PACK)
        self.KEYS = gl.constexpr(KEYS)
        self.KEY_SLABS = gl.constexpr(DIM // SLAB.value)
        self.VALUE = gl.constexpr(VALUE)
        self.VALUE_SLABS = gl.constexpr(VALUE // SLAB.value)
        self.BLOCK_SIZE = gl.constexpr(BLOCK_SIZE)
        self.HAS_WINDOW = gl.constexpr(HAS_WINDOW)
        self.HAS_CAP = gl.constexpr(HAS_CAP)
        self.STORES_SUMS = gl.constexpr(STORES_SUMS)


@record
class FlashScoring:
    """Window and factors of scores: `limit`, `score_unit` and `cap_scale` of `AttentionRule`."""

    window: gl.tensor
    unit: gl.tensor
    cap_scale: gl.tensor


@record
class Partial:
    """The running softmax over some of the keys: a part for `split_kv`, with queries in columns."""

    sums: gl.tensor  # [VALUE, ROWS], of values
    weight: gl.tensor  # [ROWS]
    top: gl.tensor  # [ROWS], scores


@record
class Pipe:
    """The rings and barriers between the producer and the two consumers."""

    tile_info: gl.shared_memory_descriptor  # [4] int32: description of the tile of queries; arrives with them
    queries: Ring  # one tile: the slabs of consumer 0, the slabs of consumer 1
    keys: Ring
    values: Ring
    turn: gl.shared_memory_descriptor  # a barrier for each consumer, which permits it to issue products


@record
class TileQueue:
    """The queue of query tiles, from which programs take one after another: see `query_tiles.PrefillPlan`."""

    items: gl.tensor
    num_tiles: gl.tensor
    num_units: gl.tensor  # tiles for all groups of heads
    queue: gl.tensor

    @gluon.jit
    def item(self, unit):
        """Return a pointer to the words of a unit's tile."""
        return self.items + unit % self.num_tiles * ITEM_WORDS

    @gluon.jit
    def next_unit(self):
        """Take the next unit. Program i begins with unit i."""
        return gl.num_programs(0) + gl.atomic_add(self.queue, 1)


@record
class FlashOutput:
    """The results [tokens, heads, VALUE]."""

    out: gl.tensor
    token_stride: Value
    head_stride: Value
    v_scale: Value  # pointer to the scale of values; None: 1


@gluon.jit
def new_pipe(dtype: gl.constexpr, shape):
    pipe = Pipe(
        gl.allocate_shared_memory(gl.int32, [4], TILE_INFO),
        new_ring(dtype, 1, ROWS, 2 * shape.KEY_SLABS * SLAB, 2),
        new_ring(dtype, STAGES, shape.KEYS, shape.KEY_SLABS * SLAB, 2),
        new_ring(dtype, STAGES, shape.KEYS, shape.VALUE, 2),
        new_barriers(2, 1),
    )
    hopper.fence_async_shared()
    return pipe


@gluon.jit
def key_tiles(first_position, count, scoring, shape):
    """Return the (first, last) tile of keys that `count` queries from `first_position` on see; at least one tile."""
    first = 0
    last = gl.maximum(first_position + count - 1, 0) // shape.KEYS
    if shape.HAS_WINDOW:
        first = gl.minimum(gl.maximum(first_position + 1 - scoring.window, 0) // shape.KEYS, last)
    return first, last


# ---- for producers --------------------------------------------------------------------------------------------------


@gluon.jit
def send_queries(pipe, turn, queries, item, first_head, shape):
    """Start the copies of a tile's queries, for heads from `first_head` on, and store the tile's `tile_info`."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    word = gl.arange(0, 4, WORDS)
    token = gl.load(item + FIRST_TOKEN)
    pipe.queries.await_free(turn)
    pipe.tile_info.store(gl.where(word == FIRST_HEAD, first_head, gl.load(item + word)))
    barrier()
    pipe.queries.expect(turn)
    for half in gl.static_range(2):
        for slab in gl.static_range(shape.KEY_SLABS):
            rows = pipe.queries.slab(turn, half * shape.KEY_SLABS + slab)
            async_load(
                queries,
                [token + half * shape.TOKENS, first_head, slab * SLAB],
                pipe.queries.barrier(turn),
                view(rows, [shape.TOKENS, shape.PACK, SLAB], QUERY_BOX),
            )


@gluon.jit
def send_end(pipe, turn, queue):
    """Signal the consumers that no queries follow. The last program to finish resets the queue for the next layer."""
    pipe.queries.await_free(turn)
    pipe.tile_info.store(gl.full([4], 0, gl.int32, gl.BlockedLayout([4], [32], [1], [0])))
    barrier()
    mbarrier.arrive(pipe.queries.barrier(turn))
    if gl.atomic_add(queue + 1, 1) == gl.num_programs(0) - 1:
        gl.store(queue, 0)
        gl.store(queue + 1, 0)


# ---- consumers ------------------------------------------------------------------------------------------------------


@gluon.jit
def consume(pipe, output, sinks, scoring, HALF: gl.constexpr, shape):
    """Compute one half of the rows of every query tile that the producer sends, and write the results."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.VALUE, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROWS_AT_ONCE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // shape.VALUE, shape.VALUE // 8], [4, 1], [1, 0])
    STORE: gl.constexpr = SUMS if shape.STORES_SUMS else ROWS_AT_ONCE
    dtype: gl.constexpr = pipe.keys.slabs.dtype
    row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    out_row = gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    dim = gl.arange(0, shape.VALUE, gl.SliceLayout(0, STORE))
    turn = 0
    n = 0
    token, count, first_position, first_head = read_tile_info(pipe, turn)
    while count > 0:
        position = first_position + HALF * shape.TOKENS + row // shape.PACK
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        if sinks is not None:
            top = gl.load(sinks + first_head + row % shape.PACK) * (LOG2_E / scoring.unit)
            total += 1.0
        sums = gl.zeros([ROWS, shape.VALUE], gl.float32, SUMS)

        # backwards from the last tile of keys: tiles that need a mask come first
        first, last = key_tiles(first_position, count, scoring, shape)
        scores = _issue_scores(pipe, turn, n, HALF, SCORES, shape)
        mbarrier.arrive(pipe.turn.index(1 - HALF))
        scores = hopper.warpgroup_mma_wait(0, deps=[scores])
        pipe.keys.release(n)
        weights, top, total, _ = _soften(scores, top, total, position, last * shape.KEYS, scoring, True, shape)
        weights = gl.convert_layout(weights.to(dtype), WEIGHTS)
        if shape.BLOCK_SIZE is not None:
            clear_tail(pipe.values, n, first_position + count, shape.BLOCK_SIZE)
        n += 1
        # all rows see all keys of earlier tiles, which need no mask; with a window, all tiles are masked
        masked = first if shape.HAS_WINDOW else gl.minimum(gl.maximum(first_position + 1, 0) // shape.KEYS, last)
        for back in range(last - masked):
            first_key = (last - 1 - back) * shape.KEYS
            sums, top, total, weights = _attend_keys(
                pipe, turn, n, sums, top, total, weights, position, first_key, scoring, HALF, True, SCORES, shape
            )
            n += 1
        for _ in range(masked - first):
            sums, top, total, weights = _attend_keys(
                pipe, turn, n, sums, top, total, weights, position, 0, scoring, HALF, False, SCORES, shape
            )
            n += 1
        pipe.queries.release(turn)
        pipe.values.await_full(n - 1)
        sums = hopper.warpgroup_mma(weights, pipe.values.tile(n - 1), sums, is_async=True)
        sums, weights = hopper.warpgroup_mma_wait(0, deps=[sums, weights])
        pipe.values.release(n - 1)

        total = gl.where(total == 0.0, 1.0, total)
        if output.v_scale is not None:
            total = total / gl.load(output.v_scale)
        result = sums / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, SUMS)), 1)
        tile_token = HALF * shape.TOKENS + out_row // shape.PACK
        head = first_head + out_row % shape.PACK
        place = (token + tile_token).to(gl.int64) * output.token_stride + head * output.head_stride
        gl.store(
            output.out + gl.expand_dims(place, 1) + gl.expand_dims(dim, 0),
            gl.convert_layout(result.to(dtype), STORE),
            mask=gl.expand_dims(tile_token < count, 1),
        )
        turn += 1
        token, count, first_position, first_head = read_tile_info(pipe, turn)


@gluon.jit
def read_tile_info(pipe, turn, WARPS: gl.constexpr = 4):
    """Wait for queries; return (token, count, first position, first head) of their tile. Count 0: no more tiles."""
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    pipe.queries.await_full(turn)
    words = pipe.tile_info.load(WORDS)
    word = gl.arange(0, 4, WORDS)
    return (
        gl.sum(gl.where(word == FIRST_TOKEN, words, 0), 0),
        gl.sum(gl.where(word == NUM_TOKENS, words, 0), 0),
        gl.sum(gl.where(word == FIRST_POSITION, words, 0), 0),
        gl.sum(gl.where(word == FIRST_HEAD, words, 0), 0),
    )


@gluon.jit
def _issue_scores(pipe, turn, n, HALF: gl.constexpr, SCORES: gl.constexpr, shape):
    """Start q K^T for key tile n, once the tile has arrived and it is this consumer's turn."""
    pipe.keys.await_full(n)
    mbarrier.wait(pipe.turn.index(HALF), (n & 1) ^ (1 - HALF))
    scores = gl.zeros([ROWS, shape.KEYS], gl.float32, SCORES)
    for slab in gl.static_range(shape.KEY_SLABS):
        query = pipe.queries.slab(turn, HALF * shape.KEY_SLABS + slab)
        keys = pipe.keys.slab(n, slab).permute((1, 0))
        scores = hopper.warpgroup_mma(query, keys, scores, use_acc=slab > 0, is_async=True)
    return scores


@gluon.jit
def _attend_keys(
    pipe,
    turn,
    n,
    sums,
    top,
    total,
    weights,
    position,
    first_key,
    scoring,
    HALF: gl.constexpr,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    shape,
):
    """Compute scores of key tile n, which begins at `first_key`, while the values of tile n - 1 are multiplied."""
    scores = _issue_scores(pipe, turn, n, HALF, SCORES, shape)
    pipe.values.await_full(n - 1)
    sums = hopper.warpgroup_mma(weights, pipe.values.tile(n - 1), sums, is_async=True)
    mbarrier.arrive(pipe.turn.index(1 - HALF))
    scores = hopper.warpgroup_mma_wait(1, deps=[scores])
    pipe.keys.release(n)
    new_weights, top, total, shrink = _soften(scores, top, total, position, first_key, scoring, MASKED, shape)
    sums, weights = hopper.warpgroup_mma_wait(0, deps=[sums, weights])
    pipe.values.release(n - 1)
    sums = sums * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout)), 1)
    return sums, top, total, gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)


@gluon.jit
def _soften(scores, top, total, position, first_key, scoring, MASKED: gl.constexpr, shape):
    """Do one step of the running softmax. Return (weights, top score, sum of weights, factor of earlier sums)."""
    if shape.HAS_CAP:
        scores = 1 - 2 / (gl.exp2(scores * scoring.cap_scale) + 1)
    if MASKED:
        key = first_key + gl.arange(0, shape.KEYS, gl.SliceLayout(0, scores.type.layout))
        distance = gl.expand_dims(position, 1) - gl.expand_dims(key, 0)
        visible = distance >= 0
        if shape.HAS_WINDOW:
            visible = visible & (distance < scoring.window)
        scores = gl.where(visible, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    shift = new_top * scoring.unit
    if MASKED:
        # for a row that has seen no key yet, -inf - -inf would be NaN
        shift = gl.where(new_top == float("-inf"), 0.0, shift)
    weights = gl.exp2(scores * scoring.unit - gl.expand_dims(shift, 1))
    shrink = gl.exp2(top * scoring.unit - shift)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink
