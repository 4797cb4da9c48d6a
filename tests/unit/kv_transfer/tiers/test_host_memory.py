"""Blocks to the host's memory and back, on each kind of device, beside the steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.core.regions import ArenaRegion
from baton.kv_transfer.block_copies import copy_runs, open_block_copier
from baton.kv_transfer.errors import TransportError
from baton.kv_transfer.host_memory import HostMemory

from ....helpers.tier_memory import LAYOUT

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def blocks_on(device: str) -> tuple[torch.Tensor, ArenaRegion]:
    blocks = torch.arange(10, dtype=torch.uint8)[:, None].repeat(1, LAYOUT.block_bytes).to(device)  # there on return
    return blocks, ArenaRegion(blocks.data_ptr(), len(blocks), device, LAYOUT, 0, LAYOUT.num_kv_heads)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_go_down_and_come_up_in_any_order(device: str) -> None:
    blocks, region = blocks_on(device)
    memory = HostMemory(4, region.block_bytes, device)
    copies = open_block_copier(region, memory)
    copies.down([(7, 0), (2, 3), (9, 1)])
    assert [bytes(memory.view(slot)[-2:]) for slot in (0, 3, 1)] == [b"\7\7", b"\2\2", b"\x09\x09"]
    copies.up([(0, 3), (5, 0)])
    assert blocks[:, -1].tolist() == [2, 1, 2, 3, 4, 7, 6, 7, 8, 9]
    assert blocks[:, 0].tolist() == [2, 1, 2, 3, 4, 7, 6, 7, 8, 9]


@pytest.mark.parametrize("device", DEVICES)
def test_neighbours_go_together_and_arrive_in_their_own_slots(device: str) -> None:
    blocks, region = blocks_on(device)
    memory = HostMemory(8, region.block_bytes, device)
    copies = open_block_copier(region, memory)
    copies.down([(2, 4), (3, 5), (4, 6), (8, 7), (7, 0), (6, 1)])
    assert [memory.view(slot)[0] for slot in (4, 5, 6, 7, 0, 1)] == [2, 3, 4, 8, 7, 6]
    copies.up([(0, 5), (1, 6), (2, 7), (9, 0)])
    assert blocks[:, 0].tolist() == blocks[:, -1].tolist() == [3, 4, 8, 3, 4, 5, 6, 7, 8, 7]
    copies.up([])


def test_a_run_ends_where_either_side_leaps() -> None:
    assert copy_runs([(2, 4), (3, 5), (5, 6), (6, 8), (7, 9), (7, 10)]) == [
        (2, 4, 2),
        (5, 6, 1),
        (6, 8, 2),
        (7, 10, 1),
    ]


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_stream_of_the_steps() -> None:
    _blocks, region = blocks_on("cuda:0")
    copies = open_block_copier(region, memory := HostMemory(1, region.block_bytes, "cuda:0"))
    steps: Any = torch.cuda.Stream("cuda:0")
    with torch.cuda.stream(steps):
        torch.cuda._sleep(2_000_000_000)  # noqa: SLF001  cycles
    copies.down([(3, 0)])
    assert not steps.query(), "the step still runs"
    assert bytes(memory.view(0)[:1]) == b"\3"
    steps.synchronize()


def test_memory_starts_on_a_page_and_a_device_that_is_unknown_is_refused() -> None:
    assert HostMemory(3, LAYOUT.block_bytes, "cpu").address % 4096 == 0
    with pytest.raises(TransportError, match="'odd:0'"):
        HostMemory(3, LAYOUT.block_bytes, "odd:0")


@pytest.mark.parametrize(
    "num_slots", [1 << 45, 1 << 62], ids=["more than the address space", "more than a size can say"]
)
def test_memory_that_the_host_does_not_have_is_refused_by_name(num_slots: int) -> None:
    size = LAYOUT.block_bytes
    with pytest.raises(TransportError, match=rf"does not have {num_slots * size} bytes .*kv_tiers\.host_bytes"):
        HostMemory(num_slots, size, "cpu")
