"""The rendezvous of a group: a store in which members exchange addresses, and the reason if one of them fails.

Addresses are stored under names. A failure is stored for the other members, who check for it while they wait. The store
is neither encrypted nor protected: like the collectives, it must be on a network that only the cluster uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from ..net.sockets import endpoint, split_endpoint
from .groups import GroupFailed

ANSWER_S = 10.0
_POLL_S = 0.02
_LOOK_S = 0.1
_FAILURE = "failure"

T = TypeVar("T")


class Rendezvous:
    """The server, run by one process of the group, or by the process that starts the group."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Listen on a free port of `host`."""
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self.address = endpoint(host, self._store.port)

    def fail(self, rank: int, reason: str) -> None:
        """Tell waiting members that member `rank` will not come."""
        _write_failure(self._store, rank, reason)


class RendezvousClient:
    """A member's connection to its group's rendezvous. Raises `GroupFailed` if there is no answer.

    `store` is a second connection for torch's groups, so that their waits do not block this one.
    """

    def __init__(self, address: str, rank: int, *, timeout_s: float) -> None:
        """Connect. `timeout_s` limits the wait for other members' values; the rendezvous itself must answer at once."""
        try:
            host, port = split_endpoint(address)
        except ValueError as error:
            raise GroupFailed(f"rendezvous: {error}") from None
        self.rank = rank
        self._timeout_s = timeout_s
        self._silent = ""  # why the rendezvous is no longer asked
        patience_s = min(timeout_s, ANSWER_S)

        def connect() -> dist.TCPStore:
            return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience_s))

        try:
            self._store = _with_timeout(connect, 2 * patience_s)
            self.store = _with_timeout(connect, 2 * patience_s)
        except (RuntimeError, dist.DistError, TimeoutError) as error:
            why = str(error) or f"no answer within {2 * patience_s:g} s"
            raise GroupFailed(f"rank {rank} finds no rendezvous at {address}: {why}") from error
        self.store.set_timeout(timedelta(seconds=timeout_s))

    def put(self, name: str, value: str) -> None:
        self._ask(lambda: self._store.set(name, value))

    def get(self, name: str) -> str:
        """Wait for a value that a member puts there. Raises `GroupFailed` if a member fails, or none puts it."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self.check()
            if (found := self._ask(lambda: self._read(name))) is not None:
                return found
            if time.monotonic() > deadline:
                raise GroupFailed(f"rank {self.rank} waited {self._timeout_s:g} s for {name!r} of its group")
            time.sleep(_POLL_S)

    def run_watched(self, work: Callable[[], T]) -> T:
        """Run `work`, which waits for other members within torch, and abandon it if one of them fails.

        `work` runs on another thread. Raises `GroupFailed`, and any error of `work`.
        """
        given = _begun(work)
        while not wait([given], _LOOK_S).done:
            self.check()
        return given.result()

    def fail(self, reason: str) -> None:
        """Tell the other members that this one has failed."""
        self._ask(lambda: _write_failure(self._store, self.rank, reason))

    def failure(self, patience_s: float | None = None) -> str | None:
        """Return the first member that failed, with its reason, or None. `patience_s`: by default `ANSWER_S`."""
        return self._ask(lambda: self._read(_FAILURE), patience_s)

    def check(self) -> None:
        """Raise `GroupFailed` if a member has failed."""
        if (failure := self.failure()) is not None:
            raise GroupFailed(failure)

    def _read(self, name: str) -> str | None:
        return self._store.get(name).decode() if self._store.check([name]) else None

    def _ask(self, question: Callable[[], T], patience_s: float | None = None) -> T:
        """Return the answer, or raise in time: torch would wait as long as the connection seems to exist."""
        patience_s = patience_s or ANSWER_S
        if self._silent:
            raise GroupFailed(self._silent)
        try:
            return _with_timeout(question, patience_s)
        except TimeoutError:
            self._silent = f"rank {self.rank} lost its group's rendezvous: no answer within {patience_s:g} s"
            raise GroupFailed(self._silent) from None
        except (RuntimeError, dist.DistError) as error:
            raise GroupFailed(f"rank {self.rank} lost its group's rendezvous: {error}") from error


def _begun(work: Callable[[], T]) -> Future[T]:
    """Start `work` on its own thread, which is abandoned if it never returns."""
    given: Future[T] = Future()

    def run() -> None:
        try:
            given.set_result(work())
        except BaseException as error:
            given.set_exception(error)

    threading.Thread(target=run, name="baton-rendezvous", daemon=True).start()
    return given


def _with_timeout(work: Callable[[], T], patience_s: float) -> T:
    """Return the result of `work`. Raises its error, or `TimeoutError`."""
    return _begun(work).result(patience_s)


def _write_failure(store: dist.Store, rank: int, reason: str) -> None:
    # The first failure is the cause of the others.
    store.compare_set(_FAILURE, "", f"rank {rank} failed: {reason}")
