"""The board on which the engines of one GPU tell each other how long their prompts take: a file that all of them map.

    /dev/shm/baton-UID-GPU    owners, times and seconds of `NUM_PLACES` places

An engine that writes takes a place that was not written for `STALE_S`, and keeps it while it writes often enough;
otherwise it takes another one the next time. So engines that have died leave nothing behind, and idle ones hold no
place. Readers ignore what is stale. Engines see each other if they have the same user and see the same /dev/shm:
containers without a common one work as if they were alone on the GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import re
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")
NUM_PLACES = 16
STALE_S = 2.0  # longer than a step takes
_OWNERS = struct.Struct(f"={NUM_PLACES}Q")  # 0: none
_TIMES = struct.Struct(f"={NUM_PLACES}d")  # by `time.monotonic`, which is that of the whole machine
_SECONDS = struct.Struct(f"={NUM_PLACES}d")
_TIMES_AT, _SECONDS_AT, _SIZE = _OWNERS.size, _OWNERS.size + _TIMES.size, _OWNERS.size + _TIMES.size + _SECONDS.size
_OWNER, _FIGURE = struct.Struct("=Q"), struct.Struct("=d")


class FileBoard:
    """Implements `DeviceBoard`. Only one thread of a process uses it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the file, or make it. Raises `OSError` if that is not possible, or if it belongs to another user.

        A file's owner can truncate it, and that ends every process that maps it.
        """
        self._clock = clock
        self._me = secrets.randbits(64) | 1
        self._place: int | None = None  # the number of this engine's place, if it has had one
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        try:
            status = os.fstat(self._file)
            if status.st_uid != os.geteuid():
                raise PermissionError(f"{path} belongs to another user")
            if status.st_size < _SIZE:
                os.truncate(self._file, _SIZE)
            self._memory = mmap.mmap(self._file, _SIZE)
        except OSError:
            os.close(self._file)
            raise

    def publish(self, backlog_s: float) -> None:
        if self._place is None or _OWNER.unpack_from(self._memory, self._place * _OWNER.size)[0] != self._me:
            if not backlog_s:
                return
            self._place = self._take_place()
        if self._place is not None:
            self._write(self._place, backlog_s)

    def _write(self, place: int, backlog_s: float) -> None:
        _FIGURE.pack_into(self._memory, _TIMES_AT + place * _FIGURE.size, self._clock())
        _FIGURE.pack_into(self._memory, _SECONDS_AT + place * _FIGURE.size, backlog_s)

    def others_backlog_s(self) -> float:
        backlogs = _SECONDS.unpack_from(self._memory, _SECONDS_AT)
        if not any(backlogs):
            return 0.0
        fresh_s = self._clock() - STALE_S
        owners, times = _OWNERS.unpack_from(self._memory, 0), _TIMES.unpack_from(self._memory, _TIMES_AT)
        places = zip(owners, times, backlogs, strict=True)
        return max((backlog for owner, at_s, backlog in places if owner != self._me and at_s > fresh_s), default=0.0)

    def close(self) -> None:
        if self._memory.closed:
            return
        self.publish(0.0)
        self._memory.close()
        os.close(self._file)

    def _take_place(self) -> int | None:
        """Return the number of a place that nobody uses, now this engine's; None if there is none."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            stale_s = self._clock() - STALE_S
            places = zip(_OWNERS.unpack_from(self._memory, 0), _TIMES.unpack_from(self._memory, _TIMES_AT), strict=True)
            for place, (owner, at_s) in enumerate(places):
                if not owner or at_s < stale_s:
                    self._write(place, 0.0)
                    _OWNER.pack_into(self._memory, place * _OWNER.size, self._me)
                    return place
            return None
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def board_of(gpu_uuid: str) -> FileBoard | None:
    """Return the board of a GPU; None, with a log line, if this machine has no memory for it."""
    path = FOLDER / f"baton-{os.getuid()}-{re.sub('[^A-Za-z0-9-]', '', gpu_uuid)}"
    with contextlib.suppress(OSError):
        return FileBoard(path)
    logger.info("%s cannot be used: decode steps do not yield to prompts of other engines on this GPU", path)
    return None
