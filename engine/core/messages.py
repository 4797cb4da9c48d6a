"""Requests, outputs and statistics of an engine: the same structures in one process and on the wire."""

from __future__ import annotations

import enum

import msgspec

from .logprobs import Logprobs
from .pace import StepTimes
from .sampling import SamplingParams
from .speculation.stats import DraftCounts, SpeculationStats
from .stages import Ages
from .tiers import TierStats

LOWEST_PRIORITY, HIGHEST_PRIORITY = -(2**31), 2**31 - 1  # numbers of `EngineRequest.priority`


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token (or a stop string, found by the detokenizer)
    LENGTH = "length"  # max_tokens, or the model's length
    HANDOFF = "handoff"  # the first token is out and the KV blocks wait for a decode engine (`kv_source` says where)
    ABORT = "abort"  # the client wants no more of it
    ERROR = "error"  # `EngineOutput.error` says what happened


class ErrorKind(enum.StrEnum):
    """The reason why an engine could not serve a request. The gateway's retry policy and HTTP status depend on it."""

    INVALID = "invalid"  # the request itself can never be served: do not retry (400)
    TOO_LONG = "too_long"  # more tokens than the engine's blocks or the model's length can ever hold (413)
    KV_LOST = "kv_lost"  # the hand-off failed (peer gone, transfer failed): prefill again elsewhere
    KV_EXPIRED = "kv_expired"  # the offer had ended before it was claimed: prefill again
    OVERLOADED = "overloaded"  # no room for it now, and nothing was computed: try another engine (503)
    TIMED_OUT = "timed_out"  # the request's deadline has passed (408)
    ENGINE_DEAD = "engine_dead"  # reported by the gateway when the engine's process is gone
    LEAVING = "leaving"  # the engine is shutting down and hands back unfinished requests: continue elsewhere
    INTERNAL = "internal"  # a bug in Baton (500)


class EngineError(msgspec.Struct, frozen=True):
    """The error of a request that ended without an answer.

    `field` names the field to change, as `InvalidSamplingParams.field` does; `message` then continues a sentence that
    begins with that name. It may be a path: `structured_outputs.structural_tag.format.elements[0]`.
    """

    kind: ErrorKind
    message: str
    field: str = ""

    @property
    def text(self) -> str:
        return f"{self.field} {self.message}" if self.field else self.message


class KVSource(msgspec.Struct, frozen=True):
    """The place where a decode engine finds the KV of a prompt's first `num_tokens` tokens."""

    ticket: bytes  # opaque to all but the connector
    num_tokens: int


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sequence to continue.

    `output_token_ids` were already generated elsewhere (the first token after a hand-off, all of them after a
    migration): penalties and seeds treat them as output, and they are never sent back.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = []
    seed: int = (
        0  # always set: the gateway draws one if the user gave none, so that a migrated request draws the same tokens
    )
    generation: int = 0  # counts re-submissions of the same request; answers to older ones are dropped
    priority: int = 0  # lower is served sooner; gateways check that the client may set it
    arrival_s: float = 0.0  # wall clock at the ingress
    timeout_s: float = 0.0  # time in the engine after which the request ends, whatever its state; 0: never
    cache_salt: str = ""  # prefixes are shared only between equal salts
    keep_kv: bool = False  # prefill only: stop after the first token, keep the blocks, answer with a ticket
    kv_source: KVSource | None = None  # decode after a hand-off
    # Decode during prefill: the KV of all tokens is on its way, and `begin` will bring the token to continue from.
    awaits_first_token: bool = False
    prediction_token_ids: list[int] = []  # the answer that the client expects: a source of drafts, never of output


class EngineOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of one step for one request. The last one of a request has a `finish_reason`."""

    request_id: str
    generation: int = 0
    token_ids: list[int] = []
    logprobs: Logprobs | None = None  # a position for each token id, if the request asked for them
    prompt_logprobs: Logprobs | None = None  # sent once, with the first token: all prompt tokens but the first
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it (the eos token counts, and is in token_ids)
    # With HANDOFF; or before any token, if the prompt is on offer while it is still being computed.
    kv_source: KVSource | None = None
    error: EngineError | None = None  # with ERROR
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache (or received), with the first output
    drafts: DraftCounts | None = None  # of this step; None: the step had no drafts for this request
    # How long before this output the request reached each stage. Sent with the first output, and with an end that came
    # from outside.
    ages: Ages | None = None


class ExpertReview(msgspec.Struct, frozen=True):
    """The balance of experts that are spread over ranks, measured over all ranks of the group."""

    imbalance: float = 0.0  # load of the busiest rank over the mean, in the last review; 0 before the first
    num_moves: int = 0  # experts copied to other places since the process started


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine between two steps. Counters start with the process."""

    num_requests_running: int
    num_requests_waiting: int
    num_requests_waiting_for_kv: int
    num_waiting_tokens: int  # prompt tokens still to compute: cached ones do not count, shared ones count once
    num_blocks: int
    num_blocks_free: int  # including those that hold reusable prefixes
    kv_usage: float = 0.0  # share of the blocks in use, in the cache group that has the fewest left
    num_blocks_held: int  # on offer to readers of prompts
    num_blocks_quarantined: int  # a failed transfer may still write to them
    num_preemptions: int
    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    num_grammars_compiled: int = 0
    num_grammars_refused: int = 0
    num_grammar_hits: int = 0  # grammars, and refusals, found in the cache
    grammar_compile_s: float = 0.0
    num_late_compilations: int = 0  # kernels that were compiled after the engine was ready
    experts: ExpertReview | None = None  # None: every rank has all experts
    tiers: TierStats | None = None  # None: the engine has no tiers
    step_times: StepTimes = StepTimes()  # measured lately
    yielded_s: float = 0.0  # for which decode steps waited for prompts of other engines on the device
    speculation: SpeculationStats | None = None  # None: the engine runs without speculation

    @property
    def num_blocks_left(self) -> int:
        """The free blocks if no cache group had a larger share of them than the group that has the fewest left."""
        return min(self.num_blocks_free, round((1 - self.kv_usage) * self.num_blocks))

    @property
    def num_requests(self) -> int:
        """All requests in the engine: running, waiting to run, and waiting for KV."""
        return self.num_requests_running + self.num_requests_waiting + self.num_requests_waiting_for_kv
