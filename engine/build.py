"""From arguments to an engine that is ready: nothing is loaded or compiled after `build_engine` returns."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import EngineConfig
from .core.connector import KVConnector
from .core.engine import EngineCore, EngineCoreConfig
from .core.layout import BLOCK_SIZE, KVLayout, KVRegion
from .core.tiers import KVTiers
from .hf_config.model_config import ModelConfig
from .parallel.member import ALONE_MEMBER, Member
from .phases import Phases
from .prepare import prepared

if TYPE_CHECKING:
    from .loading import LoadedMember
    from .structured import Grammars

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """An engine that is ready to serve, and what others need to know of it."""

    core: EngineCore
    model_config: ModelConfig
    layout: KVLayout
    region: KVRegion  # this rank's; valid as long as `core` lives
    max_model_len: int  # tokens, prompt and output together
    num_blocks: int
    startup_s: dict[str, float]  # by phase, in order
    grammars: Grammars | None  # None: it has no tokenizer
    close: Callable[[], None]  # ends the engine's group, and what it has not finished


def build_engine(
    config: EngineConfig,
    connect: Callable[[KVRegion], KVConnector] | None = None,
    member: Member = ALONE_MEMBER,
    *,
    open_tiers: Callable[[KVRegion], KVTiers] | None = None,
) -> Engine:
    """Loads the model, takes the memory for its KV blocks, and runs what it will run, so that requests find it warm.

    `connect` gets the memory of the blocks before the first step and returns who moves them; it is called on this
    thread, and so is `open_tiers`, which returns who keeps blocks that the pool may lose. Without the first the engine
    neither offers nor receives blocks, without the second it forgets what it evicts. Of a tensor-parallel group,
    `member` is the rank that schedules; the others `follow`, and move their shares of the blocks as theirs tells them.

    Raises `InvalidEngineConfig` where the machine cannot serve the arguments, `ModelError` for a checkpoint that this
    version cannot load, `GroupFailed` where another member of the group does not come or fails.
    """
    assert member.tp_rank == 0, "ranks that do not schedule follow"
    phases = Phases()
    with prepared(config, member, phases) as ready:
        with phases("connect"):
            connector = connect(ready.region) if connect else None
            tiers = open_tiers(ready.region) if open_tiers else None
        with phases("warm_up"):
            runner = ready.make_runner()
        grammars = _grammars(config, ready.core_config)
        core = EngineCore(
            ready.core_config,
            ready.membership.leading(runner),
            connector,
            late_compilations=ready.late_compilations,
            expert_review=ready.expert_review,
            lockstep=ready.membership.lockstep(review_experts_every=config.eplb_step_interval),
            tiers=tiers,
            grammars=grammars,
        )
    _log_ready(ready, phases)
    return Engine(
        core=core,
        model_config=ready.model_config,
        layout=ready.model_config.layout,
        region=ready.region,
        max_model_len=ready.core_config.max_model_len,
        num_blocks=ready.core_config.num_blocks,
        startup_s=phases.seconds,
        grammars=grammars,
        close=lambda: _close(ready, grammars),
    )


def _log_ready(ready: LoadedMember, phases: Phases) -> None:
    num_blocks = ready.core_config.num_blocks
    logger.info(
        "%s is ready in %.2f s (%s) with %d KV blocks for %d tokens",
        ready.model_config.architecture,
        phases.total,
        phases,
        num_blocks,
        num_blocks * BLOCK_SIZE,
        extra={"startup_s": phases.seconds},
    )


def _close(ready: LoadedMember, grammars: Grammars | None) -> None:
    ready.close()
    if grammars is not None:
        grammars.close()


def follow(config: EngineConfig, member: Member, connect: Callable[[KVRegion], object] | None = None) -> None:
    """Is one of the ranks of a tensor-parallel group that do not schedule, until the group ends.

    `connect` gets the memory of this rank's share of the blocks; what it returns is kept for as long. Raises what
    `build_engine` raises, and `GroupFailed` where the group ends before its time.
    """
    assert member.tp_rank > 0, "the rank that schedules is built"
    phases = Phases()
    with prepared(config, member, phases) as ready:
        with phases("connect"):
            connected = connect(ready.region) if connect else None
        with phases("warm_up"):
            runner = ready.make_runner()
        logger.info("rank %d is ready in %.2f s (%s)", member.rank, phases.total, phases)
        ready.membership.follow(runner, depth=ready.core_config.depth)
    ready.close()
    del connected


def _grammars(config: EngineConfig, core_config: EngineCoreConfig) -> Grammars | None:
    """None without a tokenizer: grammars are about text."""
    if config.skip_tokenizer_init:
        return None
    folder = config.tokenizer or config.model
    from .structured import Grammars, Vocabulary  # loads numpy

    return Grammars(Vocabulary(folder, core_config.vocab_size, core_config.eos_token_ids))
