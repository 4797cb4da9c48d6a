"""The engine of a rank that schedules, and the loop of one that follows. Neither loads or compiles anything later."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kernels.compiler import Compiler, start_compiler

from ..config import EngineConfig, InvalidEngineConfig
from ..core.config import EngineCoreConfig
from ..core.connector import KVConnector
from ..core.engine import EngineCore
from ..core.layout import BLOCK_SIZE
from ..core.regions import CacheRegion
from ..core.requests.drafting import make_drafting
from ..core.scheduling.scheduler import Scheduler
from ..core.tiers import KVTiers
from ..hf_config.model_config import ModelConfig
from ..parallel.member import ALONE_MEMBER, Member
from .model_config import read_model_config
from .phases import Phases

if TYPE_CHECKING:
    from ..structured import XGrammarBackend
    from .load import LoadedMember

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """An engine that is ready to serve."""

    core: EngineCore  # `core.config` has the sizes: of sequences, of steps, and the number of blocks
    model_config: ModelConfig
    region: CacheRegion  # this rank's blocks; valid as long as `core` lives
    startup_s: dict[str, float]  # seconds by phase, in order
    grammars: XGrammarBackend | None  # None: the engine has no tokenizer
    close: Callable[[], None]  # leaves the group, and ends the process that compiles grammars


def build_engine(
    config: EngineConfig,
    connect: Callable[[CacheRegion], KVConnector] | None = None,
    member: Member = ALONE_MEMBER,
    *,
    open_tiers: Callable[[CacheRegion], KVTiers] | None = None,
) -> Engine:
    """Load the model, allocate its KV blocks and run every kind of step once, so that no request has to wait for that.

    `connect` and `open_tiers` are called on this thread, before the first step, with the memory of the KV blocks. The
    first returns the connector that transfers blocks between engines: without it, blocks are neither offered nor
    received. The second returns the tiers that store copies of blocks: without it, evicted blocks are lost. In a
    tensor-parallel group, `member` is the rank that schedules; the other ranks run `follow`.

    Raises `InvalidEngineConfig` if the machine cannot serve the arguments, `ModelError` for a checkpoint that this
    version cannot load, `GroupFailed` if another member of the group does not arrive, or fails.
    """
    assert member.tp_rank == 0, "ranks that do not schedule follow"
    phases = Phases()
    with start_member(config, member, phases) as loaded:
        with phases("connect"):
            connector = connect(loaded.region) if connect else None
            tiers = open_tiers(loaded.region) if open_tiers else None
        with phases("warm_up"):
            runner = loaded.make_runner()
        grammars = _grammars(config, loaded.core_config)
        drafting = make_drafting(loaded.core_config, loaded.device_type)
        core = EngineCore(
            Scheduler(loaded.core_config, connector, tiers=tiers, grammars=grammars, drafting=drafting),
            loaded.membership.leading(runner),
            lockstep=loaded.membership.lockstep(review_experts_every=config.eplb_step_interval),
            yielding=loaded.yielding,
            add_runner_stats=loaded.add_runner_stats,
        )
    ends = ExitStack()  # runs in the opposite order
    if grammars is not None:
        ends.callback(grammars.close)
    ends.callback(loaded.close)
    ends.enter_context(_start_up_frozen())
    _log_ready(loaded, phases)
    return Engine(
        core=core,
        model_config=loaded.model_config,
        region=loaded.region,
        startup_s=phases.seconds,
        grammars=grammars,
        close=ends.close,
    )


def follow(config: EngineConfig, member: Member, connect: Callable[[CacheRegion], object] | None = None) -> None:
    """Run the steps that the scheduling rank of a tensor-parallel group sends, until the group ends.

    `connect` gets the memory of this rank's part of the KV blocks; its result is kept alive until then. Raises what
    `build_engine` raises, and `GroupFailed` if the group ends too early.
    """
    assert member.tp_rank > 0, "the rank that schedules is built"
    phases = Phases()
    with start_member(config, member, phases) as loaded:
        with phases("connect"):
            connected = connect(loaded.region) if connect else None
        with phases("warm_up"):
            runner = loaded.make_runner()
        with _start_up_frozen():
            logger.info("rank %d is ready in %.2f s (%s)", member.rank, phases.total, phases)
            loaded.membership.follow(runner, depth=loaded.core_config.depth)
    loaded.close()
    del connected


def _grammars(config: EngineConfig, core_config: EngineCoreConfig) -> XGrammarBackend | None:
    """Return the compiler of structured outputs; None without a tokenizer, since grammars describe text."""
    if config.skip_tokenizer_init:
        return None
    folder = config.tokenizer or config.model
    from ..structured import GrammarVocabulary, XGrammarBackend  # loads numpy

    return XGrammarBackend(GrammarVocabulary(folder, core_config.vocab_size, core_config.eos_token_ids))


def _log_ready(loaded: LoadedMember, phases: Phases) -> None:
    num_blocks = loaded.core_config.num_blocks
    num_tokens = max(group.num_blocks for group in loaded.core_config.groups) * BLOCK_SIZE
    logger.info(
        "%s is ready in %.2f s (%s) with %d KV blocks for %d tokens, and steps of up to %d requests and %d tokens",
        loaded.model_config.architecture,
        phases.total,
        phases,
        num_blocks,
        num_tokens,
        loaded.core_config.max_num_seqs,
        loaded.core_config.max_num_batched_tokens,
        extra={"startup_s": phases.seconds},
    )


@contextmanager
def _start_up_frozen() -> Iterator[None]:
    """Exempt the objects that exist when an engine is ready from garbage collection, within the context.

    There are about 300 000, mostly of libraries: a full collection would take 0.15 s to look through them, while steps
    wait. Does nothing if the process has frozen objects already.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def start_member(config: EngineConfig, member: Member, phases: Phases) -> Iterator[LoadedMember]:
    """Join the group, and load this rank's part of the model.

    A failure here or in the `with` block is reported to the other ranks. Raises what `build_engine` raises.
    """
    with phases("config"):
        _require_group_size(config, member)
        model_config = read_model_config(config)
    with _kernel_compiler(config, member, phases) as compiler:
        with phases("imports"):
            # Not at the top, because these load torch, and a process that only names `Engine` needs no torch.
            from ..parallel.rank_group import RankGroup
            from .device import RankContext, device_for
            from .load import load_member

            device = device_for(config, member)
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
            context = RankContext(config, model_config, device, member, membership.groups)
            yield load_member(context, membership, compiler, phases)


def _require_group_size(config: EngineConfig, member: Member) -> None:
    for name in ("tensor_parallel_size", "data_parallel_size"):
        asked, given = getattr(config, name), getattr(member, name)
        if asked != given:
            raise InvalidEngineConfig(
                name, f"is {asked}, but this process was started as a member of a group of {given}"
            )


@contextmanager
def _kernel_compiler(config: EngineConfig, member: Member, phases: Phases) -> Iterator[Compiler | None]:
    """Start processes that compile GPU kernels; they import torch while this one does. Yields None on a CPU, and on all
    ranks of a machine but the first, which compiles for all.
    """
    with phases("imports"):
        compiler = None if config.device == "cpu" or member.local_rank > 0 else start_compiler()
    if compiler is None:
        yield None
    else:
        with closing(compiler):
            yield compiler
