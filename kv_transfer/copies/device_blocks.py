"""Blocks where they lie, as torch sees them, for those who copy or read them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from baton.engine.core.layout import KVRegion

if TYPE_CHECKING:
    from torch import Tensor


def device_blocks(region: KVRegion) -> Tensor:
    """[num_blocks, block_bytes] uint8: the region itself, which must outlive the tensor."""
    import torch

    if region.device == "cpu":
        whole = (ctypes.c_char * region.num_bytes).from_address(region.address)
        return torch.frombuffer(whole, dtype=torch.uint8).view(region.num_blocks, region.block_bytes)
    return torch.as_tensor(_Exposed(region), device=region.device)


class _Exposed:
    """A GPU's region in the form in which torch adopts memory that is not its own, without a copy."""

    def __init__(self, region: KVRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.num_blocks, region.block_bytes),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }
