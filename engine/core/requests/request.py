"""One request, from the scheduler's point of view.

    0 <= num_computed < num_tokens <= limit          len(token_ids) <= num_tokens

`num_tokens` counts the known tokens (`token_ids`) and those that steps in flight will draw. `num_computed` counts the
tokens whose KV is in the request's blocks when those steps are done. Scheduling lets the second catch up with the
first. Both count drafts as accepted until their step is settled.

    add ──> WAITING ──────────────────> RUNNING ──> FINISHED_STOPPED | _LENGTH | _HANDOFF
              │   ^                      │   ^
              v   │ filled               v   │ computed anew
          WAITING_FOR_KV <── restored ── PREEMPTED         from everywhere: FINISHED_ABORTED | FINISHED_ERROR
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable, Sequence

from ..config import EngineCoreConfig
from ..grammar import NOT_AHEAD, Grammar, LookAhead
from ..layout import NOT_KEPT
from ..logprobs import Logprobs
from ..messages import EngineRequest, FinishReason
from ..prefix import BlockHash, prefix_root
from ..speculation.stats import DraftCounts
from ..stages import Stages
from ..step import RowStart

NO_ROW = -1
NEVER = -1  # before the first step


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # in the queue: without blocks, or with KV that a transfer or a tier has brought
    WAITING_FOR_GRAMMAR = "waiting for grammar"  # in no queue: goes back to WAITING with its first mask
    WAITING_FOR_KV = "waiting for KV"  # its blocks are reserved, and a transfer or a tier is filling them
    RUNNING = "running"  # owns a row and blocks
    PREEMPTED = "preempted"  # has given up row and blocks, and is in the queue again
    FINISHED_STOPPED = "stopped"
    FINISHED_LENGTH = "length"
    FINISHED_HANDOFF = "handed off"  # its blocks are held for the reader
    FINISHED_ABORTED = "aborted"
    FINISHED_ERROR = "error"


_S = RequestStatus
_GIVEN_UP = frozenset({_S.FINISHED_ABORTED, _S.FINISHED_ERROR})
_COMPLETED = frozenset({_S.FINISHED_STOPPED, _S.FINISHED_LENGTH})

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: _GIVEN_UP | {_S.RUNNING, _S.WAITING_FOR_GRAMMAR, _S.WAITING_FOR_KV},
    _S.WAITING_FOR_GRAMMAR: _GIVEN_UP | {_S.WAITING},
    _S.WAITING_FOR_KV: _GIVEN_UP | {_S.WAITING},
    _S.RUNNING: _GIVEN_UP | _COMPLETED | {_S.PREEMPTED, _S.FINISHED_HANDOFF},
    # A step in flight may still bring the last token.
    _S.PREEMPTED: _GIVEN_UP | _COMPLETED | {_S.RUNNING, _S.WAITING_FOR_KV},
    **{status: frozenset() for status in _GIVEN_UP | _COMPLETED | {_S.FINISHED_HANDOFF}},
}

STATUS_AFTER = {
    FinishReason.STOP: _S.FINISHED_STOPPED,
    FinishReason.LENGTH: _S.FINISHED_LENGTH,
    FinishReason.HANDOFF: _S.FINISHED_HANDOFF,
    FinishReason.ABORT: _S.FINISHED_ABORTED,
    FinishReason.ERROR: _S.FINISHED_ERROR,
}


class IllegalTransition(Exception):
    """The scheduler made a transition that is not in `TRANSITIONS`: a bug in Baton."""


class PromptLogprobs:
    """The log probabilities of a prompt's tokens, collected chunk by chunk.

    If a prompt is computed again after a preemption, some positions come twice; the first ones are kept.
    """

    __slots__ = ("_num_known", "_parts")

    def __init__(self) -> None:
        self._parts: list[Logprobs] = []
        self._num_known = 0

    def collect(self, start: int, logprobs: Logprobs) -> None:
        """Add the log probabilities of tokens start + 1, start + 2, ..."""
        known = self._num_known - start
        if known < 0:
            raise ValueError(f"prompt logprobs of positions {self._num_known + 1} to {start} are missing")
        new = logprobs.part(known, max(known, len(logprobs)))
        self._parts.append(new)
        self._num_known += len(new)

    def joined(self) -> Logprobs:
        """Return those of all tokens but the first, which has none. Call it when the prompt is computed."""
        return Logprobs.join(self._parts) if self._parts else Logprobs(1)


class Request:
    __slots__ = (
        "answered",
        "awaits_token",
        "block_hashes",
        "block_tables",
        "capacity",
        "drafts",
        "drawn_from",
        "finish_rule",
        "first_kept",
        "generation",
        "grammar",
        "guesses",
        "has_requested_kv",
        "horizon",
        "is_constrained",
        "last_step",
        "limit",
        "masks",
        "message",
        "next_registration",
        "num_accepted_drafts",
        "num_blocks_passed",
        "num_cached_tokens",
        "num_computed",
        "num_guesses",
        "num_prompt",
        "num_registered",
        "num_seen_blocks",
        "num_tokens",
        "num_unread",
        "num_unsettled_drafts",
        "prompt_logprobs",
        "queue_key",
        "request_id",
        "root",
        "row",
        "stages",
        "status",
        "token_ids",
    )

    def __init__(self, message: EngineRequest, finish_rule: FinishRule, sequence: int, stages: Stages) -> None:
        self.message = message
        self.request_id = message.request_id
        self.generation = message.generation
        self.queue_key = (message.priority, message.arrival_s, sequence)  # lower is served sooner and preempted later
        self.status = RequestStatus.WAITING
        self.finish_rule = finish_rule
        self.limit = finish_rule.limit

        self.token_ids = [*message.prompt_token_ids, *message.output_token_ids]
        self.num_prompt = len(message.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.num_computed = 0
        self.num_unread = 0  # at most so many of its computed tokens have not been read by a draft model
        self.num_guesses = 0  # guesses of its next tokens that its row has on the device
        self.num_unsettled_drafts = 0  # in steps in flight: so many of its tokens may be taken back
        self.num_accepted_drafts = 0  # in the newest settled step with drafts: its state may be so many tokens behind
        self.drafts: DraftCounts | None = None  # of the step that is being settled, until its output is made
        self.is_constrained = message.sampling.structured_outputs is not None
        # Decodes stay below this number of tokens. A grammar must know a token before the next is drawn; see `sit_out`.
        self.horizon = self.num_tokens if self.is_constrained else self.limit
        self.grammar: Grammar | None = None  # compiled, and with all tokens of the output accepted
        self.masks: list[bytes] = []  # for the next token, and after each of `guesses`; a step that draws takes them
        self.guesses: Sequence[int] = ()  # tokens that its grammar allows, one after the other
        self.drawn_from: list[bytes] = []  # the masks with which the newest step draws
        self.last_step = NEVER  # the newest step that touches its row and blocks
        self.num_blocks_passed = 0  # given to requests that overtook this one at the head of the queue

        self.row = NO_ROW
        self.block_tables: list[list[int]] = []  # one for each cache group; empty: the request has no blocks
        self.first_kept: list[int] = []  # in each table, the first entry whose block the request still owns
        self.capacity = 0  # tokens for which its tables have entries
        self.root = prefix_root(message.cache_salt)
        self.block_hashes: list[BlockHash] = []
        self.num_registered = 0  # leading blocks that are registered in the prefix cache
        self.num_seen_blocks = 0  # leading blocks that other requests had computed when it started
        self.next_registration = sys.maxsize  # number of tokens at which its next block is full

        # Only the engine that computes the prompt sends prompt logprobs, with the very first token.
        elsewhere = message.output_token_ids or message.kv_source is not None
        wants_prompt = message.sampling.prompt_logprobs is not None and not elsewhere
        self.prompt_logprobs = PromptLogprobs() if wants_prompt else None
        self.num_cached_tokens = 0
        self.stages = stages
        self.answered = False  # an output was sent
        self.has_requested_kv = False  # for its KV, at the other engine
        self.awaits_token = message.awaits_first_token  # the token to continue from is not known yet

    def move_to(self, status: RequestStatus) -> None:
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"request {self.request_id}: {self.status.value} -> {status.value}")
        self.status = status

    @property
    def is_over(self) -> bool:
        return not TRANSITIONS[self.status]

    @property
    def priority(self) -> int:
        return self.message.priority

    @property
    def awaits_transfer(self) -> bool:
        """True while another engine keeps its KV, which has not been fetched yet. It can be fetched only once."""
        return self.message.kv_source is not None and not self.has_requested_kv

    @property
    def num_to_hold(self) -> int:
        """The number of tokens that need blocks before the request can run."""
        return len(self.token_ids) + self.awaits_token

    def take_blocks(self, tables: list[list[int]], first_kept: list[int], capacity: int, *, num_computed: int) -> None:
        """Take over the blocks of these tables, from `first_kept` on.

        They hold `capacity` tokens. The KV of the first `num_computed` tokens is present, as far as it is still read.
        """
        self.block_tables, self.first_kept = tables, first_kept
        self.capacity, self.num_computed = capacity, num_computed

    @property
    def has_blocks(self) -> bool:
        return bool(self.block_tables)

    @property
    def block_ids(self) -> list[int]:
        """Its blocks, in an engine with one cache group whose layers read all tokens."""
        (blocks,) = self.block_tables
        return blocks

    def owned_blocks(self) -> list[list[int]]:
        """Return the blocks that the request owns in each group."""
        return [_without_gaps(table[first:]) for table, first in zip(self.block_tables, self.first_kept, strict=True)]

    def give_back(self, group: int, end: int) -> list[int]:
        """Give up the group's blocks before table entry `end`, and return them."""
        table, first = self.block_tables[group], self.first_kept[group]
        blocks = table[first:end]
        table[first:end] = [0] * len(blocks)
        self.first_kept[group] = max(first, end)
        return _without_gaps(blocks)

    def loaded(self, num_computed: int) -> None:
        """Count the first `num_computed` tokens as computed: a transfer or a tier has brought their KV."""
        self.num_computed = num_computed

    def advance(self, step: int, num_tokens: int, samples: bool) -> None:
        """Count the next `num_tokens` as computed by step `step`. If it `samples`, it draws one more."""
        self.num_computed += num_tokens
        self.num_tokens += samples
        self.last_step = step

    def advance_drafts(self, num_drafts: int) -> None:
        """Count drafts as computed and accepted in the newest step, beside the token that it computes anyway."""
        self.num_computed += num_drafts
        self.num_tokens += num_drafts
        self.num_unsettled_drafts += num_drafts

    def sit_out(self) -> None:
        """Keep the request out of steps until the drafts of its newest one are settled."""
        self.horizon = 0

    def settle_drafts(self, num_drafts: int, num_accepted: int, *, are_predicted: bool) -> None:
        """Take back the rejected drafts of a step. The request's row, if it still has one, has already done so."""
        self.num_unsettled_drafts -= num_drafts
        if not self.is_constrained:
            self.horizon = self.limit
        self.num_accepted_drafts = num_accepted
        self.num_tokens -= num_drafts - num_accepted
        if self.row != NO_ROW:
            self.num_computed -= num_drafts - num_accepted
        self.drafts = DraftCounts.of_step(num_drafts, num_accepted, are_predicted=are_predicted)

    def begin(self, token_id: int) -> None:
        """Continue from the first token, which another engine has drawn."""
        self.awaits_token = False
        self.token_ids.append(token_id)
        self.num_tokens = len(self.token_ids)

    @property
    def may_skip_computed_prefix(self) -> bool:
        """False while prompt logprobs are due: they need every position of the prompt to run through the model."""
        return self.prompt_logprobs is None or self.answered

    @property
    def has_unplanned_tokens(self) -> bool:
        """False once its last token is planned: then its blocks come free soon, without a preemption."""
        return self.num_computed + 1 < self.limit

    @property
    def may_go_on(self) -> bool:
        """False once its last token is planned even if all unsettled drafts are rejected."""
        return self.num_computed - self.num_unsettled_drafts + 1 < self.limit

    @property
    def may_draw(self) -> bool:
        return bool(self.masks) or not self.is_constrained

    def allow(self, mask: bytes, ahead: LookAhead = NOT_AHEAD) -> None:
        """Set the mask for the next token, and the guesses after it. The grammar has accepted all tokens so far."""
        self.masks, self.guesses = [mask, *ahead.masks], ahead.guesses
        self.horizon = min(self.limit, len(self.token_ids) + 1)

    def take_masks(self, num_draws: int) -> list[bytes]:
        """Return the masks for a step's draws, after the known tokens and after each draft. A mask is used once."""
        masks, self.masks, self.guesses = self.masks[:num_draws], [], ()
        assert len(masks) == num_draws, "a grammar's request was planned without a mask for each draw"
        self.drawn_from = masks
        return masks

    def give_up_blocks(self) -> list[list[int]]:
        """Give up the request's blocks, and return those of each group; an empty list if the request has no blocks."""
        blocks = self.owned_blocks()
        self.block_tables, self.first_kept = [], []
        return blocks

    def give_up_memory(self) -> tuple[int, list[list[int]]]:
        """Give up row and blocks, and return them. Drawn tokens are kept, computed KV is not."""
        row, blocks = self.row, self.give_up_blocks()
        self.row = NO_ROW
        self.capacity = self.num_computed = self.num_registered = self.num_guesses = 0
        self.next_registration = sys.maxsize
        return row, blocks

    def row_start(self) -> RowStart:
        message = self.message
        return RowStart(
            self.row,
            self.request_id,
            message.prompt_token_ids,
            self.token_ids[self.num_prompt :],
            message.sampling,
            message.seed,
            sorted(self.finish_rule.stop_token_ids),
            [list(table) for table in self.block_tables],
            self.num_computed,
        )


def _without_gaps(blocks: list[int]) -> list[int]:
    return [block for block in blocks if block != NOT_KEPT] if NOT_KEPT in blocks else blocks


def advance_decodes(requests: Iterable[Request], step: int) -> None:
    """Count the next token of each request as computed by step `step`, which draws one more.

    It does `Request.advance` for a whole batch: single calls would take a tenth of the time to plan a large one.
    """
    for request in requests:
        request.num_computed += 1
        request.num_tokens += 1
        request.last_step = step


class FinishRule:
    """The conditions under which a request ends by itself.

    A stop token counts only after `min_tokens` tokens of output. Lengths count prompt and output together.
    """

    __slots__ = ("_length_limit", "_min_length", "hands_off", "limit", "stop_token_ids")

    def __init__(self, request: EngineRequest, config: EngineCoreConfig) -> None:
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        eos = [] if sampling.ignore_eos else config.eos_token_ids
        self.stop_token_ids = frozenset([*eos, *sampling.stop_token_ids])
        self._min_length = num_prompt + sampling.min_tokens
        self._length_limit = config.max_length
        if sampling.max_tokens is not None:
            self._length_limit = min(self._length_limit, num_prompt + sampling.max_tokens)
        # Known before any token is drawn, so that no step is ever planned beyond it.
        self.limit = self._length_limit
        if request.keep_kv:
            self.limit = min(self.limit, num_prompt + len(request.output_token_ids) + 1)
        self.hands_off = self.limit < self._length_limit  # after one token, unless that is a stop token

    def bans_stop_tokens(self, length: int) -> bool:
        """Return whether stop tokens must be kept from following `length` tokens of prompt and output."""
        return bool(self.stop_token_ids) and length < self._min_length

    def reason(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Return why the request ends with `token_id` as its token number `num_tokens`; None if it goes on."""
        if num_tokens < self.limit and token_id not in self.stop_token_ids:
            return None
        if token_id in self.stop_token_ids and num_tokens > self._min_length:
            return FinishReason.STOP
        if num_tokens >= self._length_limit:
            return FinishReason.LENGTH
        return FinishReason.HANDOFF if num_tokens >= self.limit else None
