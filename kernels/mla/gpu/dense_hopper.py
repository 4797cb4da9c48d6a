"""Causal attention for Hopper over contiguous keys and values of concatenated sequences: see `hopper.flash`.

    key     = [nope of its head | rope, shared by all heads]                             value = value of its head
    rows of keys_values [keys, heads x (nope | value)]     rows of k_rope [keys, rope]

No `from __future__ import annotations` here: Triton reads annotations as objects.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.hopper.flash import (
    QUERY_BOX,
    ROWS,
    FlashOutput,
    FlashScoring,
    FlashShape,
    TileQueue,
    consume,
    key_tiles,
    new_pipe,
    send_end,
    send_queries,
)
from baton.kernels.hopper.rings import BOX, SLAB, async_load
from baton.kernels.launch import multiprocessors
from baton.kernels.query_tiles import FIRST_POSITION, LONG_ROWS, NUM_TOKENS, TABLE_ROW, PrefillPlan
from baton.kernels.split_kv import LOG2_E

KEYS = 128  # of a tile


def fits(q: Tensor, keys_values: Tensor, k_rope: Tensor, plan: PrefillPlan) -> bool:
    """Return whether `dense_prefill` supports the tensors: long tiles, 16-bit types, keys of 128 + 64 dims, values of
    128.
    """
    dims = (q.shape[2] - k_rope.shape[1], k_rope.shape[1], keys_values.shape[2])
    return (
        plan.rows == LONG_ROWS
        and dims == (128, 64, 256)
        and q.dtype == keys_values.dtype == k_rope.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.stride(-1) == 1 and tensor.stride(0) % 8 == 0 for tensor in (q, keys_values, k_rope))
        and all(tensor.data_ptr() % 16 == 0 for tensor in (q, keys_values, k_rope))
        and q.stride(1) % 8 == 0
        and keys_values.stride(1) == keys_values.shape[2]
    )


def dense_prefill(
    q: Tensor,
    keys_values: Tensor,
    k_rope: Tensor,
    key_start: Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    out: Tensor,
) -> None:
    """Write the rows of out [T, H, value] that `plan` covers. Supports only tensors that `fits` accepts.

    q is [T, H, nope + rope], keys_values [K, H, nope + value], k_rope [K, rope]. The keys of sequence i begin at
    key_start[i] (int32); the plan must have been made without `table_rows`. Keys and values must be finite, even after
    the last key.
    """
    num_heads, rope = q.shape[1], k_rope.shape[1]
    value = out.shape[2]
    attend_rows[(min(multiprocessors(q.device), plan.num_items * num_heads),)](
        TensorDescriptor.from_tensor(q, [ROWS.value, 1, SLAB.value], QUERY_BOX.value),
        TensorDescriptor.from_tensor(keys_values.flatten(1), [KEYS, SLAB.value], BOX.value),
        TensorDescriptor.from_tensor(k_rope, [KEYS, SLAB.value], BOX.value),
        out,
        plan.items,
        plan.num_tiles,
        plan.queue,
        key_start,
        scale * LOG2_E.value,
        *(out.stride(0), out.stride(1)),
        num_heads,
        NOPE=q.shape[2] - rope,
        ROPE=rope,
        VALUE=value,
        KEYS=KEYS,
        num_warps=4,
    )


@gluon.jit
def _produce(pipe, tiles, key_start, queries, rows, rope_rows, scoring, NOPE: gl.constexpr, shape):
    turn = 0
    n = 0
    unit = gl.program_id(0)
    while unit < tiles.num_units:
        item = tiles.item(unit)
        head = unit // tiles.num_tiles
        send_queries(pipe, turn, queries, item, head, shape)
        turn += 1
        key = gl.load(key_start + gl.load(item + TABLE_ROW))
        column = head * (NOPE + shape.VALUE)
        first, last = key_tiles(gl.load(item + FIRST_POSITION), gl.load(item + NUM_TOKENS), scoring, shape)
        for back in range(last - first + 1):
            row = key + (last - back) * shape.KEYS
            _load_keys(pipe.keys, n, rows, rope_rows, row, column, NOPE, shape)
            _load_values(pipe.values, n, rows, row, column + NOPE, shape)
            n += 1
        unit = tiles.next_unit()
    send_end(pipe, turn, tiles.queue)


@gluon.jit
def _load_keys(ring, n, rows, rope_rows, row, column, NOPE: gl.constexpr, shape):
    ring.await_free(n)
    ring.expect(n)
    for slab in gl.static_range(shape.KEY_SLABS):
        if slab < NOPE // SLAB:
            async_load(rows, [row, column + slab * SLAB], ring.barrier(n), ring.slab(n, slab))
        else:
            async_load(rope_rows, [row, slab * SLAB - NOPE], ring.barrier(n), ring.slab(n, slab))


@gluon.jit
def _load_values(ring, n, rows, row, column, shape):
    ring.await_free(n)
    ring.expect(n)
    for slab in gl.static_range(shape.VALUE_SLABS):
        async_load(rows, [row, column + slab * SLAB], ring.barrier(n), ring.slab(n, slab))


@gluon.jit
def attend_rows(
    queries,
    rows,
    rope_rows,
    out,
    items,
    tile_count,
    queue,
    key_start,
    score_unit,
    token_stride,
    head_stride,
    num_heads,
    NOPE: gl.constexpr,
    ROPE: gl.constexpr,
    VALUE: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Compute the tiles of `items` for all heads. Concurrent programs share the keys of a head in L2."""
    shape = FlashShape(1, KEYS, NOPE + ROPE, VALUE, None, False, False)
    scoring = FlashScoring(gl.to_tensor(0), score_unit, score_unit)
    pipe = new_pipe(rows.dtype, shape)
    output = FlashOutput(out, token_stride, head_stride, None)
    num_tiles = gl.load(tile_count)
    tiles = TileQueue(items, num_tiles, num_tiles * num_heads, queue)
    gl.warp_specialize(
        [
            (consume, (pipe, output, None, scoring, 0, shape)),
            (consume, (pipe, output, None, scoring, 1, shape)),
            (_produce, (pipe, tiles, key_start, queries, rows, rope_rows, scoring, NOPE, shape)),
        ],
        [4, 1],
        [240, 24],
    )
