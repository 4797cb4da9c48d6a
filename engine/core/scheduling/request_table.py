"""The table of live requests: how they begin and how they end.

    add ──> its grammar is opened, or it waits           a message that can never be served is answered at once
    end ──> out of wherever it is ──> leave ──> answered
                  a result's last token ─^

`refusal` returns why an engine can never serve a message. `outputs` collects, in order, outputs that are not part of a
step's result.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping

from ..config import EngineCoreConfig
from ..grammar import ASKED_BY
from ..kv.fence import Fence
from ..kv.transfers import Transfers
from ..messages import EngineError, EngineOutput, EngineRequest, ErrorKind, FinishReason, KVSource
from ..requests.answers import final_output
from ..requests.constraints import Constraints
from ..requests.drafting import Drafting
from ..requests.request import STATUS_AFTER, FinishRule, Request, RequestStatus
from ..sampling import SEED_BITS, InvalidSamplingParams
from ..stages import Stages
from .admission import Queues


class RequestTable(Mapping[str, Request]):
    """Requests by id. Each is in exactly one of the `queues`, or waits for its grammar."""

    def __init__(
        self,
        config: EngineCoreConfig,
        queues: Queues,
        transfers: Transfers,
        fence: Fence,
        constraints: Constraints,
        drafting: Drafting | None,
        clock: Callable[[], float],
    ) -> None:
        self.outputs: list[EngineOutput] = []  # not taken yet
        self.deadlines = Deadlines(clock)
        self._clock = clock
        self._config = config
        self._waiting = queues.waiting
        self._loading = queues.loading
        self._running = queues.running
        self._constraints = constraints
        self._transfers = transfers
        self._fence = fence
        self._drafting = drafting
        self._by_id: dict[str, Request] = {}
        self._num_added = 0

    def __getitem__(self, request_id: str) -> Request:
        return self._by_id[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def take_outputs(self) -> list[EngineOutput]:
        outputs, self.outputs = self.outputs, []
        return outputs

    # -------------------------------------------------------------------------------- beginnings

    def add(self, message: EngineRequest, received_s: float | None = None) -> None:
        """Add a request; `received_s` as in `Scheduler.add`. One that can never be served gets an ERROR output."""
        live = self._by_id.get(message.request_id)
        error = self._refusal(message, live)
        if error is not None:
            self.outputs.append(final_output(message, FinishReason.ERROR, error))
            return
        if live is not None:  # its sender gave it up before sending this one
            self.end(live, FinishReason.ABORT)
        stages = Stages(self._clock, received_s)
        request = Request(message, FinishRule(message, self._config), self._num_added, stages)
        self._num_added += 1
        if request.num_to_hold >= request.limit:  # all the tokens that it may have were generated elsewhere
            self.outputs.append(final_output(message, FinishReason.LENGTH))
            return
        self._by_id[request.request_id] = request
        self.deadlines.add(request)
        if self._drafting is not None:
            self._drafting.start(request)
        if request.is_constrained:
            self._constraints.open(request)
        else:
            self._waiting.push(request)

    def _refusal(self, message: EngineRequest, live: Request | None) -> EngineError | None:
        """Return why a message is refused, or None. `live` is the request that has its id at present."""
        if live is not None and message.generation <= live.generation:
            return EngineError(ErrorKind.INVALID, f"request id {message.request_id!r} is in use by a live request")
        can_transfer, can_constrain = self._transfers.has_connector, self._constraints.can_open
        return refusal(message, self._config, can_transfer=can_transfer, can_constrain=can_constrain)

    def begin(self, request_id: str, generation: int, token_id: int) -> bool:
        """Give a request the first token that it awaits. Returns False if it has ended or awaits none."""
        request = self._by_id.get(request_id)
        if request is None or request.generation != generation or not request.awaits_token:
            return False
        vocab_size = self._config.vocab_size
        if not 0 <= token_id < vocab_size:
            reason = f"first token {token_id} is not in the vocabulary of {vocab_size}"
            self.end(request, FinishReason.ERROR, EngineError(ErrorKind.INVALID, reason))
            return True
        request.begin(token_id)
        self._loading.ready.token_known(request)
        return True

    def take_masks(self) -> None:
        """Queue or continue requests whose masks have been computed, and end those whose grammars failed."""
        for request, error in self._constraints.collect():
            if error is not None:
                self.end(request, FinishReason.ERROR, error)
            elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
                request.move_to(RequestStatus.WAITING)
                self._waiting.push(request)
            elif request.status is RequestStatus.PREEMPTED:
                self._waiting.mask_known(request)

    # -------------------------------------------------------------------------------- ends

    def abort(self, request_id: str, newest: float) -> None:
        """End a request and withdraw its offers, of generations up to `newest`."""
        self._transfers.withdraw(request_id, newest)
        request = self._by_id.get(request_id)
        if request is not None and request.generation <= newest:
            self.end(request, FinishReason.ABORT)

    def end_expired(self) -> None:
        for request in self.deadlines.take_expired():
            message = f"the request timed out: {request.message.timeout_s:g} s have passed since this engine got it"
            self.end(request, FinishReason.ERROR, EngineError(ErrorKind.TIMED_OUT, message))

    def end(self, request: Request, reason: FinishReason, error: EngineError | None = None) -> None:
        """End and answer a request, for another reason than a step's result."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._loading.remove(request)
        self.leave(request, reason)
        self.outputs.append(final_output(request.message, reason, error, request.stages.ages()))

    def end_lost(self, request: Request, error: EngineError) -> None:
        """End and answer a request whose KV is lost. It is in no queue any more."""
        self.leave(request, FinishReason.ERROR)
        self.outputs.append(final_output(request.message, FinishReason.ERROR, error, request.stages.ages()))

    def fail(self, error: EngineError) -> None:
        """Answer all requests with this error. Their memory is not given back."""
        self.outputs += [final_output(request.message, FinishReason.ERROR, error) for request in self.values()]
        self._by_id.clear()

    def leave(self, request: Request, reason: FinishReason) -> KVSource | None:
        """Remove a request that has ended. Its blocks go to an offer, or are freed behind the fence."""
        source = None
        if reason is FinishReason.HANDOFF:
            source = self._transfers.offer(request)
        else:
            self._transfers.give_up_early(request)
        request.move_to(STATUS_AFTER[reason])
        del self._by_id[request.request_id]
        self._waiting.remove(request)
        if request.is_constrained:
            self._constraints.drop(request)
        if self._drafting is not None:
            self._drafting.end(request)
        self._fence.retire(*request.give_up_memory(), request.last_step)
        return source


