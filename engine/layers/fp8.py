"""FP8 weights: those that stay in 8 bits, and those that are dequantized for a layer without FP8 kernels.

checkpoint                           parameter                        kernels
weight             [N, K] E4M3       weight [N, K] E4M3         ─┐
weight_scale(_inv) one per block     scales [N / 128, K / 128]  ─┼──> Fp8Weight
                   one per row, or   scales [N]                 ─┘
                   one per tensor
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.hf_config.errors import UnsupportedModel, WeightsError
from baton.engine.hf_config.quantization import Quantization
from baton.kernels import fp8
from baton.kernels.activation import activate_each
from baton.kernels.fp8 import BLOCK
from baton.kernels.linear import Activation, Pointwise, RowNorm

from .base import Parameter, Share, Slot
from .method import ExpertsShape, LinearMethod, LinearWeight, multiply_stretches
from .plain_experts import FusedMethod, slots_of_each

E4M3 = torch.float8_e4m3fn


class BlockScales(Parameter):
    """Scales, one for each block of 128 x 128 values of a weight [N, K]."""

    def __init__(self, rows: Share, columns: Share) -> None:
        kept = _blocks_of(rows), _blocks_of(columns)
        super().__init__(*(share.whole for share in kept), typical=1.0, dtype=torch.float32)
        for dimension, share in enumerate(kept):
            self.keep(dimension, share)

    def slot(self, name: str, start: int = 0, rows: Share | None = None) -> Slot:
        return Slot(name, self, start // BLOCK, None if rows is None else _blocks_of(rows))


def _blocks_of(share: Share) -> Share:
    """Return the share of the blocks of 128 that contain this share of values."""
    if share.sections:
        blocks = tuple(_blocks_of(each) for each in share.sections)
        return Share(0, sum(each.size for each in blocks), -(-share.whole // BLOCK), blocks)
    first = share.start // BLOCK
    return Share(first, -(-share.end // BLOCK) - first, -(-share.whole // BLOCK))


class RowScales(Parameter):
    """Scales, one for each row of a weight."""

    def __init__(self, rows: Share) -> None:
        super().__init__(rows.whole, typical=1.0, dtype=torch.float32)
        self.keep(0, rows)

    def slot(self, name: str, start: int = 0, rows: Share | None = None) -> Slot:
        return _RowScalesSlot(name, self, start, rows)


class ScalarScale(RowScales):
    """One scale for a whole tensor."""

    def __init__(self) -> None:
        super().__init__(Share.all(1))


class _RowScalesSlot(Slot):
    """Loads scales that a checkpoint stores as [N], as [N, 1], or as one value for all rows."""

    __slots__ = ()

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return shape in (self.shape, (*self.shape, 1), (1,), ())

    def index(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return super().index(shape)[:1] if shape and shape[0] == self.shape[0] else ()

    def place(self, tensor: Tensor) -> None:
        shape, values = tuple(tensor.shape), tensor.reshape(-1)
        if self.accepts(shape):
            values = values.expand(self.shape)
        elif shape not in (self.share_shape, (*self.share_shape, 1)):
            raise WeightsError(f"{self.name} has shape {list(shape)}, must have {list(self.shape)} or one value")
        self._place(self._cut(values))


@dataclass(frozen=True)
class Fp8Linear(LinearMethod):
    """E4M3 codes, with a scale for each block or each row."""

    quantization: Quantization

    def fits(self, columns: Share, parts: Sequence[Share]) -> bool:
        """Return whether no block of scales straddles two of the merged layers, or two ranks."""
        sizes = (columns.whole, *(part.whole for part in parts[:-1]))
        stretches = [stretch for share in (columns, *parts) for stretch in share.stretches]
        borders = [border for each in stretches for border in (each.start, each.end) if border < each.whole]
        return self.quantization.keeps_linear(*sizes, *borders)

    def declare(self, rows: Share, columns: Share) -> dict[str, Parameter]:
        scales = BlockScales(rows, columns) if self.quantization.in_blocks else RowScales(rows)
        return {"weight": Parameter.part(rows, columns, dtype=E4M3), self.quantization.scale_name: scales}

    def multiply_rows(self, tensors: Mapping[str, Tensor], factors: Sequence[tuple[int, float]]) -> None:
        """Multiply the scales; the codes stay as they are.

        No block of scales has two factors, since none straddles two merged layers or sections (`Share.sections`).
        """
        each = BLOCK if self.quantization.in_blocks else 1
        counts = [(-(-count // each), factor) for count, factor in factors]
        multiply_stretches(tensors[self.quantization.scale_name], counts)

    def reorder_rows(self, tensors: Mapping[str, Tensor], order: Tensor) -> None:
        codes, scales = tensors["weight"].view(torch.uint8), tensors[self.quantization.scale_name]
        codes.copy_(codes[order])
        if self.quantization.in_blocks:
            blocks = torch.arange(len(order), device=order.device) // BLOCK
            if not torch.equal(order // BLOCK, blocks):
                raise UnsupportedModel("heads that straddle blocks of scales are not supported for this rope")
        elif scales.numel() > 1:
            scales.copy_(scales[order])

    def pack(self, tensors: Mapping[str, Tensor]) -> LinearWeight:
        return Fp8LinearWeight(fp8.Fp8Weight(tensors["weight"], tensors[self.quantization.scale_name]))


@dataclass(frozen=True)
class Fp8LinearWeight(LinearWeight):
    """A weight for the kernels of `kernels.fp8`, which quantize their inputs to 8 bits."""

    weight: fp8.Fp8Weight

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        *,
        activation: Activation | Pointwise | None = None,
        norm: RowNorm | None = None,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if isinstance(activation, Activation):
            return fp8.gated_linear(x, self.weight, bias, activation=activation, norm=norm)
        if activation is not None:
            return activate_each(fp8.linear(x, self.weight, bias, norm=norm), activation)
        return fp8.linear(x, self.weight, bias, norm=norm, add_to=add_to, out=out)


@dataclass(frozen=True)
class Fp8Experts(FusedMethod):
    """E4M3 codes, with a scale for each 128 x 128 values of a gate, up or down matrix; each matrix a tensor of its own.

    If the checkpoint has one scale per matrix, it is repeated for all of the matrix's blocks.
    """

    quantization: Quantization

    dtype = E4M3

    def fits(self, shape: ExpertsShape) -> bool:
        """Return whether there are kernels for this shape, and no block of scales straddles two ranks."""
        width = shape.width
        return self.quantization.keeps_experts(shape.hidden_size, width.start, width.end, width.whole)

    def declare(self, shape: ExpertsShape) -> dict[str, Parameter]:
        places, deep, wide = shape.held.places, Share.all(-(-shape.hidden_size // BLOCK)), _blocks_of(shape.width)
        if self.quantization.whole:
            wide = Share.all(-(-shape.width.size // BLOCK))
        return {
            **super().declare(shape),
            "gate_up_scale": Parameter.part(places, wide.times(shape.parts), deep, typical=1.0, dtype=torch.float32),
            "down_scale": Parameter.part(places, deep, wide, typical=1.0, dtype=torch.float32),
        }

    def slots(self, shape: ExpertsShape, parameters: Mapping[str, Parameter], path: str) -> Iterator[Slot]:
        yield from slots_of_each(shape, parameters["gate_up"], parameters["down"], path, "weight")
        gate_up, down = parameters["gate_up_scale"], parameters["down_scale"]
        for slot in slots_of_each(shape, gate_up, down, path, self.quantization.scale_name):
            yield _OneScaleSlot(slot) if self.quantization.whole else slot


class _OneScaleSlot(Slot):
    """Loads the one scale of a matrix, and repeats it for all of the matrix's blocks."""

    __slots__ = ()

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.name, slot.parameter, slot.start, step=slot.step, item=slot.item)
        self.shares = slot.shares

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) == 1

    def index(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        return ()

    def place(self, tensor: Tensor) -> None:
        if tensor.numel() == 1:  # dummy weights already have a value for each block
            tensor = tensor.reshape(()).expand(self.shape)
        super().place(tensor)


def plain_weight(data: Tensor, scale: Tensor, in_blocks: bool, dtype: torch.dtype) -> Tensor:
    """Dequantize a weight [N, K] from E4M3 `data` and its `scale`, for a layer without FP8 kernels.

    `data` may also be a stack [E, N, K], with scales for each matrix or one for all. Raises `WeightsError` if the
    shapes of data and scales do not match.
    """
    if data.dim() == 3:
        if scale.numel() == 1:
            scale = scale.reshape(1).expand(len(data))
        if len(scale) != len(data):
            raise WeightsError(f"scales are {list(scale.shape)}: give those of {len(data)} matrices")
        matrices = zip(data, scale, strict=True)
        return torch.stack([plain_weight(matrix, of_matrix, in_blocks, dtype) for matrix, of_matrix in matrices])
    if not in_blocks and scale.numel() in (1, len(data)):
        scale = scale.reshape(-1).expand(len(data))
    try:
        return fp8.dequantize(data, scale.float(), dtype)
    except ValueError as error:
        raise WeightsError(str(error)) from error
