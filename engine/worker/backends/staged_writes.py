"""Changes to the row tables on their way to a GPU.

    add(address, values) ... flush()        one kernel reads the pinned buffer in place; none without changes

To copy the buffer to the device first would take the CPU another 10 us, and the device would not save time: the values
are few, and prompts are read once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.step import PIECE, apply_writes

from ..tables import Values
from .cuda_stream import Stream


class StagedWrites:
    """Collects changes in a pinned buffer, which `flush` applies in the order of the stream. Implements `TableWrites`.

    Changes of one step must not overlap. A buffer is filled again only when the device has read it; there are enough
    buffers that this rarely means waiting. Changes that exceed one buffer take several.

    The kernel that applies a buffer is captured as a graph, because a first token waits for it, and a launch without a
    graph takes the CPU five times as long.
    """

    NUM_BUFFERS = 4
    BUFFER_VALUES = 1 << 18
    BUFFER_PIECES = 1 << 12

    def __init__(self, memory: Tensor, stream: Stream) -> None:
        self._stream = stream
        self._buffers = [
            _Buffer(memory, stream, self.BUFFER_PIECES, self.BUFFER_VALUES) for _ in range(self.NUM_BUFFERS)
        ]
        self._turn = 0
        self.num_flushes = 0  # kernels launched

    def capture(self) -> None:
        """Record the kernel for each buffer. It must have run once before."""
        for buffer in self._buffers:
            buffer.apply = self._stream.capture(buffer.apply)

    def add(self, address: int, values: Values) -> None:
        """Write `values` to `address` and the elements after it."""
        first, left = 0, len(values)
        while left:
            done = self._buffers[self._turn].add(address + first, values[first:] if first else values)
            first, left = first + done, left - done
            if left:
                self.flush()

    def add_singles(self, addresses: Sequence[int], values: Sequence[int]) -> None:
        """Write one value to each address."""
        first, left = 0, len(addresses)
        while left:
            done = self._buffers[self._turn].add_singles(addresses[first:], values[first:])
            first, left = first + done, left - done
            if left:
                self.flush()

    def flush(self) -> None:
        """Launch the kernel that applies the collected changes, in the current stream."""
        buffer = self._buffers[self._turn]
        if not buffer.num_pieces:
            return
        buffer.close()
        buffer.apply()
        buffer.read.record()
        self.num_flushes += 1
        self._turn = (self._turn + 1) % len(self._buffers)
        following = self._buffers[self._turn]
        following.read.synchronize()
        following.num_pieces = following.num_values = 0


class _Buffer:
    def __init__(self, memory: Tensor, stream: Stream, max_pieces: int, max_values: int) -> None:
        pieces, values = stream.pinned((max_pieces, 3), torch.int64), stream.pinned((max_values,), torch.int32)
        closed_at = stream.pinned((1,), torch.int32)
        self.apply: Callable[[], object] = functools.partial(apply_writes, memory, pieces, values, closed_at)
        self.num_pieces = self.num_values = 0
        self.read = stream.event()
        # numpy views of the same memory
        self._pieces, self._values, self._closed_at = pieces.numpy(), values.numpy(), closed_at.numpy()

    def close(self) -> None:
        """Write the number of pieces, for the device to read."""
        self._closed_at[0] = self.num_pieces

    def add(self, address: int, values: Values) -> int:
        """Add as many of the values as there is room for. Returns their number."""
        source = self.num_values
        count = min(len(values), len(self._values) - source, (len(self._pieces) - self.num_pieces) * PIECE)
        self._values[source : source + count] = values if count == len(values) else values[:count]
        if 0 < count <= PIECE:
            self._pieces[self.num_pieces] = address, source, count
            self.num_pieces += 1
        else:
            offsets = np.arange(0, count, PIECE)
            pieces = self._pieces[self.num_pieces : self.num_pieces + len(offsets)]
            pieces[:, 0], pieces[:, 1] = address + offsets, source + offsets
            pieces[:, 2] = np.minimum(PIECE, count - offsets)
            self.num_pieces += len(offsets)
        self.num_values += count
        return count

    def add_singles(self, addresses: Sequence[int], values: Sequence[int]) -> int:
        source, first = self.num_values, self.num_pieces
        count = min(len(values), len(self._values) - source, len(self._pieces) - first)
        self._values[source : source + count] = values[:count]
        pieces = self._pieces[first : first + count]
        pieces[:, 0] = addresses[:count]
        pieces[:, 1] = np.arange(source, source + count)
        pieces[:, 2] = 1
        self.num_values += count
        self.num_pieces += count
        return count
