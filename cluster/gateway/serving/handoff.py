"""One sequence between the engine that has read its prompt and the one that goes on.

    prefill says          HANDOFF ──> on offer ──> a reader is chosen ──> told soon ──> its first word: over
    or, while it reads,   KV source ──> early attempt: a reader fetches what is written ─┐
                          HANDOFF ──> on offer ──────────────────────────────────────┴─> begins ──> its first word: over

What is on offer is kept for us until a reader has it or we say that nobody wants it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from baton.cluster.contracts import EngineClient, EngineRecord
from baton.engine.core.messages import EngineRequest, KVSource

from ..routing.load import Placement
from .attempt import Attempt, AttemptTracker
from .engine_selector import EngineSelector
from .progress import Progress


@dataclass(frozen=True)
class _EarlyAttempt:
    """In a decode engine that fetches a prompt's blocks while they are written, and will go on from the first token."""

    attempt: Attempt
    source: KVSource


@dataclass(frozen=True)
class _Offer:
    """KV that a finished prefill holds for us until a decode engine has it."""

    engine: EngineRecord
    source: KVSource


class Reader(NamedTuple):
    """Who is to go on from an offer, and with what message."""

    placement: Placement
    request: EngineRequest
    holder: EngineRecord  # of the KV that it reads


class HandOff:
    """Of one sequence: at most one early attempt beside a prefill, one offer, and one reader that is to be told."""

    def __init__(
        self, client: EngineClient, progress: Progress, selector: EngineSelector, tracker: AttemptTracker
    ) -> None:
        self._client = client
        self._progress = progress
        self._selector = selector
        self._tracker = tracker
        self._early: _EarlyAttempt | None = None
        self._offer: _Offer | None = None
        self._reader: Reader | None = None

    @property
    def has_offer(self) -> bool:
        return self._offer is not None

    def start_early(self, prefill: Attempt, source: KVSource) -> None:
        """Lets a decode engine fetch the prompt while it is read; none at hand: that begins with the first token."""
        request, holder = self._progress.request(), prefill.placement.engine
        mate = self._selector.reader(self._progress.wanted(request), holder)
        if mate is not None and self._early is None:
            request = msgspec.structs.replace(request, kv_source=source, awaits_first_token=True)
            self._early = _EarlyAttempt(self._tracker.open(mate, request, holder), source)

    def offered(self, holder: EngineRecord, source: KVSource) -> None:
        """The prompt is read."""
        self._offer = _Offer(holder, source)

    async def begin_early(self) -> Attempt | None:
        """The early attempt goes on from the first token. None: there is none, or the prompt is on offer anew since."""
        early, self._early = self._early, None
        if early is None or self._offer is None:
            return None
        if early.source.ticket == self._offer.source.ticket:
            name, token = self._progress.request_id, self._progress.newest_token
            self._client.begin(early.attempt.placement.engine, name, self._progress.generation, token)
            return early.attempt
        await self._tracker.close(early.attempt)
        self._progress.generation += 1  # the engine's last word about it may still come
        return None

    def reader(self, request: EngineRequest) -> Reader | None:
        """Somebody who can go on with `request` from what is on offer."""
        if (offer := self._offer) is None:
            return None
        mate = self._selector.reader(self._progress.wanted(request), offer.engine)
        if mate is None:
            return None
        return Reader(mate, msgspec.structs.replace(request, kv_source=offer.source), offer.engine)

    def tell_soon(self, tell: Callable[[], object]) -> bool:
        """Chooses a reader; false where there is none.

        It is told by whoever calls `tell_now`: `tell` does, in the loop's next round, if nobody has before. The first
        token may be on its way to the client by then, and a client that reads slowly holds up nobody.
        """
        self._reader = self.reader(self._progress.request())
        asyncio.get_running_loop().call_soon(tell)
        return self._reader is not None

    def tell_now(self) -> Attempt | None:
        """None where nobody is to be told."""
        reader, self._reader = self._reader, None
        return None if reader is None else self._tracker.open(*reader)

    def taken(self) -> None:
        """The reader speaks: it has the KV, and told the prefill engine so."""
        self._offer = None

    def withdraw(self) -> None:
        """Nobody wants what is on offer."""
        if (offer := self._offer) is not None:
            self._offer = None
            self._client.abort(offer.engine, self._progress.request_id, self._progress.generation)

    async def end_attempts(self) -> None:
        """The early one, and the one that was to come."""
        self._reader = None
        early, self._early = self._early, None
        if early is not None:
            await self._tracker.close(early.attempt)
