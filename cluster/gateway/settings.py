"""Settings of a gateway."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from baton.engine.core.messages import LOWEST_PRIORITY, EngineStats
from baton.engine.net.sockets import SHORTEST_SILENCE_S, SILENCE_S

from .routing.breaker import BreakerSettings
from .routing.rates import CostRates


def check_api_key(key: str) -> str:
    """Return the key if it fits into `Authorization: Bearer KEY`.

    Raises `ValueError` otherwise, also for an empty one (as of an unset variable), which would let everyone in.
    """
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ValueError("must be printable ASCII without blanks, and not empty")
    return key


ApiKey = Annotated[str, AfterValidator(check_api_key)]


class QueueLimits(BaseModel):
    """An engine whose queue is this long gets no more prompts. If all engines are full, the gateway answers 503."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    requests: int = Field(1024, gt=0)
    tokens: int = Field(4_000_000, gt=0)  # of prompts, that are to be computed

    def reached(self, stats: EngineStats) -> bool:
        return stats.num_requests_waiting >= self.requests or stats.num_waiting_tokens >= self.tokens


class GatewaySettings(BaseModel):
    """One gateway's limits. Times are seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gateway_id: str = "gateway"  # different in each gateway, so that equal views of the cluster do not choose alike
    api_keys: list[ApiKey] = []  # empty: everyone may call; else only /health, /live and /metrics are open
    api_keys_file: str = ""  # more of them, one a line, which may change: no config file shows them
    isolate_keys: bool = False  # prefixes are shared only between requests with the same key
    special_tokens_in_messages: bool = False  # texts of a chat that spell control tokens become them
    allowed_origins: list[str] = []  # of web pages that may call from their visitors' browsers; "*": all
    max_body_bytes: int = Field(16 * 2**20, gt=0)  # above: 413
    request_memory_bytes: int = Field(2**30, gt=0)  # of bodies and prompts together; beyond it: 503
    body_processes: int = Field(2, ge=1)  # which read large bodies; one is not for heavy ones
    max_inflight_requests: int = Field(4096, gt=0)  # above: 429
    max_inflight_per_key: int | None = Field(None, gt=0)  # with one API key; above: 429
    queue_limits: QueueLimits = QueueLimits()  # of each engine
    min_priority: int = Field(0, ge=LOWEST_PRIORITY, le=0)  # that a request may ask for; keys of the file may have less
    max_choices: int = Field(256, gt=0)  # prompts times n in one HTTP request
    inline_tokenize_chars: int = Field(4096, ge=0)  # longer texts of small bodies are tokenized in a thread
    request_timeout_s: float = Field(600.0, gt=0)  # clients may ask for less of this and the next: see api/deadlines.py
    first_token_timeout_s: float | None = Field(None, gt=0)
    capacity_timeout_s: float = Field(30.0, ge=0)  # how long each attempt waits for an engine that can take it
    engine_silence_s: float = Field(SILENCE_S, ge=SHORTEST_SILENCE_S)  # an engine that says nothing for so long is lost
    max_attempts: int = Field(4, ge=1)  # submissions that may fail: a request that kills engines must not kill them all
    retry_budget: float = Field(0.2, ge=0)  # further attempts, as a share of the requests of the last seconds
    retry_budget_min: int = Field(10, ge=0)  # so many are allowed in any case
    breaker: BreakerSettings = BreakerSettings()
    local_prefill_max_tokens: int = Field(32768, ge=0)  # of a prompt that a decode engine computes
    drain_s: float = Field(5.0, ge=0)  # how long /health says 503 before the port closes: longer than balancers' checks
    drain_timeout_s: float = Field(30.0, gt=0)  # for open answers, from then on
    session_patience_s: float = Field(0.1, ge=0)  # so much later a session's request may be at its home engine
    cost: CostRates = CostRates()  # of the router: see docs/concepts/routing.md

    @model_validator(mode="after")
    def _isolates_somebody(self) -> Self:
        if self.isolate_keys and not (self.api_keys or self.api_keys_file):
            raise ValueError(
                "isolate_keys: there are no API keys, by which clients could be told apart: give api_keys_file"
            )
        return self
