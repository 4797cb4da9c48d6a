"""Settings of an application's gateways, fleets, autoscaling and logs."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from baton.cluster.contracts import Bounds, Role
from baton.cluster.gateway.api_keys import InvalidKeys, read_key_file
from baton.cluster.gateway.settings import Change, GatewaySettings, change_of
from baton.engine.config import EngineArguments
from baton.engine.strict_model import LONGEST_S, MOST_CPUS, MOST_RANKS, StrictModel
from baton.kv_transfer.settings import TierSettings

MAX_PORT = 65535
LONGEST_DELAY_S = 86_400.0  # of the autoscaler, which keeps a sample of each second
_LEAST_AMOUNT = 0.0001  # of a Ray resource
_NOT_CUSTOM = {  # Ray's resources that `resources` may not have, and the reason
    "CPU": "give num_cpus",
    "GPU": "fleets reserve GPUs, with num_gpus",
    **dict.fromkeys(("memory", "object_store_memory"), "Ray reserves none for engines and gateways"),
}
_HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*\.?", re.ASCII | re.IGNORECASE)


def _check_amount(amount: float) -> float:
    if 0 < amount < _LEAST_AMOUNT:
        raise ValueError(f"is {amount:g}, must be 0 or at least {_LEAST_AMOUNT}, the least that Ray counts")
    return amount


Amount = Annotated[float, Field(ge=0, le=1e9), AfterValidator(_check_amount)]  # of a Ray resource
CpuAmount = Annotated[float, Field(ge=0, le=MOST_CPUS), AfterValidator(_check_amount)]


def _check_resources(resources: dict[str, float]) -> dict[str, float]:
    for name in resources:
        if name in _NOT_CUSTOM:
            raise ValueError(f"has {name}: {_NOT_CUSTOM[name]}")
        if not name.strip():
            raise ValueError("has a name that is empty: give the name of a resource that Ray was started with")
    return resources


Resources = Annotated[dict[str, Amount], AfterValidator(_check_resources)]  # Ray's custom resources, by name


def _check_gpus(count: float | None) -> float | None:
    if count is None:
        return None
    if count > 1 and not count.is_integer():
        raise ValueError(f"is {count:g}, must be a whole number if it is above 1: Ray divides single GPUs only")
    return _check_amount(count)


def _check_host(host: str) -> str:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        # A name that ends in a number is a mistyped address.
        if not _HOST_NAME.fullmatch(host) or re.fullmatch(r"\d+", host.rstrip(".").rpartition(".")[2]):
            raise ValueError(
                f"is {host!r}, must be an address or a name to listen on, such as 0.0.0.0, :: or localhost; the port "
                "is a setting of its own"
            ) from None
    return host


class InvalidSpec(ValueError):
    """The application cannot work as described.

    The message has a line for each problem: where, what, what to change.
    """


class GatewaySpec(GatewaySettings):
    """The gateways: where they listen, their number, and the limits of each."""

    refused: ClassVar = {"gateway_id": "is not set by hand: every gateway draws its own"}

    # With internal load balancing; otherwise there is one on each node or one for each rank.
    replicas: Annotated[int, Change.OPTION] = Field(1, ge=1, le=MOST_RANKS)
    # Share of gateways of a new version that start before old ones end.
    max_surge_percent: Annotated[int, Change.OPTION] = Field(100, ge=0, le=100)
    host: Annotated[str, Change.GATEWAYS, Field(min_length=1), AfterValidator(_check_host)] = "0.0.0.0"
    # The first port of a machine, on which each gateway has its own.
    port: Annotated[int, Change.GATEWAYS] = Field(8000, ge=1, le=MAX_PORT)
    num_cpus: Annotated[CpuAmount, Change.GATEWAYS] = 0.1  # for Ray's placement
    resources: Annotated[Resources, Change.GATEWAYS] = {}

    def settings(self, gateway_id: str) -> GatewaySettings:
        """Return the settings of the gateway with this identity."""
        limits = {name: getattr(self, name) for name in GatewaySettings.model_fields}
        return GatewaySettings(**{**limits, "gateway_id": gateway_id})

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the settings that cannot change while a gateway runs."""
        names = [name for name in type(self).model_fields if change_of(type(self), name) is Change.GATEWAYS]
        return {name: getattr(self, name) for name in names}

    def keys(self) -> list[str]:
        """Return the API keys that are valid now, reading their file.

        Raises `InvalidSpec` if the file has no valid key.
        """
        try:
            return [*self.api_keys, *(read_key_file(self.api_keys_file) if self.api_keys_file else [])]
        except InvalidKeys as error:
            raise InvalidSpec(str(error)) from None


class EngineSpec(EngineArguments):
    """Arguments of all engines, or of the engines of one fleet."""

    refused: ClassVar = {
        "model": "all fleets serve one model; set the top-level `model`",
        "revision": "all fleets serve one model; set the top-level `revision`",
        "download_dir": "all fleets serve one model; set the top-level `download_dir`",
        "tokenizer": "gateways tokenize, with the tokenizer in the model's folder",
        "tokenizer_revision": "gateways tokenize, with the tokenizer in the model's folder",
        "skip_tokenizer_init": "engines of an application load no tokenizer in any case",
    }


