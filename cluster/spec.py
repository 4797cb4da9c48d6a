"""What an application is made of: the `args` of a Serve config file, checked before anything starts.

model: configs/demo/model
model_id: baton-demo
load_balancing: internal               # or hybrid, external: which ranks a gateway reaches
gateway: {port: 8000}
engine: {max_num_seqs: 64}             # arguments of every engine, named as in vLLM
fleets:
  prefill: {replicas: 1}
  decode: {min_replicas: 1, max_replicas: 4, engine: {max_num_seqs: 128}}
autoscaling: {ttft_s: 0.5, inter_token_s: 0.03}
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.engine.config import EngineConfig, InvalidEngineConfig
from baton.kv_transfer.settings import InvalidTransferSettings, TransferSettings, parse_settings
from baton.kv_transfer.tiers.settings import TierSettings

from .autoscaling.settings import AutoscalingSettings
from .contracts import Bounds, LoadBalancing, Role, ScalePlan
from .gateway.settings import GatewaySettings

MAX_PORT = 65535
SMALLEST_AMOUNT = 0.001  # of a resource in Ray, where a bundle must not be empty
CHECKOUT = Path(__file__).resolve().parent.parent

Bundle = dict[str, float]  # Ray's resources by name

# What decides the layout and the contents of KV blocks: engines that differ in it could not hand blocks to each other.
SAME_IN_ALL_FLEETS = ("dtype", "kv_cache_dtype", "block_size", "load_format", "seed", "max_model_len")

# Arguments of an engine that works alone, which in an application others decide.
NOT_AN_ENGINES = {
    "model": "all fleets serve one model; set the top-level `model`",
    "tokenizer": "gateways tokenize, with the tokenizer in the model's folder",
    "skip_tokenizer_init": "engines of an application load no tokenizer in any case",
}


class InvalidSpec(ValueError):
    """The application cannot work as described. The message has one line a problem: where, what, what to change."""


class _Strict(BaseModel):
    """Refuses unknown keys and names the nearest valid one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _name_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    raise ValueError(_unknown_key(str(key), list(cls.model_fields)))
        return data


