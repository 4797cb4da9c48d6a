"""Models whose windowed layers keep their window only draw what they draw where every layer keeps everything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.core.config import CacheGroupConfig, EngineCoreConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.layout import CacheKind
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config, load_model
from baton.engine.startup.arenas import needs_of
from baton.engine.startup.build import build_engine
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.tables import CacheArenas

from ...helpers.checkpoints import write_checkpoint
from ...helpers.kv_memory import allocate_kv
from .random_workload import live, same
from .small_engines import LIMITS, answers, backend_of, warmed_up_arenas

pytestmark = pytest.mark.exhaustive

CAPTURED_TOKENS = 32  # of the largest mixed step with a graph
VARIANTS = {
    "gpt_oss": "gpt_oss",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "mistral": "mistral",  # all layers are windowed
    "mimo_v2_flash": "mimo_v2_flash",  # windowed layers have other heads, keys are wider than values
    "gemma4": "gemma4_text",  # windowed layers have other heads, the last layers read other layers' KV
}


def in_groups(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, window_caches=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, written = tmp_path_factory.mktemp("windows"), dict[str, Path]()

    def write(variant: str) -> Path:
        if variant not in written:
            written[variant] = write_checkpoint(root / variant, VARIANTS[variant], sliding_window=24)
        return written[variant]

    return write


def engine_of(config: ModelConfig, num_blocks: int, kind: str = "cpu", *, captured: bool = False) -> EngineCore:
    """Make an engine with so many blocks in each arena, filled with a number that shows if it has any weight."""
    groups = config.caches.groups
    arenas = [allocate_kv(group.blocks, num_blocks).fill_(1000.0) for group in groups]
    runner = ModelRunner(
        load_model(config),
        CacheArenas(arenas),
        backend_of(kind, captured_tokens=CAPTURED_TOKENS),
        LIMITS,
        config.vocab_size,
    )
    if captured:
        runner.capture()
    core_config = EngineCoreConfig(
        num_blocks=num_blocks * len(groups),
        cache_groups=[CacheGroupConfig(num_blocks=num_blocks, window=group.window) for group in groups],
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_model_len=LIMITS.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=[2],
    )
    return EngineCore(Scheduler(core_config), runner)


def test_layers_are_grouped_by_what_they_keep(folders: Callable[[str], Path]) -> None:
    config = load_config(folders("gpt_oss"), dtype="float32")
    assert [group.kind for group in config.caches.groups] == [CacheKind.FULL]
    full, windowed = in_groups(config).caches.groups
    assert (full.kind, full.window, windowed.kind, windowed.window) == (CacheKind.FULL, None, CacheKind.WINDOW, 24)
    for group in (full, windowed):
        assert group.layers == tuple(
            layer for layer, window in enumerate(config.layer_windows) if window == group.window
        )
        assert group.blocks.num_layers == len(group.layers)
    model = load_model(in_groups(config))
    places = [layer.self_attn.place for layer in model.model.layers]  # type: ignore[attr-defined]
    for number, group in enumerate((full, windowed)):
        assert [place.index for place in places if place.group == number] == list(range(len(group.layers)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(2))
def test_random_lives_are_those_with_one_group(
    folders: Callable[[str], Path], variant: str, seed: int, captured: bool, kind: str
) -> None:
    config = load_config(folders(variant), dtype="float32")
    ours = engine_of(in_groups(config), 100, kind, captured=captured)
    theirs = engine_of(config, 100)
    for outputs, expected in zip(live(ours, seed), live(theirs, seed), strict=True):
        assert len(outputs) == len(expected)
        assert all(map(same, outputs, expected)), (outputs, expected)
    assert ours.stats().prefix_cache_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_small_arenas_preempt_and_change_no_answer(folders: Callable[[str], Path], variant: str) -> None:
    config = load_config(folders(variant), dtype="float32")
    ours, theirs = engine_of(in_groups(config), 12), engine_of(config, 100)
    for seed in range(3, 7):  # how long answers are depends on the seed, and so whether they need all blocks
        assert answers(ours, seed) == answers(theirs, seed)
    assert ours.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_engine_with_groups_warms_up(folders: Callable[[str], Path], kind: str) -> None:
    config = in_groups(load_config(folders("gpt_oss"), dtype="float32"))
    arenas = warmed_up_arenas(config, kind, captured_tokens=CAPTURED_TOKENS)
    assert all(bool(torch.isfinite(arena).all()) for arena in arenas)
    assert all(bool(arena.any()) for arena in arenas), "steps before the first request write to every arena"


ARGS = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 200, "max_num_seqs": 4}


def test_engines_give_back_with_tiers_too_unless_they_are_to_keep_all(folders: Callable[[str], Path]) -> None:
    args = {**ARGS, "model": str(folders("gpt_oss")), "num_gpu_blocks_override": 60}
    alone = build_engine(EngineConfig.from_args(args))
    assert [group.kind for group in alone.region.caches.groups] == [CacheKind.FULL, CacheKind.WINDOW]
    most = needs_of(alone.region.caches.groups[1]).at_full_load(4, 200)
    assert [group.num_blocks for group in alone.core.config.groups] == [60, min(60, most)]
    kept = build_engine(EngineConfig.from_args(args | {"disable_hybrid_kv_cache_manager": True}))
    reader = build_engine(EngineConfig.from_args(args), connect=lambda region: None)  # type: ignore[arg-type,return-value]
    tiered = build_engine(EngineConfig.from_args(args), open_tiers=lambda region: None)  # type: ignore[arg-type,return-value]
    assert kept.region.caches.only.kind == CacheKind.FULL
    assert alone.region.caches.fingerprint == reader.region.caches.fingerprint == tiered.region.caches.fingerprint
    assert alone.region.caches.fingerprint != kept.region.caches.fingerprint
    for engine in (alone, kept, reader, tiered):
        engine.close()
