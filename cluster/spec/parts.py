"""Settings of an application's gateways, fleets, autoscaling and logs."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from baton.cluster.contracts import Bounds, Role
from baton.cluster.gateway.api_keys import InvalidKeys, read_key_file
from baton.cluster.gateway.settings import Change, GatewaySettings, change_of
from baton.engine.config import EngineArguments
from baton.engine.strict_model import StrictModel
from baton.kv_transfer.settings import TierSettings

MAX_PORT = 65535
Resources = dict[str, Annotated[float, Field(ge=0)]]  # Ray's, by name


class InvalidSpec(ValueError):
    """The application cannot work as described. The message has one line a problem: where, what, what to change."""


class GatewaySpec(GatewaySettings):
    """The gateways: where they listen, how many there are, and the limits of each."""

    refused: ClassVar = {"gateway_id": "is not set by hand: every gateway draws its own"}

    # With internal load balancing; else there is one a node or one a rank.
    replicas: Annotated[int, Change.OPTION] = Field(1, ge=1)
    # Gateways of a new version that start before old ones end.
    max_surge_percent: Annotated[int, Change.OPTION] = Field(100, ge=0, le=100)
    host: Annotated[str, Change.GATEWAYS] = Field("0.0.0.0", min_length=1)
    # The first of a machine, where each gateway has its own.
    port: Annotated[int, Change.GATEWAYS] = Field(8000, ge=1, le=MAX_PORT)
    num_cpus: Annotated[float, Change.GATEWAYS] = Field(0.1, ge=0)  # for Ray's placement
    resources: Annotated[Resources, Change.GATEWAYS] = {}

    def settings(self, gateway_id: str) -> GatewaySettings:
        """Return the settings of the gateway with this identity."""
        limits = {name: getattr(self, name) for name in GatewaySettings.model_fields}
        return GatewaySettings(**{**limits, "gateway_id": gateway_id})

    @property
    def fixed(self) -> dict[str, Any]:
        """Return the settings that a gateway keeps from its start on."""
        names = [name for name in type(self).model_fields if change_of(type(self), name) is Change.GATEWAYS]
        return {name: getattr(self, name) for name in names}

    def keys(self) -> list[str]:
        """Return the API keys that are valid now; their file is read here. Raises `InvalidSpec` where it gives none."""
        try:
            return [*self.api_keys, *(read_key_file(self.api_keys_file) if self.api_keys_file else [])]
        except InvalidKeys as error:
            raise InvalidSpec(str(error)) from None


class EngineSpec(EngineArguments):
    """Arguments of all engines, or of those of one fleet."""

    refused: ClassVar = {
        "model": "all fleets serve one model; set the top-level `model`",
        "revision": "all fleets serve one model; set the top-level `revision`",
        "download_dir": "all fleets serve one model; set the top-level `download_dir`",
        "tokenizer": "gateways tokenize, with the tokenizer in the model's folder",
        "tokenizer_revision": "gateways tokenize, with the tokenizer in the model's folder",
        "skip_tokenizer_init": "engines of an application load no tokenizer in any case",
    }


class AutoscalingSpec(StrictModel):
    """Targets of the application, and how soon its fleets follow them; the fleets themselves bound their sizes.

    Names that Ray Serve's `autoscaling_config` has, too, mean the same.
    """

    ttft_s: float = Field(1.0, gt=0)  # from the request to its first token
    inter_token_s: float = Field(0.05, gt=0)  # between the tokens of an answer
    percentile: float = Field(0.9, gt=0, lt=1)  # share of the requests and tokens for which the targets hold
    target_utilization: float = Field(0.7, gt=0, le=1)  # of a group's capacity within the targets
    look_back_period_s: float = Field(30.0, ge=5)  # over which rates and latencies are measured
    upscale_delay_s: float = Field(5.0, ge=0)  # for which more must be wanted before more come; the first at once
    downscale_delay_s: float = Field(300.0, ge=0)
    downscale_to_zero_delay_s: float | None = Field(None, ge=0)  # without requests; by default `downscale_delay_s`


class Fleet(StrictModel):
    """Engines of one role. `replicas` counts groups, never ranks; settings of a worker hold for each rank."""

    replicas: int = Field(1, ge=1)  # where it is scaled, see `min_replicas`: at the start
    min_replicas: int | None = Field(None, ge=0)  # with `max_replicas`: the fleet is scaled, see `autoscaling`
    max_replicas: int | None = Field(None, ge=1)
    engine: EngineSpec = EngineSpec()  # over those of all engines
    num_cpus: float = Field(0.5, ge=0)  # of one worker, for Ray's placement; threads are `engine.num_threads`
    num_gpus: float | None = Field(None, ge=0)  # of one worker; by default one where the cluster has any: `gpus_of`
    resources: Resources = {}  # of one worker
    step_timeout_s: float = Field(60.0, gt=0)  # longer than any step takes: an engine that hangs is replaced after it
    drain_timeout_s: float = Field(30.0, ge=0)  # for an engine's requests when it is to end; the rest goes on elsewhere
    max_surge_percent: int = Field(0, ge=0, le=100)  # groups of a new version that start before old ones end

    @property
    def is_scaled(self) -> bool:
        return self.max_replicas is not None

    @property
    def bounds(self) -> Bounds:
        """Return the least and the most groups."""
        if self.max_replicas is None:
            return Bounds(self.replicas, self.replicas)
        return Bounds(0 if self.min_replicas is None else self.min_replicas, self.max_replicas)

    @property
    def spelled(self) -> str:
        """Return the number of groups, for people."""
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

    kv_tiers: TierSettings | None = None  # by default an engine forgets the blocks that it evicts

    @property
    def markers(self) -> list[str]:
        """Return the resources of which less than one is asked: these mark nodes for the fleet, rather than count."""
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
        """Return the fleets that are given, in the order of their ranks."""
        fleets = {Role.UNIFIED: self.unified, Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: fleet for role, fleet in fleets.items() if fleet is not None}
