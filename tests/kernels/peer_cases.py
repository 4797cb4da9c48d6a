"""Collectives over the memory of peers, inputs of ranks for them, and memory that processes on CPUs share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.kernels.peers import Op, PeerMemory, reference
from baton.kernels.peers.memory import EMPTY, total_bytes
from baton.kernels.peers.options import Method

gpu: Any = pytest.importorskip("baton.kernels.peers.gpu")

ROOM_BYTES = 128 << 10  # 512 values of a channel in one turn
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="processes share memory of CPUs")


@dataclass(frozen=True)
class Way:
    """An op by one method, with blocks of one size."""

    op: Op
    method: Method = Method.ONE_SHOT
    block: int = 32

    @property
    def options(self) -> dict[str, int]:
        return {"method": self.method, "BLOCK": self.block}

    def run(self, x: Tensor, memory: PeerMemory) -> Tensor:
        run: Callable[..., Tensor] = getattr(gpu, self.op.value)
        return run(x, memory, self.options)

    def expected(self, inputs: list[Tensor]) -> list[Tensor]:
        """What each rank has, of every rank's input."""
        define: Callable[..., Any] = getattr(reference, self.op.value)
        whole = define(inputs)
        return whole if self.op is Op.REDUCE_SCATTER else [whole] * len(inputs)

    def __str__(self) -> str:
        return f"{self.op.value} {self.method.name.lower()} {self.block}"


WAYS = [
    Way(Op.ALL_REDUCE, Method.ONE_SHOT),
    Way(Op.ALL_REDUCE, Method.TWO_SHOTS),
    Way(Op.ALL_GATHER),
    Way(Op.REDUCE_SCATTER),
]


def inputs_of(size: int, ranks: int, seed: int) -> list[Tensor]:
    """Of each rank; with zeros below zero, alone and in pairs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, generator=generator).half() for _ in range(ranks)]
    for rank, x in enumerate(inputs):
        x[rank::7] = -0.0
        x[4 * rank : 4 * rank + 3] = -0.0
    return inputs


def map_memory(rank: int, files: list[Path]) -> PeerMemory:
    count = total_bytes(ROOM_BYTES) // 2
    maps = [torch.from_file(str(file), shared=True, size=count, dtype=torch.int16) for file in files]
    addresses = [tensor.data_ptr() for tensor in maps]
    return PeerMemory(rank, addresses, CPU, room_bytes=ROOM_BYTES, keeps=maps)


def make_files(folder: Path, ranks: int) -> list[Path]:
    files = [folder / str(rank) for rank in range(ranks)]
    for file in files:
        file.write_bytes(EMPTY.to_bytes(2, "little", signed=True) * (total_bytes(ROOM_BYTES) // 2))
    return files