class AutoscalingSpec(StrictModel):
    """Latency targets of the application, and how soon its fleets follow them. The fleets themselves limit their sizes.

    Names that Ray Serve's `autoscaling_config` also has mean the same here.
    """

    ttft_s: float = Field(1.0, gt=0, le=LONGEST_S)  # target from the request to its first token
    inter_token_s: float = Field(0.05, gt=0, le=LONGEST_S)  # target between the tokens of an answer
    percentile: float = Field(0.9, gt=0, lt=1)  # share of requests and tokens that must meet the targets
    target_utilization: float = Field(0.7, gt=0, le=1)  # of the capacity that a group has within the targets
    look_back_period_s: float = Field(30.0, ge=5, le=3600)  # over which rates and latencies are measured
    # For which a fleet must be too small before it grows; from 0 at once.
    upscale_delay_s: float = Field(5.0, ge=0, le=LONGEST_DELAY_S)
    # For which it must be too large before it shrinks.
    downscale_delay_s: float = Field(300.0, ge=0, le=LONGEST_DELAY_S)
    # Without requests; by default `downscale_delay_s`.
    downscale_to_zero_delay_s: float | None = Field(None, ge=0, le=LONGEST_DELAY_S)


class Fleet(StrictModel):
    """Engines of one role. `replicas` counts groups, not ranks; settings for a worker apply to each rank."""

    # With autoscaling (see `min_replicas`): only at the start.
    replicas: int = Field(1, ge=1, le=MOST_RANKS)
    # With `max_replicas`: the fleet is autoscaled, see `autoscaling`.
    min_replicas: int | None = Field(None, ge=0, le=MOST_RANKS)
    max_replicas: int | None = Field(None, ge=1, le=MOST_RANKS)
    engine: EngineSpec = EngineSpec()  # overrides those of all engines
    num_cpus: CpuAmount = 0.5  # of one worker, for Ray's placement; `engine.num_threads` sets threads
    # Of one worker; by default one if the cluster has any: `Reservations`.
    num_gpus: Annotated[float | None, Field(ge=0, le=1024), AfterValidator(_check_gpus)] = None
    resources: Resources = {}  # of one worker
    # Longer than any step takes: then an engine hangs, and is replaced.
    step_timeout_s: float = Field(60.0, ge=1, le=LONGEST_S)
    # For requests to finish when a group ends; others continue elsewhere.
    drain_timeout_s: float = Field(30.0, ge=0, le=LONGEST_S)
    max_surge_percent: int = Field(0, ge=0, le=100)  # share of groups of a new version that start before old ones end

    @property
    def is_scaled(self) -> bool:
        return self.max_replicas is not None

    @property
    def bounds(self) -> Bounds:
        """Return the smallest and the largest number of groups."""
        if self.max_replicas is None:
            return Bounds(self.replicas, self.replicas)
        return Bounds(0 if self.min_replicas is None else self.min_replicas, self.max_replicas)

    @property
    def size_text(self) -> str:
        """Return the number of groups as text for people."""
        low, high = self.bounds.min_replicas, self.bounds.max_replicas
        return str(low) if low == high else f"{low} to {high}"

    @property
    def first_replicas(self) -> int:
        """Return the number of groups at the start."""
        return self.replicas if "replicas" in self.model_fields_set else self.bounds.clip(self.bounds.min_replicas)

    @model_validator(mode="after")
    def _bounds_hold(self) -> Self:
        if (self.min_replicas is None) != (self.max_replicas is None):
            raise ValueError("min_replicas and max_replicas need each other: give both, or neither")
        low, high = self.bounds.min_replicas, self.bounds.max_replicas
        if low > high:
            raise ValueError(f"min_replicas is {low}, which is more than max_replicas, {high}")
        if "replicas" in self.model_fields_set and not low <= self.replicas <= high:
            raise ValueError(
                f"replicas is {self.replicas}, which is not from min_replicas, {low}, to max_replicas, {high}"
            )
        return self

    kv_tiers: TierSettings | None = None  # by default there are none: evicted blocks are lost

    @property
    def markers(self) -> list[str]:
        """Return the resources of which less than one is requested: they mark the fleet's nodes, and limit nothing."""
        return [name for name, amount in self.resources.items() if 0 < amount < 1]


class Fleets(StrictModel):
    """Either `unified`, or `prefill` and `decode`, or all three."""

    unified: Fleet | None = None
    prefill: Fleet | None = None
    decode: Fleet | None = None

    @model_validator(mode="after")
    def _can_serve(self) -> Self:
        if self.prefill and not self.decode:
            raise ValueError("prefill engines need decode engines to hand their KV blocks to: add `decode`")
        if self.decode and not self.prefill:
            raise ValueError("decode engines need prefill engines to read KV blocks from: add `prefill`")
        if not self.present:
            raise ValueError("no fleet: give `unified`, or `prefill` and `decode`")
        return self

    @property
    def present(self) -> dict[Role, Fleet]:
        """Return the given fleets, in the order of their ranks."""
        fleets = {Role.UNIFIED: self.unified, Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: fleet for role, fleet in fleets.items() if fleet is not None}
