"""Peer memory: device memory of each rank of one machine that all ranks write to.

    of one rank     [2 turns][CHANNELS][room of a channel]      16-bit values; EMPTY where nothing has arrived

A channel belongs to the program with its index, which uses the two turns alternately. The device counts how often a
channel was used. So calls may be launched eagerly or replayed in captured graphs, in any order that is the same on all
ranks.

There are no barriers or flags. A sender writes values to the other ranks' memory. A receiver polls its own memory until
no value is EMPTY, takes the values, and writes EMPTY again. EMPTY is -0.0, for which senders write 0.0. Values that
must arrive unchanged are sent as 32-bit words, of which only one, twice EMPTY, cannot be sent.

Two turns are enough: a rank that sends in call n + 2 has received all values of call n + 1. So all ranks had begun n +
1, and therefore had ended n, in which they emptied the cells that they had read.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .cuda_ipc import DeviceMemory, DriverError

logger = logging.getLogger(__name__)

CHANNELS = 128  # programs that run concurrently on a device, whatever else runs there
ROOM_BYTES = 16 << 20  # bytes of a turn
EMPTY = -0x8000  # the bits of -0.0, in bfloat16 as in float16

_TURNS = 2
_CHECK_BYTES = 8

Exchange = Callable[[str], Sequence[str]]  # takes this rank's report, returns all ranks' reports in rank order


class PeerAccessError(Exception):
    """Some rank cannot write to another one's memory. All ranks raise it, with the same reason."""


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
        """`addresses` has the address of each rank's memory in this process, filled with EMPTY; `keeps` owns it."""
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

        The memory is freed when nothing refers to the result any more.
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
        weakref.finalize(memory, mapping.free).atexit = False  # the end of the process frees it anyway
        return memory

    @classmethod
    def without_peers(cls, rank: int, size: int, device: torch.device, *, room_bytes: int = ROOM_BYTES) -> PeerMemory:
        """Return memory for launches that are only recorded: all addresses are this rank's, and kernels do not wait."""
        own = torch.full((total_bytes(room_bytes) // 2,), EMPTY, dtype=torch.int16, device=device)
        memory = cls(rank, [own.data_ptr()] * size, device, room_bytes=room_bytes, keeps=own)
        memory.ended.fill_(1)
        return memory

    def read_own(self) -> bytes:
        """Return the contents of this rank's shared memory, all turns, for tests and post-mortems."""
        assert isinstance(self._keeps, PeerMapping), "the memory of one process alone"
        return self._keeps.read_own()

    def end(self) -> None:
        """Make all kernels stop waiting for peers, also those launched later. Their results are undefined."""
        if self.ended.is_cuda:
            # A copy, not a kernel: waiting kernels may occupy the whole device.
            with torch.cuda.stream(self._stream):
                self.ended.copy_(self._one, non_blocking=True)
        else:
            self.ended.fill_(1)


def total_bytes(room_bytes: int) -> int:
    """Return the bytes of one rank's memory."""
    return _TURNS * room_bytes


class PeerMapping:
    """The memory of this rank, and of the others as mapped into this process. Check values follow the turns."""

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
            except DriverError as error:  # the device has failed, or is shut down with the process
                logger.debug("memory of rank %d of %d is not freed: %s", self._rank, self._size, error)
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
        """Check that the values of all ranks have arrived: on some machines, writes to mapped peer memory are lost."""
        own = self._memory[self._rank]
        for rank in range(self._size):
            if own.read(self._checks_at + rank * _CHECK_BYTES, _CHECK_BYTES) != self._check_value(rank, self._rank):
                raise DriverError(f"the test value that rank {rank} wrote to peer memory did not arrive")
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
