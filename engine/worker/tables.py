"""The state of a runner's rows on its device, and the way of a plan's changes into it.

    memory [N] int32    tokens | blocks | sampling | computed | rows ... draw_start   | states | guesses ... read
                        one row a running request             | the batch of the step          | one row each
                                 one table of blocks for each cache group     cuts of groups of states

All tables are in one tensor, so a change is an address with some values, whichever table it belongs to. The backend's
`TableWrites` applies the changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton.kernels.sampling import ROW_WORDS, encode_row
from baton.kernels.state_batch import Cuts, most_chunks
from baton.kernels.step import StepBatch, StepTables

from ..core.layout import BLOCK_SIZE, CHECKPOINT_TOKENS
from ..core.step import Chunk, RowStart
from .shapes import StepLimits

_ALIGNMENT = 64  # elements: every table begins on a cache line, as kernels prefer
Values = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class CacheArenas:
    """The memory of an engine's caches on one rank, by cache group."""

    # Of each group: blocks of tokens in the shape of its layout, or slots of states as bytes [slots, slot_bytes].
    tensors: Sequence[Tensor]
    of_model: Sequence[int] | None = None  # the model's groups, in its order; None: all. A draft model may have others
    # For groups of states whose requests have drafts, the inputs of drafts: bytes [places, place_bytes].
    draft_inputs: Mapping[int, Tensor] = field(default_factory=dict)
    checkpoint_tokens: int = CHECKPOINT_TOKENS

    @property
    def model_groups(self) -> Sequence[int]:
        """The numbers of the model's groups, in its order."""
        return range(len(self.tensors)) if self.of_model is None else self.of_model

    @property
    def state_groups(self) -> Sequence[int]:
        """The numbers of the groups whose entries are slots of states."""
        return [group for group, tensor in enumerate(self.tensors) if tensor.dtype == torch.uint8]


class TableWrites(Protocol):
    """Changes to the tables on their way to the device. Changes of one step must not overlap."""

    num_flushes: int  # launches so far

    def add(self, address: int, values: Values) -> None:
        """Write `values` to `address` and the elements after it."""
        ...

    def add_singles(self, addresses: Sequence[int], values: Sequence[int]) -> None:
        """Write one value to each address."""
        ...

    def flush(self) -> None:
        """Apply the added changes before work that is launched later."""
        ...

    def capture(self) -> None:
        """Record the kernel of `flush`. Call it before the first request's step."""
        ...


class Table:
    """A table `[num_rows, width]` of int32, in the memory shared by all tables."""

    def __init__(self, memory: Tensor, address: int, num_rows: int, width: int) -> None:
        self.tensor = memory[address : address + num_rows * width].view(num_rows, width)
        self._address = address
        self._width = width

    def address(self, row: int, column: int = 0) -> int:
        return self._address + row * self._width + column


class StateTables(NamedTuple):
    """The slots of a step's states in one cache group, and how the step is cut into chunks: see `StateBatch`."""

    sources: Table
    targets: Table
    num_decodes: Table
    chunk_start: Table
    chunk_seqs: Table
    checkpoints: Table
    seq_chunks: Table


