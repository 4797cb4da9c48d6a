"""Step sizes that arguments leave open follow from the device and the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import pytest

from baton.engine.config import EngineConfig
from baton.engine.hf_config.model_config import ModelConfig
from baton.engine.models import load_config
from baton.engine.startup.step_sizes import MAX_TOKENS, MIN_TOKENS, step_sizes
from baton.engine.startup.weight_counts import active_weights

MODELS = Path(__file__).parents[3] / "configs" / "models"
H200, L40S, L4 = 141 * 10**9, 48 * 10**9, 24 * 10**9


OTHERS: dict[str, dict[str, Any]] = {  # models that differ from qwen3-8b in these keys
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    folders = {name: MODELS / name for name in ("qwen3-8b", "qwen3-32b")}
    keys = json.loads((MODELS / "qwen3-8b" / "config.json").read_text())
    for name, differences in OTHERS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        (folders[name] / "config.json").write_text(json.dumps(keys | differences))
    return {name: load_config(folder, load_format="dummy") for name, folder in folders.items()}


class Sizes(Protocol):
    def __call__(self, name: str = ..., memory: int | None = ..., **args: Any) -> tuple[int, int, int]: ...


@pytest.fixture
def sizes(models: dict[str, ModelConfig]) -> Sizes:
    def of(name: str = "qwen3-8b", memory: int | None = H200, **args: Any) -> tuple[int, int, int]:
        return step_sizes(EngineConfig.from_args({"model": "m", **args}), models[name], memory)

    return of


@pytest.mark.parametrize(("name", "weights"), [("qwen3-8b", 6.95e9), ("qwen3-0.6b", 0.44e9), ("qwen3-30b-a3b", 2.7e9)])
def test_active_weights_are_those_of_the_model_card_without_embeddings(
    name: str, weights: float, models: dict[str, ModelConfig]
) -> None:
    assert active_weights(models[name], 1) == pytest.approx(weights, rel=0.03)
    assert active_weights(models[name], 2) == pytest.approx(weights / 2, rel=0.03)


def test_a_cpu_has_small_steps(sizes: Sizes) -> None:
    assert sizes(memory=None)[:2] == (64, 2048)


def test_a_small_model_has_larger_steps_than_a_large_one_and_more_of_them_are_captured(sizes: Sizes) -> None:
    seqs, tokens, captured = sizes("qwen3-8b")
    more_seqs, more_tokens, more_captured = sizes("qwen3-0.6b")
    assert seqs == more_seqs
    assert MIN_TOKENS < tokens < more_tokens <= MAX_TOKENS
    assert captured < more_captured


def test_a_smaller_gpu_has_smaller_steps_of_fewer_requests(sizes: Sizes) -> None:
    (_, most, _), (_, fewer, _), (_, least, _) = (sizes("qwen3-0.6b", memory) for memory in (H200, L40S, L4))
    assert most >= fewer > least >= MIN_TOKENS
    assert [sizes(memory=memory)[0] for memory in (H200, L40S, L4)] == [512, 256, 128]


def test_a_divided_model_has_larger_steps(sizes: Sizes) -> None:
    assert sizes("qwen3-32b", tensor_parallel_size=8)[1] > sizes("qwen3-32b")[1]


@pytest.mark.parametrize("memory", [None, H200])
def test_arguments_take_precedence_and_the_rest_fits_them(memory: int | None, sizes: Sizes) -> None:
    assert sizes(memory=memory, max_num_seqs=7, max_num_batched_tokens=9, max_cudagraph_capture_size=0) == (7, 9, 0)
    assert sizes(memory=memory, max_num_batched_tokens=32)[:2] == (32, 32)
    assert sizes(memory=memory, max_num_seqs=20000)[:2] == (20000, 20000)
