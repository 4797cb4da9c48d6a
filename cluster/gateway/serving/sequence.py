"""One sequence's way through engines, as one stream of outputs.

    engine found ──> prefill (keep_kv) ── first token, KV on offer ──> decode (kv_source) ── tokens ──> done
                       └─ long prompts: on offer early ──> decode (awaits_first_token) fetches meanwhile ──^
                └──> unified or decode engine does it all ───────────────────────────────── tokens ──> done

`sequence_table.py` has its states and transitions, `sequence_attempts.py` its attempts and offer; `ServedSequence`
classifies outputs as events and carries out the effects. After a failure (`retry_policy.py`) another engine gets all
tokens up to then and the same seed. Random draws depend only on seed and position, so it draws the tokens that the lost
engine would have drawn: the stream has no gap and no repetition.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec

from baton.cluster.cached_blocks import BlockName
from baton.cluster.contracts import EngineGone
from baton.engine.core.messages import EngineError, EngineOutput, EngineRequest, ErrorKind, FinishReason, KVSource
from baton.engine.core.stages import Stage

from ..errors import ApiError, engines_full, from_engine, internal, no_capacity, no_retries_left
from ..routing.router import RoutingQuery
from .attempt import Attempt, Deadline
from .context import ServingContext
from .engine_selector import EngineSelector, Selection, ServedPath
from .retry_policy import RETRY_POLICY, AttemptHistory, Blame, Failure
from .sequence_attempts import SequenceAttempts
from .sequence_table import SEQUENCE_TABLE, Effect, SequenceEvent, SequenceState
from .timeline import Stamp, Timeline

logger = logging.getLogger(__name__)

TOKENS = SequenceEvent.TOKENS  # as a module variable, because it is looked up for each token
NO_OUTPUT = EngineOutput(request_id="")  # for events that no output has caused
OUT_OF_TURN = "An engine answered out of turn."
POLL_S = 0.02  # between two searches while no engine can take a sequence


class ServedSequence:
    """One sequence. `path` is final once the first output has arrived."""

    def __init__(
        self,
        serving: ServingContext,
        request: EngineRequest,
        timeline: Timeline,
        names: Sequence[BlockName] | None = None,
        *,
        rank: int | None = None,
        session_id: str | None = None,
        deadline: Deadline = Deadline(),
    ) -> None:
        """`timeline` gets further stamps here. `names` are those of the prompt's blocks, if known already. The engine
        of `rank` must take part. Requests with the same `session_id` prefer the same engines.
        """
        serving.metrics.requests.inc()
        self.state = SequenceState.PLACING
        self.timeline = timeline
        self._serving = serving
        self._request = request
        self._tokens = list(request.output_token_ids)
        self._generation = request.generation  # counts attempts: outputs of earlier ones are dropped
        self._attempts = SequenceAttempts(serving, timeline, deadline)
        self._query = serving.router.query(request, names, session_id=session_id, pinned_rank=rank)
        self._history = AttemptHistory(serving.settings.max_attempts)
        self._selector = EngineSelector(serving, self._history, rank)
        self._selection: Selection | None = None  # found, but not submitted yet
        self._failure: Failure | None = None  # of the attempt before
        self._owes_retry = False  # the next attempt must be paid from the retry budget
        self._for_client: EngineOutput | None = None  # the output to be yielded next
        self._path = ServedPath(request.request_id, serving.metrics)

    @property
    def gpu_time_spent(self) -> bool:
        """Return whether a closed attempt has spent device time, or may have."""
        return self._attempts.gpu_time_spent

    @property
    def path(self) -> str:
        """Return the value of `x-baton-path`."""
        return str(self._path)

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs of all attempts, as if they were one. Closing the generator ends every attempt.

        Raises `ApiError` for a failure after which no other engine can continue.
        """
        self._serving.retry_budget.began()
        try:
            while True:
                attempt = self._attempts.current or await self._next_attempt()
                try:
                    output = await anext(attempt.stream)
                except EngineGone as gone:
                    output = _died(gone)
                except StopAsyncIteration:
                    raise internal("An engine ended a request without saying why.") from None
                event = self._event_of(output)
                if event is TOKENS and attempt.has_output:  # DECODING: what `_apply` would do for this row, but faster
                    yield self._keep_tokens(output)
                    continue
                await self._apply(event, output)
                if (for_client := self._for_client) is not None:
                    self._for_client = None
                    yield for_client
                if self.state is SequenceState.DONE:
                    return
        finally:
            self._serving.retry_budget.ended()
            await self._apply(SequenceEvent.CLOSED)

    async def _apply(self, event: SequenceEvent, output: EngineOutput = NO_OUTPUT) -> None:
        row = SEQUENCE_TABLE.get((self.state, event))
        if row is None:
            logger.error("%s: %r while it is %s", self._request.request_id, event.value, self.state.name)
            raise internal(OUT_OF_TURN)
        self.state = row.next_state
        for effect in row.effects:
            await self._perform(effect, output)

    async def _perform(self, effect: Effect, output: EngineOutput) -> None:
        match effect:  # the effects of every sequence come first
            case Effect.SUBMIT:
                self._submit()
            case Effect.NOTE_FIRST_OUTPUT:
                self._note_first_output(output)
            case Effect.DELIVER:
                self._for_client = self._keep_tokens(output)
            case Effect.JUDGE_DEADLINE:
                self._attempts.judge_deadline()
            case Effect.WITHDRAW_OFFER:
                self._attempts.withdraw_offer(self._request.request_id, self._generation)
            case Effect.CLOSE_ALL:
                await self._close_all()
            case Effect.SUBMIT_EARLY:
                self._submit_early(_source_in(output))
            case Effect.KEEP_OFFER:
                self._attempts.keep_offer(_source_in(output))
            case Effect.CLOSE_ATTEMPT:
                await self._attempts.close_current()
            case Effect.HAND_OFF:
                await self._hand_off(_source_in(output))
            case Effect.SUBMIT_SOON:
                # The client gets its token first, and a client that reads slowly does not delay the submission.
                asyncio.get_running_loop().call_soon(self._submit_if_selected)
            case Effect.BEGIN_EARLY:
                self._attempts.begin_early(self._request.request_id, self._generation, self._tokens[-1])
            case Effect.DROP_OFFER:
                self._attempts.offer = None
            case Effect.BLAME:
                self._blame()
            case Effect.RETRY:
                self._retry()
            case Effect.NEW_GENERATION:
                self._generation += 1
            case Effect.ANSWER_ERROR:
                raise from_engine(self._history.newest_error, self._serving.retry_after_s())
            case Effect.ANSWER_NO_ENGINE:
                raise self._no_engine()

    # ------------------------------------------------------------------ events

    def _event_of(self, output: EngineOutput) -> SequenceEvent:
        if output.finish_reason is None and output.error is None:
            return TOKENS if output.kv_source is None else SequenceEvent.OFFERED_EARLY
        if output.finish_reason is FinishReason.ABORT:  # not aborted by this gateway, which would not listen any more
            return self._event_of_error(EngineError(ErrorKind.ENGINE_DEAD, "The engine gave the request up."), output)
        if output.error is not None:
            return self._event_of_error(output.error, output)
        return SequenceEvent.HANDED_OFF if output.finish_reason is FinishReason.HANDOFF else SequenceEvent.FINISHED

    def _event_of_error(self, error: EngineError, output: EngineOutput) -> SequenceEvent:
        attempt, now_s = self._attempts.newest, time.monotonic()
        attempt.note_error(error, was_scheduled=Stage.STARTED in (output.ages or {}))
        if not attempt.has_output:
            self.timeline.note_stages(attempt, output.ages or {}, now_s)
        self.timeline.note(Stamp.FAILED, now_s, attempt.engine.engine_id)
        holder = None if attempt.holder is None else attempt.holder.key
        engine, brought_tokens = attempt.engine.key, attempt.has_output
        self._failure = self._history.failed(error, engine, holder, brought_tokens=brought_tokens)
        if not self._history.may_go_on:
            return SequenceEvent.FAILED
        is_refusal = RETRY_POLICY[self._failure].blame is Blame.REFUSED
        return SequenceEvent.REFUSED if is_refusal else SequenceEvent.LOST

    # ------------------------------------------------------------------ placing

    async def _next_attempt(self) -> Attempt:
        if self.state is SequenceState.PLACING:
            await self._wait_for_engine()
        return self._attempts.current or self._submit()

    async def _wait_for_engine(self) -> None:
        """Wait until an engine has been selected. Raises `ApiError` (503) if none can take the sequence in time."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._serving.settings.capacity_timeout_s
        with self._serving.metrics.unplaced.track_inprogress():
            while not await self._place():
                if self._is_refused_by_all or loop.time() >= give_up_s:
                    await self._apply(SequenceEvent.NO_ENGINE)
                await asyncio.sleep(POLL_S)
        if self._owes_retry:
            self._owes_retry = False
            self._serving.retry_budget.spend()

    async def _place(self) -> bool:
        """Select an engine that continues the sequence; return False if there is none, or no retry is allowed now."""
        holder = self._attempts.holder
        if not self._may_try or (found := self._selector.select(self._failure, self._query_now(), holder)) is None:
            return False
        self._selection = found
        self._path.note(found, self._failure)
        if found.route is None:
            await self._apply(SequenceEvent.READER_FOUND)
        else:
            await self._apply(SequenceEvent.ENGINE_FOUND if holder is None else SequenceEvent.RECOMPUTE_FOUND)
        return True

    @property
    def _may_try(self) -> bool:
        return not self._owes_retry or self._serving.retry_budget.left > 0

    @property
    def _is_refused_by_all(self) -> bool:
        """Return True if no engine has room. Then the client is told at once, so that it waits and not the gateway."""
        return self._failure is Failure.OVERLOADED and (self._may_try or self._selector.are_full)

    def _no_engine(self) -> ApiError:
        retry_after_s = self._serving.retry_after_s()
        last = self._history.last_error
        detail = "" if last is None else f"the last attempt: {last.text}"
        if not self._may_try and not self._is_refused_by_all:
            return no_retries_left("Too many attempts of other requests fail, too.", retry_after_s, detail)
        if self._history.refused:
            return engines_full(retry_after_s, detail)
        return no_capacity("No engine can take the request now.", retry_after_s, detail)

    # ------------------------------------------------------------------ attempts

    def _request_now(self) -> EngineRequest:
        """Return the request with all tokens up to now, which is all that another engine needs."""
        return msgspec.structs.replace(self._request, output_token_ids=list(self._tokens), generation=self._generation)

    def _query_now(self) -> RoutingQuery:
        return self._query.with_tokens(len(self._request.prompt_token_ids) + len(self._tokens))

    def _submit(self) -> Attempt:
        """Send the sequence to the selected engine."""
        found, self._selection = self._selection, None
        assert found is not None, self.state
        return self._attempts.submit(found, self._request_now())

    def _submit_if_selected(self) -> None:
        if self._selection is not None:
            self._submit()

    def _submit_early(self, source: KVSource) -> None:
        """Let a decode engine fetch the prompt's KV while it is computed.

        If there is none, the hand-off will look again.
        """
        if self._attempts.early is not None:
            return
        placement = self._selector.reader(self._query_now(), self._attempts.newest.engine)
        if placement is not None:
            self._attempts.submit_early(placement, self._request_now(), source)

    async def _hand_off(self, source: KVSource) -> None:
        """Select the engine that continues.

        This precedes the first token's delivery, so that `path` is final by then.
        """
        self._failure = Failure.NO_READER
        early = self._attempts.early
        if early is not None and early.fetches(source):
            self.timeline.note(Stamp.TICKET, early.sent_s)
            await self._apply(SequenceEvent.EARLY_READER)
            return
        if early is not None:  # the prompt is on offer anew, so what the early reader fetches is outdated
            await self._attempts.close_early()
            self._generation += 1  # the early attempt's last output may still arrive
        self.timeline.note(Stamp.TICKET, time.monotonic())
        await self._place()

    async def _close_all(self) -> None:
        self._selection = None
        await self._attempts.close_all()

    # ------------------------------------------------------------------ outputs

    def _note_first_output(self, output: EngineOutput) -> None:
        attempt, now_s = self._attempts.newest, time.monotonic()
        self.timeline.note_stages(attempt, output.ages or {}, now_s)
        if not self._tokens:
            self.timeline.note(Stamp.FIRST_TOKEN, now_s)
        elif attempt.holder is None:
            self.timeline.note(Stamp.RESUMED, now_s)
        self._attempts.note_first_output()

    def _keep_tokens(self, output: EngineOutput) -> EngineOutput:
        """Keep the tokens, which another engine would need. Return the output for the client."""
        if self._tokens and output.num_cached_tokens:  # the client got this number with the first output
            output = msgspec.structs.replace(output, num_cached_tokens=0)
        self._tokens += output.token_ids
        if output.prompt_logprobs is not None:  # delivered, so no other engine has to compute them again
            sampling = msgspec.structs.replace(self._request.sampling, prompt_logprobs=None)
            self._request = msgspec.structs.replace(self._request, sampling=sampling)
        if output.finish_reason is FinishReason.HANDOFF:
            return msgspec.structs.replace(output, finish_reason=None, kv_source=None)
        return output

    # ------------------------------------------------------------------ failures

    def _blame(self) -> None:
        """Report a failed attempt to circuits, metrics and the log."""
        attempt, failure, again = self._attempts.newest, self._history.failures[-1], self._history.may_go_on
        self._attempts.note_failure(failure)
        logger.log(
            logging.WARNING if again else logging.INFO,  # if not, the request fails, which has its own log line
            "attempt %d at %s after %d tokens: %s at %s, %s: %s",
            len(self._history.failures),
            self._request.request_id,
            len(self._tokens),
            failure,
            attempt.engine.engine_id,
            "another follows" if again else "the last one",
            self._history.newest_error.text,
        )

    def _retry(self) -> None:
        self._owes_retry = self._history.must_pay
        self._generation += 1
        self._serving.metrics.retries.labels(self._failure).inc()


def _source_in(output: EngineOutput) -> KVSource:
    if output.kv_source is None:
        raise internal("A prefill engine handed over without saying where its KV is.")
    return output.kv_source


def _died(gone: EngineGone) -> EngineOutput:
    error = EngineError(ErrorKind.ENGINE_DEAD, str(gone) or "An engine's process is gone.")
    return EngineOutput(request_id="", finish_reason=FinishReason.ERROR, error=error)
