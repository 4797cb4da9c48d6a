"""A cable that is slow and loses frames: `python slow_link.py NEAR FAR --delay-ms 200 --loss 0.05 --seed 1`.

    NEAR (a host's cable, taken off the bridge)  ── delay, loss ──>  FAR (goes on to the bridge)
                                                 <── unchanged ───

Frames that the host sends are delayed and some are dropped; frames that it receives are not: as `tc qdisc add ...
netem` on its interface would do, for kernels without netem. Frames keep their offload header, so that large ones stay
whole, and are lost as a whole, as with netem. Prints a line when it forwards; runs until it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import select
import socket
import time
from collections import deque

ETH_P_ALL = 3
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
LARGEST_BYTES = 2**17
QUEUE_FRAMES = 10_000  # more than these are dropped, as by a full queue


class SlowWire:
    """Forward frames between two interfaces. `delay_s` and `loss` (a share) apply from near to far."""

    def __init__(self, near: str, far: str, *, delay_s: float, loss: float, seed: int) -> None:
        self._near, self._far = _opened(near), _opened(far)
        self._delay_s, self._loss, self._rng = delay_s, loss, random.Random(seed)
        self._waiting: deque[tuple[float, bytes]] = deque()

    def carry(self) -> None:
        while True:
            wait_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            ready, _, _ = select.select([self._near, self._far], [], [], wait_s)
            if self._far in ready:
                _send(self._near, self._far.recv(LARGEST_BYTES))
            if self._near in ready:
                self._take(self._near.recv(LARGEST_BYTES))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                _send(self._far, self._waiting.popleft()[1])

    def _take(self, frame: bytes) -> None:
        if len(self._waiting) < QUEUE_FRAMES and self._rng.random() >= self._loss:
            self._waiting.append((time.monotonic() + self._delay_s, frame))


def _opened(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.bind((interface, ETH_P_ALL))
    return opened


def _send(out: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # an interface that is down or full loses frames, too
        out.send(frame)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("near")
    words.add_argument("far")
    words.add_argument("--delay-ms", type=float, required=True)
    words.add_argument("--loss", type=float, required=True)
    words.add_argument("--seed", type=int, required=True)
    given = words.parse_args()
    wire = SlowWire(given.near, given.far, delay_s=given.delay_ms / 1000, loss=given.loss, seed=given.seed)
    print("ready", flush=True)
    wire.carry()


if __name__ == "__main__":
    main()
