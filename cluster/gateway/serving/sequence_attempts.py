"""The attempts and the KV offer of one sequence: at most one current attempt, one early attempt, and one offer.

current    the attempt whose outputs are read
early      fetches the prompt's KV while the current one computes it; becomes the current one with `begin_early`
offer      KV that the prefill engine keeps until another engine has fetched it or the offer is withdrawn
"""

from __future__ import annotations

import msgspec

from baton.cluster.contracts import EngineRecord
from baton.engine.core.messages import EngineRequest, KVSource

from ..routing.load import Placement
from .attempt import Attempt, Deadline, KVOffer
from .context import ServingContext
from .engine_selector import Selection
from .retry_policy import Failure
from .timeline import Timeline


class SequenceAttempts:
    """Opens and closes the attempts of one sequence, and holds its offer."""

    def __init__(self, serving: ServingContext, timeline: Timeline, deadline: Deadline) -> None:
        self.current: Attempt | None = None
        self.early: Attempt | None = None
        self.offer: KVOffer | None = None
        self.gpu_time_spent = False  # by a closed attempt, or possibly so
        self._client = serving.client
        self._tracker = serving.attempts
        self._timeline = timeline
        self._deadline = deadline

    @property
    def newest(self) -> Attempt:
        """Return the current attempt. Call it only in states in which there is one."""
        assert self.current is not None, "an output came of no attempt"
        return self.current

    @property
    def holder(self) -> EngineRecord | None:
        """Return the engine that has KV on offer."""
        return None if self.offer is None else self.offer.engine

    # ------------------------------------------------------------------ begin

    def submit(self, found: Selection, request: EngineRequest) -> Attempt:
        """Send the request to an engine that computes it or, without a route, to one that fetches the KV on offer."""
        if found.route is not None:
            if found.route.hands_off:  # the engine writes one token only, so a prediction is of no use
                request = msgspec.structs.replace(request, keep_kv=True, prediction_token_ids=[])
            return self._listen_to(self._open(found.placement, request))
        assert self.offer is not None
        request = msgspec.structs.replace(request, kv_source=self.offer.source)
        return self._listen_to(self._open(found.placement, request, self.offer.engine))

    def submit_early(self, placement: Placement, request: EngineRequest, source: KVSource) -> None:
        """Let an engine fetch the KV `source` while the current attempt computes it."""
        request = msgspec.structs.replace(request, kv_source=source, awaits_first_token=True)
        self.early = self._open(placement, request, self.newest.engine)

    def begin_early(self, request_id: str, generation: int, token_id: int) -> None:
        """Let the early attempt continue from the first token, as the current one."""
        early, self.early = self.early, None
        assert early is not None
        self._client.begin(early.engine, request_id, generation, token_id)
        self._listen_to(early)

    def _open(self, placement: Placement, request: EngineRequest, holder: EngineRecord | None = None) -> Attempt:
        return self._tracker.open(placement, self._deadline.on(request), holder)

    def _listen_to(self, attempt: Attempt) -> Attempt:
        self.current = attempt
        self._timeline.sent(attempt)
        return attempt

    # ------------------------------------------------------------------ offers

    def keep_offer(self, source: KVSource) -> None:
        self.offer = KVOffer(self.newest.engine, source)

    def withdraw_offer(self, request_id: str, generation: int) -> None:
        """Withdraw the offer, if any: no engine will fetch its KV."""
        if (offer := self.offer) is not None:
            self.offer = None
            self._client.abort(offer.engine, request_id, generation)

    # ------------------------------------------------------------------ reports about an engine

    def note_first_output(self) -> None:
        self._tracker.note_first_output(self.newest)

    def note_failure(self, failure: Failure) -> None:
        self._tracker.note_failure(self.newest, failure, self._deadline)

    def judge_deadline(self) -> None:
        """If the deadline has ended the current attempt, count that against its engine's circuit."""
        if self.current is not None and self._deadline.is_over:
            self.note_failure(Failure.TIMED_OUT)

    # ------------------------------------------------------------------ end

    async def close_all(self) -> None:
        await self.close_early()
        await self.close_current()

    async def close_early(self) -> None:
        early, self.early = self.early, None
        if early is not None:
            await self._close(early)

    async def close_current(self) -> None:
        attempt, self.current = self.current, None
        if attempt is not None:
            await self._close(attempt)

    async def _close(self, attempt: Attempt) -> None:
        self.gpu_time_spent |= attempt.has_run
        await self._tracker.close(attempt)
