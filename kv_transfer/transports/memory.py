"""What all transports over UCX need of memory: the device's context, a few bytes of our own, checked ranges."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence

from ..errors import TransportError
from . import ByteRange

WARM_BYTES = 64  # of the read that connects to a peer
PROBE_BYTES = 4 << 20  # of the read behind it, whose time gives the rate


@dataclasses.dataclass(slots=True)
class Scratch:
    """`PROBE_BYTES` into which a peer's memory is read to connect to it, and to measure how fast that is."""

    address: int
    owner: object  # keeps the memory alive


def use_device(device: str) -> int | None:
    """The number of a GPU, which becomes the calling thread's current one: UCX looks there for its context. None: CPU.

    Raises `TransportError` for a device whose memory cannot be registered.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return None
    if kind != "cuda" or not index.isdigit():
        raise TransportError(f"the KV region is on {device!r}; 'cpu' and 'cuda:N' can be registered")
    import torch

    torch.cuda.set_device(int(index))
    torch.cuda.current_stream().synchronize()  # makes the context current in this thread
    return int(index)


def make_scratch(device: str) -> Scratch:
    if device == "cpu":
        buffer = (ctypes.c_char * PROBE_BYTES)()
        return Scratch(ctypes.addressof(buffer), buffer)
    import torch

    tensor = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    return Scratch(tensor.data_ptr(), tensor)


def check_ranges(ranges: Sequence[ByteRange], our_bytes: int, their_bytes: int, peer_name: str) -> None:
    """A range outside a registered region is refused here, by name, whatever UCX would make of it: `TransportError`."""
    for remote, local, num_bytes in ranges:
        if num_bytes < 1 or not 0 <= remote <= their_bytes - num_bytes:
            raise TransportError(f"{num_bytes} bytes at {remote} are outside the {their_bytes} bytes of {peer_name}")
        if not 0 <= local <= our_bytes - num_bytes:
            raise TransportError(f"{num_bytes} bytes at {local} are outside the {our_bytes} bytes of our region")
