"""Requests that have their blocks, filled by a transfer or out of a tier, and need only a row to run."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from ..requests.request import Request

_rank = attrgetter("rank")


class FilledRequests:
    """By rank, as those that wait: by priority, then by arrival. Those that do not know their first token stand aside.

    add ──> aside ──its token is known──> ready ──> taken
     └──────────────────────────────────────^
    """

    def __init__(self) -> None:
        self._ready: list[Request] = []  # by rank
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
            insort(self._ready, request, key=_rank)

    def token_known(self, request: Request) -> None:
        """Where its blocks are not there yet, nothing happens."""
        if request in self._aside:
            self._aside.remove(request)
            insort(self._ready, request, key=_rank)

    def take(self) -> Request:
        """The head."""
        return self._ready.pop(0)

    def remove(self, request: Request) -> None:
        """One of these."""
        if request in self._aside:
            self._aside.remove(request)
        else:
            self._ready.remove(request)
