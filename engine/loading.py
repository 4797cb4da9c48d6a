"""A member's model in its memory, and the blocks beside it. Loads torch: `engine.prepare` says when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton.kernels.compiler import Compiler

from .config import EngineConfig
from .core.engine import EngineCoreConfig
from .core.layout import KVRegion
from .core.messages import ExpertReview
from .core.step import Runner
from .hf_config.model_config import ModelConfig
from .parallel.balance import ExpertBalancer, ReviewingRunner
from .parallel.membership import Membership
from .phases import Phases
from .worker.assembly import assembly_for, region_of
from .worker.workplace import Workplace

_CLOSE_S = 5.0


@dataclass(frozen=True)
class LoadedMember:
    """A member whose model is loaded and whose blocks have their memory."""

    membership: Membership
    model_config: ModelConfig
    core_config: EngineCoreConfig
    region: KVRegion
    make_runner: Callable[[], Runner]
    late_compilations: Callable[[], int]
    expert_review: Callable[[], ExpertReview] | None  # None: no experts are spread over ranks
    release: Callable[[], None]

    def close(self) -> None:
        """Leaves the group. What was captured goes in between: it holds on to the group, and may wait for its end."""
        self.membership.close()
        self.release()
        self.membership.groups.wait_closed(_CLOSE_S)


def load_member(
    config: EngineConfig,
    model_config: ModelConfig,
    membership: Membership,
    place: Workplace,
    compiler: Compiler | None,
    phases: Phases,
) -> LoadedMember:
    """All members of the group do it at the same time: the least of what they have room for is what all take."""
    layout, member, widest = model_config.layout, place.member, place.groups.widest
    heads = layout.heads_of(member.tp_rank, member.tensor_parallel_size)
    own_layout = msgspec.structs.replace(layout, num_kv_heads=len(heads))  # of what lies on this rank
    with phases("kernels"):
        assembly = assembly_for(config, place, phases, compiler)
        assembly.prepare_kernels(model_config, own_layout)
    with phases("weights"):
        model = assembly.load_weights(model_config)
    with phases("kv_cache"):
        sizes = assembly.size_kv_cache(model, model_config, own_layout)
        max_model_len, num_blocks = (-size for size in widest.agree([-size for size in sizes]))
        kv = assembly.allocate_kv(own_layout, num_blocks)
    core_config = _core_config(config, model_config, max_model_len, num_blocks, config.depth_on(assembly.device))
    balancer = ExpertBalancer.of(model, place.groups, moves=config.enable_eplb)

    def make_runner() -> Runner:
        runner = assembly.make_runner(model, kv, model_config, core_config)
        widest.agree([0])  # nobody serves before all can
        return runner if balancer is None else ReviewingRunner(runner, balancer, assembly.in_order)

    return LoadedMember(
        membership=membership,
        model_config=model_config,
        core_config=core_config,
        region=region_of(kv, layout, heads.start),
        make_runner=make_runner,
        late_compilations=assembly.late_compilations,
        expert_review=None if balancer is None else lambda: balancer.last,
        release=assembly.release,
    )


def _core_config(
    config: EngineConfig, model_config: ModelConfig, max_model_len: int, num_blocks: int, depth: int
) -> EngineCoreConfig:
    return EngineCoreConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        eos_token_ids=list(model_config.eos_token_ids),
        vocab_size=model_config.vocab_size,
        depth=depth,
    )
