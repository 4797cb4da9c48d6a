"""Benchmark of the kernels around the model. They are small: on a GPU, launches take most of their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from baton.kernels.roofline import BenchCase

from . import (
    PIECE,
    OutputRing,
    StepBatch,
    StepBuffers,
    StepTables,
    apply_writes,
    chunk_inputs,
    decode_inputs,
    store_tokens,
)

BLOCK_SIZE, CONTEXT = 16, 1024  # tokens of a block, tokens of a row before the step
# sequences, tokens of each in a step with chunks
ON_CPU, ON_GPU = ((16, 8),), ((1, 512), (64, 32), (256, 32))
DECODE_BYTES = 16 + 36  # of a sequence: its row, start, token and block are read, six inputs are written
CHUNK_TOKEN_BYTES, CHUNK_SEQ_BYTES = 8 + 20, 12 + 16  # of a token and of a sequence, read and written
STORE_BYTES = 20 + 12  # of a sequence: the drawn token, row, sample and length; the token twice and the start


def cases(device: torch.device) -> Iterator[BenchCase]:
    for num_seqs, chunk in ON_GPU if device.type == "cuda" else ON_CPU:
        num_tokens = num_seqs * chunk
        tables, batch, ring = _state(num_seqs, chunk, device)
        decode, chunks = _buffers(num_seqs, num_seqs, device), _buffers(num_seqs, num_tokens, device)
        decode_inputs(tables, batch, decode)
        drawn = torch.randint(1000, (num_seqs,), device=device)
        pieces, values, count = _writes(num_seqs, device)
        chunk_bytes = num_tokens * CHUNK_TOKEN_BYTES + num_seqs * CHUNK_SEQ_BYTES
        write = partial(apply_writes, tables.tokens.view(-1), pieces, values, count)
        yield _case(f"apply_writes {num_seqs} x {PIECE}", device, write, pieces.nbytes + 2 * values.nbytes)
        decoding = partial(decode_inputs, tables, batch, decode)
        yield _case(f"decode_inputs {num_seqs}", device, decoding, num_seqs * DECODE_BYTES)
        chunking = partial(chunk_inputs, tables, batch, chunks)
        yield _case(f"chunk_inputs {num_seqs} x {chunk}", device, chunking, chunk_bytes)
        store = partial(store_tokens, drawn, tables, batch, decode, ring)
        yield _case(f"store_tokens {num_seqs}", device, store, num_seqs * STORE_BYTES)


def _case(shape: str, device: torch.device, run: Callable[[], object], num_bytes: int) -> BenchCase:
    return BenchCase(op="step", shape=shape, dtype=torch.int32, device=device, run=run, num_bytes=num_bytes)


def _state(num_seqs: int, chunk: int, device: torch.device) -> tuple[StepTables, StepBatch, OutputRing]:
    """Return rows of CONTEXT tokens, with room for a chunk after them, and a batch of all rows."""
    length = max(CONTEXT + chunk, PIECE) + 1
    num_blocks = -(-length // BLOCK_SIZE)

    def int32(*shape: int, most: int) -> torch.Tensor:
        return torch.randint(most, shape, dtype=torch.int32, device=device)

    blocks = int32(1, num_seqs, num_blocks, most=1 << 16)
    computed = torch.full((num_seqs,), CONTEXT, dtype=torch.int32, device=device)
    tables = StepTables(int32(num_seqs, length, most=1000), blocks, computed, BLOCK_SIZE)
    rows = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    ones = torch.ones_like(rows[:-1])
    pages = torch.zeros(3, num_seqs, dtype=torch.int32, pin_memory=device.type == "cuda")
    ring = OutputRing(pages, torch.zeros(1, dtype=torch.int32, device=device))
    return tables, StepBatch(rows[:-1], rows * chunk, ones, draw_start=rows), ring


def _buffers(num_seqs: int, num_tokens: int, device: torch.device) -> StepBuffers:
    def new(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    return StepBuffers(
        token_ids=new(num_tokens, torch.int32),
        positions=new(num_tokens, torch.int64),
        slots=new(num_tokens, torch.int64)[None],
        seq_lens=new(num_seqs, torch.int32),
        table_rows=new(num_seqs, torch.int32),
        last_tokens=new(num_seqs, torch.int64),
    )


def _writes(num_pieces: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return pieces of PIECE values each, with different targets, their values, and their number."""
    starts = torch.arange(num_pieces, dtype=torch.int64, device=device) * PIECE
    pieces = torch.stack([starts, starts, torch.full_like(starts, PIECE)], dim=1)
    values = torch.randint(1000, (num_pieces * PIECE,), dtype=torch.int32, device=device)
    return pieces, values, torch.full((1,), num_pieces, dtype=torch.int32, device=device)
