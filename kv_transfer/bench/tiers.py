"""Measure copies to host memory and back: `python -m baton.kv_transfer.bench.tiers --device cuda:0`.

The copies run beside a thread that sleeps, and beside one that keeps the GIL busy, as a step loop may. They are
requested in one call, or one by one.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Sequence

from baton.engine.core.layout import KVLayout
from baton.engine.core.regions import ArenaRegion

from ..block_copies import SlotPair, open_block_copier
from ..host_memory import HostMemory

ROUNDS = 4


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the blocks are: cpu or cuda:N")
    parser.add_argument("--blocks", type=int, default=16, help="number of blocks copied at a time")
    parser.add_argument(
        "--layers", type=int, default=36, help="of 8 KV heads of 128 in bfloat16: 65536 bytes a block each"
    )
    given = parser.parse_args()
    layout = KVLayout(model="any", num_layers=given.layers, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    blocks = torch.zeros(2 * given.blocks, layout.block_bytes, dtype=torch.uint8, device=given.device)
    region = ArenaRegion(blocks.data_ptr(), len(blocks), given.device, layout, 0, layout.num_kv_heads)
    memory = HostMemory(given.blocks, layout.block_bytes, given.device)
    neighbours = list(range(given.blocks))
    shuffled = random.Random(0).sample(range(len(blocks)), given.blocks)
    print(f"{given.blocks} blocks of {layout.block_bytes} bytes on {given.device}, GB/s")
    for order, ids in (("neighbours", neighbours), ("anywhere", shuffled)):
        pairs = [(block, slot) for slot, block in enumerate(ids)]
        for together in (True, False):
            calls = [pairs] if together else [[pair] for pair in pairs]
            for busy in (False, True):
                down, up = _rates(region, memory, calls, busy=busy)
                how = f"{order:10} {'together' if together else 'one by one':10} {'busy' if busy else 'idle'} loop"
                print(f"{how}: down {down:5.1f}, up {up:5.1f}", flush=True)


def _rates(
    region: ArenaRegion, memory: HostMemory, calls: Sequence[Sequence[SlotPair]], *, busy: bool
) -> tuple[float, float]:
    """Return the GB/s of copies down and up, in a thread of their own beside this one."""
    rates: list[float] = []
    over = threading.Event()

    def copy() -> None:
        copier = open_block_copier(region, memory)
        num_bytes = ROUNDS * sum(map(len, calls)) * region.block_bytes
        for copy_pairs in (copier.down, copier.up):
            for pairs in calls:
                copy_pairs(pairs)
            start = time.perf_counter()
            for _ in range(ROUNDS):
                for pairs in calls:
                    copy_pairs(pairs)
            rates.append(num_bytes / (time.perf_counter() - start) / 1e9)
        over.set()

    thread = threading.Thread(target=copy)
    thread.start()
    while busy and not over.is_set():
        sum(range(2000))
    thread.join()
    down, up = rates
    return down, up


if __name__ == "__main__":
    main()
