"""The start-up that every rank of a group goes through: read the config, join the group, load the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from baton.kernels.compiler import Compiler, start_compiler

from ..config import DTYPES, EngineConfig, InvalidEngineConfig
from ..hf_config.model_config import ModelConfig
from ..models import load_config
from ..parallel.member import Member
from .division import check_division
from .phases import Phases
from .speculation_limits import check_speculation

if TYPE_CHECKING:
    from .load import LoadedMember

logger = logging.getLogger(__name__)


@contextmanager
def loaded_member(config: EngineConfig, member: Member, phases: Phases) -> Iterator[LoadedMember]:
    """Load this rank's part of the model. A failure in here or in the `with` block is reported to the other ranks.

    Raises what `build_engine` raises.
    """
    with phases("config"):
        _require_group_size(config, member)
        model_config = _read_model_config(config)
    with _kernel_compiler(config, member, phases) as compiler:
        with phases("imports"):
            # Here rather than at the top: torch loads with it, and a process that only names `Engine` needs no torch.
            from ..parallel.rank_group import RankGroup
            from .device import DeviceContext, device_for
            from .load import load_member

            device = device_for(config, member)
        check_speculation(model_config, config, device.type)
        membership = RankGroup(
            member,
            config.expert_spread,
            timeout_s=config.distributed_timeout_seconds,
            peer_memory=not config.disable_custom_all_reduce,
        )
        with membership.reporting_failure():
            with phases("join"):
                membership.join(device)
            for name, reason in config.ignored_on(device.type).items():
                logger.warning("%s is ignored: %s", name, reason)
            context = DeviceContext(device, member, membership.groups)
            yield load_member(config, model_config, membership, context, compiler, phases)


def _require_group_size(config: EngineConfig, member: Member) -> None:
    for name in ("tensor_parallel_size", "data_parallel_size"):
        asked, given = getattr(config, name), getattr(member, name)
        if asked != given:
            raise InvalidEngineConfig(
                name, f"is {asked}, but this process was started as a member of a group of {given}"
            )


def _read_model_config(config: EngineConfig) -> ModelConfig:
    """Read the checkpoint's config. Raises `InvalidEngineConfig` where the model cannot be served as asked."""
    model_config = load_config(
        config.model,
        dtype=DTYPES[config.dtype] or "auto",
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        kv_cache_dtype=config.kv_cache_dtype,
        seed=config.seed,
        window_caches=not config.disable_hybrid_kv_cache_manager,
    )
    check_division(model_config, config)
    check_speculation(model_config, config)
    return model_config


@contextmanager
def _kernel_compiler(config: EngineConfig, member: Member, phases: Phases) -> Iterator[Compiler | None]:
    """Start processes that compile GPU kernels; they import torch while this one does. None on a CPU, and on all ranks
    of a machine but its first, which compiles for all.
    """
    with phases("imports"):
        compiler = None if config.device == "cpu" or member.local_rank > 0 else start_compiler()
    if compiler is None:
        yield None
    else:
        with closing(compiler):
            yield compiler