class RowTables:
    """State that a request keeps on the device from its first step to its last, and the batch of the current step.

    `tokens[row]` has the prompt, then the output. A step writes the tokens that it samples there itself, so the next
    step may read them. `computed[row]` is the number of tokens whose KV exists: a step begins after them, and updates
    the number itself.

    In cache group g, tokens 16 i ... 16 i + 15 are in block `blocks[g, row, i]`. In a group of states, slot
    `blocks[g, row, i]` has the state after the last computed one of tokens 512 i ... 512 i + 511. Entries behind those
    that plans have named are leftovers, which nothing reads.

    With drafts, a state is that after the first `applied[g][row]` tokens: fewer than are computed if drafts were
    accepted (`kernels.state_batch.Replay`). `guesses[row]`, made by the host or the device, are those of the row's
    tokens from index `first_guess[row]` on. If the device makes guesses, `capacity[row]` is the number of tokens that
    the row's blocks hold, and `read[row]` the number of tokens that a draft model has read. The host knows that at most
    `unread[row]` of the computed tokens are not read, and that the request began with `num_known[row]` tokens.
    """

    def __init__(self, memory: Tensor, writes: TableWrites, limits: StepLimits, arenas: CacheArenas) -> None:
        """`memory` has `num_values(limits, arenas)` zeros; `writes` applies changes to it.

        The CPU keeps the tables of groups of states, too, because a step of chunks is cut at the ends of their entries.
        """
        self.memory = memory
        self._writes = writes
        num_groups, state_groups = len(arenas.tensors), arenas.state_groups
        shapes = _table_shapes(limits, arenas)
        addresses = accumulate(map(_table_size, shapes.values()), initial=0)
        tables = {
            name: Table(memory, address, *shape)
            for (name, shape), address in zip(shapes.items(), addresses, strict=False)
        }
        self.tokens, self._blocks = tables["tokens"], tables["blocks"]
        self.sampling, self.computed = tables["sampling"], tables["computed"]
        self.rows, self.samples = tables["rows"], tables["samples"]
        self.query_start, self.draw_start = tables["query_start"], tables["draw_start"]
        self.guesses, self.first_guess = tables["guesses"], tables["first_guess"]
        self.capacity, self.read = tables["capacity"], tables["read"]
        self._applied = tables["applied"]
        self.applied = dict(zip(state_groups, self._applied.tensor, strict=True))
        self.states = {
            group: StateTables(*(tables[f"{name} {group}"] for name in StateTables._fields)) for group in state_groups
        }
        self.blocks = self._blocks.tensor.unflatten(0, (num_groups, -1))
        self.rows.tensor.fill_(-1)
        self.step = StepTables(self.tokens.tensor, self.blocks, self.computed.tensor[0], BLOCK_SIZE)
        self._num_rows = limits.max_num_seqs
        self._writes_capacity = limits.guesses_on_device
        self.unread = [0] * limits.max_num_seqs
        self.num_known = [0] * limits.max_num_seqs
        self._num_blocks = [[0] * limits.max_num_seqs for _ in range(num_groups)]  # length of each row's block tables
        self.state_slots = {group: [list[int]() for _ in range(limits.max_num_seqs)] for group in state_groups}

    @staticmethod
    def num_values(limits: StepLimits, arenas: CacheArenas) -> int:
        """Return how many int32 the tables take."""
        return sum(map(_table_size, _table_shapes(limits, arenas).values()))

    def guess(self, row: int, first: int, token_ids: Sequence[int]) -> None:
        """Write guesses of a row's tokens from index `first` on; if there is not room for all, the last of them."""
        width = self.guesses.tensor.shape[1]
        first += max(0, len(token_ids) - width)
        self._writes.add(self.guesses.address(row), token_ids[-width:])
        self._writes.add(self.first_guess.address(0, row), [first])

    def batch(self, num_seqs: int) -> StepBatch:
        """Return the first `num_seqs` entries of the step's batch."""
        return StepBatch(
            rows=self.rows.tensor[0, :num_seqs],
            query_start=self.query_start.tensor[0, : num_seqs + 1],
            samples=self.samples.tensor[0, :num_seqs],
            draw_start=self.draw_start.tensor[0, : num_seqs + 1],
        )

    def start(self, start: RowStart) -> None:
        """Write a request's data to its row."""
        row, prompt_len, add = start.row, len(start.prompt_token_ids), self._writes.add
        add(self.tokens.address(row), start.prompt_token_ids)
        add(self.tokens.address(row, prompt_len), start.output_token_ids)
        for group, blocks in enumerate(start.block_tables):
            add(self._block_address(group, row, 0), blocks)
            self._num_blocks[group][row] = len(blocks)
            if group in self.state_slots:
                self.state_slots[group][row] = list(blocks)
        add(self.sampling.address(row), encode_row(start.sampling, seed=start.seed, prompt_len=prompt_len))
        add(self.computed.address(0, row), [start.num_computed])
        for number in range(len(self.applied)):
            add(self._applied.address(number, row), [start.num_computed])
        self.unread[row], self.num_known[row] = 0, prompt_len + len(start.output_token_ids)
        if self._writes_capacity:
            add(self.capacity.address(0, row), [self.capacity_of(row)])
            add(self.read.address(0, row), [start.num_computed])

    def append_blocks(self, chunks: Sequence[Chunk]) -> None:
        """Append the new blocks of each chunk to its row's block tables. Single blocks are written in one call."""
        addresses, blocks = [], []
        for chunk in chunks:
            if not chunk.new_block_ids:
                continue
            for group, new in enumerate(chunk.new_block_ids):
                first = self._num_blocks[group][chunk.row]
                self._num_blocks[group][chunk.row] = first + len(new)
                if group in self.state_slots:
                    self.state_slots[group][chunk.row] += new
                address = self._block_address(group, chunk.row, first)
                if len(new) == 1:
                    addresses.append(address)
                    blocks.append(new[0])
                elif new:
                    self._writes.add(address, new)
            if self._writes_capacity:
                addresses.append(self.capacity.address(0, chunk.row))
                blocks.append(self.capacity_of(chunk.row))
        if addresses:
            self._writes.add_singles(addresses, blocks)

    def capacity_of(self, row: int) -> int:
        """Return how many tokens a row's blocks can hold in every group of token blocks."""
        kept = (counts[row] for group, counts in enumerate(self._num_blocks) if group not in self.state_slots)
        return BLOCK_SIZE * min(kept)

    def set_states(self, group: int, sources: Sequence[int], targets: Sequence[int], cuts: Cuts) -> None:
        """Write the slots of a step of chunks, and how the step is cut."""
        columns = cuts.columns(sources, targets)
        for name, table in self.states[group]._asdict().items():
            self._writes.add(table.address(0), columns[name])

    def _block_address(self, group: int, row: int, entry: int) -> int:
        return self._blocks.address(group * self._num_rows + row, entry)


