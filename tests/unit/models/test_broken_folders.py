"""Any content of a model's files is read, or refused with a typed error, never with another exception."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.hf_config.checkpoint import Checkpoint
from baton.engine.hf_config.errors import ModelError
from baton.engine.models import load_config

from .small_config import SIZES

KEYS: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    **SIZES,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
    "rope_parameters": {"rope_type": "default"},
    "original_max_position_embeddings": 256,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "sliding_attention"],
    "quantization_config": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": False,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
}
GENERATION: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "eos_token_id": [2], "max_new_tokens": 5}
ROPE = (
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "rope_theta",
    "beta_fast",
    "mscale",
    "mscale_all_dim",
)

numbers = st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none()
leaves = numbers | st.text(max_size=5)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
ropes = st.dictionaries(st.sampled_from(ROPE), values | st.sampled_from(["yarn", "llama3", "linear"]), max_size=5)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    architecture=st.sampled_from(["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"]),
    changes=st.dictionaries(st.sampled_from(sorted(KEYS)), values, max_size=3),
    rope=st.none() | ropes,
    generation=st.dictionaries(st.sampled_from(sorted(GENERATION)), values, max_size=2),
)
def test_any_json_in_a_config_is_read_or_refused(
    tmp_path_factory: Any,
    architecture: str,
    changes: dict[str, Any],
    rope: dict[str, Any] | None,
    generation: dict[str, Any],
) -> None:
    folder = Path(tmp_path_factory.getbasetemp())
    config = {
        **KEYS,
        "architectures": [architecture],
        **({"rope_scaling": rope} if rope is not None else {}),
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({**GENERATION, **generation}))
    with contextlib.suppress(ModelError):
        load_config(folder, load_format="dummy")


entries = st.fixed_dictionaries(
    {}, optional={"dtype": values | st.just("F32"), "shape": values, "data_offsets": values | st.just([0, 4])}
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(header=values | st.dictionaries(st.text(max_size=5), values | entries, max_size=3), data=st.binary(max_size=8))
def test_any_header_of_a_weights_file_is_read_or_refused(tmp_path_factory: Any, header: Any, data: bytes) -> None:
    folder = Path(tmp_path_factory.getbasetemp())
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with contextlib.suppress(ModelError):
        Checkpoint.open(folder).fingerprint()
