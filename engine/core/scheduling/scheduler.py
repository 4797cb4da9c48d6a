"""The scheduler: decides which tokens of which requests run in the next step.

One rule: computed catches up with target. Every step hands out at most `max_num_batched_tokens` tokens to at most
`max_num_seqs` requests: first to running ones, then to waiting ones, by priority and arrival. Chunked prefill, prefix
hits, resuming after preemption and continuing after a hand-off are this one rule with different starting points.

The state is kept as if every planned step had already run, so the next one can be planned while results are pending.
Results that a stop or an abort made superfluous are dropped when they arrive; `kv/fence.py` keeps the memory until
then.

    request_table       all live requests: how they begin, how they end
    queues              the waiting queue, and the ready queue beside it
    running_requests    running requests and their parts of a step; preemption
    admission           which waiting requests may start; KV that transfers and tiers load for them
    step_builder        the step that is being planned, and steps in flight

Every block that is not free is in one of these states, and comes free with the event beside it:

    running            the request's end, or preemption: the last request in rank gives way to one that needs a block
    ready              as running: these requests start before any that needs new blocks
    held, quarantined  the connector's events
    lent               the tiers' events
    fenced             the next settled step
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ..config import EngineCoreConfig
from ..connector import KVConnector
from ..grammar import GrammarSource
from ..kv.block_numbers import BlockNumbers
from ..kv.blocks import BlockPoolCorrupted
from ..kv.cache_groups import make_groups
from ..kv.fence import Fence, RowPool
from ..kv.prompt_backlog import PromptBacklog
from ..kv.request_memory import RequestMemory
from ..kv.tier_copies import TierCopies
from ..kv.transfers import Transfers
from ..messages import EngineError, EngineOutput, EngineRequest, EngineStats, ErrorKind, FinishReason
from ..pace import StepMeter
from ..requests.answers import final_output, first_or_last_tokens, next_tokens, nothing_drawn, on_offer
from ..requests.constraints import Constraints
from ..requests.drafting import Drafting
from ..requests.request import Request, RequestStatus
from ..step import NO_TOKEN, Chunk, ChunkResult, StepPlan, StepResult
from ..tiers import KVTiers
from .admission import Admission, KVLoading, Queues
from .queues import WaitingQueue
from .request_table import RequestTable
from .running_requests import RunningRequests
from .step_builder import StepMismatch, StepsInFlight


class Scheduler:
    def __init__(
        self,
        config: EngineCoreConfig,
        connector: KVConnector | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        tiers: KVTiers | None = None,
        grammars: GrammarSource | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.config = config
        block_size = config.block_size
        self.groups = make_groups(config.groups, block_size)
        pool = self.groups[0].pool
        self.rows = RowPool(config.max_num_seqs)
        self.fence = Fence(self.rows, self.groups)
        self.memory = RequestMemory(self.groups, block_size, config.enable_prefix_caching)
        numbers = BlockNumbers(self.groups)
        self.transfers = Transfers(connector, numbers)
        self.tier_copies = TierCopies(tiers, self.groups, numbers, self.memory, block_size, clock)
        self.constraints = Constraints(grammars, clock)
        self.backlog = PromptBacklog(self.memory, pool, block_size)
        self.waiting = WaitingQueue(self.backlog)
        self.loading = KVLoading(
            self.transfers, self.tier_copies, self.memory, self.fence, self.waiting, config.max_num_seqs
        )
        self.drafting = drafting
        self.running = RunningRequests(
            self.memory, self.fence, self.transfers, self.waiting, self.drafting, overlaps=config.depth > 1
        )
        queues = Queues(self.waiting, self.loading, self.running)
        self.admission = Admission(queues, self.memory, self.fence, self.tier_copies)
        self.requests = RequestTable(config, queues, self.transfers, self.fence, self.constraints, self.drafting, clock)
        self.steps = StepsInFlight(config.max_num_batched_tokens, self.memory)
        self._meter = StepMeter()
        self._clock = clock
        self._num_drawn = 0  # tokens, ever
        self._stuck = False  # nothing can be planned until an event from outside

    # -------------------------------------------------------------------------------- from outside

    def add(self, message: EngineRequest, received_s: float | None = None) -> None:
        """Queue a request. One that can never be served is answered with an ERROR output.

        `received_s` is the time when the request arrived in this process, by `clock`; default: now.
        """
        self._stuck = False
        self.requests.add(message, received_s)

    def abort(self, request_id: str, generation: int | None = None) -> None:
        """End a request, wherever it is, and withdraw its offers. Unknown ids are ignored.

        With a `generation`, requests and offers of newer generations stay.
        """
        self._stuck = False
        self.requests.abort(request_id, math.inf if generation is None else generation)

    def begin(self, request_id: str, generation: int, token_id: int) -> None:
        """Give a request the first token that it awaits. Ignored if the request has ended, or awaits none."""
        if self.requests.begin(request_id, generation, token_id):
            self._stuck = False

    def poll_transfers(self) -> None:
        """Make requests whose KV has arrived ready, and answer those whose KV is lost."""
        for request, error in self.loading.poll():
            self.requests.end_lost(request, error)

    def fail(self, message: str) -> None:
        """Answer every live request with an INTERNAL error, and forget the steps in flight."""
        self.requests.fail(EngineError(ErrorKind.INTERNAL, message))
        self.steps.forget()
        self._meter.forget()

    def take_outputs(self) -> list[EngineOutput]:
        """Return, in order, outputs that are not part of a step's result: refusals, aborts, lost KV."""
        return self.requests.take_outputs()

    def has_work(self) -> bool:
        return bool(self.requests.outputs or self.steps or (self.requests and not self._stuck))

    @property
    def has_prompts(self) -> bool:
        """True if the next step would compute prompt tokens, memory permitting."""
        return bool(self.backlog.num_tokens or self.running.num_unread_tokens)

    def decode_s(self) -> float:
        """Return the time of a step in which all running requests decode; 0 before any was measured."""
        line = self._meter.times().decode
        return 0.0 if line is None else line.at(len(self.running))

    def backlog_s(self) -> float:
        """Return the time that the prompts will take, those of steps in flight included; 0 before any was measured."""
        line, num_tokens = self._meter.times().prefill, self.num_waiting_tokens
        if line is None or not num_tokens:
            return 0.0
        num_steps = math.ceil(num_tokens / self.config.max_num_batched_tokens)
        return line.base_s * num_steps + line.unit_s * num_tokens

    # -------------------------------------------------------------------------------- planning

    def plan_step(self) -> StepPlan | None:
        """Return the next step, which counts as computed from now on; None if nothing can run."""
        self.requests.end_expired()
        self.requests.take_masks()
        builder = self.steps.begin()
        self.admission.preempt_for_head()
        prefills = self.running.plan_decodes(builder, num_waiting=len(self.waiting) + len(self.loading.ready))
        self.admission.admit_ready(builder)
        short = self.admission.choose_short(prefills, builder)
        self.running.plan_prefills(prefills, builder, reserved=sum(request.num_tokens for request in short))
        self.admission.admit_short(short, builder)
        self.admission.admit_waiting(builder)
        self._offer_early(builder.started)
        if builder.is_empty:
            self._idle()
            return None
        plan = self.steps.enter(
            builder,
            self.rows.drain_freed(),
            constrained=self.constraints.num_live > 0,
            drafting=self.drafting,
        )
        self.tier_copies.planned(plan.step)
        self._meter.planned(plan.step, self._clock())
        self._stuck = False
        return plan

    def _offer_early(self, started: Sequence[Request]) -> None:
        """Offer prompts that take several steps early, so that their readers can begin before the last step."""
        for request in started:
            if request.finish_rule.hands_off and request.num_computed < len(request.token_ids):
                source = self.transfers.offer_early(request)
                if source is not None:
                    self.requests.outputs.append(on_offer(request, source))

    def _idle(self) -> None:
        """Wait for results, masks or an event from outside, since nothing can run."""
        self._stuck = not self.steps and not self.constraints.is_busy
        if not self.steps and self.constraints.is_busy:
            self.constraints.pause()

    # -------------------------------------------------------------------------------- results

    def settle(self, result: StepResult) -> list[EngineOutput]:
        """Take in the result of the oldest step in flight. Returns its outputs, after those that needed no step.

        If it raises, the outputs so far are not lost: `take_outputs` returns them.
        """
        plan, requests, num_prompt_tokens, num_decodes = self.steps.take(result)
        seconds = self._meter.settled(plan.step, num_prompt_tokens, num_decodes, self._clock())
        self.fence.settled(plan.step)
        num_live = len(self.requests)
        running, preempted = RequestStatus.RUNNING, RequestStatus.PREEMPTED
        num_drawn = 0
        for request, chunk, drawn in zip(requests, plan.chunks, result.chunks, strict=True):
            if request.status is not running and request.status is not preempted:
                continue  # it has ended since the step was planned
            if chunk.prompt_logprobs:
                _collect_prompt_logprobs(request, chunk, drawn)
            if chunk.samples:
                num_drawn += self._accept(request, chunk, drawn)
            elif request.message.keep_kv:
                self.transfers.advance(request, chunk.start + chunk.num_tokens)
        self._num_drawn += num_drawn
        if self.drafting is not None:
            num_drafts = plan.num_tokens - num_decodes - num_prompt_tokens
            self.drafting.observe(
                num_decodes,
                num_drafts,
                num_prompt_tokens,
                seconds,
                plan.num_guesses,
                reads_late=plan.reads_late,
            )
        if len(self.requests) != num_live:
            self.running.remove_ended()
        if self.tier_copies.has_tiers:
            self.tier_copies.settled(plan.step, newest_planned=self.steps.num_planned - 1, num_tokens=plan.num_tokens)
        return self.take_outputs()

    def _accept(self, request: Request, chunk: Chunk, drawn: ChunkResult) -> int:
        """Append drawn tokens to their request, up to one that ends it, and output them. Returns their number."""
        token_ids, known, reason = drawn.token_ids, request.token_ids, None
        if chunk.num_drafts and self.drafting is not None:
            self.drafting.settled(request, chunk, len(token_ids) - 1)
        num_before = len(known)
        for token_id in token_ids:
            if token_id == NO_TOKEN:
                break
            known.append(token_id)
            if reason := request.finish_rule.reason(token_id, len(known)):
                break
        num_known = len(known)
        if num_known >= request.next_registration:
            self.memory.register(request)
        num_new = num_known - num_before
        if reason is None and request.answered and 0 < num_new == len(token_ids):
            if request.is_constrained:
                self._advance_grammar(request, token_ids)
            self.requests.outputs.append(next_tokens(request, token_ids, drawn.logprobs))
        else:
            self._answer(request, drawn, num_new, reason)
        return num_new

    def _advance_grammar(self, request: Request, token_ids: list[int]) -> None:
        """Have the grammar accept new tokens, and look ahead at possible drafts for the next step."""
        most, guesses = (0, ()) if self.drafting is None else self.drafting.guess_for_grammar(request)
        self.constraints.advance(request, token_ids, guesses, most)

    def _answer(self, request: Request, drawn: ChunkResult, num_new: int, reason: FinishReason | None) -> None:
        """Output the first `num_new` of the tokens drawn, which are the first of an answer or the last."""
        token_ids, logprobs = drawn.token_ids, drawn.logprobs
        lacks_token = num_new < len(token_ids) and reason is None
        if num_new < len(token_ids):
            token_ids = token_ids[:num_new]
            logprobs = logprobs.part(0, num_new) if logprobs else None
        if token_ids:
            if request.is_constrained and reason is None and not lacks_token:
                self._advance_grammar(request, token_ids)
            source = self.requests.leave(request, reason) if reason else None
            self.requests.outputs.append(first_or_last_tokens(request, token_ids, logprobs, reason, source))
        if lacks_token or not drawn.token_ids:
            self._end_without_token(request, drawn)

    def _end_without_token(self, request: Request, drawn: ChunkResult) -> None:
        """Answer a request for which no token could be drawn. Raises `StepMismatch` if the result lacks its draw."""
        if not drawn.token_ids:
            raise StepMismatch(f"no token was drawn for request {request.request_id}")
        error = nothing_drawn(request, len(drawn.token_ids) - 1)
        self.requests.leave(request, FinishReason.ERROR)
        self.requests.outputs.append(final_output(request.message, FinishReason.ERROR, error))

    # -------------------------------------------------------------------------------- watching

    def check_idle(self) -> None:
        """Raise `BlockPoolCorrupted` if no request is left, but some block or row is not free."""
        if self.requests or self.steps or self.tier_copies.has_stores:  # blocks lent to stores may be held, too
            return
        held, quarantined = self.transfers.held.num_blocks, self._num_quarantined
        if self._num_free + held + quarantined != self.config.num_blocks:
            raise BlockPoolCorrupted(
                f"no request is left, yet of {self.config.num_blocks} blocks {self._num_free} are free, "
                f"{held} held and {quarantined} quarantined"
            )
        if self.rows.num_free != self.rows.num_rows:
            raise BlockPoolCorrupted(
                f"no request is left, yet {self.rows.num_free} of {self.rows.num_rows} rows are free"
            )

    @property
    def _num_free(self) -> int:
        return sum(group.pool.num_free for group in self.groups)

    @property
    def _num_quarantined(self) -> int:
        return self.transfers.quarantine.num_blocks + self.tier_copies.quarantine.num_blocks

    @property
    def num_waiting_tokens(self) -> int:
        """The prompt tokens still to compute, those of steps in flight included."""
        return self.backlog.num_tokens + self.steps.num_prompt_tokens + self.running.num_unread_tokens

    def stats(self) -> EngineStats:
        grammars = self.constraints.stats()
        return EngineStats(
            num_requests_running=len(self.running),
            num_requests_waiting=len(self.waiting) + len(self.loading.ready) + self.constraints.num_opening,
            num_requests_waiting_for_kv=self.loading.num_coming,
            num_waiting_tokens=self.num_waiting_tokens,
            num_blocks=self.config.num_blocks,
            num_blocks_free=self._num_free,
            kv_usage=max(1 - group.pool.num_free / group.pool.num_blocks for group in self.groups),
            num_blocks_held=self.transfers.held.num_blocks,
            num_blocks_quarantined=self._num_quarantined,
            num_preemptions=self.running.num_preemptions,
            num_steps=self.steps.num_planned,
            prompt_tokens=self.admission.num_prompt_tokens,
            generation_tokens=self._num_drawn,
            prefix_cache_queries=self.groups[0].pool.prefix_queries,
            prefix_cache_hits=self.groups[0].pool.prefix_hits,
            num_grammars_compiled=grammars.num_compiled,
            num_grammars_refused=grammars.num_refused,
            num_grammar_hits=grammars.num_hits,
            grammar_compile_s=grammars.compile_s,
            tiers=self.tier_copies.stats(),
            step_times=self._meter.times(),
            speculation=None if self.drafting is None else self.drafting.stats(),
        )


def _collect_prompt_logprobs(request: Request, chunk: Chunk, drawn: ChunkResult) -> None:
    if request.prompt_logprobs is None or drawn.prompt_logprobs is None:
        raise StepMismatch(f"no prompt logprobs came for request {request.request_id}")
    request.prompt_logprobs.collect(chunk.start, drawn.prompt_logprobs)