def _table_shapes(limits: StepLimits, arenas: CacheArenas) -> dict[str, tuple[int, int]]:
    """Return the rows and the width of each table, in the order in which they lie in memory."""
    seqs, num_groups = limits.max_num_seqs, len(arenas.tensors)
    chunks = most_chunks(seqs, limits.max_num_batched_tokens, arenas.checkpoint_tokens)
    widths_of_states = {
        "sources": seqs,
        "targets": seqs,
        "num_decodes": 1,
        "chunk_start": chunks + 1,
        "chunk_seqs": chunks,
        "checkpoints": chunks,
        "seq_chunks": seqs + 1,
    }
    lines = seqs + limits.guesses_on_device  # steps that guess use the last line for their padding
    return {
        "tokens": (seqs, limits.max_model_len),
        "blocks": (num_groups * seqs, -(-limits.max_model_len // BLOCK_SIZE)),
        "sampling": (seqs, ROW_WORDS),
        "computed": (1, seqs),
        "rows": (1, seqs),
        "samples": (1, seqs),
        "query_start": (1, seqs + 1),
        "draw_start": (1, seqs + 1),
        **{f"{name} {group}": (1, width) for group in arenas.state_groups for name, width in widths_of_states.items()},
        "guesses": (lines, limits.max_guesses),
        "first_guess": (1, lines),
        "applied": (len(arenas.state_groups), seqs),
        "capacity": (1, seqs if limits.guesses_on_device else 0),
        "read": (1, lines if limits.guesses_on_device else 0),
    }


def _table_size(shape: tuple[int, int]) -> int:
    rows, width = shape
    return -(-rows * width // _ALIGNMENT) * _ALIGNMENT
