"""Parts that several transports use: device contexts, scratch memory, range checks, errors of background calls."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable

import numpy as np

from ..errors import TransportError
from . import Ranges, RangeTable

logger = logging.getLogger(__name__)

WARM_BYTES = 64  # size of the small read that connects to a peer
PROBE_BYTES = 4 << 20  # size of the reads after it, whose times give the lane's rate
NUM_PROBES = 3


@dataclasses.dataclass(slots=True)
class Scratch:
    """`PROBE_BYTES` of memory for the reads that connect to a peer and measure its rate."""

    address: int
    owner: object  # keeps the memory alive


@dataclasses.dataclass(slots=True)
class LaneRate:
    """The rate of a lane: that of the fastest of `NUM_PROBES` reads.

    The lane of a peer is chosen by it once, so one read that something else delayed must not decide.
    """

    bytes_per_s: float | None = None
    began_s: float | None = None  # when the newest read began
    num_ended: int = 0

    def begin(self, now_s: float) -> None:
        self.began_s = now_s

    def end(self, num_bytes: int, now_s: float) -> bool:
        """Note the end of a read. Returns True if it was the last one."""
        assert self.began_s is not None, "it was begun"
        self.num_ended += 1
        self.bytes_per_s = max(self.bytes_per_s or 0.0, num_bytes / max(now_s - self.began_s, 1e-9))
        return self.num_ended >= NUM_PROBES


def make_scratch(device: str) -> Scratch:
    """Allocate `Scratch` on a device."""
    if device == "cpu":
        buffer = (ctypes.c_char * PROBE_BYTES)()
        return Scratch(ctypes.addressof(buffer), buffer)
    import torch

    tensor = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    return Scratch(tensor.data_ptr(), tensor)


def check_ranges(ranges: Ranges, our_bytes: int, their_bytes: int, peer_name: str) -> RangeTable:
    """Return the ranges as an array. Raises `TransportError` for a range outside a registered region."""
    table = np.asarray(ranges, dtype=np.int64).reshape(-1, 3)
    remote, local, num_bytes = table.T
    is_empty = num_bytes < 1
    for starts, limit, region in ((remote, their_bytes, peer_name), (local, our_bytes, "our region")):
        outside = is_empty | (starts < 0) | (starts > limit - num_bytes)
        if outside.any():
            at = int(outside.argmax())
            raise TransportError(f"{num_bytes[at]} bytes at {starts[at]} are outside the {limit} bytes of {region}")
    return table


class ErrorLatch:
    """Logs errors of background calls: the first of several in a row, and the first success after them.

    The library may work the next time. If it does not, its reads fail or end too late, and the engine goes on.
    """

    def __init__(self, library: str, errors: tuple[type[Exception], ...]) -> None:
        self._library, self._errors = library, errors
        self._is_down = False

    def call(self, function: Callable[[], object]) -> bool:
        """Call `function` and return the truth of its result. Returns False if it raises one of `errors`."""
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