SPARE_ENTRIES = 1024  # entries of requests that have ended; with more of them, the heap is built anew


class Deadlines:
    """A heap by deadline. Entries of ended requests are dropped at the top, or when the heap is mostly such entries."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Request]] = []
        self._num_added = 0
        self._limit = SPARE_ENTRIES

    def add(self, request: Request) -> None:
        """Add a request, if it has a deadline. Its message has the time left, since machines' clocks differ."""
        timeout_s = request.message.timeout_s
        if not timeout_s:
            return
        if len(self._heap) >= self._limit:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + SPARE_ENTRIES
        self._num_added += 1
        heapq.heappush(self._heap, (self._clock() + timeout_s, self._num_added, request))

    def take_expired(self) -> list[Request]:
        """Return the live requests whose deadline has passed. Each is returned once."""
        heap = self._heap
        if not heap or heap[0][0] > (now := self._clock()):
            return []
        expired = []
        while heap and heap[0][0] <= now:
            request = heapq.heappop(heap)[2]
            if not request.is_over:
                expired.append(request)
        return expired


def refusal(
    request: EngineRequest, config: EngineCoreConfig, *, can_transfer: bool, can_constrain: bool = False
) -> EngineError | None:
    """Return why this engine can never serve the request; None if it can."""
    message = _invalid(request, config, can_transfer)
    if message is not None:
        return EngineError(ErrorKind.INVALID, message)
    try:
        request.sampling.check_vocabulary(config.vocab_size)
    except InvalidSamplingParams as error:
        return EngineError(ErrorKind.INVALID, error.message, error.field)
    message = _unconstrainable(request, config, can_constrain)
    if message is not None:
        return EngineError(ErrorKind.INVALID, message, ASKED_BY)
    message = _too_long(request, config)
    if message is not None:
        return EngineError(ErrorKind.TOO_LONG, message)
    return None


def _invalid(request: EngineRequest, config: EngineCoreConfig, can_transfer: bool) -> str | None:
    if not request.prompt_token_ids:
        return "the prompt is empty: give at least one token"
    given = {
        "prompt": request.prompt_token_ids,
        "output": request.output_token_ids,
        "prediction": request.prediction_token_ids,
    }
    for name, token_ids in given.items():
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= config.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < config.vocab_size)
            return f"token id {wrong} in the {name} is not in the vocabulary of {config.vocab_size}"
    if len(request.prediction_token_ids) > config.max_model_len:
        num_tokens, most = len(request.prediction_token_ids), config.max_model_len
        return f"the prediction has {num_tokens} tokens, it may have {most}: no answer of this model is longer"
    if not 0 <= request.seed < 2**SEED_BITS:
        return f"seed is {request.seed}, it must be from 0 to 2**{SEED_BITS} - 1"
    if (request.keep_kv or request.kv_source is not None) and not can_transfer:
        return "this engine has no KV connector: it can neither offer nor receive KV blocks"
    if request.kv_source is not None:
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) + request.awaits_first_token
        if not 0 < request.kv_source.num_tokens < num_tokens:
            return (
                f"kv_source.num_tokens is {request.kv_source.num_tokens}, it must be from 1 to {num_tokens - 1}: "
                f"at least one of the {num_tokens} tokens must be left to compute"
            )
    if request.awaits_first_token and (request.kv_source is None or request.sampling.structured_outputs is not None):
        return (
            "awaits_first_token: only a request with a kv_source and without structured outputs can wait for its token"
        )
    return None


def _unconstrainable(request: EngineRequest, config: EngineCoreConfig, can_constrain: bool) -> str | None:
    if request.sampling.structured_outputs is None:
        return None
    if not can_constrain:
        return "cannot be enforced: this engine has no tokenizer, so it knows tokens but no text"
    if not config.eos_token_ids:
        return "cannot be enforced: this model has no end-of-sequence token, so no output could end"
    return None


def _too_long(request: EngineRequest, config: EngineCoreConfig) -> str | None:
    num_prompt, num_output = len(request.prompt_token_ids), len(request.output_token_ids)
    if num_prompt < config.max_length and num_prompt + num_output <= config.max_length:
        return None
    limit = f"max_model_len is {config.max_model_len}"
    if config.max_length < config.max_model_len:
        limit = f"the {config.num_blocks} KV blocks of this engine hold {config.max_length} tokens"
    given = f"a prompt of {num_prompt} tokens" + (f" and an output of {num_output}" if num_output else "")
    return f"{given} is too long: {limit}, and at least one token of it is for the answer"
