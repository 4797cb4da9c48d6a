"""Which layers of a model stay in the 8 bits that its checkpoint has them in."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.hf_config.errors import WeightsError
from baton.engine.hf_config.quantization import Quantization
from baton.engine.layers.base import Layer, layers_of
from baton.engine.layers.experts import Experts
from baton.engine.layers.fp8 import Fp8Format
from baton.engine.layers.linear import Linear
from baton.kernels.fp8 import BLOCK


def keep_in_8_bits(model: Layer, quantization: Quantization, is_quantized: Callable[[str], bool]) -> None:
    """Gives the layers of `model` that come in 8 bits the format for it, before anything is allocated.

    `is_quantized` tells by a linear layer's name in the checkpoint. Layers that were merged of both kinds stay plain,
    and so do experts that there are no kernels for. Raises `WeightsError` for a layer whose ranks would divide blocks.
    """
    chosen = Fp8Format(quantization)
    for path, layer in layers_of(Linear, model):
        parts, columns = layer.parts_at(path), layer.weight.shares[1]
        if not all(is_quantized(name) for name in parts):
            continue
        if not chosen.fits(columns.whole, [share.whole for share in parts.values()]):
            continue
        if not chosen.divides(columns, list(parts.values())):
            raise WeightsError(
                f"tensor_parallel_size: {path} has a scale for every {BLOCK} x {BLOCK} values, and so many ranks would "
                "divide them; give fewer"
            )
        layer.take_format(chosen)
    for path, experts in layers_of(Experts, model):
        if experts.can_take(chosen) and all(is_quantized(name) for name in experts.parts_at(path)):
            experts.take_format(chosen)
