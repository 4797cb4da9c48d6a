"""Sizes that do not divide over the ranks are refused with the argument's name, before anything starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.engine import EngineConfig, InvalidEngineConfig
from baton.engine.models import load_config
from baton.engine.startup.division import check_division

from ...helpers.tiny_shapes import DIFFERENCES, SHAPE

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., None]:
    """Return a function that checks a model of config keys against engine arguments."""

    def run(kind: str, keys: dict[str, Any], **args: Any) -> None:
        raw = {**SHAPE, **DIFFERENCES[kind], **keys, "architectures": [ARCHITECTURES[kind]], "model_type": kind}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model = load_config(tmp_path, load_format="dummy")
        check_division(model, EngineConfig.from_args({"model": str(tmp_path), **args}))

    return run


@pytest.mark.parametrize(
    ("kind", "keys", "args"),
    [
        ("qwen3", {}, {"tensor_parallel_size": 2}),
        ("qwen3", {}, {"tensor_parallel_size": 4}),  # each of two KV heads twice
        ("qwen3", {"vocab_size": 251}, {"tensor_parallel_size": 4}),  # padded
        ("qwen3", {}, {"data_parallel_size": 3}),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 6}, {"tensor_parallel_size": 3}),
        ("deepseek_v2", {}, {"tensor_parallel_size": 4}),  # latents have one head, which all ranks keep
        ("qwen3_moe", {"num_experts": 6}, {"data_parallel_size": 3, "enable_expert_parallel": True}),
        ("qwen3_moe", {"moe_intermediate_size": 41}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
        (
            "qwen3_moe",
            {"num_experts": 6},
            {"tensor_parallel_size": 4, "enable_expert_parallel": True, "num_redundant_experts": 2},
        ),
        (
            "qwen3",  # ranks have 192 of 384 values, which are not whole blocks
            {"head_dim": 64, "intermediate_size": 384, "quantization_config": BLOCKS},
            {"tensor_parallel_size": 2},
        ),
    ],
)
def test_sizes_that_divide_are_accepted(check: Callable[..., None], kind: str, keys: Any, args: Any) -> None:
    check(kind, keys, **args)


@pytest.mark.parametrize(
    ("kind", "keys", "args", "field", "message"),
    [
        ("qwen3", {}, {"tensor_parallel_size": 3}, "tensor_parallel_size", r"num_attention_heads \(4\)"),
        ("qwen3", {"intermediate_size": 95}, {"tensor_parallel_size": 2}, "tensor_parallel_size", "intermediate_size"),
        (
            "qwen3",
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            {"tensor_parallel_size": 4},
            "tensor_parallel_size",
            "6 KV heads",
        ),
        ("qwen3_moe", {"moe_intermediate_size": 41}, {"tensor_parallel_size": 2}, "tensor_parallel_size", "moe_inter"),
        (
            "mixtral",
            {"intermediate_size": 41},
            {"tensor_parallel_size": 2},
            "tensor_parallel_size",
            "'s intermediate_size",
        ),
        (
            "deepseek_v2",
            {"n_shared_experts": 1, "moe_intermediate_size": 41},
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "tensor_parallel_size",
            "shared experts",
        ),
        (
            "kimi_linear",
            {"linear_num_heads": 3},
            {"tensor_parallel_size": 2},
            "tensor_parallel_size",
            r"linear_num_heads \(3\)",
        ),
        (
            "mimo_v2_flash",
            {},
            {"disable_hybrid_kv_cache_manager": True},
            "disable_hybrid_kv_cache_manager",
            "with a window have other heads",
        ),
        (
            "mimo_v2_flash",
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            {"tensor_parallel_size": 2},
            "tensor_parallel_size",
            "3 KV heads cannot be shared out over 2 ranks",
        ),
        ("qwen3", {}, {"enable_expert_parallel": True}, "enable_expert_parallel", "has no experts"),
        (
            "qwen3_moe",
            {"num_experts": 6},
            {"data_parallel_size": 4, "enable_expert_parallel": True},
            "enable_expert_parallel",
            "6 experts do not divide",
        ),
        (
            "qwen3_moe",
            {"num_experts": 6},
            {"data_parallel_size": 2, "enable_expert_parallel": True, "num_redundant_experts": 1},
            "num_redundant_experts",
            "1 copies do not divide",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(
    check: Callable[..., None], kind: str, keys: Any, args: Any, field: str, message: str
) -> None:
    with pytest.raises(InvalidEngineConfig, match=message) as caught:
        check(kind, keys, **args)
    assert caught.value.field == field
