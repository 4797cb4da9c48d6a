"""Cases of collectives over peer memory, inputs for them, and memory that processes on CPUs share."""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.parallel import Member
from baton.engine.parallel.rendezvous import RendezvousClient
from baton.kernels.p2p import Op, PeerMemory, reference
from baton.kernels.p2p.options import OF_TOKENS, Algorithm
from baton.kernels.p2p.peer_memory import EMPTY, total_bytes

from ...helpers.member_pool import device_of

gpu: Any = pytest.importorskip("baton.kernels.p2p.gpu")

ROOM_BYTES = 128 << 10  # 512 values per channel and turn
CPU = torch.device("cpu")
TIMEOUT_S = 150.0  # on devices each process compiles, or waits for one that does
REPLAYS = 200
COLLECTIVES = [op for op in Op if op not in OF_TOKENS]
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="processes share memory of CPUs")


@dataclass(frozen=True)
class Way:
    """An op with one method and one block size."""

    op: Op
    method: Algorithm = Algorithm.ONE_SHOT
    block: int = 32

    @property
    def options(self) -> dict[str, int]:
        return {"method": self.method, "BLOCK": self.block}

    def run(self, x: Tensor, memory: PeerMemory) -> Tensor:
        run: Callable[..., Tensor] = getattr(gpu, self.op.value)
        return run(x, memory, self.options)

    def expected(self, inputs: list[Tensor]) -> list[Tensor]:
        """Return each rank's result for all ranks' inputs."""
        define: Callable[..., Any] = getattr(reference, self.op.value)
        whole = define(inputs)
        return whole if self.op is Op.REDUCE_SCATTER else [whole] * len(inputs)

    def __str__(self) -> str:
        return f"{self.op.value} {self.method.name.lower()} {self.block}"


WAYS = [
    Way(Op.ALL_REDUCE, Algorithm.ONE_SHOT),
    Way(Op.ALL_REDUCE, Algorithm.TWO_SHOTS),
    Way(Op.ALL_GATHER),
    Way(Op.REDUCE_SCATTER),
]


def inputs_of(size: int, ranks: int, seed: int) -> list[Tensor]:
    """Return each rank's input. Some values are negative zeros, alone and in pairs."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(size, generator=generator).half() for _ in range(ranks)]
    for rank, x in enumerate(inputs):
        x[rank::7] = -0.0
        x[4 * rank : 4 * rank + 3] = -0.0
    return inputs


@functools.cache
def sleep_after_each_poll() -> None:
    """Let other processes run after each poll, as there are more ranks than cores."""
    from triton.runtime.interpreter import interpreter_builder

    load = interpreter_builder.create_masked_load

    def load_and_wait(ptrs: Any, mask: Any, other: Any, cache_policy: Any, is_volatile: bool) -> Any:
        if is_volatile:
            time.sleep(0.0002)
        return load(ptrs, mask, other, cache_policy, is_volatile)

    interpreter_builder.create_masked_load = load_and_wait


def map_memory(rank: int, files: list[Path]) -> PeerMemory:
    sleep_after_each_poll()
    count = total_bytes(ROOM_BYTES) // 2
    maps = [torch.from_file(str(file), shared=True, size=count, dtype=torch.int16) for file in files]
    addresses = [tensor.data_ptr() for tensor in maps]
    return PeerMemory(rank, addresses, CPU, room_bytes=ROOM_BYTES, keeps=maps)


def make_files(folder: Path, ranks: int) -> list[Path]:
    files = [folder / str(rank) for rank in range(ranks)]
    for file in files:
        file.write_bytes(EMPTY.to_bytes(2, "little", signed=True) * (total_bytes(ROOM_BYTES) // 2))
    return files


def exchange_of(member: Member, name: str) -> Callable[[str], list[str]]:
    rendezvous_client = RendezvousClient(member.rendezvous, member.rank, timeout_s=TIMEOUT_S)
    numbers = itertools.count()

    def exchange(words: str) -> list[str]:
        number = next(numbers)
        rendezvous_client.put(f"{name}/{number}/{member.rank}", words)
        return [rendezvous_client.get(f"{name}/{number}/{rank}") for rank in range(member.world_size)]

    return exchange


def share_memory(member: Member) -> tuple[PeerMemory, Callable[[str], list[str]]]:
    torch.cuda.set_device(device_of(member))
    exchange = exchange_of(member, "p2p")
    return PeerMemory.share(member.rank, member.world_size, device_of(member), exchange), exchange


def replay_unevenly(member: Member, work: Callable[[], None]) -> None:
    """Replay a graph of `work` many times, with one device or the other late by turns."""
    stream, graph = torch.cuda.Stream(device_of(member)), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="relaxed")
        work()
        graph.capture_end()
        for replay in range(REPLAYS):
            if replay % 5 == 3 * member.rank:
                torch.cuda._sleep(50_000)  # noqa: SLF001  cycles, so that the ranks are not in step
            if replay % 50 == 10 * member.rank:
                time.sleep(0.002)
            graph.replay()
            if replay % 37 == 0:
                work()  # between replays, without the graph
        stream.synchronize()


def num_left(member: Member, memory: PeerMemory) -> int:
    """Return how many values in this rank's memory were never read."""
    left = torch.frombuffer(memory.read_own(), dtype=torch.int16)
    return int((left != EMPTY).sum())


def wait_in_vain(member: Member, run: Callable[[PeerMemory], object]) -> tuple[bool, float]:
    """Return whether rank 0 waits for rank 1, which does not take part, and the seconds until its kernel has ended."""
    memory, exchange = share_memory(member)
    waits, elapsed_s = False, 0.0
    if member.rank == 0:
        run(PeerMemory.without_peers(0, 2, device_of(member)))  # compiles
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        run(memory)
        done.record()
        time.sleep(0.2)
        waits, begin = not done.query(), time.monotonic()
        memory.end()
        while not done.query() and time.monotonic() - begin < 10:
            time.sleep(0.001)
        elapsed_s = time.monotonic() - begin
    exchange("done")
    return waits, elapsed_s
