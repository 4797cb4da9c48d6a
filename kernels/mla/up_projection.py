"""The matrices between latents and heads: `kv_b_proj` of a checkpoint, seen from both sides.

weight [heads x (nope + value), rank]      of each head: rows that make keys of latents, then rows that make values

expanded   key = K_h latent,  value = V_h latent                    for every key: pays where many queries read it
absorbed   q . (K_h latent) = (K_h^T q) . latent,  and V_h after    for every query: pays where few read many keys
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_EXPANDED_TOKENS = 1 << 16  # keys of one step that are spelt out: half a GiB at 16 heads


@dataclass(frozen=True)
class UpProjection:
    """`weight` [heads * (nope_dim + value_dim), rank], contiguous, as the checkpoint has it."""

    weight: Tensor
    num_heads: int
    nope_dim: int
    value_dim: int

    @property
    def rank(self) -> int:
        return self.weight.shape[1]

    @property
    def by_head(self) -> Tensor:
        """[heads, nope_dim + value_dim, rank]"""
        return self.weight.view(self.num_heads, self.nope_dim + self.value_dim, self.rank)

    def absorb(self, q: Tensor) -> Tensor:
        """Queries without position q [T, heads, nope_dim] in the space of the latents: [T, heads, rank], strided."""
        return torch.bmm(q.transpose(0, 1), self.by_head[:, : self.nope_dim]).transpose(0, 1)

    def values(self, attended: Tensor, out: Tensor) -> Tensor:
        """Weighted sums of latents [T, heads, rank] as values, into `out` [T, heads, value_dim]."""
        per_head = self.by_head[:, self.nope_dim :].transpose(1, 2)
        torch.bmm(attended.transpose(0, 1), per_head, out=out.transpose(0, 1))
        return out
