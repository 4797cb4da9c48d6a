"""Settings of a gateway, and the way in which each can be changed while the application runs."""

from __future__ import annotations

import enum
import re
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from baton.cluster.contracts import QueueBound
from baton.engine.core.messages import LOWEST_PRIORITY
from baton.engine.net.sockets import HEARTBEAT_TIMEOUT_S, MAX_HEARTBEAT_TIMEOUT_S, MIN_HEARTBEAT_TIMEOUT_S
from baton.engine.strict_model import LONGEST_S, MOST_BYTES, MOST_REQUESTS, MOST_TOKENS, StrictModel

from .routing.breaker import BreakerSettings
from .routing.rates import CostRates

LONGEST_DRAIN_S = 3600.0  # upper limit of each drain setting: Serve needs a fixed bound, but settings may change


def check_api_key(key: str) -> str:
    """Return the key if it can be sent as `Authorization: Bearer KEY`.

    Raises `ValueError` otherwise, also for an empty key (as from an unset variable), which would admit everyone.
    """
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise ValueError("must be printable ASCII without blanks, and not empty")
    return key


ApiKey = Annotated[str, AfterValidator(check_api_key)]

_DEFAULT_PORTS = {"http": 80, "https": 443}  # browsers leave them out


def check_origin(origin: str) -> str:
    """Return the origin if browsers send it so, as `Origin: SCHEME://HOST[:PORT]` or `null`, or if it is "*".

    Raises `ValueError` otherwise, with the right spelling if there is one.
    """
    if origin in ("*", "null") or origin == (spelled := _spelled_by_browsers(origin)):
        return origin
    allowed = "https://chat.example or http://localhost:3000, or '*' for all"
    what = f"give {spelled!r}" if spelled else f"such as {allowed}"
    raise ValueError(f"is {origin!r}, must be the origin of web pages as browsers send it, {what}")


def _spelled_by_browsers(url: str) -> str | None:
    """Return the origin of a URL as in RFC 6454; None if it has none."""
    # Of a browser's extension or an app, in which case counts.
    if re.fullmatch(r"(?!https?:)[a-z][a-z0-9+.-]*://[\w.:-]+", url, re.ASCII):
        return url
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:  # also of the host's encoding
        return None
    if parts.scheme not in _DEFAULT_PORTS or not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:.]*:[0-9a-f:.]*", host):
        return None
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}" + ("" if port in (None, _DEFAULT_PORTS[parts.scheme]) else f":{port}")


Origin = Annotated[str, AfterValidator(check_origin)]


class Change(enum.StrEnum):
    """The effect of a change of a setting while the application runs, and the place for it."""

    IN_PLACE = "in place"  # `user_config` of the gateways: running gateways apply it
    GATEWAYS = "gateways restart"  # `user_config`: gateways are replaced, engines continue
    OPTION = "Serve's option"  # of the deployment `gateway`, with load balancing `internal`
    ALL = "all restarts"  # `args`: engines use the setting, too


def change_of(settings: type[StrictModel], name: str) -> Change:
    """Return how a change of this field is applied: as its annotation says, by default in place."""
    annotations = settings.model_fields[name].metadata
    return next((each for each in annotations if isinstance(each, Change)), Change.IN_PLACE)


class QueueLimits(StrictModel):
    """An engine with a queue of this length gets no more prompts. If all engines are full, the gateway answers 503."""

    requests: int = Field(1024, gt=0, le=MOST_REQUESTS)
    tokens: int = Field(4_000_000, gt=0, le=10**12)  # of prompts, that are still to be computed

    @property
    def bound(self) -> QueueBound:
        return QueueBound(self.requests, self.tokens)


class GatewaySettings(StrictModel):
    """One gateway's limits. Times are in seconds."""

    gateway_id: str = "gateway"  # unique, so that gateways with equal views of the cluster do not all choose alike
    api_keys: list[ApiKey] = []  # empty: everyone may call; else only the routes of `OPEN_PATHS` need no key
    api_keys_file: str = ""  # file with more keys, one a line; it may change, and keeps keys out of config files
    isolate_keys: bool = False  # cached prefixes are shared only between requests with the same key
    special_tokens_in_messages: bool = False  # text in a chat that spells a control token becomes that token
    allowed_origins: list[Origin] = []  # of web pages that may call from their visitors' browsers; "*": all
    page: bool = True  # serve the page that shows the fleet at `/`; otherwise `/` is a 404
    max_body_bytes: int = Field(16 * 2**20, gt=0, le=MOST_BYTES)  # above: 413
    request_memory_bytes: int = Field(2**30, gt=0, le=MOST_BYTES)  # of all bodies and prompts together; above: 503
    # That read large bodies; one gets no heavy ones.
    body_processes: Annotated[int, Change.GATEWAYS] = Field(2, ge=1, le=256)
    max_inflight_requests: int = Field(4096, gt=0, le=MOST_REQUESTS)  # above: 429
    max_inflight_per_key: int | None = Field(None, gt=0, le=MOST_REQUESTS)  # the same for one API key; above: 429
    queue_limits: QueueLimits = QueueLimits()  # for each engine
    min_priority: int = Field(0, ge=LOWEST_PRIORITY, le=0)  # that a request may have; keys in the file may allow less
    max_choices: int = Field(256, gt=0, le=MOST_REQUESTS)  # prompts times n in one HTTP request
    # Longer texts of small bodies are tokenized in a thread.
    inline_tokenize_chars: int = Field(4096, ge=0, le=MOST_BYTES)
    # Clients may lower this and the next: see api/deadlines.py.
    request_timeout_s: float = Field(600.0, gt=0, le=LONGEST_S)
    first_token_timeout_s: float | None = Field(None, gt=0, le=LONGEST_S)
    # That each attempt waits for an engine that can take it.
    capacity_timeout_s: float = Field(30.0, ge=0, le=LONGEST_S)
    # A gateway takes an engine for lost from which nothing arrives for so long, and an engine a gateway.
    engine_heartbeat_timeout_s: Annotated[float, Change.ALL] = Field(
        HEARTBEAT_TIMEOUT_S, ge=MIN_HEARTBEAT_TIMEOUT_S, le=MAX_HEARTBEAT_TIMEOUT_S
    )
    # Submissions that may fail: a request that kills engines must not kill them all.
    max_attempts: int = Field(4, ge=1, le=1000)
    retry_budget: float = Field(0.2, ge=0, le=1000)  # limit of retries, as a share of the requests of the last seconds
    retry_budget_min: int = Field(10, ge=0, le=MOST_REQUESTS)  # retries that are always allowed
    breaker: BreakerSettings = BreakerSettings()
    # Longest prompt that a decode engine computes.
    local_prefill_max_tokens: int = Field(32768, ge=0, le=MOST_TOKENS)
    # How long /health answers 503 before the port closes: longer than the period of balancers' checks.
    drain_s: float = Field(5.0, ge=0, le=LONGEST_DRAIN_S)
    drain_timeout_s: float = Field(30.0, gt=0, le=LONGEST_DRAIN_S)  # for open answers, once the port is closed
    # Extra cost up to which a session stays with its home engine.
    session_patience_s: float = Field(0.1, ge=0, le=LONGEST_S)
    cost: CostRates = CostRates()  # of the router: see docs/concepts/routing.md

    @model_validator(mode="after")
    def _isolation_needs_keys(self) -> Self:
        if self.isolate_keys and not (self.api_keys or self.api_keys_file):
            raise ValueError(
                "isolate_keys: there are no API keys, by which clients could be told apart: give api_keys_file"
            )
        return self
