"""How fast prompts' blocks move from one process to another, beside raw NIXL moving the same bytes.

Both sides of the comparison use the same memory and the same descriptors, one a run of blocks, in turns. The connector
is timed from `receive` to `Received`: claim, grant, read, commit, and two threads woken. Raw NIXL is timed while it
prepares, posts and polls one transfer.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from baton.engine.core.connector import Received
from baton.engine.core.layout import KVLayout, KVRegion

from .connector import PeerInfo, TransferConnector, TransferSettings
from .curve import ClusterKey
from .descriptors import block_ranges
from .errors import TransferError

DEFAULT_LAYOUT = KVLayout(
    model="bench", num_layers=28, num_kv_heads=8, head_dim=128, dtype="bfloat16"
)  # 1.8 MB a block
ANSWER_TIMEOUT_S = 60.0


class BenchFailed(TransferError):
    """A hand-off of the benchmark did not succeed, or brought something else than was sent."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the repeats, for prompts of one length."""

    num_tokens: int
    in_flight: int  # prompts handed off at the same time
    num_bytes: int  # of all of them
    descriptors: int
    gb_per_s: float
    raw_gb_per_s: float
    ratio: float  # median over the repeats of raw time / connector time, each pair measured back to back


def measure(
    layout: KVLayout = DEFAULT_LAYOUT,
    *,
    num_tokens: Sequence[int] = (16, 64, 256, 1024),
    in_flight: Sequence[int] = (1, 4),
    repeats: int = 15,
    run_blocks: int = 1,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Moves blocks between two processes. `run_blocks`: how many blocks lie next to each other on both sides.

    On "cuda" the holder uses GPU 0 and the reader GPU 1, where there are two. Raises `BenchFailed`.
    """
    largest = max(-(-length // layout.block_size) for length in num_tokens) * max(in_flight)
    num_blocks = -(-largest // run_blocks) * run_blocks
    key = ClusterKey.generate()
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    holder = spawn.Process(target=_hold, args=(theirs, key, layout, num_blocks, device), daemon=True)
    holder.start()
    reader = None
    try:
        reader = _Reader(pipe, key, layout, num_blocks, device)
        rng = random.Random(seed)
        rows = [reader.row(length, width, repeats, run_blocks, rng) for length in num_tokens for width in in_flight]
        return {
            "device": device,
            "block_bytes": layout.block_bytes,
            "run_blocks": run_blocks,
            "repeats": repeats,
            "rows": [msgspec.to_builtins(row) for row in rows],
        }
    finally:
        if reader is not None:
            reader.connector.close()
        holder.kill()
        holder.join()


def run(device: str = "cpu") -> dict[str, Any]:
    """`measure` with its defaults: what `baton bench kv` prints."""
    return measure(device=device)


def table(result: dict[str, Any]) -> str:
    """A result of `measure` for people."""
    lines = [f"{'tokens':>7} {'at once':>7} {'MB':>8} {'descriptors':>11} {'GB/s':>7} {'raw GB/s':>8} {'ratio':>6}"]
    for row in result["rows"]:
        lines.append(
            f"{row['num_tokens']:7d} {row['in_flight']:7d} {row['num_bytes'] / 1e6:8.1f} {row['descriptors']:11d}"
            f" {row['gb_per_s']:7.2f} {row['raw_gb_per_s']:8.2f} {row['ratio']:6.2f}"
        )
    return "\n".join(lines)


@dataclasses.dataclass
class _Memory:
    address: int
    device: str
    owner: Any  # keeps it alive

    @classmethod
    def allocate(cls, num_bytes: int, device: str, index: int, seed: int) -> _Memory:
        if device == "cpu":
            array = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
            return cls(array.ctypes.data, "cpu", array)
        import torch

        place = f"cuda:{index % torch.cuda.device_count()}"
        tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=place)
        torch.cuda.synchronize(place)
        return cls(tensor.data_ptr(), place, tensor)

    @property
    def nixl(self) -> tuple[str, int]:
        """NIXL's memory type and device number."""
        return ("DRAM", 0) if self.device == "cpu" else ("VRAM", int(self.device.partition(":")[2]))

    def block(self, index: int, block_bytes: int) -> bytes:
        piece = self.owner[index * block_bytes : (index + 1) * block_bytes]
        return (piece if self.device == "cpu" else piece.cpu().numpy()).tobytes()


def _raw_agent(name: str, memory: _Memory, num_bytes: int) -> Any:
    """An agent with NIXL's own API and nothing of ours."""
    from nixl._api import nixl_agent, nixl_agent_config

    kind, device = memory.nixl
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(memory.address, num_bytes, device, "")], kind)
    return agent


def _hold(pipe: Connection, key: ClusterKey, layout: KVLayout, num_blocks: int, device: str) -> None:
    """The holder's process: offers what the reader asks for, and helps raw NIXL along."""
    num_bytes = num_blocks * layout.block_bytes
    memory = _Memory.allocate(num_bytes, device, 0, seed=1)
    region = KVRegion(memory.address, num_blocks, memory.device, layout)
    connector = TransferConnector(region, engine_id="holder", epoch=1, host="127.0.0.1", key=key)
    raw = _raw_agent("raw holder", memory, num_bytes)
    pipe.send((connector.address, raw.get_agent_metadata(), memory.address, memory.nixl))
    while True:
        while not pipe.poll(0.001):
            raw.get_new_notifs()
            connector.poll()
        order, value = pipe.recv()
        if order == "offer":
            offers = [connector.offer("bench", 0, blocks, len(blocks) * layout.block_size) for blocks in value]
            pipe.send([offer.ticket for offer in offers])
        else:
            pipe.send(memory.block(value, layout.block_bytes))


