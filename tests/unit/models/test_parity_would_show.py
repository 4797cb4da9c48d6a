"""The parity tests are sensitive: without a rope, cap, state or window, logprobs differ from `transformers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.layout import StateLayout
from baton.engine.hf_config.rope import NO_ROPE, Rope
from baton.engine.layers.recurrent import part_of
from baton.engine.models import load_config, load_model

from ...helpers.checkpoints import STATEFUL, make_model, write_checkpoint
from ...helpers.paged import PagedRun, chunked_logprobs, random_tokens, reference_logprobs
from ...helpers.tiny_shapes import ROPES
from .parity_pairs import RECURRENT_TOLERANCE, TOLERANCE, Pair, assert_close

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("variant", [f"llama-rope-{name}" for name in ("theta", "linear", "llama3", "yarn")])
def test_a_dropped_rope_scaling_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    unscaled = load_model(dataclasses.replace(model.config, rope=pair("llama")[0].config.rope))
    tokens = random_tokens(100)
    error = (chunked_logprobs(unscaled, tokens, 100) - reference_logprobs(reference, tokens)).abs().max().item()
    assert error > 1000 * TOLERANCE


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        ("gemma2", {"embedding": 1.0}),
        ("gemma2", {"score": 32**-0.5}),
        ("gemma2", {"score_cap": None}),
        ("gemma2", {"logit_cap": None}),
        ("gemma3_text", {"embedding": 1.0}),
        ("gemma3_text", {"score": 32**-0.5}),
        ("gemma3_text-logit-cap", {"logit_cap": None}),
        ("mimo_v2_flash", {"attention_output": 1.0}),
        ("gemma4_text", {"embedding": 1.0}),
        ("gemma4_text", {"score": 32**-0.5}),
        ("gemma4_text", {"logit_cap": None}),
        ("falcon_h1", {"embedding": 1.0}),
        ("falcon_h1", {"score": 16**-0.5}),
        ("falcon_h1", {"attention_output": 1.0}),
        ("falcon_h1", {"mlp_gate": 1.0}),
        ("falcon_h1", {"mlp_output": 1.0}),
        ("falcon_h1", {"logit": 1.0}),
        ("granitemoehybrid", {"embedding": 1.0}),
        ("granitemoehybrid", {"score": 16**-0.5}),
        ("granitemoehybrid", {"attention_output": 1.0}),
        ("granitemoehybrid-dense", {"mlp_output": 1.0}),
        ("granitemoehybrid", {"logit": 1.0}),
    ],
)
def test_a_dropped_factor_or_cap_would_show(variant: str, change: dict[str, Any], pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    config = dataclasses.replace(model.config, scales=dataclasses.replace(model.config.scales, **change))
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(config), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("variant", "change"),
    [
        *(
            ("falcon_h1", {"multipliers": (1.2, 0.9, 0.8, 1.1, 0.7)[:part] + (3.0,) + (0.7,) * (4 - part)})
            for part in range(5)
        ),
        ("falcon_h1", {"output_multiplier": 1.0}),
        ("falcon_h1", {"norm": "gate first"}),
        ("falcon_h1-gate-first", {"norm": "norm first"}),
        ("granitemoehybrid", {"output_multiplier": 1.0}),
        ("bamba-time-steps", {"time_step_limits": (0.0, 0.2)}),
        ("bamba-time-steps", {"time_step_limits": (0.05, 9.0)}),
    ],
)
def test_a_wrong_part_of_mamba_would_show(variant: str, change: dict[str, Any], pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    assert model.config.mamba is not None
    config = dataclasses.replace(model.config, mamba=dataclasses.replace(model.config.mamba, **change))
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(config), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 20 * RECURRENT_TOLERANCE


@pytest.mark.parametrize("variant", STATEFUL)
@pytest.mark.parametrize("part", [0, 1], ids=["convolution", "state"])
def test_a_state_lost_between_chunks_would_show(variant: str, part: int, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)
    run = PagedRun(model, 1, 100)
    run.step([(0, tokens[:64])])
    states = model.config.caches.groups[1].blocks
    assert isinstance(states, StateLayout)
    for layer in range(states.num_layers):
        part_of(run.arenas[1], states, layer, part).zero_()
    error = (run.step([(0, tokens[64:])])[0] - reference_logprobs(reference, tokens)[64:]).abs().max().item()
    assert error > 20 * RECURRENT_TOLERANCE


@pytest.mark.parametrize("variant", ["granitemoehybrid", "nemotron_h", "olmo_hybrid", "olmo_hybrid-rotated"])
def test_a_missing_or_additional_rotation_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    rope = Rope(500.0) if model.config.rope == NO_ROPE else NO_ROPE
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(dataclasses.replace(model.config, rope=rope)), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 20 * RECURRENT_TOLERANCE


@pytest.mark.parametrize("variant", ["gemma3_text", "mimo_v2_flash"])
def test_a_dropped_rope_of_window_layers_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)
    other = chunked_logprobs(load_model(dataclasses.replace(model.config, window_rope=None)), tokens, 100)
    assert (other - reference_logprobs(reference, tokens)).abs().max().item() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_a_context_beyond_the_stated_one_is_scaled_as_transformers_scales_it(kind: str, tmp_path: Path) -> None:
    """Dynamic scaling depends on the longest sequence that is served; this test's has exactly that length."""
    keys: dict[str, Any] = {"rope": ROPES[kind], "max_position_embeddings": 64}
    folder = write_checkpoint(tmp_path, "llama", **keys)
    model = load_model(load_config(folder, max_model_len=120))
    tokens = random_tokens(120)
    assert_close(chunked_logprobs(model, tokens, 37), reference_logprobs(make_model("llama", **keys), tokens), model)


@pytest.mark.parametrize(
    "variant",
    [
        "mistral",
        "qwen2-window",
        "qwen3-window",
        "mixtral",
        "gpt_oss",
        "gemma2",
        "gemma3_text",
        "mimo_v2_flash",
        "gemma4_text",
    ],
)
def test_a_sliding_window_of_one_key_more_or_less_would_show(variant: str, pair: Callable[..., Pair]) -> None:
    model, reference = pair(variant)
    tokens = random_tokens(100)
    expected = reference_logprobs(reference, tokens)
    for change in (-1, 1):
        windows = tuple(window and window + change for window in model.config.layer_windows)
        other = load_model(dataclasses.replace(model.config, layer_windows=windows))
        assert (chunked_logprobs(other, tokens, 100) - expected).abs().max().item() > 100 * TOLERANCE
