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


def use_quantized_methods(model: Layer, quantization: Quantization, is_quantized: Callable[[str], bool]) -> list[str]:
    """Give the layers of `model` that the checkpoint has quantized the method for it, before anything is allocated.

    `is_quantized` tells by a linear layer's name in the checkpoint. Returns the layers that stay plain nevertheless:
    those merged of both kinds, or of parts that would share a block, and experts that there are no kernels for. Raises
    `WeightsError` for a layer whose ranks would divide blocks.
    """
    plain = [path for path, layer in layers_of(Linear, model) if not _quantize(path, layer, quantization, is_quantized)]
    method = Fp8Experts(quantization)
    for path, experts in layers_of(Experts, model):
        parts = experts.parts_at(path)
        if parts and method.fits(experts.shape) and all(is_quantized(name) for name in parts):
            experts.use(method)
        elif any(is_quantized(name) for name in parts):
            plain.append(path)
    return plain


def _quantize(path: str, layer: Linear, quantization: Quantization, is_quantized: Callable[[str], bool]) -> bool:
    """Return false for a layer that stays plain although some of it is quantized."""
    method, parts = Fp8Linear(quantization), layer.parts_at(path)
    shares, quantized = list(parts.values()), [is_quantized(name) for name in parts]
    if not all(quantized) or not method.fits(layer.columns, shares):
        return not any(quantized)
    if not method.divides(layer.columns, shares):
        raise WeightsError(
            f"tensor_parallel_size: {path} has a scale for every {BLOCK} x {BLOCK} values, and so many ranks would "
            "divide them; give fewer"
        )
    layer.use(method)
    return True
