"""The matrices between latents and heads: `kv_b_proj` of a checkpoint, and the two ways to use it.

weight [heads x (nope + value), rank]      for each head: rows that map latents to keys, then to values

expanded   key = K_h latent,  value = V_h latent                    once per key: pays if many queries read it
absorbed   q . (K_h latent) = (K_h^T q) . latent,  and V_h after    once per query: pays if few queries read many keys
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_TILED_TOKENS = 256  # absorbed tokens of a step for which a GPU's kernels are chosen by their number
MAX_EXPANDED_TOKENS = 1 << 16  # most keys of one step that are expanded: half a GiB with 16 heads


@dataclass(frozen=True)
class UpProjection:
    """`kv_b_proj`: `weight` [heads * (nope_dim + value_dim), rank], contiguous, as in the checkpoint."""

    weight: Tensor
    num_heads: int
    nope_dim: int
    value_dim: int

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    @property
    def by_head(self) -> Tensor:
        """The weight as [heads, nope_dim + value_dim, rank]."""
        return self.weight.view(self.num_heads, self.nope_dim + self.value_dim, self.rank)

    def absorb(self, q: Tensor) -> Tensor:
        """Project queries' unrotated part [T, heads, nope_dim] to the space of latents: [T, heads, rank], strided."""
        return torch.bmm(q.transpose(0, 1), self.by_head[:, : self.nope_dim]).transpose(0, 1)

    def values(self, attended: Tensor, out: Tensor) -> Tensor:
        """Project weighted sums of latents [T, heads, rank] to values, in `out` [T, heads, value_dim]."""
        per_head = self.by_head[:, self.nope_dim :].transpose(1, 2)
        torch.bmm(attended.transpose(0, 1), per_head, out=out.transpose(0, 1))
        return out