def _unknown_key(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"unknown key {key!r}; " + (f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}")


class GatewaySpec(_Strict, GatewaySettings):
    """The gateways: where they listen, how many there are, and the limits of each."""

    replicas: int = Field(1, ge=1)  # with internal load balancing; else there is one a node or one a rank
    max_surge_percent: int = Field(100, ge=0, le=100)  # gateways of a new version that start before old ones end
    host: str = "0.0.0.0"
    port: int = Field(8000, ge=1, le=MAX_PORT)  # the first of a machine, where each gateway has its own
    num_cpus: float = Field(0.1, ge=0)  # for Ray's placement
    resources: dict[str, float] = {}
    api_keys_file: str = ""  # more API keys, one a line, on every node with a gateway: no config file shows them

    def settings(self, gateway_id: str) -> GatewaySettings:
        """The limits of the gateway with this identity. Raises `InvalidSpec` where `api_keys_file` gives no key."""
        limits = {name: getattr(self, name) for name in GatewaySettings.model_fields}
        api_keys = [*self.api_keys, *(_keys_in(self.api_keys_file) if self.api_keys_file else [])]
        return GatewaySettings(**{**limits, "gateway_id": gateway_id, "api_keys": api_keys})

    @model_validator(mode="after")
    def _identity_is_ours(self) -> Self:
        if "gateway_id" in self.model_fields_set:
            raise ValueError("gateway_id is not set by hand: every gateway draws its own")
        return self


def _keys_in(file: str) -> list[str]:
    """Never empty: without keys everyone could call. Raises `InvalidSpec`."""
    try:
        lines = Path(file).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSpec(f"gateway.api_keys_file: {file}: {error}") from None
    keys = [key for line in lines if (key := line.strip())]
    if not keys:
        raise InvalidSpec(f"gateway.api_keys_file: {file} holds no key: one a line is expected")
    return keys


class AutoscalingSpec(_Strict, AutoscalingSettings):
    """See `AutoscalingSettings`."""


class KVTiers(_Strict, TierSettings):
    """Memory behind the pool of each engine of a fleet."""


class Fleet(_Strict):
    """Engines of one role. `replicas` counts groups, never ranks: what is said of a worker holds for each rank."""

    replicas: int = Field(1, ge=1)  # where it is scaled, see `min_replicas`: at the start
    min_replicas: int | None = Field(None, ge=0)  # with `max_replicas`: the fleet is scaled, see `autoscaling`
    max_replicas: int | None = Field(None, ge=1)
    engine: dict[str, Any] = {}
    num_cpus: float = Field(0.5, ge=0)  # of one worker, for Ray's placement; threads are `engine.num_threads`
    num_gpus: float | None = Field(None, ge=0)  # of one worker; by default one where the cluster has any: `gpus_of`
    resources: dict[str, float] = {}  # of one worker
    step_timeout_s: float = Field(60.0, gt=0)  # longer than any step takes: an engine that hangs is replaced after it
    drain_timeout_s: float = Field(30.0, ge=0)  # for what an engine has when it is to end; the rest goes on elsewhere
    max_surge_percent: int = Field(0, ge=0, le=100)  # groups of a new version that start before old ones end

    @property
    def is_scaled(self) -> bool:
        return self.max_replicas is not None

    @property
    def bounds(self) -> Bounds:
        """Groups at least and at most."""
        if self.max_replicas is None:
            return Bounds(self.replicas, self.replicas)
        return Bounds(0 if self.min_replicas is None else self.min_replicas, self.max_replicas)

    @property
    def spelled(self) -> str:
        """How many groups, for people."""
        low, high = self.bounds.min_replicas, self.bounds.max_replicas
        return str(low) if low == high else f"{low} to {high}"

    @property
    def first_replicas(self) -> int:
        """Groups at the start."""
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

    kv_tiers: KVTiers | None = None  # by default an engine forgets the blocks that it evicts

    @property
    def markers(self) -> list[str]:
        """Resources of which so little is asked that they say where the fleet belongs rather than count something."""
        return [name for name, amount in self.resources.items() if 0 < amount < 1]


class Fleets(_Strict):
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
        """In the order of ranks."""
        fleets = {Role.UNIFIED: self.unified, Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: fleet for role, fleet in fleets.items() if fleet is not None}


class FleetSpec(_Strict):
    """One application: a model, its gateways and its engines. Build it with `load_spec`, whose errors read better."""

    model: str
    model_id: str = ""  # what clients call it; by default the folder's name
    load_balancing: LoadBalancing = LoadBalancing.INTERNAL
    gateway: GatewaySpec = GatewaySpec()
    engine: dict[str, Any] = {}
    fleets: Fleets
    transfer: dict[str, Any] = {}
    autoscaling: AutoscalingSpec | None = None

    @model_validator(mode="after")
    def _scaling_has_bounds(self) -> Self:
        scaled = [role for role, fleet in self.fleets.present.items() if fleet.is_scaled]
        if scaled and self.autoscaling is None:
            raise ValueError(
                f"fleets.{scaled[0]} has min_replicas and max_replicas: add `autoscaling`, with the targets that "
                "decide (`autoscaling: {}` takes the defaults), or give `replicas` alone"
            )
        if self.autoscaling is not None and not scaled:
            raise ValueError("autoscaling: no fleet has min_replicas and max_replicas, so there is nothing to scale")
        if Role.UNIFIED in scaled and len(self.fleets.present) > 1:
            raise ValueError(
                "fleets.unified: beside prefill and decode engines its number is fixed, since it cannot be told which "
                "of them requests need more of; leave min_replicas and max_replicas out"
            )
        sleeping = [
            role for role in scaled if role.writes_answers and self.fleets.present[role].bounds.min_replicas == 0
        ]
        if sleeping and self.load_balancing is not LoadBalancing.INTERNAL:
            raise ValueError(
                f"fleets.{sleeping[0]}.min_replicas is 0: with load_balancing {self.load_balancing} gateways are where "
                "ranks are, so nobody would be there for the first request; give 1, or load_balancing internal"
            )
        return self

    @model_validator(mode="after")
    def _engines_fit_together(self) -> Self:
        configs = {role: self.engine_config(role) for role in self.fleets.present}
        self.transfer_settings()
        for role, config in configs.items():
            gpus = self.fleets.present[role].num_gpus
            if gpus is not None and config.world_size > 1 and gpus not in (0, 1):
                raise ValueError(f"fleets.{role}.num_gpus is {gpus:g}: ranks of one group have a GPU each")
            self._check_tiers(role, config)
            self._check_buffer(role, config)
        first_role, first = next(iter(configs.items()))
        for role, config in configs.items():
            for name in SAME_IN_ALL_FLEETS:
                ours, theirs = getattr(first, name), getattr(config, name)
                if ours != theirs:
                    raise ValueError(
                        f"{name} is {ours!r} for {first_role} and {theirs!r} for {role}: it must be the same in all "
                        "fleets, or their KV blocks do not fit; set it once, under the top-level `engine`"
                    )
        return self

    def _check_buffer(self, role: Role, config: EngineConfig) -> None:
        if config.tensor_parallel_size > 1 and self.transfer_settings().buffer == "host":
            raise ValueError(
                f"transfer.buffer is 'host': ranks of a group of tensor_parallel_size {config.tensor_parallel_size} "
                f"({role}) cannot share a buffer yet; give 'device', or tensor_parallel_size 1"
            )

    def _check_tiers(self, role: Role, config: EngineConfig) -> None:
        if self.fleets.present[role].kv_tiers is None:
            return
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"fleets.{role}.kv_tiers: ranks of a group of tensor_parallel_size {config.tensor_parallel_size} "
                "cannot keep tiers together yet; leave kv_tiers out, or give tensor_parallel_size 1"
            )
        if not config.enable_prefix_caching:
            raise ValueError(
                f"fleets.{role}.kv_tiers: blocks are found by the prefix cache, which is turned off by "
                "enable_prefix_caching: false; leave one of them out"
            )

    @model_validator(mode="after")
    def _gateways_are_where_the_ranks_are(self) -> Self:
        if self.load_balancing is not LoadBalancing.INTERNAL and "replicas" in self.gateway.model_fields_set:
            each = "node" if self.load_balancing is LoadBalancing.HYBRID else "rank"
            raise ValueError(
                f"gateway.replicas: load_balancing is {self.load_balancing}, so there is one a {each}; leave it out"
            )
        last_port = self.gateway.port + self.num_gateways(nodes=1) - 1
        if self.load_balancing is LoadBalancing.EXTERNAL and last_port > MAX_PORT:
            raise ValueError(f"gateway.port: a gateway a rank needs ports up to {last_port}; choose a lower one")
        return self

    @property
    def served_model_id(self) -> str:
        return self.model_id or Path(self.model).name

    @property
    def num_workers(self) -> int:
        """Processes with a device: all ranks of all groups."""
        return sum(self.num_workers_of(role) for role in self.fleets.present)

    def num_workers_of(self, role: Role) -> int:
        """At most, where the fleet is scaled."""
        return self.fleets.present[role].bounds.max_replicas * self.engine_config(role).world_size

    @property
    def scale_plan(self) -> ScalePlan | None:
        """None: every fleet has a fixed size."""
        if self.autoscaling is None:
            return None
        settings = self.autoscaling.model_dump()
        if settings["downscale_to_zero_delay_s"] is None:
            settings["downscale_to_zero_delay_s"] = self.autoscaling.downscale_delay_s
        return ScalePlan(fleets={role: fleet.bounds for role, fleet in self.fleets.present.items()}, **settings)

    @property
    def scales_from_zero(self) -> bool:
        """Whether a request may find nobody to write its answer, and has to wait for who will be."""
        return not any(role.writes_answers and fleet.bounds.min_replicas for role, fleet in self.fleets.present.items())

    def num_gateways(self, nodes: int) -> int:
        """Of the whole application, on so many nodes with ranks that write answers."""
        match self.load_balancing:
            case LoadBalancing.INTERNAL:
                return self.gateway.replicas
            case LoadBalancing.HYBRID:
                return nodes
            case LoadBalancing.EXTERNAL:
                return sum(self.num_ranks(role) for role in self.fleets.present if role.writes_answers)

    def num_ranks(self, role: Role) -> int:
        """Engines of this fleet, at most: the data-parallel ranks of all its groups."""
        return self.fleets.present[role].bounds.max_replicas * self.engine_config(role).data_parallel_size

    def first_rank(self, role: Role) -> int:
        """The fleets follow each other in the order of `Fleets.present`, each with the ranks of all its groups."""
        first = 0
        for other in self.fleets.present:
            if other is role:
                break
            first += self.num_ranks(other)
        return first

    def gpus_of(self, role: Role, cluster_gpus: float) -> float:
        """How many GPUs Ray must reserve for one worker of this role, in a cluster that has `cluster_gpus` in all."""
        given = self.fleets.present[role].num_gpus
        if given is not None:
            return given
        device = self.engine_config(role).device
        return 1.0 if device == "cuda" or (device == "auto" and cluster_gpus > 0) else 0.0

    def bundle_of(self, role: Role, cluster_gpus: float) -> Bundle:
        """What one worker of this role reserves with Ray."""
        fleet = self.fleets.present[role]
        wanted = {"CPU": fleet.num_cpus, "GPU": self.gpus_of(role, cluster_gpus), **fleet.resources}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": SMALLEST_AMOUNT}

    def missing_gpus(self, cluster_gpus: float) -> str:
        """Why a cluster with so many GPUs cannot place all engines; empty where it can."""
        needed = sum(
            fleet.first_replicas * self.engine_config(role).world_size * self.gpus_of(role, cluster_gpus)
            for role, fleet in self.fleets.present.items()
        )
        if needed <= cluster_gpus:
            return ""
        return (
            f"{self.num_workers} ranks reserve {needed:g} GPUs, the cluster has {cluster_gpus:g}: give fewer "
            "replicas, smaller groups (tensor_parallel_size, data_parallel_size), let engines share a GPU "
            "(fleets.*.num_gpus: 0.5, and as much less gpu_memory_utilization), or run them on CPUs "
            "(engine.device: cpu)"
        )

    def missing_markers(self, cluster: Mapping[str, float]) -> str:
        """Why a cluster with these resources has no place for some fleet; empty where it has."""
        missing = (
            f"fleets.{role}.resources: no node has {name}; start Ray with it on those that the fleet belongs on "
            f"(ray start --resources='{{\"{name}\": 1}}')"
            for role, fleet in self.fleets.present.items()
            for name in fleet.markers
            if cluster.get(name, 0) == 0
        )
        return "\n".join(missing)

    def transfer_settings(self) -> TransferSettings:
        """How blocks are handed over. Raises `ValueError` that names the setting."""
        for name in self.transfer:
            if name not in TransferSettings.__struct_fields__:
                raise ValueError(f"transfer: {_unknown_key(name, list(TransferSettings.__struct_fields__))}")
        try:
            return parse_settings(self.transfer)
        except InvalidTransferSettings as error:
            raise ValueError(f"transfer: {error}") from None

    def engine_config(self, role: Role) -> EngineConfig:
        """The arguments of one engine of this role. Raises `ValueError` that names the argument."""
        own = self.fleets.present[role].engine
        for where, args in (("engine", self.engine), (f"fleets.{role}.engine", own)):
            for name, reason in NOT_AN_ENGINES.items():
                if name in args:
                    raise ValueError(f"{where}.{name}: {reason}")
        try:
            return EngineConfig.from_args({**self.engine, **own, "model": self.model})
        except InvalidEngineConfig as error:
            raise ValueError(f"engine arguments of {role}: {error}") from None


