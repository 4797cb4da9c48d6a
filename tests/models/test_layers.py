"""Layers on their own: what the parity tests' short sequences do not reach."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from baton.engine.layers.base import Layer
from baton.engine.layers.linear import MergedLinear
from baton.engine.layers.mlp import CPU_SLICE, GatedMLP
from baton.engine.models.errors import WeightsError


def filled(layer: Layer, path: str) -> dict[str, torch.Tensor]:
    """Fills the layer's slots with random numbers, finishes it, and gives what went in, by name in the checkpoint."""
    layer.allocate("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors = {slot.name: torch.randn(slot.shape, generator=generator) for slot in layer.slots(path)}
    for slot in layer.slots(path):
        slot.place(tensors[slot.name])
    layer.finish()
    return tensors


@pytest.mark.parametrize("num_tokens", [1, CPU_SLICE, CPU_SLICE + 1, 2 * CPU_SLICE + 300])
def test_a_gated_mlp_equals_its_formula_at_every_length(num_tokens: int) -> None:
    mlp = GatedMLP(32, 48, bias=True)
    weights = filled(mlp, "mlp")
    x = torch.randn(num_tokens, 32)

    def part(name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(value, weights[f"mlp.{name}.weight"], weights[f"mlp.{name}.bias"])

    expected = part("down_proj", functional.silu(part("gate_proj", x)) * part("up_proj", x))
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)


def test_parts_of_a_merged_layer_are_siblings_of_it_in_the_checkpoint() -> None:
    layer = MergedLinear(8, {"q_proj": 4, "k_proj": 2}, bias=True)
    slots = {slot.name: (slot.start, slot.shape) for slot in layer.slots("model.layers.3.self_attn.qkv_proj")}
    assert slots == {
        "model.layers.3.self_attn.q_proj.weight": (0, (4, 8)),
        "model.layers.3.self_attn.k_proj.weight": (4, (2, 8)),
        "model.layers.3.self_attn.q_proj.bias": (0, (4,)),
        "model.layers.3.self_attn.k_proj.bias": (4, (2,)),
    }


def test_a_slot_takes_its_own_shape_only_also_where_another_would_broadcast() -> None:
    layer = MergedLinear(8, {"q_proj": 4, "k_proj": 2})
    layer.allocate("cpu", torch.float32)
    slot = next(layer.slots("attn.qkv_proj"))
    with pytest.raises(WeightsError, match=r"attn\.q_proj\.weight has shape \[1, 8\], must have \[4, 8\]"):
        slot.place(torch.zeros(1, 8))
