"""The models that engines are compared with: the engine takes each, and transformers can write weights for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from baton.engine.hf_config.eagle3 import read_eagle3
from baton.engine.models import load_config

TOOL = Path(__file__).parents[2] / "tools" / "model_shapes.py"
SMALL = {
    "num_hidden_layers": 4,
    "vocab_size": 500,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_shapes", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_engine_takes_all_shapes_and_words_are_tokens(tool: ModuleType, tmp_path: Path) -> None:
    for name, shape in tool.SHAPES.items():
        tool.write_config(tmp_path / name, shape)
        model, is_head = name.removesuffix("-eagle3"), name.endswith("-eagle3")
        config = load_config(str(tmp_path / model), load_format="dummy")
        assert config.vocab_size == shape["vocab_size"]
        if is_head:
            head = read_eagle3(tmp_path / name, config)
            assert head.eagle3 is not None
            assert head.eagle3.vocab_size == config.vocab_size, "with random numbers that both share it must know all"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "gpt-oss-20b")
    ids = [3, 19, 199, 200000]
    assert tokenizer.decode(ids) == "w3 w19 w199 w200000"
    assert tokenizer.encode(tokenizer.decode(ids)) == ids, "no word begins with a special token"


def test_norms_scale_by_about_one_whatever_their_weights_mean(tool: ModuleType, tmp_path: Path) -> None:
    tool.write_config(tmp_path, tool.SHAPES["qwen3-next-8"] | SMALL)
    tool.write_weights(tmp_path)
    load_config(str(tmp_path))
    with safe_open(tmp_path / "model.safetensors", "pt") as weights:
        means = {name: float(weights.get_tensor(name).float().mean()) for name in weights.keys()}  # noqa: SIM118
        assert float(weights.get_tensor("model.embed_tokens.weight").float().std()) == pytest.approx(0.02, rel=0.1)
    assert means["model.layers.0.linear_attn.norm.weight"] == pytest.approx(1, abs=0.02)  # multiplies
    assert means["model.norm.weight"] == pytest.approx(0, abs=0.02)  # is added to 1
    assert means["model.layers.3.self_attn.q_norm.weight"] == pytest.approx(0, abs=0.02)
    assert torch.tensor(list(means.values())).isfinite().all()


@pytest.mark.parametrize("shapes", [["qwen3-8b-fp8"], ["qwen3-0.6b", "qwen3-next-16-mtp"], []])
def test_weights_that_transformers_cannot_write_are_refused_before_any_are_written(
    tool: ModuleType, shapes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["model_shapes.py", str(tmp_path), *shapes, "--weights"])
    with pytest.raises(SystemExit):
        tool.main()
    assert list(tmp_path.iterdir()) == []
