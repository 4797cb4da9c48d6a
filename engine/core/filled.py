"""Requests that have their blocks, filled by a transfer or out of a tier, and need only a row to run."""

from __future__ import annotations

from collections import deque

from .request import Request


class FilledRequests:
    """In the order in which they became ready. Those that do not know their first token yet stand aside.

    add ──> aside ──its token is known──> ready ──> taken
     └──────────────────────────────────────^
    """

    def __init__(self) -> None:
        self._ready: deque[Request] = deque()
        self._aside: set[Request] = set()

    def __len__(self) -> int:
        return len(self._ready) + len(self._aside)

    def __contains__(self, request: Request) -> bool:
        return request in self._aside or request in self._ready

    @property
    def head(self) -> Request | None:
        """The next one; None where none is ready."""
        return self._ready[0] if self._ready else None

    def add(self, request: Request) -> None:
        if request.awaits_token:
            self._aside.add(request)
        else:
            self._ready.append(request)

    def token_known(self, request: Request) -> None:
        """Where its blocks are not there yet, nothing happens."""
        if request in self._aside:
            self._aside.remove(request)
            self._ready.append(request)

    def take(self) -> Request:
        """The head."""
        return self._ready.popleft()

    def remove(self, request: Request) -> None:
        """One of these."""
        if request in self._aside:
            self._aside.remove(request)
        else:
            self._ready.remove(request)
