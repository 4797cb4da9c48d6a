"""Planned weights have the sizes of a model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config import EngineConfig
from baton.engine.layers.base import Layer
from baton.engine.models import load_config, make_model
from baton.engine.parallel.groups import ALL_ALONE, ExpertSpread, Group, ParallelGroups
from baton.engine.startup.weight_counts import weights_of_rank

from ...helpers.tiny_shapes import DIFFERENCES, SHAPE

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}


WIDER = {"hidden_size": 512, "vocab_size": 1024}  # so large that biases and norms, which plans leave out, hardly count


class Rank(Group):
    """A rank's view of a group without its other members."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def _refuse_communication(self, *_: Any) -> Any:
        raise AssertionError("dividing a model must not communicate")

    all_reduce = all_gather = reduce_scatter = all_to_all = all_max = close = _refuse_communication


def numbers_in(layer: Layer) -> int:
    own = sum(parameter.data.numel() for _, parameter in layer.parameters())
    return own + sum(numbers_in(child) for _, child in layer.children())


def write_config(folder: Path, architecture: str, **keys: Any) -> str:
    config = {**SHAPE, **DIFFERENCES[architecture], **WIDER, "architectures": [CLASSES[architecture]], **keys}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "ranks", "dp_size"),
    [
        *((architecture, ranks, 1) for architecture in CLASSES for ranks in (1, 2)),
        *((architecture, 1, 2) for architecture in ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss")),
    ],
)
def test_planned_weights_equal_those_of_a_model(architecture: str, ranks: int, dp_size: int, tmp_path: Path) -> None:
    check_planned_weights(write_config(tmp_path, architecture), ranks, dp_size)


@pytest.mark.parametrize(("ranks", "dp_size"), [(1, 1), (2, 1), (1, 2)])
def test_experts_beside_an_mlp_are_planned_with_it(ranks: int, dp_size: int, tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    check_planned_weights(write_config(tmp_path, "gemma4_text", **experts), ranks, dp_size)


def check_planned_weights(folder: str, ranks: int, dp_size: int) -> None:
    model = load_config(folder, load_format="dummy")
    groups = ALL_ALONE if ranks == 1 else ParallelGroups(tp=Rank(1, ranks))
    if dp_size > 1:
        groups = ParallelGroups(dp=Rank(1, dp_size), ep=Rank(1, dp_size), spread=ExpertSpread())
    layers = make_model(model)
    layers.divide(groups)
    layers.allocate("meta", torch.bfloat16)
    config = EngineConfig(
        model=folder, tensor_parallel_size=ranks, data_parallel_size=dp_size, enable_expert_parallel=dp_size > 1
    )
    planned = weights_of_rank(model, config)
    assert planned.plain + planned.narrow == pytest.approx(numbers_in(layers), rel=0.02)
