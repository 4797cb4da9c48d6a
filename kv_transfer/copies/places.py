"""Memory of the host that stands in for blocks which the transport cannot register: blocks of the same layout."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from baton.engine.core.layout import KVRegion

from ..errors import TransportError
from .host_memory import HostMemory


class Places(NamedTuple):
    memory: HostMemory
    region: KVRegion  # peers are told of it


def take_places(region: KVRegion, buffer_bytes: int) -> Places:
    """For one rank's share of blocks. Raises `TransportError` for room that holds none, or that cannot be pinned."""
    num_places = buffer_bytes // region.block_bytes
    if num_places < 1:
        raise TransportError(
            f"transfer.buffer_bytes is {buffer_bytes} and a block has {region.block_bytes} bytes:"
            " it should hold the blocks of several of the longest prompts"
        )
    memory = HostMemory(num_places, region.block_bytes, region.device)
    return Places(memory, msgspec.structs.replace(region, address=memory.address, num_blocks=num_places, device="cpu"))
