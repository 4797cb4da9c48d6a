"""The settings of one application: the `args` of a Serve config file, checked before anything starts.

model: configs/demo/model
model_id: baton-demo
load_balancing: internal               # or hybrid, external: the ranks that a gateway reaches
gateway: {port: 8000}
engine: {max_num_seqs: 64}             # arguments of every engine, named as in vLLM
fleets:
  prefill: {replicas: 1}
  decode: {min_replicas: 1, max_replicas: 4, engine: {max_num_seqs: 128}}
autoscaling: {ttft_s: 0.5, inter_token_s: 0.03}
logging: {format: json}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from baton.cluster.contracts import LoadBalancing, Role, ScalePlan
from baton.cluster.gateway.settings import Change, change_of
from baton.cluster.logs import LogSettings
from baton.engine.config import EngineConfig, InvalidEngineConfig
from baton.engine.hf_config.hub import Files, is_hub_name, model_folder
from baton.engine.strict_model import MOST_RANKS, StrictModel
from baton.kv_transfer.settings import TransferSettings

from .parts import MAX_PORT, AutoscalingSpec, EngineSpec, Fleets, GatewaySpec

MEMORY_ARGUMENTS = ("gpu_share", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")
MODEL_ARGUMENTS = {"model", "revision", "download_dir"}  # top-level settings that are also arguments of each engine

# These determine the layout and content of KV blocks: engines that differ in one could not hand over to each other.
SAME_IN_ALL_FLEETS = ("dtype", "kv_cache_dtype", "block_size", "load_format", "seed", "max_model_len")


def _check_model_id(name: str) -> str:
    if not name:
        raise ValueError("is empty: give the name by which clients ask for the model, or leave it out")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"is {name!r}, must be printable, without blanks at its ends")
    return name


class FleetSpec(StrictModel):
    """One application: a model, its gateways and its engines. Build it with `load_spec`, which has clearer errors."""

    model: str  # a folder that every machine has, or a name on the Hub
    revision: str | None = None  # of a name on the Hub: a branch, a tag or a commit; by default `main`
    # For a name on the Hub, on every machine; by default `huggingface_hub`'s cache.
    download_dir: str | None = Field(None, min_length=1)
    # The clients' name of the model; by default the folder's name, or the name on the Hub.
    model_id: Annotated[str, AfterValidator(_check_model_id)] = ""
    load_balancing: LoadBalancing = LoadBalancing.INTERNAL
    gateway: GatewaySpec = GatewaySpec()
    engine: EngineSpec = EngineSpec()
    fleets: Fleets
    transfer: TransferSettings = TransferSettings()
    autoscaling: AutoscalingSpec | None = None
    logging: LogSettings = LogSettings()

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
                "fleets.unified: its number is fixed if there are prefill and decode engines, too, since the "
                "autoscaler cannot tell which of them are short; leave min_replicas and max_replicas out"
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
        if self.num_workers > MOST_RANKS:
            raise ValueError(
                f"fleets: they have {self.num_workers} ranks in all, and may have {MOST_RANKS}: give fewer replicas "
                "or smaller groups (tensor_parallel_size, data_parallel_size)"
            )
        for role, config in configs.items():
            gpus = self.fleets.present[role].num_gpus
            if gpus is not None and config.world_size > 1 and gpus not in (0, 1):
                raise ValueError(f"fleets.{role}.num_gpus is {gpus:g}: ranks of one group have a GPU each")
            self._check_tiers(role, config)
        first_role, first = next(iter(configs.items()))
        for role, config in configs.items():
            for name in SAME_IN_ALL_FLEETS:
                ours, theirs = getattr(first, name), getattr(config, name)
                if ours != theirs:
                    raise ValueError(
                        f"{name} is {ours!r} for {first_role} and {theirs!r} for {role}: it must be the same in all "
                        "fleets, or their KV blocks do not fit; set it once, under the top-level `engine`"
                    )
            ours, theirs = first.kept_for_guesses, config.kept_for_guesses
            if ours != theirs:
                raise ValueError(
                    f"speculative_config drafts with {ours or 'no model'} for {first_role} and with "
                    f"{theirs or 'no model'} for {role}: the drafter's KV is part of a hand-off, so it must be the "
                    "same in all fleets; set it once, under the top-level `engine`"
                )
        return self

    def _check_tiers(self, role: Role, config: EngineConfig) -> None:
        if self.fleets.present[role].kv_tiers is None:
            return
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
        return self.model_id or (self.model if is_hub_name(self.model) else Path(self.model).name)

    def model_folder(self, files: Files) -> Path:
        """Return the model's folder on this machine; if the model is a name on the Hub, download missing `files` first.

        Raises `ModelNotFetched`.
        """
        return model_folder(self.model, files, revision=self.revision, download_dir=self.download_dir)

    def engine_args(self) -> dict[str, Any]:
        """Return the arguments that matter for engines, without limits of gateways, latency targets or API keys."""
        parts = {"model", "revision", "download_dir", "model_id", "engine", "fleets", "transfer", "logging"}
        args = self.model_dump(mode="json", exclude_unset=True, include=parts)
        shared = {name for name in type(self.gateway).model_fields if change_of(type(self.gateway), name) is Change.ALL}
        args["gateway"] = self.gateway.model_dump(mode="json", exclude_unset=True, include=shared)
        return args if self.autoscaling is None else args | {"autoscaling": {}}

    @property
    def num_workers(self) -> int:
        """Count the processes with a device: all ranks of all groups."""
        return sum(self.num_workers_of(role) for role in self.fleets.present)

    def num_workers_of(self, role: Role) -> int:
        """Count the workers of one fleet; of an autoscaled one, the maximum."""
        return self.fleets.present[role].bounds.max_replicas * self.engine_config(role).world_size

    @property
    def scale_plan(self) -> ScalePlan | None:
        """Return the autoscaler's settings; None if every fleet has a fixed size."""
        if self.autoscaling is None:
            return None
        settings = self.autoscaling.model_dump()
        if settings["downscale_to_zero_delay_s"] is None:
            settings["downscale_to_zero_delay_s"] = self.autoscaling.downscale_delay_s
        return ScalePlan(fleets={role: fleet.bounds for role, fleet in self.fleets.present.items()}, **settings)

    @property
    def scales_from_zero(self) -> bool:
        """Return whether all engines that write answers may be stopped, so that a request waits for one to start."""
        return not any(role.writes_answers and fleet.bounds.min_replicas for role, fleet in self.fleets.present.items())

    def num_gateways(self, nodes: int) -> int:
        """Return the number of gateways, given the number of nodes with ranks that write answers."""
        match self.load_balancing:
            case LoadBalancing.INTERNAL:
                return self.gateway.replicas
            case LoadBalancing.HYBRID:
                return nodes
            case LoadBalancing.EXTERNAL:
                return sum(self.num_ranks(role) for role in self.fleets.present if role.writes_answers)

    def num_ranks(self, role: Role) -> int:
        """Return the maximum number of engines of this fleet: the data-parallel ranks of all its groups."""
        return self.fleets.present[role].bounds.max_replicas * self.engine_config(role).data_parallel_size

    def first_rank(self, role: Role) -> int:
        """Return the first rank of a fleet.

        Ranks are numbered through all fleets' groups, in the order of `present`.
        """
        first = 0
        for other in self.fleets.present:
            if other is role:
                break
            first += self.num_ranks(other)
        return first

    def engine_config(self, role: Role) -> EngineConfig:
        """Return the arguments of one engine of this role. Raises `ValueError` that names the invalid argument."""
        fleet = self.fleets.present[role]
        arguments = self.engine.model_dump(exclude_unset=True) | fleet.engine.model_dump(exclude_unset=True)
        is_sized = arguments.get("device") == "cpu" or any(arguments.get(name) is not None for name in MEMORY_ARGUMENTS)
        if fleet.num_gpus is not None and 0 < fleet.num_gpus < 1 and not is_sized:
            arguments["gpu_share"] = fleet.num_gpus
        try:
            return EngineConfig.from_args(arguments | self.model_dump(include=MODEL_ARGUMENTS))
        except InvalidEngineConfig as error:
            whose = "" if error.field in MODEL_ARGUMENTS else f"engine arguments of {role}: "
            raise ValueError(f"{whose}{error}") from None
