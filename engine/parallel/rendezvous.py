"""Where the members of a group find each other, and read why one of them could not come.

Addresses are exchanged under names; a failure is written down for the others, who see it while they wait. What is kept
here is neither encrypted nor guarded: it belongs on a network that the cluster has to itself, as do the collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .errors import GroupFailed

_POLL_S = 0.01
_FAILURE = "failure"


class Rendezvous:
    """The place itself, held open by one process of the group (or by whoever starts it) for as long as it lives."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """On a free port, reached under `host`."""
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = f"{host}:{self._store.port}"

    def fail(self, rank: int, reason: str) -> None:
        """Tells whoever waits here that member `rank` does not come."""
        _write_failure(self._store, rank, reason)


class Meeting:
    """A member's connection to its group's rendezvous. Raises `GroupFailed` where nobody answers there."""

    def __init__(self, address: str, rank: int, *, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise GroupFailed(f"rendezvous {address!r} is no host:port")
        self.rank = rank
        self._timeout_s = timeout_s
        try:
            self.store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, dist.DistError) as error:
            raise GroupFailed(f"rank {rank} finds no rendezvous at {address}: {error}") from error

    def put(self, name: str, value: str) -> None:
        self._ask(lambda: self.store.set(name, value))

    def get(self, name: str) -> str:
        """What someone puts there, waited for. Raises `GroupFailed` where a member fails meanwhile, or none does."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self.check()
            if self._ask(lambda: self.store.check([name])):
                return self._read(name)
            if time.monotonic() > deadline:
                raise GroupFailed(f"rank {self.rank} waited {self._timeout_s:g} s for {name!r} of its group")
            time.sleep(_POLL_S)

    def fail(self, reason: str) -> None:
        """Tells the others that this member does not go on."""
        self._ask(lambda: _write_failure(self.store, self.rank, reason))

    def failure(self) -> str | None:
        """Which member failed first, and why; None: none that is known of."""
        return self._read(_FAILURE) if self._ask(lambda: self.store.check([_FAILURE])) else None

    def check(self) -> None:
        """Raises `GroupFailed` where a member has failed."""
        if (failure := self.failure()) is not None:
            raise GroupFailed(failure)

    def _read(self, name: str) -> str:
        value: bytes = self._ask(lambda: self.store.get(name))
        return value.decode()

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (RuntimeError, dist.DistError) as error:
            raise GroupFailed(f"rank {self.rank} lost its group's rendezvous: {error}") from error


def _write_failure(store: dist.Store, rank: int, reason: str) -> None:
    # The first failure is the cause of the others.
    store.compare_set(_FAILURE, "", f"rank {rank} failed: {reason}")
