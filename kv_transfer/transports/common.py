"""Parts that several transports use: device contexts, scratch memory, range checks, errors of background calls."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable, Sequence

from ..errors import TransportError
from . import ByteRange

logger = logging.getLogger(__name__)

WARM_BYTES = 64  # size of the small read that connects to a peer
PROBE_BYTES = 4 << 20  # size of the read behind it, whose time gives the rate


@dataclasses.dataclass(slots=True)
class Scratch:
    """`PROBE_BYTES` of memory for the reads that connect to a peer and measure its rate."""

    address: int
    owner: object  # keeps the memory alive


def use_device(device: str) -> int | None:
    """Return a GPU's number after making it the calling thread's current device, where UCX looks for it. None: a CPU.

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
    """Allocate `Scratch` on a device."""
    if device == "cpu":
        buffer = (ctypes.c_char * PROBE_BYTES)()
        return Scratch(ctypes.addressof(buffer), buffer)
    import torch

    tensor = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    return Scratch(tensor.data_ptr(), tensor)


def check_ranges(ranges: Sequence[ByteRange], our_bytes: int, their_bytes: int, peer_name: str) -> None:
    """Raise `TransportError` for a range outside a registered region, whatever UCX would make of it."""
    for remote, local, num_bytes in ranges:
        if num_bytes < 1 or not 0 <= remote <= their_bytes - num_bytes:
            raise TransportError(f"{num_bytes} bytes at {remote} are outside the {their_bytes} bytes of {peer_name}")
        if not 0 <= local <= our_bytes - num_bytes:
            raise TransportError(f"{num_bytes} bytes at {local} are outside the {our_bytes} bytes of our region")


class ErrorLatch:
    """Logs errors of calls whose result nobody waits for: the first of several in a row, and when they end.

    A library that fails so may work the next time. If it does not, its reads fail or end too late: the engine goes on.
    """

    def __init__(self, library: str, errors: tuple[type[Exception], ...]) -> None:
        self._library, self._errors = library, errors
        self._is_down = False

    def call(self, function: Callable[[], object]) -> bool:
        """Call `function`. Returns whether it returned something true; False where it raised one of `errors`."""
        try:
            result = bool(function())
        except self._errors as error:
            if not self._is_down:
                logger.error("%s fails, and hand-offs may until it works again: %s", self._library, error)
            self._is_down = True
            return False
        if self._is_down:
            logger.info("%s works again", self._library)
        self._is_down = False
        return result
