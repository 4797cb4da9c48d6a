"""The blocks in a GPU's memory as torch sees them, for those who copy or read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.core.layout import KVRegion

if TYPE_CHECKING:
    from torch import Tensor


def device_blocks(region: KVRegion) -> Tensor:
    """[num_blocks, block_bytes] uint8: the region itself, which must outlive the tensor."""
    import torch

    return torch.as_tensor(_Exposed(region), device=region.device)


class _Exposed:
    """A region in the form in which torch adopts memory that is not its own, without a copy."""

    def __init__(self, region: KVRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.num_blocks, region.block_bytes),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }
