"""Layers by themselves, in cases that the parity tests' short sequences do not reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from baton.engine.hf_config.errors import WeightsError
from baton.engine.hf_config.experts import ExpertsConfig
from baton.engine.layers.base import Layer, Parameter, Share, Slot
from baton.engine.layers.embedding import Embedding
from baton.engine.layers.linear import Linear, MergedLinear
from baton.engine.layers.method import PLAIN, LinearMethod, LinearWeight, multiply_stretches
from baton.engine.layers.mlp import CPU_SLICE, GatedMLP
from baton.engine.layers.moe import MoE
from baton.engine.layers.norm import ResidualStream, RMSNorm
from baton.engine.layers.step_context import TokenRows
from baton.kernels.activation.reference import activate
from baton.kernels.linear import Activation


def filled(layer: Layer, path: str) -> dict[str, torch.Tensor]:
    """Fill the layer's slots with random numbers and finish it. Return the tensors by their names in the checkpoint."""
    layer.allocate("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors = {slot.name: torch.randn(slot.shape, generator=generator) for slot in layer.slots(path)}
    for slot in layer.slots(path):
        slot.place(tensors[slot.name])
    layer.finish()
    return tensors


@pytest.mark.parametrize("num_tokens", [1, CPU_SLICE, CPU_SLICE + 1, 2 * CPU_SLICE + 300])
@pytest.mark.parametrize("activation", Activation)
def test_a_gated_mlp_equals_its_formula_at_every_length(activation: Activation, num_tokens: int) -> None:
    mlp = GatedMLP(32, 48, bias=True, activation=activation)
    weights = filled(mlp, "mlp")
    x = torch.randn(num_tokens, 32)

    def part(name: str, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(value, weights[f"mlp.{name}.weight"], weights[f"mlp.{name}.bias"])

    expected = part("down_proj", activate(part("gate_proj", x), activation) * part("up_proj", x))
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


@dataclass(frozen=True)
class HalvesMethod(LinearMethod):
    """A method that stores a weight as a sum of two parts, like a low-rank adapter."""

    def declare(self, rows: Share, columns: Share) -> dict[str, Parameter]:
        return {"first": Parameter.part(rows, columns), "second": Parameter.part(rows, columns)}

    def multiply_rows(self, tensors: Mapping[str, torch.Tensor], factors: Sequence[tuple[int, float]]) -> None:
        for part in tensors.values():
            multiply_stretches(part, factors)

    def reorder_rows(self, tensors: Mapping[str, torch.Tensor], order: torch.Tensor) -> None:
        for part in tensors.values():
            part.copy_(part[order])

    def pack(self, tensors: Mapping[str, torch.Tensor]) -> LinearWeight:
        return HalvesWeight(*(PLAIN.pack({"weight": tensors[name]}) for name in ("first", "second")))


@dataclass(frozen=True)
class HalvesWeight(LinearWeight):
    first: LinearWeight
    second: LinearWeight

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: Activation | None = None,
        **around: Any,
    ) -> torch.Tensor:
        total = self.second.multiply(x, bias, add_to=self.first.multiply(x))
        return total if activation is None else functional.silu(total.chunk(2, -1)[0]) * total.chunk(2, -1)[1]


def test_a_layer_is_stored_and_multiplied_by_its_method() -> None:
    layer, share = MergedLinear(32, {"gate": 16, "up": 16}, bias=True), Share(8, 8, 16)
    layer.keep_parts({"gate": share, "up": share})
    layer.use(HalvesMethod())
    weights = filled(layer, "mlp.gate_up")
    parts = ("first", "second", "bias")
    assert {(name, tuple(tensor.shape)) for name, tensor in weights.items()} == {
        (f"mlp.{layer}.{part}", (16,) if part == "bias" else (16, 32)) for layer in ("gate", "up") for part in parts
    }
    x = torch.randn(5, 32)
    gate, up = (
        functional.linear(x, weights[f"mlp.{name}.first"] + weights[f"mlp.{name}.second"], weights[f"mlp.{name}.bias"])
        for name in ("gate", "up")
    )
    expected = (functional.silu(gate) * up)[:, share.slice]
    torch.testing.assert_close(layer(x, activation=Activation.SILU), expected, rtol=1e-4, atol=1e-4)


def test_a_slot_takes_its_own_shape_only_even_if_another_would_broadcast() -> None:
    layer = MergedLinear(8, {"q_proj": 4, "k_proj": 2})
    layer.allocate("cpu", torch.float32)
    slot = next(layer.slots("attn.qkv_proj"))
    with pytest.raises(WeightsError, match=r"attn\.q_proj\.weight has shape \[1, 8\], must have \[4, 8\]"):
        slot.place(torch.zeros(1, 8))


EXPERTS = ExpertsConfig(
    num_experts=4, top_k=2, intermediate_size=24, shared_intermediate_size=40, scale=2.0, sparse_layers=(True,)
)


def test_an_moe_layer_is_its_shared_experts_and_the_weighted_sum_of_the_best_others() -> None:
    moe = MoE(32, EXPERTS)
    weights = filled(moe, "mlp")
    x = torch.randn(7, 32)

    def expert(path: str) -> torch.Tensor:
        gate, up, down = (weights[f"mlp.{path}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)

    scores = functional.linear(x, weights["mlp.gate.weight"]).softmax(-1)
    best = scores.topk(2).indices
    every = torch.stack([expert(f"experts.{index}") for index in range(4)], dim=1)
    routed = (scores.gather(1, best)[..., None] * every.gather(1, best[..., None].expand(-1, -1, 32))).sum(1)
    result = moe(x, TokenRows(torch.arange(7)))
    torch.testing.assert_close(result, expert("shared_experts") + 2.0 * routed, rtol=1e-4, atol=1e-4)


def test_padding_changes_nothing_for_other_tokens_and_stays_finite() -> None:
    moe = MoE(32, EXPERTS)
    filled(moe, "mlp")
    x = torch.randn(5, 32)
    alone = moe(x[:3], TokenRows(torch.arange(3)))
    padded = moe(x, TokenRows(torch.tensor([0, 1, 2, -1, -1])))
    torch.testing.assert_close(padded[:3], alone, rtol=1e-4, atol=1e-3)
    assert padded.isfinite().all()


class FixedMoE(MoE):
    """An MoE layer for tokens without padding."""

    def __call__(self, hidden: torch.Tensor, rows: object = None, **around: Any) -> torch.Tensor:
        return super().__call__(hidden, TokenRows(torch.arange(len(hidden))), **around)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_stream_is_the_sum_of_its_layers(in_place: bool) -> None:
    layers = (Linear(32, 32), GatedMLP(32, 48), FixedMoE(32, EXPERTS))
    norms = [RMSNorm(32, 1e-6) for _ in range(4)]
    for layer in (*layers, *norms):
        filled(layer, "layer")
    expected = torch.randn(6, 32)
    stream = ResidualStream(expected.clone(), in_place=in_place)
    for layer, norm in zip(layers, norms, strict=False):
        x, its_norm = stream.read(norm)
        stream.take(layer(x, norm=its_norm, add_to=stream.target))
        expected = expected + layer(norm(expected))
    torch.testing.assert_close(stream.normed(norms[-1]), norms[-1](expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("with_norms_before", [True, False])
def test_norms_after_layers_apply_to_their_output_before_it_is_added(in_place: bool, with_norms_before: bool) -> None:
    layers = (Linear(32, 32), GatedMLP(32, 48), Linear(32, 32))
    norms = [RMSNorm(32, 1e-6) for _ in range(2 * len(layers) + 1)]
    for layer in (*layers, *norms):
        filled(layer, "layer")
    expected = torch.randn(6, 32)
    stream = ResidualStream(expected.clone(), in_place=in_place)
    for layer, before, behind in zip(layers, norms[::2], norms[1::2], strict=False):
        x, its_norm = stream.read(before if with_norms_before else None)
        stream.take(layer(x, norm=its_norm), behind)
        expected = expected + behind(layer(before(expected) if with_norms_before else expected))
    torch.testing.assert_close(stream.normed(norms[-1]), norms[-1](expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_place", [True, False])
def test_unwanted_tokens_are_dropped_from_a_stream_after_it_was_read(in_place: bool) -> None:
    linear, norm, wanted = Linear(32, 32), RMSNorm(32, 1e-6), torch.tensor([1, 4])
    for layer in (linear, norm):
        filled(layer, "layer")
    hidden = torch.randn(6, 32)
    stream = ResidualStream(hidden.clone(), in_place=in_place)
    x, its_norm = stream.read(norm)
    stream.keep(wanted)
    stream.take(linear(x[wanted], norm=its_norm, add_to=stream.target))
    expected = hidden[wanted] + linear(norm(hidden[wanted]))
    torch.testing.assert_close(stream.normed(norm), norm(expected), rtol=1e-4, atol=1e-4)


def test_slots_of_a_stack_fill_every_second_row_of_their_item() -> None:
    stack = Parameter(2, 4, 3)
    stack.allocate("cpu", torch.float32)
    stack.data.zero_()
    slot = Slot("up", stack, 1, Share.all(2), step=2, item=1)
    assert (slot.shape, slot.num_elements) == ((2, 3), 6)
    slot.place(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert stack.data.nonzero()[:, :2].unique(dim=0).tolist() == [[1, 1], [1, 3]]
    assert stack.data[1, 3].tolist() == [4.0, 5.0, 6.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_with_an_offset_adds_it_to_the_stored_weight_in_float32(dtype: torch.dtype) -> None:
    norm, stored, x = RMSNorm(64, 1e-6, offset=1.0), torch.randn(64).to(dtype) / 50, torch.randn(5, 64).to(dtype)
    norm.allocate("cpu", dtype)
    (slot,) = norm.slots("model.norm")
    slot.place(stored)
    assert slot.num_bytes(dtype) == 4 * 64
    assert torch.equal(norm.weight.data, 1 + stored.float())
    expected = functional.rms_norm(x.float(), (64,), 1 + stored.float(), 1e-6).to(dtype)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5 if dtype == torch.float32 else 8e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_scale_of_embeddings_is_rounded_to_their_type_as_transformers_does(dtype: torch.dtype) -> None:
    embedding, ids = Embedding(20, 48, scale=3072**0.5), torch.tensor([3, 19, 0])
    embedding.allocate("cpu", dtype)
    for slot in embedding.slots("model.embed_tokens"):
        slot.place(torch.randn(20, 48))
    embedding.finish()
    scale = {torch.float32: torch.tensor(3072**0.5).item(), torch.bfloat16: 55.5}[dtype]
    assert torch.equal(embedding(ids), embedding.weight.data[ids] * torch.tensor(scale, dtype=dtype))
