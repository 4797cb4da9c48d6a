"""A model folder's config is read without torch and transformers, and refused by name if it cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine.hf_config.errors import InvalidModelConfig, MaxModelLenTooLong
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.hf_config.rope import LinearRope, Llama3Rope, Rope, YarnRope
from baton.engine.models import load_config

from .published_configs import PLAIN, QWEN3_MOE, experts


def test_sizes_are_read(read: Callable[..., ModelConfig]) -> None:
    config = read()
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 32)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 64, 96)
    assert (config.dtype, config.max_model_len, config.rms_norm_eps) == ("bfloat16", 512, 1e-6)
    assert config.layer_windows == (None, None)


def test_reading_a_config_loads_neither_torch_nor_transformers(read: Callable[..., ModelConfig]) -> None:
    folder = read().folder
    code = (
        "import sys; from baton.engine.models import load_config; "
        f"load_config({str(folder)!r}, load_format='dummy'); "
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("architecture", "head_dim"), [("LlamaForCausalLM", 16), ("Qwen2ForCausalLM", 16), ("Qwen3ForCausalLM", 128)]
)
def test_a_missing_head_dim_has_the_default_of_transformers(
    read: Callable[..., ModelConfig], architecture: str, head_dim: int
) -> None:
    assert read(architectures=[architecture], head_dim=None).head_dim == head_dim


def test_key_value_heads_default_to_all_heads_in_llama(read: Callable[..., ModelConfig]) -> None:
    assert read(architectures=["LlamaForCausalLM"], num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": None}, Rope(10_000.0)),
        ({}, Rope(500.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, LinearRope(500.0, 2.0)),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, Rope(7.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            Llama3Rope(500.0, 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 256}},
            YarnRope(500.0, 1.0, 256, 1.0, 32.0, 1.0, True),
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, Rope(500.0)),
    ],
)
def test_rope_is_read_in_the_form_of_transformers_4_and_5(
    read: Callable[..., ModelConfig], keys: dict[str, Any], expected: Rope
) -> None:
    assert read(**keys).rope == expected


def test_yarn_extends_the_positions_of_a_config_that_states_the_original_length(
    read: Callable[..., ModelConfig],
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_scaling=yarn).max_model_len == 2048
    assert read(rope_scaling=yarn, max_position_embeddings=2048).max_model_len == 2048


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({"sliding_window": 8}, (None, None)),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        (
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
        ({"sliding_window": 8, "use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, (None, None)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (None, None)),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            (None, 4096),
        ),
    ],
)
def test_windows_follow_the_rules_of_each_architecture(
    read: Callable[..., ModelConfig], keys: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert read(**keys).layer_windows == expected


def test_a_null_sliding_window_is_no_window(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**PLAIN, "architectures": ["MistralForCausalLM"], "sliding_window": None})
    )
    assert load_config(tmp_path, load_format="dummy").layer_windows == (None, None)


def test_a_dense_model_has_no_experts(read: Callable[..., ModelConfig]) -> None:
    assert read().moe is None


def test_experts_are_read_under_the_names_of_transformers_4_and_5(read: Callable[..., ModelConfig]) -> None:
    found = experts(read(**QWEN3_MOE, moe_intermediate_size=24, norm_topk_prob=True))
    assert (found.num_experts, found.top_k, found.intermediate_size, found.renormalize) == (8, 2, 24, True)
    assert found.shared_intermediate_size == 0
    assert experts(read(**{**QWEN3_MOE, "num_experts": None, "num_local_experts": 6})).num_experts == 6


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, (False, False, False, True)),
    ],
)
def test_moe_layers_are_those_that_the_config_names(
    read: Callable[..., ModelConfig], keys: dict[str, Any], sparse: tuple[bool, ...]
) -> None:
    assert experts(read(**QWEN3_MOE, num_hidden_layers=4, **keys)).sparse_layers == sparse


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"num_experts_per_tok": 9}, "9 experts a token cannot be chosen from 8"),
        ({"mlp_only_layers": 1}, "'mlp_only_layers' must be a list"),
        ({"num_experts": 0}, "'num_experts' must be from 1"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' must be from 1"),
    ],
)
def test_experts_that_contradict_themselves_are_refused(
    read: Callable[..., ModelConfig], keys: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidModelConfig, match=named):
        read(**{**QWEN3_MOE, **keys})


def test_end_tokens_of_the_generation_config_win(read: Callable[..., ModelConfig]) -> None:
    assert read().eos_token_ids == (2,)
    assert read(eos_token_id=[5, 6, 5]).eos_token_ids == (5, 6)
    assert read(eos_token_id=None).eos_token_ids == ()
    assert read(eos_token_id=[-1, 5, 10**6]).eos_token_ids == (5,), "tokens outside of the vocabulary are never drawn"
    assert read(generation={"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    assert read(generation={"temperature": 0.6}).eos_token_ids == (2,)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_the_end_of_a_turn_that_only_the_tokenizer_names_is_a_stop_token(
    read: Callable[..., ModelConfig], tmp_path: Path, eos: Any
) -> None:
    added = {"2": {"content": "</s>"}, "7": {"content": "<|im_end|>"}}
    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({"eos_token": eos, "added_tokens_decoder": added}))
    assert read().eos_token_ids == (2, 7)
    assert read(generation={"eos_token_id": [7, 8]}).eos_token_ids == (7, 8)
    tokenizer.write_text(json.dumps({"eos_token": eos}))
    assert read(generation={"eos_token_id": [8]}).eos_token_ids == (8,)


def test_generation_defaults_are_those_of_the_checkpoint(read: Callable[..., ModelConfig]) -> None:
    assert read().generation.temperature is None
    defaults = read(generation={"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}).generation
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (0.6, 0.9, 20, None)


def test_dtype_is_the_checkpoints_unless_given(read: Callable[..., ModelConfig]) -> None:
    assert read(torch_dtype=None, dtype="float16").dtype == "float16"
    assert read(given={"dtype": "float32"}).dtype == "float32"
    assert read(torch_dtype=None).dtype == "float32"


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_linear_and_dynamic_scaling_extend_the_context_by_their_factor_if_requested(
    kind: str, read: Callable[..., ModelConfig]
) -> None:
    keys = {"rope_scaling": {"type": kind, "factor": 2.5}}
    assert read(**keys).max_model_len == 512
    assert read(**keys, given={"max_model_len": 1280}).max_model_len == 1280
    with pytest.raises(MaxModelLenTooLong, match=r"1281.*1280 positions"):
        read(**keys, given={"max_model_len": 1281})


def test_dynamic_scaling_depends_on_max_model_len_and_is_part_of_the_identity(
    read: Callable[..., ModelConfig],
) -> None:
    """Engines of other lengths rotate keys by other angles, so they must not read each other's."""
    keys = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    within, beyond = read(**keys, given={"max_model_len": 300}), read(**keys, given={"max_model_len": 1024})
    assert within.rope == Rope(500.0)
    assert beyond.rope == Rope(pytest.approx(500.0 * 3 ** (32 / 30)))
    assert within.identity == read(**keys).identity != beyond.identity


def test_identity_of_dummy_weights_depends_on_the_computation_and_the_seed_only(
    read: Callable[..., ModelConfig],
) -> None:
    identity = read().identity
    assert identity == read(transformers_version="9", generation={"temperature": 0.5}).identity
    assert identity == read(given={"max_model_len": 100}).identity
    assert identity != read(given={"seed": 1}).identity
    assert identity != read(rope_theta=501.0).identity
    assert identity != read(rms_norm_eps=1e-5).identity
