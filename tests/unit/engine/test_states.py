"""Models with recurrent states draw the same tokens however prompts are cut, cached, preempted and captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.config import EngineConfig, InvalidEngineConfig
from baton.engine.core.engine import EngineCore
from baton.engine.core.kv.cache_groups import FIRST_CHECKPOINT_TOKENS
from baton.engine.core.layout import BLOCK_SIZE, CHECKPOINT_TOKENS, STATE_ALIGNMENT, CacheKind, StateLayout
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduling.scheduler import Scheduler
from baton.engine.hf_config.errors import InvalidModelConfig, ModelError, UnsupportedModel
from baton.engine.layers.recurrent import part_of
from baton.engine.models import load_config, load_model
from baton.engine.offline.llm import LLM
from baton.engine.startup.build import build_engine
from baton.engine.startup.weight_counts import weights_of_rank
from baton.engine.worker.runner import ModelRunner
from baton.engine.worker.tables import CacheArenas
from baton.kernels.state_batch import LEAST_CUT

from ...helpers.checkpoints import STATEFUL, edit_config, make_model, write_checkpoint
from ...helpers.kv_memory import allocate_kv
from ...helpers.paged import random_tokens, reference_greedy
from .small_engines import LIMITS, answers, backend_of, hybrid_config, warmed_up_arenas

pytestmark = pytest.mark.exhaustive

CAPTURED_TOKENS = 0  # of the largest mixed step with a graph
CHECKPOINTS = 32  # tokens apart, so that short sequences have several
HYBRIDS = [name for name in STATEFUL if name != "qwen3_5_text"]  # which other tests here have


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("states") / "qwen3_5", "qwen3_5_text")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: write_checkpoint(tmp_path_factory.mktemp("states") / name, name))


def engine_of(
    folder: Path,
    kind: str = "cpu",
    *,
    num_blocks: int = 100,
    num_slots: int = 60,
    caching: bool = True,
    captured: bool = False,
) -> EngineCore:
    """Make an engine whose slots start as NaN, so that reading an unwritten one shows."""
    config = load_config(folder, dtype="float32")
    blocks, states = config.caches.groups
    arenas = [
        allocate_kv(blocks.blocks, num_blocks).fill_(1000.0),
        allocate_kv(states.blocks, num_slots).fill_(0xFF),
    ]
    runner = ModelRunner(
        load_model(config),
        CacheArenas(arenas, checkpoint_tokens=CHECKPOINTS),
        backend_of(kind, captured_tokens=CAPTURED_TOKENS),
        LIMITS,
        config.vocab_size,
    )
    if captured:
        runner.capture()
    core_config = hybrid_config(config, LIMITS, num_blocks, num_slots, CHECKPOINTS, enable_prefix_caching=caching)
    return EngineCore(Scheduler(core_config), runner)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_random_requests_are_answered_as_without_any_cache(folder: Path, kind: str, captured: bool, seed: int) -> None:
    ours = engine_of(folder, kind, captured=captured)
    expected = answers(engine_of(folder, caching=False), seed)
    assert answers(ours, seed) == expected
    assert answers(ours, seed) == expected, "the second time from the cache"
    assert ours.stats().prefix_cache_hits > 4 * CHECKPOINTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_hybrids_answer_as_without_any_cache(architecture: str, kind: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(architecture)
    ours, expected = engine_of(folder, kind, captured=True), answers(engine_of(folder, caching=False), 1)
    assert answers(ours, 1) == expected
    assert answers(ours, 1) == expected, "the second time from the cache"
    assert ours.stats().prefix_cache_hits > 4 * CHECKPOINTS
    small = engine_of(folder, kind, num_blocks=13, num_slots=4)
    assert answers(small, 1) == expected
    assert small.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "num_slots"), [(13, 60), (100, 2), (14, 4)])
def test_small_arenas_change_no_answer(folder: Path, num_blocks: int, num_slots: int) -> None:
    ours = engine_of(folder, num_blocks=num_blocks, num_slots=num_slots)
    assert answers(ours, 3) == answers(engine_of(folder, caching=False), 3)
    assert (ours.stats().num_preemptions > 0) == (num_blocks < 20)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_engine_with_states_warms_up(folder: Path, kind: str) -> None:
    config = load_config(folder, dtype="float32")
    arenas = warmed_up_arenas(config, kind, captured_tokens=CAPTURED_TOKENS)
    assert all(bool(arena.any()) for arena in arenas), "steps before the first request write to every arena"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_5_text", "olmo_hybrid", "falcon_h1", "nemotron_h"])
def test_prompts_longer_than_a_checkpoint_are_answered_as_transformers_does_and_then_from_the_cache(
    architecture: str, tmp_path: Path
) -> None:
    positions = {"max_position_embeddings": 2048}
    folder = write_checkpoint(tmp_path / "long", architecture, **positions)
    tokens = random_tokens(1030)
    prompts = [tokens[:length] for length in (CHECKPOINT_TOKENS, CHECKPOINT_TOKENS + 1, 1030)]
    reference = make_model(architecture, **positions)
    expected = [reference_greedy(reference, prompt, 4) for prompt in prompts]
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(folder, skip_tokenizer_init=True, device="cpu", max_num_batched_tokens=700) as llm:
        for cached in (None, [0, CHECKPOINT_TOKENS, 2 * CHECKPOINT_TOKENS]):
            outputs = llm.generate(inputs, sampling)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            assert cached in (None, [output.num_cached_tokens for output in outputs])


def test_the_parts_of_all_layers_share_a_slot_and_nothing_else(folder: Path) -> None:
    config = load_config(folder, dtype="bfloat16")
    full, states = config.caches.groups
    assert (full.kind, full.layers, states.kind, states.layers) == (CacheKind.FULL, (1,), CacheKind.STATE, (0, 2, 3))
    layout = states.blocks
    assert isinstance(layout, StateLayout)
    assert all(offset % STATE_ALIGNMENT == 0 for offset in layout.offsets)
    slots = torch.zeros(3, layout.block_bytes, dtype=torch.uint8)
    for layer in range(layout.num_layers):
        for part in range(len(layout.parts)):
            view = part_of(slots, layout, layer, part)
            assert view.shape == (3, *layout.parts[part].shape)
            assert not view.any()
            view[1] = 1.0
    assert not slots[[0, 2]].any()


def test_a_checkpoint_is_cut_where_kernels_can() -> None:
    assert FIRST_CHECKPOINT_TOKENS == LEAST_CUT
    assert CHECKPOINT_TOKENS % BLOCK_SIZE == 0


@pytest.mark.parametrize(
    ("architecture", "attention", "states"),
    [("falcon_h1", (0, 1, 2), (0, 1, 2)), ("granitemoehybrid", (1,), (0, 2)), ("nemotron_h", (2,), (0, 4))],
)
def test_a_layer_has_a_place_in_each_group_that_it_keeps_something_in(
    architecture: str, attention: tuple[int, ...], states: tuple[int, ...], folder_of: Callable[[str], Path]
) -> None:
    config = load_config(folder_of(architecture))
    assert [group.layers for group in config.caches.groups] == [attention, states]
    assert [config.caches.place_of(layer).index for layer in attention] == list(range(len(attention)))
    assert [config.caches.state_place_of(layer).index for layer in states] == list(range(len(states)))


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"])
def test_weights_are_counted_as_the_model_has_them(architecture: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(architecture)
    config = load_config(folder)
    slots = {slot.name: slot.num_elements for slot in load_model(config).slots()}
    counted = weights_of_rank(config, EngineConfig(model=str(folder)))
    tiny = ("A_log", ".D", "dt_bias", "q_norm.weight", "e_score_correction_bias")
    small = sum(size for name, size in slots.items() if name.endswith(tiny))
    assert counted.plain + counted.narrow == pytest.approx(sum(slots.values()) - small, rel=0.001)


@pytest.mark.parametrize(
    ("argument", "value"), [("tensor_parallel_size", 4), ("disable_hybrid_kv_cache_manager", True)]
)
def test_what_does_not_serve_these_states_is_refused_by_name(folder: Path, argument: str, value: object) -> None:
    config = EngineConfig.from_args({"model": str(folder), "device": "cpu", argument: value})
    with pytest.raises(InvalidEngineConfig, match=argument):
        build_engine(config)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"linear_conv_kernel_dim": 5}, UnsupportedModel, "only 2 to 4"),
        ({"linear_key_head_dim": 24}, UnsupportedModel, "multiples of 16"),
        ({"linear_num_value_heads": 3}, InvalidModelConfig, "a multiple of linear_num_key_heads"),
        ({"layer_types": ["linear_attention"] * 4}, UnsupportedModel, "without a full_attention layer"),
        ({"attn_output_gate": False}, UnsupportedModel, "attn_output_gate false"),
        ({"output_gate_type": "sigmoid"}, UnsupportedModel, "output_gate_type 'sigmoid' .*only 'swish'"),
        ({"layer_types": ["linear_attention"]}, InvalidModelConfig, "names 1 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, UnsupportedModel, "sliding_attention"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.01}},
            InvalidModelConfig,
            "even number",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 2}}, InvalidModelConfig, "at most 1"),
    ],
)
def test_configs_that_no_layer_computes_are_refused(
    tmp_path: Path, changes: dict[str, object], error: type[ModelError], text: str
) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3_5_text")
    edit_config(folder, **changes)
    with pytest.raises(error, match=text):
        load_config(folder)


def test_layer_types_follow_from_the_interval_where_they_are_left_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "qwen3_5_text")
    edit_config(folder, layer_types=None, full_attention_interval=2)
    linear = load_config(folder, load_format="dummy").linear
    assert linear is not None
    assert linear.layers == (True, False, True, False)
