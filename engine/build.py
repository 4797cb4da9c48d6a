"""From arguments to an engine that is ready: nothing is loaded or compiled after `build_engine` returns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.kernels.compiler import start_compiler

from .config import DTYPES, EngineConfig
from .core.connector import KVConnector
from .core.engine import EngineCore, EngineCoreConfig
from .core.layout import BLOCK_SIZE, KVLayout, KVRegion
from .model_config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Engine:
    """An engine that is ready to serve, and what others need to know of it."""

    core: EngineCore
    model_config: ModelConfig
    layout: KVLayout
    region: KVRegion  # valid as long as `core` lives
    max_model_len: int  # tokens, prompt and output together
    num_blocks: int
    startup_s: dict[str, float]  # by phase, in order


def build_engine(config: EngineConfig, connect: Callable[[KVRegion], KVConnector] | None = None) -> Engine:
    """Loads the model, takes the memory for its KV blocks, and runs what it will run, so that requests find it warm.

    `connect` gets the memory of the blocks before the first step and returns who moves them; it is called on this
    thread. Without it the engine neither offers nor receives blocks.

    Raises `InvalidEngineConfig` where the machine cannot serve the arguments, `ModelError` for a checkpoint that this
    version cannot load.
    """
    phases = _Phases()
    with phases("config"):
        model_config = ModelConfig.from_folder(
            config.model,
            dtype=DTYPES[config.dtype] or "auto",
            max_model_len=config.max_model_len,
            load_format=config.load_format,
            kv_cache_dtype=config.kv_cache_dtype,
            seed=config.seed,
        )
        layout = _layout_of(model_config)
    with phases("imports"):
        # Here rather than at the top: torch loads with it, and whoever only names an `Engine` has no use for torch.
        # Processes that compile for a GPU import it at the same time.
        compiler = None if config.device == "cpu" else start_compiler()
        from .worker.assembly import assembly_for, region_of

        assembly = assembly_for(config, compiler)
    for name, reason in config.ignored_on(assembly.device).items():
        logger.warning("%s is ignored: %s", name, reason)
    with phases("kernels"):
        assembly.prepare_kernels()
    with phases("weights"):
        model = assembly.load_weights(model_config)
    with phases("kv_cache"):
        max_model_len, num_blocks = assembly.size_kv_cache(model, model_config, layout)
        kv = assembly.allocate_kv(layout, num_blocks)
        region = region_of(kv, layout)
    with phases("connect"):
        connector = connect(region) if connect else None
    core_config = _core_config(config, model_config, max_model_len, num_blocks, config.depth_on(assembly.device))
    with phases("warm_up"):
        runner = assembly.make_runner(model, kv, model_config, core_config)
    core = EngineCore(core_config, runner, connector, late_compilations=assembly.late_compilations)
    phases.log(model_config.architecture, num_blocks)
    return Engine(core, model_config, layout, region, max_model_len, num_blocks, phases.seconds)


class _Phases:
    """Start-up is a feature: whoever makes a phase slower sees it in the log."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def log(self, what: str, num_blocks: int) -> None:
        logger.info(
            "%s is ready after %.2f s (%s) with %d KV blocks for %d tokens",
            what,
            sum(self.seconds.values()),
            ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items()),
            num_blocks,
            num_blocks * BLOCK_SIZE,
        )


def _layout_of(model_config: ModelConfig) -> KVLayout:
    return KVLayout(
        model=model_config.identity,
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.cache.num_kv_heads,
        num_planes=model_config.cache.num_planes,
        head_dim=model_config.cache.head_dim,
        dtype=model_config.cache_dtype,
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
