"""The gated delta rule on a GPU.

    decodes     `step`: one kernel, which reads and writes each state once; the option LANES chooses between two
    others      `intra` (one decay per head) or `intra_per_dim`: everything that needs no state, for all chunks in
                parallel; then `scan`: the states from chunk to chunk, with outputs and checkpoints

For each chunk and head, `intra` passes two matrices in the inputs' dtype and a few factors to `scan`. Only requested
states (targets and checkpoints) are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kernels import pdl
from baton.kernels.state_batch import CHUNK, StateBatch
from baton.kernels.tuned import Options

from ..gate import DeltaDrafts, Gate
from .intra import FACTORS, intra_chunk
from .intra_per_dim import intra_chunk_per_dim
from .options import Shape, intra_options, scan_options, step_options
from .scan import scan_chunks
from .step import step_tokens, step_tokens_by_columns

__all__ = ["gated_delta"]

LINE_BYTES = 128


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gate,
    state: Tensor,
    batch: StateBatch,
    *,
    scale: float,
    norm_eps: float | None = 1e-6,
    drafts: DeltaDrafts | None = None,
    out: Tensor | None = None,
    step: Options | None = None,
    intra: Options | None = None,
    scan: Options | None = None,
) -> Tensor:
    """See `baton.kernels.gated_delta.gated_delta`. `step`, `intra` and `scan` replace the tuned options."""
    _, num_heads, value_dim = v.shape
    shape = Shape(num_heads, num_heads // q.shape[1], q.shape[2], value_dim, gate.per_dim)
    out = batch.empty_like(v) if out is None else out
    operands = (q, k, v, gate, state, batch, shape, scale, norm_eps, out)
    if batch.most_decodes:
        _step(*operands, drafts, step or step_options(shape, batch.most_decodes, q.device))
    if batch.num_chunks:
        intra = intra or intra_options(shape, q.shape[0], q.device)
        scan = scan or scan_options(shape, batch.most_prefills, q.shape[0], q.device)
        _chunks(*operands, intra, scan)
    return out


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gate,
    state: Tensor,
    batch: StateBatch,
    shape: Shape,
    scale: float,
    norm_eps: float | None,
    out: Tensor,
    drafts: DeltaDrafts | None,
    options: Options,
) -> None:
    values, replay = options["VALUES"], batch.replay
    kernel, words = step_tokens, {"VALUES": values, "num_warps": options["num_warps"]}
    if lanes := options["LANES"]:
        kernel, words = step_tokens_by_columns, words | {"WARPS": options["num_warps"], "LANES": lanes}
    kernel[(shape.value_dim // values, shape.num_heads, batch.most_decodes)](
        q,
        k,
        v,
        gate.decay,
        gate.beta,
        gate.log_rate,
        gate.bias,
        state,
        batch.query_start,
        batch.sources,
        batch.targets,
        batch.num_decodes,
        out,
        *(drafts or (None,) * 4),
        *((None,) * 3 if replay is None else (replay.rows, replay.starts, replay.counts)),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        gate.decay.stride(0),
        gate.beta.stride(0),
        state.stride(0),
        out.stride(0),
        0 if drafts is None else drafts.k.stride(0),
        scale,
        norm_eps or 0.0,
        NUM_HEADS=shape.num_heads,
        GROUP=shape.group,
        KEY_DIM=shape.key_dim,
        KEYS=shape.padded_key_dim,
        VALUE_DIM=shape.value_dim,
        NUM_PLACES=0 if replay is None else replay.num_places,
        PER_DIM=shape.per_dim,
        NORM=norm_eps is not None,
        BETA_SCALE=gate.beta_scale,
        PREFETCH=min(values, LINE_BYTES // state.element_size()) if pdl.SUPPORTED.value else 0,
        **words,
        **pdl.launch_options(),
    )


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Gate,
    state: Tensor,
    batch: StateBatch,
    shape: Shape,
    scale: float,
    norm_eps: float | None,
    out: Tensor,
    intra: Options,
    scan: Options,
) -> None:
    num_chunks, heads, key_dim = batch.num_chunks, shape.num_heads, shape.key_dim
    precision = "tf32x3" if q.dtype == torch.float32 else "tf32"
    squares = q.new_empty(num_chunks, heads, 2, CHUNK, CHUNK)
    mixing, attention = squares.unbind(2)
    heads_of = {"NUM_HEADS": heads, "GROUP": shape.group, "KEY_DIM": key_dim, "KEYS": shape.padded_key_dim}
    sizes = {**heads_of, "CHUNK": CHUNK, "PRECISION": precision}
    inputs = (q, k, gate.decay, gate.beta, gate.log_rate, gate.bias, batch.chunk_start)
    strides = (q.stride(0), k.stride(0), gate.decay.stride(0), gate.beta.stride(0))
    launch = {"NORM": norm_eps is not None, "BETA_SCALE": gate.beta_scale, **pdl.launch_options()}
    keys: tuple[Tensor, Tensor, Tensor | None]
    if shape.per_dim:
        reads, queries, writes = (q.new_empty(num_chunks, heads, CHUNK, key_dim) for _ in range(3))
        factors = q.new_empty((num_chunks, heads, key_dim), dtype=torch.float32)
        intra_chunk_per_dim[(heads, num_chunks)](
            *inputs,
            *(mixing, attention, reads, queries, writes, factors),
            *strides,
            scale,
            norm_eps or 0.0,
            **sizes,
            **intra,
            **launch,
        )
        keys = queries, reads, writes
    else:
        factors = q.new_empty((num_chunks, heads, FACTORS.value, CHUNK), dtype=torch.float32)
        intra_chunk[(heads // intra["HEADS"], num_chunks)](
            *inputs,
            *(mixing, attention, factors),
            *strides,
            scale,
            norm_eps or 0.0,
            **sizes,
            **intra,
            **launch,
        )
        keys = q, k, None
    scan_chunks[(shape.value_dim // scan["VALUES"], heads, batch.most_prefills)](
        *keys,
        v,
        mixing,
        attention,
        factors,
        state,
        batch.sources,
        batch.targets,
        batch.chunk_start,
        batch.checkpoints,
        batch.seq_chunks,
        out,
        batch.least_decodes,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        state.stride(0),
        out.stride(0),
        VALUE_DIM=shape.value_dim,
        PER_DIM=shape.per_dim,
        **sizes,
        **scan,
        **pdl.launch_options(),
    )
