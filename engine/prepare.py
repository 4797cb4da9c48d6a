"""The way of every member of a group to a loaded model: arguments, its fellows, weights and blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from baton.kernels.compiler import Compiler, start_compiler

from .config import DTYPES, EngineConfig, InvalidEngineConfig
from .hf_config.model_config import ModelConfig
from .parallel.division import check_division
from .parallel.member import Member
from .phases import Phases

if TYPE_CHECKING:
    from .loading import LoadedMember

logger = logging.getLogger(__name__)


@contextmanager
def prepared(config: EngineConfig, member: Member, phases: Phases) -> Iterator[LoadedMember]:
    """What fails in here or within, the other members of the group hear of. Raises what `build_engine` raises."""
    with phases("config"):
        _require_its_member(config, member)
        model_config = _read_model(config)
    with _compiling(config, member, phases) as compiler:
        with phases("imports"):
            # Here rather than at the top: torch loads with it, and whoever only names an `Engine` has no use for torch.
            from .loading import load_member
            from .parallel.membership import Membership
            from .worker.workplace import Workplace, device_for

            device = device_for(config, member)
        membership = Membership(
            member,
            config.expert_spread,
            timeout_s=config.distributed_timeout_seconds,
            peer_memory=not config.disable_custom_all_reduce,
        )
        with membership.telling():
            with phases("join"):
                membership.join(device)
            for name, reason in config.ignored_on(device.type).items():
                logger.warning("%s is ignored: %s", name, reason)
            place = Workplace(device, member, membership.groups)
            yield load_member(config, model_config, membership, place, compiler, phases)


@contextmanager
def _compiling(config: EngineConfig, member: Member, phases: Phases) -> Iterator[Compiler | None]:
    """Processes that compile for a GPU, and import torch at the same time as this one; None where there are none."""
    with phases("imports"):
        compiler = None if config.device == "cpu" or member.local_rank > 0 else start_compiler()
    if compiler is None:
        yield None
    else:
        with closing(compiler):
            yield compiler


def _read_model(config: EngineConfig) -> ModelConfig:
    """What the checkpoint says, where it can be divided as the arguments ask."""
    model_config = ModelConfig.from_folder(
        config.model,
        dtype=DTYPES[config.dtype] or "auto",
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        kv_cache_dtype=config.kv_cache_dtype,
        seed=config.seed,
    )
    check_division(model_config, config)
    return model_config


def _require_its_member(config: EngineConfig, member: Member) -> None:
    for name in ("tensor_parallel_size", "data_parallel_size"):
        asked, given = getattr(config, name), getattr(member, name)
        if asked != given:
            raise InvalidEngineConfig(
                name, f"is {asked}, but this process was started as a member of a group of {given}"
            )
