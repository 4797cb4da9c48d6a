"""Settings of a gateway, and how a change of each is applied while the application runs."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from baton.cluster.contracts import QueueBound
from baton.engine.core.messages import LOWEST_PRIORITY
from baton.engine.net.sockets import HEARTBEAT_TIMEOUT_S, MIN_HEARTBEAT_TIMEOUT_S
from baton.engine.strict_model import StrictModel

from .routing.breaker import BreakerSettings
from .routing.rates import CostRates

LONGEST_DRAIN_S = 3600.0  # of each part: Serve must know a bound, and these may change


def check_api_key(key: str) -> str:
    """Return the key if it fits into `Authorization: Bearer KEY`.

    Raises `ValueError` otherwise, also for an empty one (as of an unset variable), which would let everyone in.
    """
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ValueError("must be printable ASCII without blanks, and not empty")
    return key


ApiKey = Annotated[str, AfterValidator(check_api_key)]


class Change(enum.StrEnum):
    """The effort that a change of a setting takes while the application runs."""

    IN_PLACE = "in place"  # `user_config` of the gateways: running ones follow
    GATEWAYS = "gateways restart"  # `user_config`: gateways are replaced, engines go on
    OPTION = "Serve's option"  # of the deployment `gateway`, with load balancing `internal`
    ALL = "all restarts"  # `args`: engines use it, too


def change_of(settings: type[StrictModel], name: str) -> Change:
    """Return how a change of this field is applied: as its annotation says, or else in place."""
    said = settings.model_fields[name].metadata
    return next((each for each in said if isinstance(each, Change)), Change.IN_PLACE)


class QueueLimits(StrictModel):
    """An engine whose queue is this long gets no more prompts. If all engines are full, the gateway answers 503."""

    requests: int = Field(1024, gt=0)
    tokens: int = Field(4_000_000, gt=0)  # of prompts, that are to be computed

    @property
    def bound(self) -> QueueBound:
        return QueueBound(self.requests, self.tokens)


class GatewaySettings(StrictModel):
    """One gateway's limits. Times are seconds."""

    gateway_id: str = "gateway"  # different in each gateway, so that equal views of the cluster do not choose alike
    api_keys: list[ApiKey] = []  # empty: everyone may call; else only the routes of `OPEN_PATHS` are open
    api_keys_file: str = ""  # more of them, one a line, which may change: no config file shows them
    isolate_keys: bool = False  # prefixes are shared only between requests with the same key
    special_tokens_in_messages: bool = False  # texts of a chat that spell control tokens become them
    allowed_origins: list[str] = []  # of web pages that may call from their visitors' browsers; "*": all
    page: bool = True  # serve the page that shows the fleet at `/`; without it `/` is a 404
    max_body_bytes: int = Field(16 * 2**20, gt=0)  # above: 413
    request_memory_bytes: int = Field(2**30, gt=0)  # of bodies and prompts together; beyond it: 503
    body_processes: Annotated[int, Change.GATEWAYS] = Field(2, ge=1)  # which read large bodies; one not heavy ones
    max_inflight_requests: int = Field(4096, gt=0)  # above: 429
    max_inflight_per_key: int | None = Field(None, gt=0)  # with one API key; above: 429
    queue_limits: QueueLimits = QueueLimits()  # of each engine
    min_priority: int = Field(0, ge=LOWEST_PRIORITY, le=0)  # that a request may ask for; keys of the file may have less
    max_choices: int = Field(256, gt=0)  # prompts times n in one HTTP request
    inline_tokenize_chars: int = Field(4096, ge=0)  # longer texts of small bodies are tokenized in a thread
    request_timeout_s: float = Field(600.0, gt=0)  # clients may ask for less of this and the next: see api/deadlines.py
    first_token_timeout_s: float | None = Field(None, gt=0)
    capacity_timeout_s: float = Field(30.0, ge=0)  # how long each attempt waits for an engine that can take it
    # An engine that says nothing for so long is lost, and for an engine a gateway.
    engine_heartbeat_timeout_s: Annotated[float, Change.ALL] = Field(HEARTBEAT_TIMEOUT_S, ge=MIN_HEARTBEAT_TIMEOUT_S)
    max_attempts: int = Field(4, ge=1)  # submissions that may fail: a request that kills engines must not kill them all
    retry_budget: float = Field(0.2, ge=0)  # further attempts, as a share of the requests of the last seconds
    retry_budget_min: int = Field(10, ge=0)  # so many are allowed in any case
    breaker: BreakerSettings = BreakerSettings()
    local_prefill_max_tokens: int = Field(32768, ge=0)  # of a prompt that a decode engine computes
    # How long /health says 503 before the port closes: longer than balancers' checks.
    drain_s: float = Field(5.0, ge=0, le=LONGEST_DRAIN_S)
    drain_timeout_s: float = Field(30.0, gt=0, le=LONGEST_DRAIN_S)  # for open answers, from then on
    session_patience_s: float = Field(0.1, ge=0)  # so much later a session's request may be at its home engine
    cost: CostRates = CostRates()  # of the router: see docs/concepts/routing.md

    @model_validator(mode="after")
    def _isolation_needs_keys(self) -> Self:
        if self.isolate_keys and not (self.api_keys or self.api_keys_file):
            raise ValueError(
                "isolate_keys: there are no API keys, by which clients could be told apart: give api_keys_file"
            )
        return self
