"""The newest finished requests with their timelines, so that one can ask afterwards where a request's time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .timeline import Timeline, TimelineReport

MOST_REQUESTS = 512
MOST_CHOICES = 8  # kept of one request


class EndedRequest(msgspec.Struct, frozen=True):
    """A finished request: its times and outcome, but no text."""

    request_id: str
    route: str
    status: int  # of the HTTP response; 499 if the client disconnected before it began
    began_at: float  # Unix time, in seconds
    latency_s: float
    path: str  # as in `x-baton-path`
    choices: list[TimelineReport]  # the first ones


@dataclass(frozen=True)
class _Kept:
    request: EndedRequest  # without its choices
    caller: bytes | None
    timelines: list[Timeline]

    def report(self) -> EndedRequest:
        return msgspec.structs.replace(self.request, choices=[timeline.report() for timeline in self.timelines])


class RecentRequests:
    """Keeps the newest finished requests of one gateway. Timelines are turned into reports only on demand."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._kept: deque[_Kept] = deque(maxlen=most)

    def note(self, request: EndedRequest, caller: bytes | None, timelines: Sequence[Timeline]) -> None:
        """Keep a finished request, whose `choices` are made of the timelines. `caller` is the digest of its API key."""
        self._kept.append(_Kept(request, caller, list(timelines[:MOST_CHOICES])))

    def find(self, request_id: str, caller: bytes | None, *, sees_all: bool) -> list[EndedRequest]:
        """Return the requests with this id, newest first: those of the caller, or all if it `sees_all`."""
        return [
            each.report()
            for each in reversed(self._kept)
            if each.request.request_id == request_id and (sees_all or each.caller == caller)
        ]
