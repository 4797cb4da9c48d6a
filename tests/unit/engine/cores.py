"""Engine cores over either backend's runner, without start-up, and their answers."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.core.config import CacheGroupConfig, EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.messages import EngineOutput, EngineRequest
from baton.engine.core.requests.drafting import Drafting
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_model
from baton.engine.parallel.groups import ALL_ALONE
from baton.engine.startup.arenas import engine_caches
from baton.engine.startup.device import load_draft_model
from baton.engine.worker.backends import Backend
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.shapes import StepLimits
from baton.engine.worker.tables import CacheArenas

from ...helpers.at_once import make_masks_at_once
from ...helpers.kv_memory import allocate_kv
from .narrow_grammars import NarrowGrammars


class Engines:
    """Engines of one tiny model. Their blocks start as NaN, so that reading an unwritten one changes the answer."""

    def __init__(self, config: ModelConfig, limits: StepLimits) -> None:
        self.config = config
        self.limits = limits
        self.model = load_model(config)
        self.draft_model = load_draft_model(config, self.model, progress=lambda *_: None, groups=ALL_ALONE)

    def runner(self, backend: Backend, num_blocks: int) -> ModelRunner:
        """Make a runner with so many blocks in each cache group."""
        layout, own, _ = engine_caches(self.config)
        tensors = [allocate_kv(group.blocks, num_blocks).fill_(float("nan")) for group in layout.groups]
        arenas = CacheArenas(tensors, own)
        return ModelRunner(self.model, arenas, backend, self.limits, self.config.vocab_size, self.draft_model)

    def core(self, runner: ModelRunner, num_blocks: int, depth: int, drafting: Drafting | None = None) -> EngineCore:
        groups = engine_caches(self.config).layout.groups
        config = EngineCoreConfig(
            num_blocks=num_blocks * len(groups),
            cache_groups=[CacheGroupConfig(num_blocks=num_blocks, window=group.window) for group in groups],
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.config.vocab_size,
            eos_token_ids=[2],
            depth=depth,
        )
        core = EngineCore(Scheduler(config, drafting=drafting, grammars=NarrowGrammars()), runner)
        make_masks_at_once(core)
        return core


def answers_of(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    for request in requests:
        core.add(request)
    while core.has_work():
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_and_logprobs(outputs: Sequence[EngineOutput]) -> tuple[list[int], list[float]]:
    tokens = [token for output in outputs for token in output.token_ids]
    values = [entry.logprobs[0] for output in outputs if output.logprobs for entry in output.logprobs]
    return tokens, values
