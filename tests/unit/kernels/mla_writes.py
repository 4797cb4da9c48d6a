"""Writes of latents, and the shapes that tests of the MLA kernels use."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.mla import gpu, reference

from .mla_cases import LAYER, SMALL, LatentStep, Shape, latent_step, padded

# Tiles of 16 keys, so that short sequences have many.
prepare = functools.partial(gpu.prepare, tile=16)


@dataclasses.dataclass
class Write:
    """One layer's projections for the tokens of a step, and the angles of the rotation."""

    step: LatentStep
    compressed: Tensor
    norm: Tensor
    cos_sin: Tensor

    def run(self, op: Callable[..., None], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rotated queries and the cache, in `dtype`."""
        q, kv = self.step.q.to(dtype, copy=True), self.step.kv.to(dtype, copy=True)
        q_rope = q[..., self.step.up.nope_dim :]
        norm, compressed = self.norm.to(dtype), self.compressed.to(dtype)
        op(q_rope, compressed, norm, self.cos_sin, kv, LAYER, self.step.batch, eps=1e-6)
        return q, kv


def write(device: torch.device, dtype: torch.dtype, shape: Shape = SMALL, first_block: int = 0) -> Write:
    step = padded(latent_step([1, 3, 20], [34, 19, 20], device, shape=shape, dtype=dtype, first_block=first_block), 4)
    projected = torch.randn(step.batch.num_tokens, shape.rank + shape.rope + 16, device=device).to(dtype)
    angles = torch.randn(64, shape.rope // 2, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    norm = torch.randn(shape.rank, device=device).to(dtype)
    return Write(step, projected[:, : shape.rank + shape.rope], norm, cos_sin)


def check_write(inputs: Write) -> None:
    dtype = inputs.step.q.dtype
    tolerance = 4 * torch.finfo(dtype).eps
    results, exact = inputs.run(gpu.latent_and_cache, dtype), inputs.run(reference.latent_and_cache, torch.float64)
    for result, expected in zip(results, exact, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
