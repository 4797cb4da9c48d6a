"""One sequence on its way through the engines, and what happens when one of them fails.

    route ──> prefill (keep_kv) ── first token, HANDOFF ──> decode (kv_source) ── tokens ──> done
      │         └── long prompts: on offer ──> decode (awaits_first_token), fetches meanwhile ──^
      ^  └──> unified or decode engine, does it all ─────────────────────────── tokens ──> done
      └────── a failure (ladder.py): all tokens so far, generation + 1, same seed

Random draws depend on seed and position only, so whoever continues draws what the lost engine would have drawn: the
stream has no gap and no repetition.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from baton.cluster.contracts import EngineClient, EngineGone
from baton.engine.core.messages import EngineError, EngineOutput, ErrorKind, FinishReason
from baton.engine.core.stages import Stage

from ..errors import from_engine, internal
from ..metrics import GatewayMetrics
from .handoff import HandOff
from .ladder import LADDER, Attempts, Blame, Failure
from .ledger import engine_key
from .legs import Leg, Legs
from .placing import Placing
from .progress import Progress
from .retries import RetryBudget
from .timeline import Stamp, Timeline
from .way import Way

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pieces:
    """What works on one sequence. They know each other: all share its `progress`, `attempts` and `legs`."""

    progress: Progress
    attempts: Attempts
    legs: Legs
    handoff: HandOff
    way: Way
    placing: Placing


class Dispatch:
    """One sequence. What `way` says is final once the first output is there.

    At any time it has at most one leg, or one that is about to be sent, and what its hand-off has.
    """

    def __init__(
        self, pieces: Pieces, client: EngineClient, retries: RetryBudget, metrics: GatewayMetrics, timeline: Timeline
    ) -> None:
        self.timeline = timeline
        self._progress = pieces.progress
        self._attempts = pieces.attempts
        self._legs = pieces.legs
        self._handoff = pieces.handoff
        self._way = pieces.way
        self._placing = pieces.placing
        self._client = client
        self._retries = retries
        self._metrics = metrics
        self._leg: Leg | None = None
        self._failure: Failure | None = None  # that decides where to go on

    @property
    def way(self) -> str:
        """For people: `x-baton-path`."""
        return str(self._way)

    @property
    def gpu_time_spent(self) -> bool:
        """Or it may have been. What an attempt took is known when that has ended."""
        return self._legs.gpu_time_spent

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """Outputs of whichever engines serve the sequence, as if they were one. Closing it ends every leg.

        Raises `ApiError` for what no engine could make good.
        """
        self._retries.began()
        try:
            while True:
                leg = self._leg or self._tell_reader() or self._go_on_in(await self._placing.leg(self._failure))
                try:
                    output = await anext(leg.stream)
                except EngineGone as gone:
                    output = _died(gone)
                except StopAsyncIteration:
                    raise internal("An engine ended a request without saying why.") from None
                if (error := _error_in(output)) is not None:
                    self._legs.failed(leg, error, was_scheduled=Stage.STARTED in (output.ages or {}))
                    self._note_end(leg, output)
                    await self._fail(leg, error)
                    continue
                if output.kv_source is not None and output.finish_reason is None:
                    self._handoff.start_early(leg, output.kv_source)
                    continue
                output = await self._accept(leg, output)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._retries.ended()
            if self._leg is not None and self._legs.deadline.is_over:
                self._legs.judge(self._leg, Failure.TIMED_OUT)
            self._handoff.withdraw()
            await self._end_leg()

    async def _accept(self, leg: Leg, output: EngineOutput) -> EngineOutput:
        """Keeps what another engine would need to go on from here; starts the decode leg when prefill is done."""
        if not leg.is_read:
            self._note_first_word(leg, output)
            self._legs.spoke(leg)
            self._handoff.taken()
        output = self._progress.take(output)
        if output.finish_reason is not FinishReason.HANDOFF:
            return output
        if output.kv_source is None:
            raise internal("A prefill engine handed over without saying where its KV is.")
        self._handoff.offered(leg.placement.engine, output.kv_source)
        self._failure, self._leg = Failure.NO_READER, None
        await self._legs.close(leg)
        reader = await self._handoff.begin_early()
        self.timeline.note(Stamp.TICKET, time.monotonic() if reader is None else reader.sent_s)  # which is when it came
        if reader is None and not self._handoff.tell_soon(self._tell_reader):
            reader = self._way.next_leg(self._failure)
        if reader is not None:
            self._go_on_in(reader)
        return msgspec.structs.replace(output, finish_reason=None, kv_source=None)

    def _tell_reader(self) -> Leg | None:
        """The one that is to go on, where there is one that does not know: while there is, there is no leg."""
        leg = self._handoff.tell_now()
        return None if leg is None else self._go_on_in(leg)

    def _go_on_in(self, leg: Leg) -> Leg:
        self._leg = leg
        self.timeline.sent(leg)
        return leg

    def _note_first_word(self, leg: Leg, output: EngineOutput) -> None:
        now_s = time.monotonic()
        self.timeline.heard(leg, output.ages or {}, now_s)
        if not self._progress.num_tokens:
            self.timeline.note(Stamp.FIRST_TOKEN, now_s)
        elif leg.holder is None:
            self.timeline.note(Stamp.RESUMED, now_s)

    def _note_end(self, leg: Leg, output: EngineOutput) -> None:
        """Of an attempt that was lost."""
        now_s = time.monotonic()
        if not leg.is_read:
            self.timeline.heard(leg, output.ages or {}, now_s)
        self.timeline.note(Stamp.FAILED, now_s, leg.placement.engine.engine_id)

    async def _fail(self, leg: Leg, error: EngineError) -> None:
        """Clears away a failed attempt. Raises `ApiError` where another one is of no use."""
        holder = None if leg.holder is None else engine_key(leg.holder)
        engine = engine_key(leg.placement.engine)
        failure = self._failure = self._attempts.failed(error, engine, holder, brought_tokens=leg.is_read)
        self._legs.judge(leg, failure)
        self._note_decision(leg, failure)
        self._tell(leg, failure, error)
        await self._end_leg()
        if LADDER[failure].blame is not Blame.FULL:  # who refuses has not touched what is on offer
            self._handoff.withdraw()
        if not self._attempts.may_go_on:
            raise from_engine(error, self._placing.retry_after_s())
        self._placing.failed()
        self._progress.generation += 1
        self._metrics.retries.labels(failure).inc()

    def _tell(self, leg: Leg, failure: Failure, error: EngineError) -> None:
        """Log a failed attempt."""
        again = self._attempts.may_go_on
        logger.log(
            logging.WARNING if again else logging.INFO,  # else the request fails, and that is told
            "attempt %d at %s after %d tokens: %s at %s, %s: %s",
            len(self._attempts.failures),
            self._progress.request_id,
            self._progress.num_tokens,
            failure,
            leg.placement.engine.engine_id,
            "another follows" if again else "the last one",
            error.text,
        )

    def _note_decision(self, leg: Leg, failure: Failure) -> None:
        """How long the request waited for somebody who had said his last word."""
        match LADDER[failure].blame:
            case Blame.ENGINE:
                blamed = leg.placement.engine
            case Blame.HOLDER:
                blamed = leg.holder or leg.placement.engine
            case _:
                return
        since_s = max(leg.sent_s, self._client.heard_s(blamed))
        self._metrics.decisions_s.labels(failure).observe(time.monotonic() - since_s)

    async def _end_leg(self) -> None:
        """And the early one beside it, or the one that was to come."""
        await self._handoff.end_legs()
        leg, self._leg = self._leg, None
        if leg is not None:
            await self._legs.close(leg)


def _error_in(output: EngineOutput) -> EngineError | None:
    if output.finish_reason is FinishReason.ABORT:  # not by us, or nobody would be here to read it
        return EngineError(ErrorKind.ENGINE_DEAD, "The engine gave the request up.")
    return output.error


def _died(gone: EngineGone) -> EngineOutput:
    error = EngineError(ErrorKind.ENGINE_DEAD, str(gone) or "An engine's process is gone.")
    return EngineOutput(request_id="", finish_reason=FinishReason.ERROR, error=error)