class _Reader:
    """The reader's half, in the calling process."""

    def __init__(self, pipe: Connection, key: ClusterKey, layout: KVLayout, num_blocks: int, device: str) -> None:
        num_bytes = num_blocks * layout.block_bytes
        self._pipe, self._layout, self._num_blocks = pipe, layout, num_blocks
        self._memory = _Memory.allocate(num_bytes, device, 1, seed=2)
        self._news = threading.Event()
        region = KVRegion(self._memory.address, num_blocks, self._memory.device, layout)
        settings = TransferSettings()
        self.connector = TransferConnector(
            region, engine_id="reader", epoch=2, host="127.0.0.1", key=key, settings=settings, wake=self._news.set
        )
        address, metadata, self._remote, self._remote_nixl = self._answer()
        self._raw = _raw_agent("raw reader", self._memory, num_bytes)
        self._raw_peer = self._raw.add_remote_agent(metadata)
        self.connector.peers_changed([PeerInfo("holder", 1, address, layout.fingerprint)])

    def row(self, num_tokens: int, in_flight: int, repeats: int, run_blocks: int, rng: random.Random) -> Row:
        count = -(-num_tokens // self._layout.block_size)
        ours, raw, descriptors = [], [], 0
        for number in range(repeats + 2):  # the first two warm up
            prompts = [
                (self._blocks(count, run_blocks, rng, part), self._blocks(count, run_blocks, rng, part))
                for part in range(in_flight)
            ]
            descriptors = sum(len(block_ranges(*prompt, self._layout.block_bytes)) for prompt in prompts)
            turns = [lambda p=prompts: raw.append(self._time_raw(p)), lambda p=prompts: ours.append(self._time_ours(p))]
            for turn in turns if number % 2 else turns[::-1]:
                turn()
        ours, raw = ours[2:], raw[2:]
        num_bytes = count * in_flight * self._layout.block_bytes
        return Row(
            num_tokens=num_tokens,
            in_flight=in_flight,
            num_bytes=num_bytes,
            descriptors=descriptors,
            gb_per_s=num_bytes / statistics.median(ours) / 1e9,
            raw_gb_per_s=num_bytes / statistics.median(raw) / 1e9,
            ratio=statistics.median(theirs / mine for theirs, mine in zip(raw, ours, strict=True)),
        )

    def _blocks(self, count: int, run_blocks: int, rng: random.Random, part: int) -> list[int]:
        """Blocks of one prompt: runs of neighbours in random order, in a part of the memory of its own."""
        runs = list(range(-(-count // run_blocks)))
        rng.shuffle(runs)
        blocks = [run * run_blocks + offset for run in runs for offset in range(run_blocks)]
        return [part * count + block for block in blocks if block < count]

    def _time_ours(self, prompts: list[tuple[list[int], list[int]]]) -> float:
        self._pipe.send(("offer", [source for source, _ in prompts]))
        tickets = self._answer()
        waiting = set()
        begin = time.perf_counter()
        for ticket, (_, target) in zip(tickets, prompts, strict=True):
            waiting.add(self.connector.receive("bench", 0, ticket, 0, target))
        while waiting:
            if not self._news.wait(ANSWER_TIMEOUT_S):
                raise BenchFailed(f"nothing was received within {ANSWER_TIMEOUT_S:g} s")
            self._news.clear()
            for event in self.connector.poll():
                if not isinstance(event, Received):
                    raise BenchFailed(f"a hand-off failed: {event}")
                waiting.remove(event.transfer_id)
        seconds = time.perf_counter() - begin
        self._compare(prompts[-1][0][-1], prompts[-1][1][-1])
        return seconds

    def _time_raw(self, prompts: list[tuple[list[int], list[int]]]) -> float:
        ranges = [block_ranges(source, target, self._layout.block_bytes) for source, target in prompts]
        begin = time.perf_counter()
        running = [self._post_raw(np.asarray(pieces, dtype=np.int64)) for pieces in ranges]
        for handle, state in running:
            while state == "PROC":
                state = self._raw.check_xfer_state(handle)
            if state != "DONE":
                raise BenchFailed(f"raw NIXL says {state}")
        return time.perf_counter() - begin

    def _post_raw(self, pieces: np.ndarray) -> tuple[Any, str]:
        kind, device = self._memory.nixl
        remote_kind, remote_device = self._remote_nixl
        local, remote = np.empty(pieces.shape, dtype=np.uint64), np.empty(pieces.shape, dtype=np.uint64)
        remote[:, 0], remote[:, 1], remote[:, 2] = pieces[:, 0] + self._remote, pieces[:, 2], remote_device
        local[:, 0], local[:, 1], local[:, 2] = pieces[:, 1] + self._memory.address, pieces[:, 2], device
        ours, theirs = self._raw.get_xfer_descs(local, kind), self._raw.get_xfer_descs(remote, remote_kind)
        handle = self._raw.initialize_xfer("READ", ours, theirs, self._raw_peer)
        return handle, self._raw.transfer(handle)

    def _compare(self, source: int, target: int) -> None:
        self._pipe.send(("block", source))
        if self._answer() != self._memory.block(target, self._layout.block_bytes):
            raise BenchFailed(f"block {target} holds something else than the holder's block {source}")

    def _answer(self) -> Any:
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise BenchFailed(f"the holder's process did not answer within {ANSWER_TIMEOUT_S:g} s")
        return self._pipe.recv()


if __name__ == "__main__":
    print(table(run()))
