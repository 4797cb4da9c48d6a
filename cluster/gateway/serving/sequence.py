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
from ..routing.load import engine_key
from .admission_wait import AdmissionWait
from .attempt import Attempt, AttemptTracker
from .handoff import HandOff
from .progress import Progress
from .retry_path import RetryPath
from .retry_policy import RETRY_POLICY, AttemptHistory, Blame, Failure, RetryBudget
from .timeline import Stamp, Timeline

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pieces:
    """What works on one sequence. They know each other: all share its `progress`, `attempts` and `attempts`."""

    progress: Progress
    history: AttemptHistory
    tracker: AttemptTracker
    handoff: HandOff
    path: RetryPath
    wait: AdmissionWait


class ServedSequence:
    """One sequence. What `way` says is final once the first output is there.

    At any time it has at most one attempt, or one that is about to be sent, and what its hand-off has.
    """

    def __init__(
        self, pieces: Pieces, client: EngineClient, retries: RetryBudget, metrics: GatewayMetrics, timeline: Timeline
    ) -> None:
        self.timeline = timeline
        self._progress = pieces.progress
        self._history = pieces.history
        self._tracker = pieces.tracker
        self._handoff = pieces.handoff
        self._path = pieces.path
        self._wait = pieces.wait
        self._client = client
        self._retries = retries
        self._metrics = metrics
        self._attempt: Attempt | None = None
        self._failure: Failure | None = None  # that decides where to go on

    @property
    def path(self) -> str:
        """For people: `x-baton-path`."""
        return str(self._path)

    @property
    def gpu_time_spent(self) -> bool:
        """Or it may have been. What an attempt took is known when that has ended."""
        return self._tracker.gpu_time_spent

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """Outputs of whichever engines serve the sequence, as if they were one. Closing it ends every attempt.

        Raises `ApiError` for what no engine could make good.
        """
        self._retries.began()
        try:
            while True:
                attempt = (
                    self._attempt or self._tell_reader() or self._go_on_in(await self._wait.attempt(self._failure))
                )
                try:
                    output = await anext(attempt.stream)
                except EngineGone as gone:
                    output = _died(gone)
                except StopAsyncIteration:
                    raise internal("An engine ended a request without saying why.") from None
                if (error := _error_in(output)) is not None:
                    self._tracker.failed(attempt, error, was_scheduled=Stage.STARTED in (output.ages or {}))
                    self._note_end(attempt, output)
                    await self._fail(attempt, error)
                    continue
                if output.kv_source is not None and output.finish_reason is None:
                    self._handoff.start_early(attempt, output.kv_source)
                    continue
                output = await self._accept(attempt, output)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._retries.ended()
            if self._attempt is not None and self._tracker.deadline.is_over:
                self._tracker.judge(self._attempt, Failure.TIMED_OUT)
            self._handoff.withdraw()
            await self._end_attempt()

    async def _accept(self, attempt: Attempt, output: EngineOutput) -> EngineOutput:
        """Keeps what another engine would need to go on from here; starts the decode attempt when prefill is done."""
        if not attempt.is_read:
            self._note_first_word(attempt, output)
            self._tracker.spoke(attempt)
            self._handoff.taken()
        output = self._progress.take(output)
        if output.finish_reason is not FinishReason.HANDOFF:
            return output
        if output.kv_source is None:
            raise internal("A prefill engine handed over without saying where its KV is.")
        self._handoff.offered(attempt.placement.engine, output.kv_source)
        self._failure, self._attempt = Failure.NO_READER, None
        await self._tracker.close(attempt)
        reader = await self._handoff.begin_early()
        self.timeline.note(Stamp.TICKET, time.monotonic() if reader is None else reader.sent_s)  # which is when it came
        if reader is None and not self._handoff.tell_soon(self._tell_reader):
            reader = self._path.next_attempt(self._failure)
        if reader is not None:
            self._go_on_in(reader)
        return msgspec.structs.replace(output, finish_reason=None, kv_source=None)

    def _tell_reader(self) -> Attempt | None:
        """The one that is to go on, where there is one that does not know: while there is, there is no attempt."""
        attempt = self._handoff.tell_now()
        return None if attempt is None else self._go_on_in(attempt)

    def _go_on_in(self, attempt: Attempt) -> Attempt:
        self._attempt = attempt
        self.timeline.sent(attempt)
        return attempt

    def _note_first_word(self, attempt: Attempt, output: EngineOutput) -> None:
        now_s = time.monotonic()
        self.timeline.heard(attempt, output.ages or {}, now_s)
        if not self._progress.num_tokens:
            self.timeline.note(Stamp.FIRST_TOKEN, now_s)
        elif attempt.holder is None:
            self.timeline.note(Stamp.RESUMED, now_s)

    def _note_end(self, attempt: Attempt, output: EngineOutput) -> None:
        """Of an attempt that was lost."""
        now_s = time.monotonic()
        if not attempt.is_read:
            self.timeline.heard(attempt, output.ages or {}, now_s)
        self.timeline.note(Stamp.FAILED, now_s, attempt.placement.engine.engine_id)

    async def _fail(self, attempt: Attempt, error: EngineError) -> None:
        """Clears away a failed attempt. Raises `ApiError` where another one is of no use."""
        holder = None if attempt.holder is None else engine_key(attempt.holder)
        engine = engine_key(attempt.placement.engine)
        failure = self._failure = self._history.failed(error, engine, holder, brought_tokens=attempt.is_read)
        self._tracker.judge(attempt, failure)
        self._note_decision(attempt, failure)
        self._tell(attempt, failure, error)
        await self._end_attempt()
        if RETRY_POLICY[failure].blame is not Blame.FULL:  # who refuses has not touched what is on offer
            self._handoff.withdraw()
        if not self._history.may_go_on:
            raise from_engine(error, self._wait.retry_after_s())
        self._wait.failed()
        self._progress.generation += 1
        self._metrics.retries.labels(failure).inc()

    def _tell(self, attempt: Attempt, failure: Failure, error: EngineError) -> None:
        """Log a failed attempt."""
        again = self._history.may_go_on
        logger.log(
            logging.WARNING if again else logging.INFO,  # else the request fails, and that is told
            "attempt %d at %s after %d tokens: %s at %s, %s: %s",
            len(self._history.failures),
            self._progress.request_id,
            self._progress.num_tokens,
            failure,
            attempt.placement.engine.engine_id,
            "another follows" if again else "the last one",
            error.text,
        )

    def _note_decision(self, attempt: Attempt, failure: Failure) -> None:
        """How long the request waited for somebody who had said his last word."""
        match RETRY_POLICY[failure].blame:
            case Blame.ENGINE:
                blamed = attempt.placement.engine
            case Blame.HOLDER:
                blamed = attempt.holder or attempt.placement.engine
            case _:
                return
        since_s = max(attempt.sent_s, self._client.heard_s(blamed))
        self._metrics.decisions_s.labels(failure).observe(time.monotonic() - since_s)

    async def _end_attempt(self) -> None:
        """And the early one beside it, or the one that was to come."""
        await self._handoff.end_attempts()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            await self._tracker.close(attempt)


def _error_in(output: EngineOutput) -> EngineError | None:
    if output.finish_reason is FinishReason.ABORT:  # not by us, or nobody would be here to read it
        return EngineError(ErrorKind.ENGINE_DEAD, "The engine gave the request up.")
    return output.error


def _died(gone: EngineGone) -> EngineOutput:
    error = EngineError(ErrorKind.ENGINE_DEAD, str(gone) or "An engine's process is gone.")
    return EngineOutput(request_id="", finish_reason=FinishReason.ERROR, error=error)
