"""Rotation tables with parameters of published models, over their whole context, against `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.hf_config.rope import Rotation
from baton.engine.hf_config.rope_reader import read_rope
from baton.engine.layers.rotary import cos_sin_table

from ...helpers.paged import PagedRun, random_tokens
from .parity_pairs import Pair

LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rope", "max_positions"),
    [
        ({"rope_type": "default", "rope_theta": 10_000.0}, 4096),
        ({"rope_type": "default", "rope_theta": 1e6}, 131_072),
        ({"rope_type": "linear", "rope_theta": 100_000.0, "factor": 4.0}, 16_384),
        ({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}, 4096),
        ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, 131_072),
        ({"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.3, "factor": 2.0}, 4096),
        (LLAMA_3_1, 131_072),
        ({**LLAMA_3_1, "factor": 32.0}, 131_072),
        (QWEN_YARN, 131_072),
        ({**QWEN_YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}, 131_072),
        ({**QWEN_YARN, "attention_factor": 1.0}, 131_072),
        ({**QWEN_YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}, 163_840),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_equal_those_of_transformers_to_the_last_bit(
    rope: dict[str, Any], max_positions: int, head_dim: int
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=max_positions, rope_parameters=dict(rope))
    positions = torch.cat([torch.arange(64), torch.arange(max_positions - 64, max_positions)])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])  # both halves have the same angles
    expected = torch.cat([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]], dim=-1)
    table = cos_sin_table(Rotation(read_rope({"rope_parameters": rope}, max_positions), head_dim), max_positions)
    assert table.dtype == torch.float32
    turning = table.shape[1] // 2  # a proportional rope does not rotate the other pairs
    whole = torch.cat([table.new_ones(max_positions, head_dim // 2), table.new_zeros(max_positions, head_dim // 2)], 1)
    whole[:, :turning], whole[:, head_dim // 2 : head_dim // 2 + turning] = table.chunk(2, dim=1)
    assert torch.equal(whole[positions], expected)
    fraction = rope.get("partial_rotary_factor", 1.0)
    assert turning == int(fraction * head_dim // 2)


class Lookups(TorchDispatchMode):
    """Counts the lookups in tables with one number a position."""

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self._num_positions, self.count = num_positions, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor and args[0].shape == (self._num_positions,):
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_looks_up_the_growth_of_queries_once_for_all_layers(pair: Callable[..., Pair]) -> None:
    model, _ = pair("ministral3")
    run = PagedRun(model, 1, 100)
    with Lookups(model.config.max_model_len) as lookups:
        run.step([(0, random_tokens(32))])
    assert (lookups.count, model.config.num_layers) == (1, 3)
