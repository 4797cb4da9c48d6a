"""Chooses the weight method of each layer of a model whose checkpoint is quantized."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.hf_config.errors import WeightsError
from baton.engine.hf_config.quantization import Quantization
from baton.engine.layers.base import Layer, layers_of
from baton.engine.layers.experts import Experts
from baton.engine.layers.fp8 import Fp8Experts, Fp8Linear
from baton.engine.layers.linear import Linear
from baton.kernels.fp8 import BLOCK


def use_quantized_methods(model: Layer, quantization: Quantization, is_quantized: Callable[[str], bool]) -> None:
    """Give the layers of `model` that the checkpoint has quantized the method for it, before anything is allocated.

    `is_quantized` tells by a linear layer's name in the checkpoint. Layers that were merged of both kinds stay plain,
    and so do experts that there are no kernels for. Raises `WeightsError` for a layer whose ranks would divide blocks.
    """
    for_linear, for_experts = Fp8Linear(quantization), Fp8Experts(quantization)
    for path, layer in layers_of(Linear, model):
        parts = layer.parts_at(path)
        shares = list(parts.values())
        if not all(is_quantized(name) for name in parts) or not for_linear.fits(layer.columns, shares):
            continue
        if not for_linear.divides(layer.columns, shares):
            raise WeightsError(
                f"tensor_parallel_size: {path} has a scale for every {BLOCK} x {BLOCK} values, and so many ranks would "
                "divide them; give fewer"
            )
        layer.use(for_linear)
    for path, experts in layers_of(Experts, model):
        parts_of_experts = experts.parts_at(path)
        if (
            parts_of_experts
            and for_experts.fits(experts.shape)
            and all(is_quantized(name) for name in parts_of_experts)
        ):
            experts.use(for_experts)
