"""Peer memory: device memory of each rank of one machine that all ranks write to.

    of one rank     [2 turns][CHANNELS][room of a channel]      values of 16 bits, EMPTY where nothing has arrived

A channel belongs to the program of that number, which takes the two turns alternately. How often a channel was used is
counted on the device: so calls may be launched one by one or replayed in captured graphs, in any order that is the same
on all ranks.

There is no barrier and no flag. A sender writes values into the memory of the others; a receiver looks at its own until
none of them is EMPTY, takes them, and leaves EMPTY behind. EMPTY is -0.0, for which senders write 0.0. Where values are
not summed but brought as they are, they go in words of 32 bits, of which only one, two times EMPTY, is not sent.

Two turns are enough: a rank that sends in turn n + 2 has received all of n + 1, so all ranks had launched n + 1, and so
had ended n, in which they emptied what they had read.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .cuda_ipc import DeviceMemory, DriverError

logger = logging.getLogger(__name__)

CHANNELS = 128  # programs that are on a device at the same time, whatever else runs there
ROOM_BYTES = 16 << 20  # of a turn
EMPTY = -0x8000  # the bits of -0.0, in bfloat16 as in float16

_TURNS = 2
_CHECK_BYTES = 8

Exchange = Callable[[str], Sequence[str]]  # takes this rank's report, returns all ranks' reports in rank order


class PeerAccessError(Exception):
    """Some rank cannot write to the memory of another. All ranks raise it, with the same reason."""


class PeerMemory:
    """One rank's view of the peer memory. Used by one stream at a time."""

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        device: torch.device,
        *,
        room_bytes: int = ROOM_BYTES,
        keeps: object = None,
    ) -> None:
        """`addresses` are those of each rank's memory in this process, all of it EMPTY. `keeps` owns the memory."""
        self.rank = rank
        self.size = len(addresses)
        self.room_bytes = room_bytes
        self.addresses = torch.tensor(addresses, dtype=torch.int64).to(device)  # [size]
        self.turns = torch.zeros(CHANNELS, dtype=torch.int32, device=device)  # how often each channel was used
        self.ended = torch.zeros(1, dtype=torch.int32, device=device)  # 1 once kernels must stop waiting
        self._keeps = keeps
        if device.type == "cuda":
            self._one = torch.ones(1, dtype=torch.int32, pin_memory=True)
            self._stream = torch.cuda.Stream(device)

    @classmethod
    def share(
        cls, rank: int, size: int, device: torch.device, exchange: Exchange, *, room_bytes: int = ROOM_BYTES
    ) -> PeerMemory:
        """Allocate this rank's part and open the others'. All ranks call it. Raises `PeerAccessError`.

        The memory is given back when nothing refers to the result any more.
        """
        mapping = PeerMapping(rank, size, room_bytes)
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the driver, too, knows by now which device is meant
            try:
                mapping.make(exchange)
            except BaseException:
                mapping.free()
                raise
            memory = cls(rank, mapping.addresses, device, room_bytes=room_bytes, keeps=mapping)
            torch.cuda.synchronize()  # its tables were filled in a stream that need not be the one that uses them
        weakref.finalize(memory, mapping.free).atexit = False  # the end of the process frees all
        return memory

    @classmethod
    def without_peers(cls, rank: int, size: int, device: torch.device, *, room_bytes: int = ROOM_BYTES) -> PeerMemory:
        """Return memory for launches that are only recorded: every rank's is this rank's own, and no kernel waits."""
        own = torch.full((total_bytes(room_bytes) // 2,), EMPTY, dtype=torch.int16, device=device)
        memory = cls(rank, [own.data_ptr()] * size, device, room_bytes=room_bytes, keeps=own)
        memory.ended.fill_(1)
        return memory

    def read_own(self) -> bytes:
        """Return what lies in this rank's memory, all turns. For tests and post-mortems of memory that is shared."""
        assert isinstance(self._keeps, PeerMapping), "the memory of one process alone"
        return self._keeps.read_own()

    def end(self) -> None:
        """Make kernels that wait for a peer stop waiting, also those launched later. What they write is undefined."""
        if self.ended.is_cuda:
            # By the copy engine: kernels that wait may leave no room on the device for one more.
            with torch.cuda.stream(self._stream):
                self.ended.copy_(self._one, non_blocking=True)
        else:
            self.ended.fill_(1)


def total_bytes(room_bytes: int) -> int:
    """Return the bytes of one rank's memory."""
    return _TURNS * room_bytes


class PeerMapping:
    """The memory of this rank, and of the others as mapped into this process. Proofs of access lie behind the turns."""

    def __init__(self, rank: int, size: int, room_bytes: int) -> None:
        self._rank = rank
        self._size = size
        self._checks_at = total_bytes(room_bytes)
        self._memory: dict[int, DeviceMemory] = {}  # by rank

    @property
    def addresses(self) -> list[int]:
        return [self._memory[rank].address for rank in range(self._size)]

    def read_own(self) -> bytes:
        return self._memory[self._rank].read(0, self._checks_at)

    def make(self, exchange: Exchange) -> None:
        """Allocate, open and check all memory. Raises `PeerAccessError`."""
        if len(set(_together(exchange, _machine))) > 1:
            raise PeerAccessError("the ranks are on several machines")
        handles = _together(exchange, self._allocate)
        _together(exchange, lambda: self._open(handles))
        _together(exchange, self._write_check_values)
        _together(exchange, self._verify_check_values)

    def free(self) -> None:
        """Close the others' memory, then free this rank's own."""
        own = self._memory.pop(self._rank, None)
        for memory in (*self._memory.values(), *([] if own is None else [own])):
            try:
                memory.free()
            except DriverError as error:  # of a device that has failed, or ends with the process
                logger.debug("memory of rank %d of %d is not given back: %s", self._rank, self._size, error)
        self._memory.clear()

    def _allocate(self) -> str:
        own = DeviceMemory.allocate(self._checks_at + self._size * _CHECK_BYTES)
        self._memory[self._rank] = own
        own.fill(EMPTY, self._checks_at // 2)
        return own.handle().hex()

    def _open(self, handles: Sequence[str]) -> str:
        for rank, handle in enumerate(handles):
            if rank != self._rank:
                self._memory[rank] = DeviceMemory.open(bytes.fromhex(handle))
        return ""

    def _write_check_values(self) -> str:
        for rank, memory in self._memory.items():
            memory.write(self._checks_at + self._rank * _CHECK_BYTES, self._check_value(self._rank, rank))
        return ""

    def _verify_check_values(self) -> str:
        """Check that what each rank wrote has arrived: some machines map a peer's memory and lose writes to it."""
        own = self._memory[self._rank]
        for rank in range(self._size):
            if own.read(self._checks_at + rank * _CHECK_BYTES, _CHECK_BYTES) != self._check_value(rank, self._rank):
                raise DriverError(f"what rank {rank} wrote to its memory did not arrive")
        return ""

    def _check_value(self, writer: int, reader: int) -> bytes:
        return (1 + writer * self._size + reader).to_bytes(_CHECK_BYTES, "little")


def _together(exchange: Exchange, work: Callable[[], str]) -> list[str]:
    """Run `work` on each rank and return all results. If the driver refuses one, all raise `PeerAccessError`."""
    try:
        own = f"+{work()}"
    except DriverError as error:
        own = f"-{error}"
    reports = exchange(own)
    for rank, report in enumerate(reports):
        if report.startswith("-"):
            raise PeerAccessError(f"rank {rank}: {report[1:]}")
    return [report[1:] for report in reports]


def _machine() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