def load_spec(args: Mapping[str, Any], *, needs_model: bool = True) -> FleetSpec:
    """The application that these arguments describe; its `model` is an absolute path.

    Without `needs_model` the folder may be on other machines only. Raises `InvalidSpec`.
    """
    if not isinstance(args, Mapping):
        raise InvalidSpec(f"the application must be a mapping with `model` and `fleets`, not {type(args).__name__}")
    if isinstance(args.get("model"), str) and (needs_model or has_model(args["model"])):
        args = {**args, "model": str(find_model_folder(args["model"]))}
    try:
        return FleetSpec.model_validate(dict(args))
    except pydantic.ValidationError as error:
        raise InvalidSpec("\n".join(_line(problem) for problem in error.errors())) from None


def _line(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    what = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what


def find_model_folder(model: str) -> Path:
    """A relative folder is looked up from the current folder, then from Baton's checkout (for the demo).

    Raises `InvalidSpec`.
    """
    candidates = _model_folders(model)
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    looked_at = " and ".join(str(folder) for folder in candidates)
    raise InvalidSpec(f"model: {model!r} is no model folder: there is no config.json in {looked_at}")


def has_model(model: str) -> bool:
    """Whether the folder is on this machine."""
    return any((folder / "config.json").is_file() for folder in _model_folders(model))


def _model_folders(model: str) -> list[Path]:
    here = [Path(model).expanduser().absolute()]
    return here if os.path.isabs(model) else [*here, CHECKOUT / model]


def specs_in_file(path: Path, *, model: str | None = None, needs_model: bool = True) -> dict[str, FleetSpec]:
    """The applications of a Serve config file by name, or the one of a file that holds only its arguments.

    `model` takes the place of theirs; see `load_spec` for `needs_model`. Raises `InvalidSpec`.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InvalidSpec(f"{path}: {error}") from None
    if not isinstance(content, Mapping):
        raise InvalidSpec(f"{path}: must hold a mapping")
    if "applications" not in content:
        applications = {"baton": content}
    else:
        applications = {str(app.get("name", "default")): app.get("args") or {} for app in content["applications"]}
    own = {} if model is None else {"model": model}
    return {name: load_spec({**args, **own}, needs_model=needs_model) for name, args in applications.items()}
