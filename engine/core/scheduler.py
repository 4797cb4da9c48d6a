"""Which tokens of which requests run in the next step.

One rule: computed catches up with target. Every step hands out at most `max_num_batched_tokens` tokens to at most
`max_num_seqs` requests: first to those that run, then to those that wait, by priority and arrival. Chunked prefill,
prefix hits, resuming after preemption and going on after a hand-off are this one rule with other starting points.

The books are kept as if every planned step had already run, so the next one can be planned while results are on their
way. What a stop or an abort makes superfluous is dropped when its result comes; `fence.py` keeps the memory until then.

Who holds blocks, and what brings them back:

    running            the end, or preemption: the last in rank gives way when one before it needs a block
    filled             they are let in before anyone who needs new blocks
    held, quarantined  the connector's events
    lent               the tiers' events
    fenced             the next settled step
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from .answers import first_or_last_token, last_words, next_token, on_offer
from .blocks import BlockPool, BlockPoolCorrupted
from .config import EngineCoreConfig
from .connector import KVConnector
from .constraints import Constraints, nothing_left
from .deadlines import Deadlines
from .draft import StepDraft
from .fence import Fence, RowPool
from .filled import FilledRequests
from .finish import FinishRule
from .grammar import GrammarSource
from .handoff import Arrival, Handoffs
from .memory import RequestMemory
from .messages import EngineError, EngineOutput, EngineRequest, EngineStats, ErrorKind, FinishReason, KVSource
from .queue import WaitingQueue
from .request import STATUS_AFTER, Request, RequestStatus
from .step import Chunk, ChunkResult, StepPlan, StepResult
from .tiering import Restoration, Tiering
from .tiers import KVTiers
from .unread import UnreadPrompts
from .validate import refusal

_NO_BLOCKS: list[int] = []  # shared by all chunks that bring none; never written to
_rank = attrgetter("rank")


class _StepInFlight(NamedTuple):
    plan: StepPlan
    requests: Sequence[Request]
    num_prompt_tokens: int


class StepMismatch(Exception):
    """A result does not fit the oldest step in flight: the runner broke the contract of `step.py`."""


class Scheduler:
    def __init__(
        self,
        config: EngineCoreConfig,
        connector: KVConnector | None = None,
        clock: Callable[[], float] = time.time,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        tiers: KVTiers | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.rows = RowPool(config.max_num_seqs)
        self.fence = Fence(self.rows, self.pool)
        self.memory = RequestMemory(self.pool, config.block_size, config.enable_prefix_caching)
        self.handoffs = Handoffs(connector, self.pool, config.block_size)
        self.tiering = Tiering(tiers, self.pool, config.block_size, monotonic)
        self.constraints = Constraints(grammars)
        self.requests: dict[str, Request] = {}  # all that are not over
        self.unread = UnreadPrompts(self.memory, self.pool, config.block_size)
        self.waiting = WaitingQueue(self.unread)
        self.filled = FilledRequests()
        self.running: list[Request] = []  # by rank
        self.deadlines = Deadlines(monotonic)
        self._reading: list[Request] = []  # those of the newest step that may have more of their prompts left
        self._can_transfer = connector is not None
        self._clock = clock
        self._in_flight: deque[_StepInFlight] = deque()
        self._outputs: list[EngineOutput] = []  # not taken yet
        self._num_added = self._num_steps = self._num_preemptions = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._under_pressure = False  # a running request lacks a block in this step: nobody new gets any
        self._stuck = False  # nothing can be planned until something happens outside

    # -------------------------------------------------------------------------------- from outside

    def add(self, message: EngineRequest) -> None:
        """Queues a request. One that can never be served is answered with an ERROR output."""
        self._stuck = False
        live = self.requests.get(message.request_id)
        error = refusal(message, self.config, can_transfer=self._can_transfer, can_constrain=self.constraints.can_open)
        if live is not None and message.generation <= live.generation:
            error = EngineError(ErrorKind.INVALID, f"request id {message.request_id!r} is in use by a live request")
        if error is not None:
            self._outputs.append(last_words(message, FinishReason.ERROR, error))
            return
        if live is not None:  # its sender gave up on it before it sent this one
            self._end(live, FinishReason.ABORT)
        request = Request(message, FinishRule(message, self.config), self._num_added)
        self._num_added += 1
        if request.num_to_hold >= request.limit:  # every token it may have was generated elsewhere
            self._outputs.append(last_words(message, FinishReason.LENGTH))
            return
        self.requests[request.request_id] = request
        self.deadlines.add(request)
        if request.is_constrained:
            self.constraints.open(request)
        else:
            self.waiting.push(request)

    def abort(self, request_id: str) -> None:
        """Ends a request wherever it is, and withdraws what it has on offer. Unknown ids are ignored."""
        self._stuck = False
        self.handoffs.withdraw(request_id)
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)

    def begin(self, request_id: str, generation: int, token_id: int) -> None:
        """The first token of a request that awaits it. Where it is over or does not, nothing happens."""
        request = self.requests.get(request_id)
        if request is None or request.generation != generation or not request.awaits_token:
            return
        self._stuck = False
        if not 0 <= token_id < self.config.vocab_size:
            error = EngineError(
                ErrorKind.INVALID, f"first token {token_id} is not in the vocabulary of {self.config.vocab_size}"
            )
            self._end(request, FinishReason.ERROR, error)
            return
        request.begin(token_id)
        self.filled.token_known(request)

    def poll_transfers(self) -> None:
        """Lets requests go on whose KV came, and answers those whose KV did not."""
        for arrival in self.handoffs.poll():
            self._on_arrival(arrival)
        for restoration in self.tiering.poll():
            self._on_restoration(restoration)

    def fail(self, message: str) -> None:
        """Answers every live request with an INTERNAL error. Steps in flight are forgotten."""
        error = EngineError(ErrorKind.INTERNAL, message)
        self._outputs += [last_words(request.message, FinishReason.ERROR, error) for request in self.requests.values()]
        self.requests.clear()
        self._in_flight.clear()

    def take_outputs(self) -> list[EngineOutput]:
        """What no result brings: refusals, aborts, lost KV; in order, before what the next result brings."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def has_work(self) -> bool:
        return bool(self._outputs or self._in_flight or (self.requests and not self._stuck))

    # -------------------------------------------------------------------------------- planning

    def plan_step(self) -> StepPlan | None:
        """The next step, entered in the books as done; None where nothing can run now."""
        self._end_expired()
        self._take_masks()
        draft = StepDraft(self._num_steps, self.config.max_num_batched_tokens)
        self._under_pressure = False
        self._make_way_for_priority()
        prefills = self._continue_decodes(draft)
        self._reading = prefills.copy()
        self._admit_filled(draft)
        self._continue_prefills(draft, prefills)
        self._admit_waiting(draft)
        if draft.is_empty:
            self._rest()
            return None
        plan, requests = draft.seal(self.rows.drain_freed(), constrained=self.constraints.num_live > 0)
        self._in_flight.append(_StepInFlight(plan, requests, draft.num_prompt_tokens))
        self.tiering.planned(plan.step)
        self._num_steps += 1
        self._stuck = False
        return plan

    def _end_expired(self) -> None:
        for request in self.deadlines.take_expired():
            message = f"the request's time is over: {request.message.timeout_s:g} s from when this engine got it"
            self._end(request, FinishReason.ERROR, EngineError(ErrorKind.TIMED_OUT, message))

    def _take_masks(self) -> None:
        for request, error in self.constraints.collect():
            if error is not None:
                self._end(request, FinishReason.ERROR, error)
            elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
                request.move_to(RequestStatus.WAITING)
                self.waiting.push(request)

    def _rest(self) -> None:
        """Nothing runs: results, masks, or what happens outside bring the next step."""
        self._stuck = not self._in_flight and not self.constraints.is_busy
        if not self._in_flight and self.constraints.is_busy:
            self.constraints.pause()

    def _make_way_for_priority(self) -> None:
        """Where only blocks are missing for the head of the queue, requests of lower priority give up theirs.

        None does in vain: held or arriving KV may keep so much that the head would not fit, and everyone would wait.
        """
        head = self.waiting.peek()
        if head is None or self.fence.closed or (not self.rows.num_free and not head.awaits_transfer):
            return
        if not self.running or self.running[-1].priority <= head.priority:
            return
        lower = [each for each in self.running if each.priority > head.priority and self._gives_way(each)]
        if not self.memory.fits(head, without=lower):
            return
        while lower and not self.fence.closed and not self.memory.fits(head):
            self._preempt(lower.pop())

    def _gives_way(self, request: Request) -> bool:
        """Its blocks would be free soon after it was preempted; what is on offer waits for its reader."""
        return request.has_unplanned_tokens and not self.handoffs.grows(request)

    def _continue_decodes(self, draft: StepDraft) -> list[Request]:
        """One token for each request that has one left to compute. Returns the others, which have more.

        The budget suffices, since it is never less than the number of rows.
        """
        prefills = []
        step, chunks, requests = draft.step, draft.singles, draft.singles_requests
        for request in self.running:  # preemption removes only requests that come later
            start = request.num_computed
            if request.num_tokens - start != 1:
                prefills.append(request)
                continue
            if start + 1 >= request.horizon:  # its last token is on the way, or one that its grammar must see first
                continue
            new_blocks = _NO_BLOCKS
            if start >= request.capacity:
                new_blocks = self._grow(request, draft)
                if not new_blocks:
                    continue
            chunks.append(Chunk(request.row, start, 1, True, new_blocks))
            requests.append(request)
            request.num_computed = start + 1
            request.num_tokens = start + 2
            request.last_step = step
        draft.budget -= len(chunks)
        return prefills

    def _admit_filled(self, draft: StepDraft) -> None:
        while (head := self.filled.head) is not None and head.may_draw and self.rows.num_free and draft.budget:
            self._start(self.filled.take(), draft)

    def _continue_prefills(self, draft: StepDraft, prefills: list[Request]) -> None:
        for request in prefills:
            if not draft.budget:
                return
            draft.add(request)
            self.memory.register(request)

    def _admit_waiting(self, draft: StepDraft) -> None:
        """In order, and nobody overtakes: a request that does not fit yet would starve otherwise."""
        while not self._under_pressure and (request := self.waiting.peek()):
            if request.awaits_transfer:
                if not self._begin_transfer(request):
                    return
            elif self._is_in_tiers(request):
                if not self._begin_restore(request):
                    return
            elif draft.budget and self.rows.num_free and self._can_start(request):
                self.waiting.remove(request)
                self._start(request, draft)
            else:
                return

    def _can_start(self, request: Request) -> bool:
        """Takes blocks for it. One that was preempted comes back only when all its drawn tokens are known."""
        known = self.fence.has_passed(request.last_step) and request.may_draw
        return known and self.memory.reserve(request)

    def _begin_transfer(self, request: Request) -> bool:
        """Transfers need neither row nor budget, so they run ahead of the rows, by one batch at most."""
        if not self._may_fill_ahead() or not self.memory.reserve(request):
            return False
        self.waiting.remove(request)
        request.move_to(RequestStatus.WAITING_FOR_KV)
        self.handoffs.receive(request)
        return True

    def _may_fill_ahead(self) -> bool:
        return self.handoffs.num_pulling + self.tiering.num_restoring + len(self.filled) < self.rows.num_rows

    def _is_in_tiers(self, request: Request) -> bool:
        if not self.tiering.exists or not self.fence.has_passed(request.last_step):
            return False
        return self.tiering.pays(self.memory.missing(request))

    def _begin_restore(self, request: Request) -> bool:
        """As a transfer; where another request has the same blocks restored, it waits to find them in the pool."""
        missing = self.memory.missing(request)
        if self.tiering.is_coming(missing[0]) or not self._may_fill_ahead() or not self.memory.reserve(request):
            return False
        self.waiting.remove(request)
        request.move_to(RequestStatus.WAITING_FOR_KV)
        self.tiering.restore(request, missing)
        return True

    def _start(self, request: Request, draft: StepDraft) -> None:
        request.move_to(RequestStatus.RUNNING)
        request.row = self.rows.take()
        insort(self.running, request, key=_rank)
        if not request.scheduled_s:
            request.scheduled_s = self._clock()
            request.num_cached_tokens = min(request.num_computed, request.num_prompt)
            self._prompt_tokens += 0 if request.message.kv_source else request.num_prompt
            self.tiering.started(request)
        draft.started.append(request.row_start())
        draft.add(request)
        self._reading.append(request)
        self.memory.register(request)
        if request.finish_rule.hands_off and request.num_computed < len(request.token_ids):
            self._offer_early(request)

    def _offer_early(self, request: Request) -> None:
        """The prompt takes several steps: its reader may begin before the last."""
        source = self.handoffs.offer_early(request)
        if source is not None:
            self._outputs.append(on_offer(request, source))

    # -------------------------------------------------------------------------------- memory pressure

    def _grow(self, request: Request, draft: StepDraft) -> list[int]:
        """One more block for a running request; none where it has to sit this step out."""
        while not (new_blocks := self.memory.grow(request)):
            self._under_pressure = True
            if self.fence.closed or self.handoffs.any_asked_back:  # blocks are on their way back
                return []
            last = self._last_in_rank()
            if last is not None and last is not request:
                self._preempt(last)
                continue
            # Nobody before it needs its blocks, so it keeps them while others run. Alone, it must not block the queue.
            if draft.is_empty and not self._in_flight:
                self._preempt(request)
                self._under_pressure = False
            return []
        return new_blocks

    def _last_in_rank(self) -> Request | None:
        """The next to be preempted. Requests whose last token is on the way give their blocks back anyway."""
        return next((request for request in reversed(self.running) if request.has_unplanned_tokens), None)

    def _preempt(self, request: Request) -> None:
        self._num_preemptions += 1
        self.running.remove(request)
        request.move_to(RequestStatus.PREEMPTED)
        self.handoffs.give_up_early(request)
        self.fence.retire(*request.give_up_memory(), request.last_step)
        self.waiting.push(request)

    # -------------------------------------------------------------------------------- results

    def settle(self, result: StepResult) -> list[EngineOutput]:
        """Takes in the result of the oldest step in flight. Returns what it brought, after outputs that needed no step.

        Where it raises, the outputs so far are not lost: `take_outputs` has them.
        """
        plan, requests = self._oldest_step(result)
        self.fence.settled(plan.step)
        num_live = len(self.requests)
        running, preempted = RequestStatus.RUNNING, RequestStatus.PREEMPTED
        outputs = self._outputs
        for request, chunk, drawn in zip(requests, plan.chunks, result.chunks, strict=True):
            if request.status is not running and request.status is not preempted:
                continue  # over since the step was planned
            if chunk.prompt_logprobs:
                _collect_prompt_logprobs(request, chunk, drawn)
            if chunk.samples:
                outputs.append(self._accept(request, drawn))
                self._generation_tokens += 1
            elif request.message.keep_kv:
                self.handoffs.advance(request, chunk.start + chunk.num_tokens)
        if len(self.requests) != num_live:
            self.running = [request for request in self.running if request.status is running]
        self.tiering.settled(plan.step, newest_planned=self._num_steps - 1, num_tokens=plan.num_tokens)
        return self.take_outputs()

    def _oldest_step(self, result: StepResult) -> tuple[StepPlan, Sequence[Request]]:
        if self._in_flight:
            plan, requests, _ = self._in_flight.popleft()
            if result.step == plan.step and len(result.chunks) == len(requests):
                return plan, requests
            expected = f"step {plan.step} with {len(requests)} chunks"
        else:
            expected = "none"
        raise StepMismatch(f"got a result of step {result.step} with {len(result.chunks)} chunks, expected {expected}")

    def _accept(self, request: Request, drawn: ChunkResult) -> EngineOutput:
        """A token becomes known."""
        token_id = drawn.token_id
        if token_id is None:
            raise StepMismatch(f"no token was drawn for request {request.request_id}")
        if not request.could_draw(token_id):
            self._leave(request, FinishReason.ERROR)
            return last_words(request.message, FinishReason.ERROR, nothing_left())
        request.token_ids.append(token_id)
        num_tokens = len(request.token_ids)
        if num_tokens >= request.next_registration:
            self.memory.register(request)
        reason = request.finish_rule.reason(token_id, num_tokens)
        if request.is_constrained and reason is None:
            self.constraints.advance(request, [token_id])
        if reason is None and request.answered:
            return next_token(request, drawn)
        return first_or_last_token(request, drawn, reason, self._leave(request, reason) if reason else None)

    # -------------------------------------------------------------------------------- ends

    def _on_arrival(self, arrival: Arrival) -> None:
        request = arrival.request
        if arrival.failure is not None:
            self._leave(request, FinishReason.ERROR)
            error = EngineError(ErrorKind.KV_LOST, f"the KV blocks of the prompt did not arrive: {arrival.failure}")
            self._outputs.append(last_words(request.message, FinishReason.ERROR, error))
            return
        assert request.message.kv_source is not None
        # Prefix hits may reach further than the transfer: those blocks are others' too, and are never written again.
        request.num_computed = max(request.num_computed, request.message.kv_source.num_tokens)
        self.memory.register(request)
        request.move_to(RequestStatus.WAITING)
        self.filled.add(request)

    def _on_restoration(self, restoration: Restoration) -> None:
        """What did not come is computed."""
        request = restoration.request
        if not request.block_ids:
            request.move_to(RequestStatus.WAITING)
            self.waiting.push(request)
            return
        request.num_computed += restoration.num_blocks * self.config.block_size
        self.memory.register(request)
        request.move_to(RequestStatus.WAITING)
        self.filled.add(request)

    def _end(self, request: Request, reason: FinishReason, error: EngineError | None = None) -> None:
        """Ends a request that no result ends."""
        if self.tiering.restores(request):
            self.tiering.cancel(request)
        elif request.status is RequestStatus.WAITING_FOR_KV:
            self.handoffs.cancel(request)
        elif request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.block_ids:
            self.filled.remove(request)
        self._leave(request, reason)
        self._outputs.append(last_words(request.message, reason, error, request.scheduled_s))

    def _leave(self, request: Request, reason: FinishReason) -> KVSource | None:
        """The request is over. Its memory goes to its reader or behind the fence."""
        source = None
        if reason is FinishReason.HANDOFF:
            source = self.handoffs.offer(request)
        else:
            self.handoffs.give_up_early(request)
        request.move_to(STATUS_AFTER[reason])
        del self.requests[request.request_id]
        self.waiting.remove(request)
        if request.is_constrained:
            self.constraints.drop(request)
        self.fence.retire(*request.give_up_memory(), request.last_step)
        return source

    # -------------------------------------------------------------------------------- watching

    def check_idle(self) -> None:
        """Where nothing is left to do, nothing may be left over. Raises `BlockPoolCorrupted`."""
        if self.requests or self._in_flight or self.tiering.any_lent:  # what is lent may be held, too
            return
        held, quarantined = self.handoffs.held.num_blocks, self._num_quarantined
        if self.pool.num_free + held + quarantined != self.pool.num_blocks:
            raise BlockPoolCorrupted(
                f"no request is left, yet of {self.pool.num_blocks} blocks {self.pool.num_free} are free, "
                f"{held} held and {quarantined} quarantined"
            )
        if self.rows.num_free != self.rows.num_rows:
            raise BlockPoolCorrupted(
                f"no request is left, yet {self.rows.num_free} of {self.rows.num_rows} rows are free"
            )

    @property
    def _num_quarantined(self) -> int:
        return self.handoffs.quarantine.num_blocks + self.tiering.quarantine.num_blocks

    def _num_tokens_being_read(self) -> int:
        """What steps under way compute of prompts, and what is left of those that run in several steps."""
        running = (each for each in self._reading if each.status is RequestStatus.RUNNING)
        left = (each.num_tokens - each.num_computed for each in running)
        under_way = sum(step.num_prompt_tokens for step in self._in_flight)
        return under_way + sum(count for count in left if count > 1)  # 1: the token that is being drawn

    def stats(self) -> EngineStats:
        grammars = self.constraints.stats()
        return EngineStats(
            num_requests_running=len(self.running),
            num_requests_waiting=len(self.waiting) + len(self.filled) + self.constraints.num_opening,
            num_requests_waiting_for_kv=self.handoffs.num_pulling + self.tiering.num_restoring,
            num_waiting_tokens=self.unread.num_tokens + self._num_tokens_being_read(),
            num_blocks=self.pool.num_blocks,
            num_blocks_free=self.pool.num_free,
            num_blocks_held=self.handoffs.held.num_blocks,
            num_blocks_quarantined=self._num_quarantined,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self.pool.prefix_queries,
            prefix_cache_hits=self.pool.prefix_hits,
            num_grammars_compiled=grammars.num_compiled,
            num_grammars_refused=grammars.num_refused,
            num_grammar_hits=grammars.num_hits,
            grammar_compile_s=grammars.compile_s,
            tiers=self.tiering.stats(),
        )


def _collect_prompt_logprobs(request: Request, chunk: Chunk, drawn: ChunkResult) -> None:
    if request.prompt_logprobs is None or drawn.prompt_logprobs is None:
        raise StepMismatch(f"no prompt logprobs came for request {request.request_id}")
    request.prompt_logprobs.collect(chunk.start, drawn.prompt_logprobs)
